// The memory of the pretended device: its addresses are ones that the host may not touch.
//
// Owns the arena, which is mapped twice: `device_base`, without any permission, gives the addresses
// that tensors show; the bytes lie in the shadow, at a constant distance. Host code that follows a
// device address therefore dies, as on a GPU. Fresh and freed bytes are 0xFF: a NaN in every float.
// Owns the list of registered (page-locked) host ranges too. Any thread may enter.
#pragma once

#include <sys/mman.h>
#include <torch/extension.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

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

  void* take(size_t bytes) {
    const size_t size = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    std::lock_guard<std::mutex> hold(mutex_);
    auto block = free_.end();
    if (allocated_ + size <= limit_) {
      block = std::find_if(free_.begin(), free_.end(),
                           [&](const auto& found) { return found.second >= size; });
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block != free_.end(),
                     "CUDA out of memory. Tried to allocate ", bytes, " bytes; the pretended GPU ",
                     "has ", limit_, " bytes of which ", allocated_, " are allocated.");
    const size_t offset = block->first, rest = block->second - size;
    free_.erase(block);
    if (rest > 0) free_[offset + size] = rest;
    used_[offset] = size;
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    ++num_allocations_;
    std::memset(shadow_base_ + offset, 0xFF, size);
    return device_base_ + offset;
  }

  void give_back(void* address) {
    std::lock_guard<std::mutex> hold(mutex_);
    const size_t offset = static_cast<char*>(address) - device_base_;
    const size_t size = used_.at(offset);
    used_.erase(offset);
    allocated_ -= size;
    std::memset(shadow_base_ + offset, 0xFF, size);
    auto block = free_.emplace(offset, size).first;
    join_with_next(block);
    if (block != free_.begin()) join_with_next(std::prev(block));
  }

  size_t allocated() { return locked(allocated_); }
  size_t peak() { return locked(peak_); }
  size_t num_allocations() { return locked(num_allocations_); }
  void restart_peak() {
    std::lock_guard<std::mutex> hold(mutex_);
    peak_ = allocated_;
  }
  void limit(size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    limit_ = bytes;
  }

 private:
  Arena() : device_base_(map(PROT_NONE)), shadow_base_(map(PROT_READ | PROT_WRITE)) {
    free_[0] = kArenaBytes;
  }

  static char* map(int protection) {
    void* found =
        mmap(nullptr, kArenaBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space for the pretended device");
    return static_cast<char*>(found);
  }

  void join_with_next(std::map<size_t, size_t>::iterator block) {
    const auto next = std::next(block);
    if (next == free_.end() || block->first + block->second != next->first) return;
    block->second += next->second;
    free_.erase(next);
  }

  size_t locked(const size_t& number) {
    std::lock_guard<std::mutex> hold(mutex_);
    return number;
  }

  char* const device_base_;
  char* const shadow_base_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;
  size_t allocated_ = 0, peak_ = 0, num_allocations_ = 0, limit_ = kArenaBytes;
};

inline char* shadow(const void* address) { return Arena::get().shadow(address); }

// Host memory that copies may use without waiting, as cudaHostRegister keeps it.
class Registered {
 public:
  static Registered& get() {
    static auto* ranges = new Registered();
    return *ranges;
  }

  // False where a part of it is registered already.
  bool add(const void* begin, size_t bytes) {
    const char* at = static_cast<const char*>(begin);
    std::lock_guard<std::mutex> hold(mutex_);
    for (const auto& [start, size] : ranges_) {
      if (at < start + size && start < at + bytes) return false;
    }
    ranges_[at] = bytes;
    return true;
  }

  bool remove(const void* begin) {
    std::lock_guard<std::mutex> hold(mutex_);
    return ranges_.erase(static_cast<const char*>(begin)) > 0;
  }

  bool holds(const void* address) {
    const char* at = static_cast<const char*>(address);
    std::lock_guard<std::mutex> hold(mutex_);
    auto after = ranges_.upper_bound(at);
    if (after == ranges_.begin()) return false;
    const auto& [start, size] = *std::prev(after);
    return at < start + size;
  }

  // Whether a registered range begins or ends inside these bytes: CUDA copies no such range.
  bool borders_inside(const void* begin, size_t bytes) {
    const char* at = static_cast<const char*>(begin);
    std::lock_guard<std::mutex> hold(mutex_);
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& range) {
      const char *start = range.first, *end = range.first + range.second;
      return start < at + bytes && end > at && !(start <= at && end >= at + bytes);
    });
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
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
    std::memcpy(shadow(target), shadow(source), bytes);
  }
};

struct PinnedAllocator final : public at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* found = nullptr;
    const size_t size = std::max<size_t>(bytes, 1);
    if (posix_memalign(&found, 4096, size) != 0) throw std::bad_alloc();
    Registered::get().add(found, size);
    return {found, found, &give_back, c10::Device(c10::kCPU)};
  }
  static void give_back(void* address) {
    Registered::get().remove(address);
    std::free(address);
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace pretended
