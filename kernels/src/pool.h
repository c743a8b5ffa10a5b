// The thread pool: owns the worker threads and the scratch of the call in progress. Of the kernels
// it has only the pointer to their table.
#ifndef STRONGHOLD_POOL_H_
#define STRONGHOLD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "prefetch.h"
#include "targets.h"

namespace sh {

// The loops that prefetch. Each has a separate distance.
enum class Loop { kUpdateInPlace, kUpdateOutOfPlace, kTrafficInPlace, kTrafficOutOfPlace };
constexpr int kNumLoops = 4;

// The distances of one optimizer.
struct PrefetchDistances {
  PrefetchDistance of[kNumLoops][kNumLayouts][kNumDtypes];
};

}  // namespace sh

// The opaque type of the C ABI.
struct sh_pool {
 public:
  // One item of a job. Called from several threads at once with different indices.
  using Item = void (*)(void* context, int64_t index);

  sh_pool(int num_threads, std::vector<int> cores, const sh::Kernels* kernels);
  ~sh_pool();
  sh_pool(const sh_pool&) = delete;
  sh_pool& operator=(const sh_pool&) = delete;

  const sh::Kernels& kernels() const { return *kernels_; }

  // True in a child of the process that created the pool, where its threads do not exist.
  bool forked() const;

  // One call of the C ABI. Holding it serialises callers and guards the scratch.
  class Call {
   public:
    explicit Call(sh_pool* pool) : pool_(pool), lock_(pool->call_mutex_) {}
    // Runs item(context, i) for i in [0, num_items), on this thread and on the workers that wake in
    // time. Waits until all items are done.
    void Run(int64_t num_items, Item item, void* context);
    int64_t num_threads() const { return static_cast<int64_t>(pool_->threads_.size()) + 1; }
    std::vector<int64_t>& offsets() { return pool_->offsets_; }
    std::vector<double>& partials() { return pool_->partials_; }
    sh::PrefetchDistance& distance(sh::Loop loop, int optimizer, int weight_dtype, int grad_dtype) {
      return pool_->distances_[optimizer].of[static_cast<int>(loop)][weight_dtype][grad_dtype];
    }

   private:
    sh_pool* pool_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  void Stop();
  void Work();
  void Claim();

  const sh::Kernels* kernels_;
  const std::vector<int> cores_;
  const int owner_pid_;

  std::mutex call_mutex_;
  std::vector<int64_t> offsets_;  // scratch, kept so that steady state allocates nothing
  std::vector<double> partials_;
  std::vector<sh::PrefetchDistances> distances_;  // one for each optimizer

  // The job in progress. item_, context_ and num_items_ are written only while no worker is
  // active; workers read them after taking a seat under mutex_.
  Item item_ = nullptr;
  void* context_ = nullptr;
  int64_t num_items_ = 0;
  std::atomic<int64_t> next_{0};

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  int seats_ = 0;   // workers that the job still wants
  int active_ = 0;  // workers inside the job
  bool stop_ = false;

  std::vector<std::thread> threads_;
};

#endif  // STRONGHOLD_POOL_H_
