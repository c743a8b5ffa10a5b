// The memory of the pretended device: its addresses are ones that the host may not touch.
//
// Owns the arena, which is mapped twice: `device_base`, without any permission, gives the addresses
// that tensors show; the bytes lie in the shadow, at a constant distance. Host code that follows a
// device address therefore dies, as on a GPU. Fresh and freed bytes are 0xFF: a NaN in every float.
// Owns the list of registered (page-locked) host ranges too. Any thread may enter.
//
// Memory is given out again as torch's CUDA allocator does it: what is freed belongs to the stream
// that was current when it was taken, and that stream's later work may have it at once, although
// the earlier work is still to come. Memory that other streams use (`record_stream`) waits until
// these have passed the point of its free. What is poisoned is poisoned in stream order: before the
// stream's next launch, copy or allocation, the first that could write it. Not pretended: torch's
// rounding to segments of megabytes.
#pragma once

#include <sys/mman.h>
#include <torch/extension.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <vector>

#include "streams.h"

namespace pretended {

constexpr size_t kArenaBytes = size_t{24} << 30;  // reserved address space, not memory
constexpr size_t kBlockBytes = 512;               // torch's own allocator rounds up to this

class Arena {
 public:
  // Never destroyed: tensors of global objects may outlive main.
  static Arena& get() {
    static auto* arena = new Arena();
    return *arena;
  }

  char* device_base() const { return device_base_; }
  int64_t distance() const { return shadow_base_ - device_base_; }

  // Where the bytes behind a device address lie.
  char* shadow(const void* address) const {
    if (address == nullptr) return nullptr;
    const char* at = static_cast<const char*>(address);
    TORCH_CHECK(at >= device_base_ && at < device_base_ + kArenaBytes,
                "CUDA error: illegal memory access: the pretended device got a host address");
    return shadow_base_ + (at - device_base_);
  }

  // What is not `poisoned` is memory that nobody reads.
  void* take(size_t bytes, bool poisoned = true) {
    Entered::check();
    const size_t size = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const c10::StreamId stream = Streams::current();
    std::unique_lock<std::mutex> hold(mutex_);
    settle_waiting();
    Streams::get().of(stream).push_deferred();
    auto block = find(size, stream);
    if (block == free_.end()) {  // what other streams keep is given back before memory is out
      hold.unlock();
      settle_streams();
      hold.lock();
      settle_waiting();
      drop_kept();
      ++num_retries_;
      block = find(size, stream);
    }
    if (block == free_.end()) ++num_failures_;
    TORCH_CHECK_WITH(OutOfMemoryError, block != free_.end(),
                     "CUDA out of memory. Tried to allocate ", bytes, " bytes; the pretended GPU ",
                     "has ", limit_, " bytes of which ", allocated_, " are allocated.");
    const size_t offset = block->first;
    const Free found = block->second;
    free_.erase(block);
    if (found.size > size) free_[offset + size] = Free{found.size - size, found.stream};
    used_[offset] = Used{size, stream, {}};
    if (found.stream == kNobody) {
      reserved_ += size;
      if (poisoned) poison(offset, size, stream);
      Streams::get().of(stream).push_deferred();
    }
    allocated_ += size;
    active_ += size;
    peak_ = std::max(peak_, allocated_);
    active_peak_ = std::max(active_peak_, active_);
    reserved_peak_ = std::max(reserved_peak_, reserved_);
    ++num_allocations_;
    return device_base_ + offset;
  }

  void give_back(void* address) {
    std::lock_guard<std::mutex> hold(mutex_);
    const size_t offset = static_cast<char*>(address) - device_base_;
    const Used block = used_.at(offset);
    used_.erase(offset);
    allocated_ -= block.size;
    if (block.others.empty()) {
      keep(offset, block.size, block.stream);
      return;
    }
    Waiting waiting{offset, block.size, block.stream, {}};
    for (const c10::StreamId other : block.others) {
      auto passed = std::make_shared<Recorded>();
      Streams::get().of(other).push([passed] { passed->fire(); });
      waiting.passed.push_back(std::move(passed));
    }
    waiting_.push_back(std::move(waiting));
  }

  void record_use(void* address, c10::StreamId stream) {
    if (address == nullptr) return;
    std::lock_guard<std::mutex> hold(mutex_);
    const size_t offset = static_cast<char*>(address) - device_base_;
    const auto block = used_.find(offset);
    if (block != used_.end() && block->second.stream != stream) block->second.others.insert(stream);
  }

  // Gives the memory that streams keep for themselves back to the device.
  void empty_cache() {
    settle_streams();
    std::lock_guard<std::mutex> hold(mutex_);
    settle_waiting();
    drop_kept();
  }

  size_t active() { return locked(active_); }
  size_t active_peak() { return locked(active_peak_); }
  size_t reserved() { return locked(reserved_); }
  size_t reserved_peak() { return locked(reserved_peak_); }
  size_t num_retries() { return locked(num_retries_); }
  size_t num_failures() { return locked(num_failures_); }
  size_t allocated() { return locked(allocated_); }
  size_t peak() { return locked(peak_); }
  size_t num_allocations() { return locked(num_allocations_); }
  void restart_peak() {
    std::lock_guard<std::mutex> hold(mutex_);
    peak_ = allocated_;
    active_peak_ = active_;
    reserved_peak_ = reserved_;
  }
  void limit(size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    limit_ = bytes;
  }

 private:
  static void settle_streams() {
    Streams::get().synchronize();
    Streams::get().push_deferred();
    Streams::get().synchronize();
  }

  Arena() : device_base_(map(PROT_NONE)), shadow_base_(map(PROT_READ | PROT_WRITE)) {
    free_[0] = Free{kArenaBytes, kNobody};
  }

  static constexpr c10::StreamId kNobody = -1;  // memory that the process has not taken
  struct Free {
    size_t size;
    c10::StreamId stream;
  };
  struct Used {
    size_t size;
    c10::StreamId stream;
    std::set<c10::StreamId> others;
  };
  struct Waiting {  // freed, but other streams may still use it
    size_t offset, size;
    c10::StreamId stream;
    std::vector<std::shared_ptr<Recorded>> passed;
  };
  using Blocks = std::map<size_t, Free>;

  // The smallest block that the stream keeps, or memory that nobody has.
  Blocks::iterator find(size_t size, c10::StreamId stream) {
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      const Free& found = block->second;
      if (found.stream == stream && found.size >= size &&
          (best == free_.end() || found.size < best->second.size)) {
        best = block;
      }
    }
    if (best != free_.end() || reserved_ + size > limit_) return best;
    return std::find_if(free_.begin(), free_.end(), [&](const auto& block) {
      return block.second.stream == kNobody && block.second.size >= size;
    });
  }

  void keep(size_t offset, size_t size, c10::StreamId stream) {
    active_ -= size;
    poison(offset, size, stream);
    join(free_.emplace(offset, Free{size, stream}).first);
  }

  void settle_waiting() {
    for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
      const bool passed = std::all_of(waiting->passed.begin(), waiting->passed.end(),
                                      [](const auto& event) { return event->done(); });
      if (passed) keep(waiting->offset, waiting->size, waiting->stream);
      waiting = passed ? waiting_.erase(waiting) : std::next(waiting);
    }
  }

  void drop_kept() {
    for (auto& block : free_) {
      if (block.second.stream == kNobody) continue;
      reserved_ -= block.second.size;
      block.second.stream = kNobody;
    }
    for (auto block = free_.begin(); block != free_.end(); ++block) join_with_next(block);
  }

  void poison(size_t offset, size_t size, c10::StreamId stream) {
    Streams::get().of(stream).defer(
        [at = shadow_base_ + offset, size] { std::memset(at, 0xFF, size); });
  }

  static char* map(int protection) {
    void* found =
        mmap(nullptr, kArenaBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space for the pretended device");
    return static_cast<char*>(found);
  }

  void join(Blocks::iterator block) {
    join_with_next(block);
    if (block != free_.begin()) join_with_next(std::prev(block));
  }

  void join_with_next(Blocks::iterator block) {
    for (;;) {
      const auto next = std::next(block);
      if (next == free_.end() || block->first + block->second.size != next->first) return;
      if (block->second.stream != next->second.stream) return;
      block->second.size += next->second.size;
      free_.erase(next);
    }
  }

  size_t locked(const size_t& number) {
    std::lock_guard<std::mutex> hold(mutex_);
    return number;
  }

  char* const device_base_;
  char* const shadow_base_;
  std::mutex mutex_;
  Blocks free_;  // by offset
  std::map<size_t, Used> used_;
  std::vector<Waiting> waiting_;
  size_t allocated_ = 0, peak_ = 0, num_allocations_ = 0, limit_ = kArenaBytes;
  size_t active_ = 0, active_peak_ = 0;  // allocated, or freed and still used
  size_t reserved_ = 0, reserved_peak_ = 0, num_retries_ = 0;
  size_t num_failures_ = 0;  // to find memory
};

inline char* shadow(const void* address) { return Arena::get().shadow(address); }

// Host memory that copies may use without waiting, as cudaHostRegister keeps it: whole pages.
class Registered {
 public:
  static Registered& get() {
    static auto* ranges = new Registered();
    return *ranges;
  }

  // False where a page of it is registered already.
  bool add(const void* begin, size_t bytes) {
    const char* at = static_cast<const char*>(begin);
    std::lock_guard<std::mutex> hold(mutex_);
    for (const auto& [start, range] : ranges_) {
      if (page(at) < page(start + range.size - 1) + 1 && page(start) < page(at + bytes - 1) + 1) {
        return false;
      }
    }
    ranges_[at] = Range{bytes};
    return true;
  }

  // False where it is not registered. The device may not be using it any more.
  bool remove(const void* begin) {
    std::lock_guard<std::mutex> hold(mutex_);
    const auto found = ranges_.find(static_cast<const char*>(begin));
    if (found == ranges_.end()) return false;
    TORCH_CHECK(found->second.num_copies == 0,
                "host memory is unregistered, or freed, while it is copied");
    ranges_.erase(found);
    return true;
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> hold(mutex_);
    return range_of(address) != nullptr;
  }

  // A copy to or from the memory at the address was asked for (1), or has happened (-1).
  void count_copy(const void* address, int change) {
    std::lock_guard<std::mutex> hold(mutex_);
    Range* range = range_of(address);
    range->num_copies += change;
    if (range->num_copies == 0 && range->freed) {
      ranges_.erase(static_cast<const char*>(range->freed));
      std::free(std::exchange(range->freed, nullptr));
    }
  }

  // Torch's own pinned memory, which it keeps until it was copied.
  void free(void* begin) {
    std::lock_guard<std::mutex> hold(mutex_);
    Range& range = ranges_.at(static_cast<const char*>(begin));
    if (range.num_copies > 0) {
      range.freed = begin;
      return;
    }
    ranges_.erase(static_cast<const char*>(begin));
    std::free(begin);
  }

  // Whether a registered range begins or ends inside these bytes: CUDA copies no such range.
  bool borders_inside(const void* begin, size_t bytes) {
    const char* at = static_cast<const char*>(begin);
    std::lock_guard<std::mutex> hold(mutex_);
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& range) {
      const char *start = range.first, *end = range.first + range.second.size;
      return start < at + bytes && end > at && !(start <= at && end >= at + bytes);
    });
  }

 private:
  struct Range {
    size_t size;
    int num_copies = 0;
    void* freed = nullptr;
  };

  static uintptr_t page(const char* at) { return reinterpret_cast<uintptr_t>(at) / 4096; }

  Range* range_of(const void* address) {
    const char* at = static_cast<const char*>(address);
    const auto after = ranges_.upper_bound(at);
    if (after == ranges_.begin()) return nullptr;
    auto& [start, range] = *std::prev(after);
    return at < start + range.size ? &range : nullptr;
  }

  std::mutex mutex_;
  std::map<const char*, Range> ranges_;
};

struct DeviceAllocator final : public at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* found = bytes == 0 ? nullptr : Arena::get().take(bytes);
    return {found, found, &give_back, c10::Device(c10::kCUDA, 0)};
  }
  static void give_back(void* address) {
    if (address != nullptr) Arena::get().give_back(address);
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    current_stream().synchronize();
    std::memcpy(shadow(target), shadow(source), bytes);
  }
};

// Torch's allocator passes over memory that is not its own: a view that came by DLPack.
inline void record_use(const c10::DataPtr& data, c10::StreamId stream) {
  if (data.get_deleter() != &DeviceAllocator::give_back) return;
  Arena::get().record_use(data.get(), stream);
}

struct PinnedAllocator final : public at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* found = nullptr;
    const size_t size = std::max<size_t>(bytes, 1);
    if (posix_memalign(&found, 4096, size) != 0) throw std::bad_alloc();
    Registered::get().add(found, size);
    return {found, found, &give_back, c10::Device(c10::kCPU)};
  }
  static void give_back(void* address) { Registered::get().free(address); }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace pretended
