// The engine that works on every system: threads that call pread and pwrite.

#include <pthread.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "io_engine.h"
#include "io_queue.h"

namespace sh {
namespace {

// Every blocking call needs a thread. No disk is faster with more threads than this.
constexpr int kMaxIoThreads = 64;

int64_t Transfer(const IoBlock& block) {
  const size_t nbytes = static_cast<size_t>(block.nbytes);
  const ssize_t result = block.kind == IoKind::kRead
                             ? pread(block.fd, block.address, nbytes, block.offset)
                             : pwrite(block.fd, block.address, nbytes, block.offset);
  return result < 0 ? -static_cast<int64_t>(errno) : result;
}

class IoThreads : public IoEngine {
 public:
  IoThreads(IoQueue* queue, int num_threads) : queue_(queue) {
    try {
      threads_.reserve(static_cast<size_t>(num_threads));
      for (int i = 0; i < num_threads; ++i) threads_.push_back(StartIoThread(&Work, queue));
    } catch (const std::system_error&) {
      // Fewer threads transfer the same bytes.
      if (threads_.empty()) throw;
    }
  }

  ~IoThreads() override {
    queue_->Stop();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }

  void Wake() noexcept override {}  // TakeOrWait has its own condition

 private:
  static void Work(void* context) {
    IoQueue* queue = static_cast<IoQueue*>(context);
    IoBlock block;
    while (queue->TakeOrWait(&block)) {
      while (!IoAdvance(&block, Transfer(block))) {
      }
      queue->End(block);
    }
  }

  IoQueue* queue_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> MakeIoThreads(IoQueue* queue, int depth) {
  return std::make_unique<IoThreads>(queue, std::min(depth, kMaxIoThreads));
}

std::thread StartIoThread(void (*body)(void*), void* context) {
  // A thread inherits its creator's mask.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(body, context);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace sh
