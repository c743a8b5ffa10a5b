// The distance of an update's memory prefetch, chosen by timing the work itself.
//
// [Note: prefetch]
// 1. A step has seven to nine streams of memory. Some hardware prefetchers cannot follow so many.
//    Others can.
// 2. Measured on an Intel Xeon: a distance of 256 elements takes 8 % off a bf16 step and 4 % off an
//    fp32 step (half that distance: 3 %).
// 3. Measured on an AMD EPYC (Zen 4): an fp32 step is 10 to 30 % longer with 256 elements than with
//    64. In bf16 either one is faster by up to 10 %, depending on the arrays' addresses.
// 4. So some chunks of a pool's first calls alternate between the two distances. The pool keeps the
//    faster one. It changes no bit of a result.
#ifndef STRONGHOLD_PREFETCH_H_
#define STRONGHOLD_PREFETCH_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace sh {

class PrefetchDistance {
 public:
  static constexpr int64_t kFar = 256, kNear = 64;  // elements
  // Chunks that are timed: some 10 ms of work. Chunks of a shared machine differ by a fifth; the
  // medians of 256 then differ by 2 %.
  static constexpr int64_t kTrials = 512;
  static constexpr float kMargin = 0.97f;  // near is taken if it is faster by more than noise

  // For one chunk. `trial` is -1 if its time is not needed.
  struct Turn {
    int64_t elements;
    int64_t trial;
  };

  // Any thread inside a call.
  Turn Next() {
    if (chosen_ != 0) return {chosen_, -1};
    const int64_t trial = next_.fetch_add(1, std::memory_order_relaxed);
    if (trial >= kTrials) return {kFar, -1};
    return {IsNear(trial) ? kNear : kFar, trial};
  }
  void Record(int64_t trial, float seconds) { seconds_[trial] = seconds; }

  // Before and after the chunks of a call, while no other thread is inside.
  void Begin() {
    if (chosen_ == 0) seconds_.resize(kTrials);
  }
  void End() {
    if (chosen_ != 0 || next_.load(std::memory_order_relaxed) < kTrials) return;
    chosen_ = Median(true) < kMargin * Median(false) ? kNear : kFar;
    std::vector<float>().swap(seconds_);
  }

  // 0 until it is known.
  int64_t chosen() const { return chosen_; }

 private:
  // The parity of the bits. In any order of threads, every thread uses both distances.
  static bool IsNear(int64_t trial) { return __builtin_parityll(trial) != 0; }

  float Median(bool near) const {
    std::vector<float> found;
    for (int64_t i = 0; i < kTrials; ++i) {
      if (IsNear(i) == near) found.push_back(seconds_[i]);
    }
    const auto middle = found.begin() + found.size() / 2;
    std::nth_element(found.begin(), middle, found.end());
    return *middle;
  }

  int64_t chosen_ = 0;
  std::atomic<int64_t> next_{0};
  std::vector<float> seconds_;
};

}  // namespace sh

#endif  // STRONGHOLD_PREFETCH_H_
