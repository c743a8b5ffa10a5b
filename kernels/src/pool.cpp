#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <exception>
#include <system_error>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace {

#if defined(__linux__)
cpu_set_t MaskOf(const std::vector<int>& cores) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int core : cores) CPU_SET(core, &mask);
  return mask;
}
#endif

void Confine(const std::vector<int>& cores) {
  if (cores.empty()) return;
#if defined(__linux__)
  const cpu_set_t mask = MaskOf(cores);
  const int error = pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask);
  if (error != 0) throw std::system_error(error, std::generic_category(), "core list");
#else
  throw std::system_error(ENOTSUP, std::generic_category(), "core list");
#endif
}

// The calling thread's floating-point mode and core mask are set for the call and restored after
// it. A process that flushes denormals must get the bits that the workers compute.
class CallerScope {
 public:
  explicit CallerScope(const std::vector<int>& cores) : confined_(!cores.empty()) {
    fegetenv(&environment_);
    fesetenv(FE_DFL_ENV);
#if defined(__linux__)
    if (confined_) {
      const cpu_set_t mask = MaskOf(cores);
      confined_ = pthread_getaffinity_np(pthread_self(), sizeof(mask_), &mask_) == 0 &&
                  pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask) == 0;
    }
#endif
  }
  ~CallerScope() {
#if defined(__linux__)
    if (confined_) pthread_setaffinity_np(pthread_self(), sizeof(mask_), &mask_);
#endif
    fesetenv(&environment_);
  }

 private:
  bool confined_;
  std::fenv_t environment_;
#if defined(__linux__)
  cpu_set_t mask_;
#endif
};

}  // namespace

sh_pool::sh_pool(int num_threads, std::vector<int> cores, const sh::Kernels* kernels)
    : kernels_(kernels),
      cores_(std::move(cores)),
      owner_pid_(static_cast<int>(getpid())),
      distances_(kernels->num_optimizers) {
  // A thread inherits core mask and floating-point mode from its creator. A short-lived thread sets
  // them. So a refused core list is reported here, and the calling thread does not change.
  std::exception_ptr failure;
  std::thread([&] {
    try {
      Confine(cores_);
      fesetenv(FE_DFL_ENV);
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back(&sh_pool::Work, this);
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) {
    Stop();
    std::rethrow_exception(failure);
  }
}

sh_pool::~sh_pool() {
  const std::lock_guard<std::mutex> last_call(call_mutex_);
  Stop();
}

void sh_pool::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool sh_pool::forked() const { return static_cast<int>(getpid()) != owner_pid_; }

void sh_pool::Call::Run(int64_t num_items, Item item, void* context) {
  const CallerScope scope(pool_->cores_);
  if (num_items <= 1 || pool_->threads_.empty()) {
    for (int64_t i = 0; i < num_items; ++i) item(context, i);
    return;
  }
  const int helpers = static_cast<int>(
      std::min<int64_t>(num_items - 1, static_cast<int64_t>(pool_->threads_.size())));
  {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    pool_->item_ = item;
    pool_->context_ = context;
    pool_->num_items_ = num_items;
    pool_->next_.store(0, std::memory_order_relaxed);
    pool_->seats_ = helpers;
  }
  for (int i = 0; i < helpers; ++i) pool_->wake_.notify_one();
  pool_->Claim();
  // All items are claimed. Seats that no worker took are withdrawn, so that a short job does not
  // wait for a thread that is still waking. The workers inside finish their last item.
  std::unique_lock<std::mutex> lock(pool_->mutex_);
  pool_->seats_ = 0;
  pool_->done_.wait(lock, [this] { return pool_->active_ == 0; });
}

void sh_pool::Claim() {
  // Relaxed: only the uniqueness of the index matters. The job was published, and its results are
  // collected, under mutex_.
  for (;;) {
    const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= num_items_) return;
    item_(context_, index);
  }
}

void sh_pool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || seats_ > 0; });
    if (stop_) return;
    --seats_;
    ++active_;
    lock.unlock();
    Claim();
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}
