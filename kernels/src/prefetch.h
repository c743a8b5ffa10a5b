// How far ahead the loop of an update asks for memory: chosen by timing the work itself.
//
// [Note: prefetch] Seven to nine streams are more than some prefetchers of the hardware follow, and
// others need no help. On an Intel Xeon asking for the group 256 elements ahead takes 8 % off a
// bf16 step and 4 % off an fp32 step (half that distance: 3 %). On an AMD EPYC (Zen 4) it makes an
// fp32 step 10 to 30 % longer than 64 elements ahead do; in bf16 the one or the other is faster by
// up to 10 %, as the arrays lie. So some chunks of a pool's first calls take turns between the two
// distances, and what was faster is kept. The bits of a result know nothing of it.
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

  // For one chunk. `trial` is -1 where its time is not wanted.
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
  // The parity of the bits: whatever order threads come in, each has turns at both distances.
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
