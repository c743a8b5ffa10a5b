// The engine on io_uring: one thread makes the ring, issues every request and reaps every
// completion, as IORING_SETUP_SINGLE_ISSUER demands.

#include "io_engine.h"
#include "io_ring.h"

#include <cerrno>
#include <exception>
#include <system_error>

#if defined(STRONGHOLD_HAS_IO_URING)

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>

#include "io_queue.h"

namespace sh {
namespace {

constexpr uint64_t kWakeTag = ~uint64_t{0};
constexpr int64_t kMaxBuffer = int64_t{1} << 30;  // the kernel's limit for one registered buffer
constexpr int kMaxRefusals = 1000;                // of io_uring_enter in a row, a millisecond each

class IoUring : public IoEngine {
 public:
  IoUring(IoQueue* queue, int depth, std::vector<sh_io_region> regions, int* registration)
      : queue_(queue), blocks_(static_cast<size_t>(depth)), regions_(std::move(regions)) {
    for (int slot = depth - 1; slot >= 0; --slot) free_.push_back(slot);
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    try {
      std::future<int> ready = ready_.get_future();
      thread_ = StartIoThread(&Main, this);
      *registration = ready.get();
    } catch (...) {
      if (thread_.joinable()) thread_.join();
      close(wake_fd_);
      throw;
    }
  }

  ~IoUring() override {
    stop_.store(true, std::memory_order_release);
    Wake();
    thread_.join();
    close(wake_fd_);
  }

  const char* name() const override { return "io_uring"; }
  bool registered() const override { return !buffers_.empty(); }

  void Wake() noexcept override {
    const uint64_t one = 1;
    // It cannot fail: the counter would have to overflow.
    while (write(wake_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

 private:
  static void Main(void* context) { static_cast<IoUring*>(context)->Run(); }

  void Run() {
    try {
      ring_.emplace(static_cast<unsigned>(blocks_.size()) + 1);  // and one for the wake-up
      ready_.set_value(Register());
    } catch (...) {
      ready_.set_exception(std::current_exception());
      return;
    }
    while (!stop_.load(std::memory_order_acquire) || free_.size() < blocks_.size()) {
      Issue();
      const int error = ring_->SubmitAndWait();
      const bool reaped = Reap();
      if (error == 0 || error == EINTR || reaped) {
        refusals_ = 0;
      } else {
        Starve(error);
      }
    }
    ring_.reset();
  }

  int Register() {
    for (const sh_io_region& region : regions_) {
      for (int64_t begin = 0; begin < region.nbytes; begin += kMaxBuffer) {
        const int64_t nbytes = std::min(kMaxBuffer, region.nbytes - begin);
        buffers_.push_back(
            {static_cast<char*>(region.address) + begin, static_cast<size_t>(nbytes)});
      }
    }
    if (buffers_.empty()) return 0;
    const int error = ring_->RegisterBuffers(buffers_);
    if (error != 0) buffers_.clear();
    return error;
  }

  void Issue() {
    if (!armed_) {
      io_uring_sqe* entry = ring_->Prepare();
      entry->opcode = IORING_OP_POLL_ADD;
      entry->fd = wake_fd_;
      entry->poll_events = POLLIN;
      entry->user_data = kWakeTag;
      armed_ = true;
    }
    while (!free_.empty() && queue_->Take(&blocks_[free_.back()])) {
      Prepare(free_.back());
      free_.pop_back();
    }
  }

  void Prepare(int slot) {
    const IoBlock& block = blocks_[slot];
    io_uring_sqe* entry = ring_->Prepare();
    entry->fd = block.fd;
    entry->user_data = static_cast<uint64_t>(slot);
    const bool reading = block.kind == IoKind::kRead;
    const int buffer = BufferOf(block);
    if (buffer >= 0) {
      entry->opcode = reading ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      entry->buf_index = static_cast<uint16_t>(buffer);
    } else {
      entry->opcode = reading ? IORING_OP_READ : IORING_OP_WRITE;
    }
    entry->addr = reinterpret_cast<uintptr_t>(block.address);
    entry->len = static_cast<uint32_t>(block.nbytes);
    entry->off = static_cast<uint64_t>(block.offset);
    // A request that would have to wait goes to a thread of the kernel.
    if (block.stalls > 0) entry->flags = IOSQE_ASYNC;
  }

  int BufferOf(const IoBlock& block) const {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const char* begin = static_cast<const char*>(buffers_[i].iov_base);
      if (block.address < begin) continue;
      const size_t skip = static_cast<size_t>(block.address - begin);
      if (skip + static_cast<size_t>(block.nbytes) <= buffers_[i].iov_len) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  bool Reap() {
    bool any = false;
    io_uring_cqe completion;
    while (ring_->Reap(&completion)) {
      any = true;
      if (completion.user_data == kWakeTag) {
        uint64_t count;
        // A failed read loses nothing: the poll reports again, and Issue asks the queue.
        if (read(wake_fd_, &count, sizeof(count)) < 0) count = 0;
        armed_ = false;
      } else {
        Complete(static_cast<int>(completion.user_data), completion.res);
      }
    }
    return any;
  }

  void Complete(int slot, int64_t result) {
    if (!IoAdvance(&blocks_[slot], result)) {
      Prepare(slot);
      return;
    }
    queue_->End(blocks_[slot]);
    free_.push_back(slot);
  }

  // The kernel took no request and completed none. It may be short of memory for a moment. If that
  // lasts, the requests that it did not take fail. Otherwise they would wait for ever.
  void Starve(int error) {
    const timespec pause = {0, 1000000};
    nanosleep(&pause, nullptr);
    if (++refusals_ < kMaxRefusals) return;
    io_uring_sqe entry;
    while (ring_->Withdraw(&entry)) {
      if (entry.user_data == kWakeTag) {
        armed_ = false;
      } else {
        Complete(static_cast<int>(entry.user_data), -error);
      }
    }
    refusals_ = 0;
  }

  IoQueue* queue_;
  std::vector<IoBlock> blocks_;  // by slot; a request's user_data is its slot
  std::vector<sh_io_region> regions_;
  std::vector<iovec> buffers_;  // registered
  int wake_fd_ = -1;
  std::atomic<bool> stop_{false};
  std::promise<int> ready_;

  // Only the ring's thread uses these.
  std::optional<IoRing> ring_;
  std::vector<int> free_;  // slots
  bool armed_ = false;     // the poll of wake_fd_ is prepared or in the kernel
  int refusals_ = 0;

  std::thread thread_;
};

}  // namespace

std::unique_ptr<IoEngine> MakeIoUring(IoQueue* queue, int depth, std::vector<sh_io_region> regions,
                                      int* registration) {
  return std::make_unique<IoUring>(queue, depth, std::move(regions), registration);
}

}  // namespace sh

#else

namespace sh {

std::unique_ptr<IoEngine> MakeIoUring(IoQueue*, int, std::vector<sh_io_region>, int*) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring");
}

}  // namespace sh

#endif  // STRONGHOLD_HAS_IO_URING
