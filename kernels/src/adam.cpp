// sh_adam and sh_adam_traffic: checks, constants, and the split over threads.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>

#include "pool.h"
#include "status.h"
#include "stronghold.h"
#include "targets.h"

namespace sh {
namespace {

// Elements that a thread claims at a time, over all segments laid end to end: 850 kB of traffic
// in bf16, some 20 us, so that claims are rare and the last thread is not late. Once a loop's
// distance of prefetching is known they are up to kMostChunks as many, which takes 4 % off a step
// with lean states: each claim begins and ends the overlap of [Note: strips].
constexpr int64_t kChunk = 32768;
constexpr int64_t kMostChunks = 4;
// Segments start on a multiple of this in that order, so that chunks end on whole vectors, and on
// whole groups.
constexpr int64_t kAlign = 64;
static_assert(kAlign % kLeanGroup == 0 && kChunk % kAlign == 0);

constexpr int64_t kWeightBytes[kNumLayouts] = {4, 2, 2, 2};
constexpr int64_t kLowBytes[kNumLayouts] = {0, 2, 4, 1};
constexpr int64_t kMomentBytes[kNumLayouts] = {4, 4, 4, 1};
constexpr int64_t kGradBytes[kNumDtypes] = {4, 2, 2};

AdamConstants ConstantsOf(const sh_adam_segment& s) {
  double correction1 = 1.0, correction2 = 1.0;
  if (s.bias_correction != 0) {
    // pow of the step, not a running product: resuming at any step gives the same constants.
    correction1 = 1.0 - std::pow(s.beta1, static_cast<double>(s.step));
    correction2 = 1.0 - std::pow(s.beta2, static_cast<double>(s.step));
  }
  const auto rounded = [](double x) { return static_cast<float>(x); };
  AdamConstants c;
  c.grad_scale = rounded(s.grad_scale);
  c.weight_decay = rounded(s.weight_decay);
  c.decay_factor = rounded(1.0 - s.lr * s.weight_decay);
  c.beta1 = rounded(s.beta1);
  c.one_minus_beta1 = rounded(1.0 - s.beta1);
  c.beta2 = rounded(s.beta2);
  c.one_minus_beta2 = rounded(1.0 - s.beta2);
  c.inv_sqrt_bias_correction2 = rounded(1.0 / std::sqrt(correction2));
  c.eps = rounded(s.eps);
  c.neg_step_size = rounded(-s.lr / correction1);
  return c;
}

AdamArrays ArraysOf(const sh_adam_segment& s) {
  return {static_cast<char*>(s.weight),
          static_cast<char*>(s.low),
          static_cast<char*>(s.exp_avg),
          static_cast<char*>(s.exp_avg_sq),
          static_cast<const char*>(s.grad),
          reinterpret_cast<char*>(s.exp_avg_scale),
          reinterpret_cast<char*>(s.exp_avg_sq_scale)};
}

void CheckArrays(const sh_adam_segment& s, int64_t index, sh_dtype weight_dtype) {
  RequireAt(s.numel >= 0, index, "numel is negative");
  if (s.numel == 0) return;
  RequireAt(s.weight != nullptr, index, "weight is NULL");
  RequireAt(s.exp_avg != nullptr, index, "exp_avg is NULL");
  RequireAt(s.exp_avg_sq != nullptr, index, "exp_avg_sq is NULL");
  RequireAt(s.grad != nullptr, index, "grad is NULL");
  RequireAt(s.low != nullptr || weight_dtype == SH_F32, index, "low is NULL");
  if (weight_dtype != SH_BF16_LEAN) return;
  RequireAt(s.exp_avg_scale != nullptr, index, "exp_avg_scale is NULL");
  RequireAt(s.exp_avg_sq_scale != nullptr, index, "exp_avg_sq_scale is NULL");
}

void CheckNumbers(const sh_adam_segment& s, int64_t index) {
  // Written so that NaN fails.
  RequireAt(s.beta1 >= 0.0 && s.beta1 < 1.0, index, "beta1 must be in [0, 1)");
  RequireAt(s.beta2 >= 0.0 && s.beta2 < 1.0, index, "beta2 must be in [0, 1)");
  RequireAt(s.eps >= 0.0, index, "eps must be >= 0");
  RequireAt(std::isfinite(s.lr), index, "lr must be finite");
  RequireAt(std::isfinite(s.weight_decay), index, "weight_decay must be finite");
  RequireAt(s.bias_correction == 0 || s.step >= 1, index, "step must be >= 1");
}

// One call, as its chunks see it.
struct AdamJob {
  const Kernels* kernels;
  int weight_dtype;
  int grad_dtype;
  const sh_adam_segment* segments;
  const sh_adam_segment* to;  // sh_adam_traffic alone
  int64_t num_segments;
  const int64_t* ends;         // [num_segments], padded to kAlign
  int64_t chunk;               // elements
  PrefetchDistance* distance;  // nullptr: nothing is timed
};

AdamArrays Advanced(const AdamArrays& a, const AdamJob& job, int64_t i) {
  const int64_t moment = i * kMomentBytes[job.weight_dtype];
  const int64_t scale = job.weight_dtype == SH_BF16_LEAN ? i / kLeanGroup * 4 : 0;
  return {a.weight + i * kWeightBytes[job.weight_dtype],
          a.low + i * kLowBytes[job.weight_dtype],
          a.exp_avg + moment,
          a.exp_avg_sq + moment,
          a.grad + i * kGradBytes[job.grad_dtype],
          a.exp_avg_scale + scale,
          a.exp_avg_sq_scale + scale};
}

// Calls range(segment, begin, end) for the parts of segments that lie in chunk `index`.
template <class Range>
void ForEachPart(const AdamJob& job, int64_t index, const Range& range) {
  const int64_t begin = index * job.chunk;
  const int64_t end = std::min(begin + job.chunk, job.ends[job.num_segments - 1]);
  int64_t i = std::upper_bound(job.ends, job.ends + job.num_segments, begin) - job.ends;
  for (; i < job.num_segments; ++i) {
    const int64_t start = i == 0 ? 0 : job.ends[i - 1];
    if (start >= end) return;
    const int64_t from = std::max(begin, start) - start;
    const int64_t upto = std::min(end - start, job.segments[i].numel);
    if (from < upto) range(i, from, upto);
  }
}

// Calls chunk(elements to prefetch ahead) for chunk `index`, and times it while the distance is
// being chosen. Only whole chunks are alike.
template <class Chunk>
void AtDistance(const AdamJob& job, int64_t index, const Chunk& chunk) {
  const bool whole = (index + 1) * job.chunk <= job.ends[job.num_segments - 1];
  if (job.distance == nullptr || !whole) return chunk(PrefetchDistance::kFar);
  const PrefetchDistance::Turn turn = job.distance->Next();
  if (turn.trial < 0) return chunk(turn.elements);
  const auto begun = std::chrono::steady_clock::now();
  chunk(turn.elements);
  const std::chrono::duration<float> took = std::chrono::steady_clock::now() - begun;
  job.distance->Record(turn.trial, took.count());
}

void AdamPart(const AdamJob& job, int64_t index, int64_t ahead) {
  ForEachPart(job, index, [&job, ahead](int64_t i, int64_t from, int64_t upto) {
    const sh_adam_segment& s = job.segments[i];
    // With no weight decay the L2 form is the decoupled one with the factor 1.
    const bool adamw = s.adamw != 0 || s.weight_decay == 0.0;
    job.kernels->adam[job.weight_dtype][job.grad_dtype][adamw ? 1 : 0](
        ConstantsOf(s), Advanced(ArraysOf(s), job, from), upto - from, ahead);
  });
}

void TrafficPart(const AdamJob& job, int64_t index, int64_t ahead) {
  const bool in_place = job.to == nullptr;
  ForEachPart(job, index, [&job, in_place, ahead](int64_t i, int64_t from, int64_t upto) {
    const sh_adam_segment* to = in_place ? job.segments : job.to;
    job.kernels->traffic[job.weight_dtype][job.grad_dtype](
        Advanced(ArraysOf(job.segments[i]), job, from), Advanced(ArraysOf(to[i]), job, from),
        in_place, upto - from, ahead);
  });
}

template <void (*kPart)(const AdamJob&, int64_t, int64_t)>
void Chunk(void* context, int64_t index) {
  const AdamJob& job = *static_cast<const AdamJob*>(context);
  AtDistance(job, index, [&job, index](int64_t ahead) { kPart(job, index, ahead); });
}

void CheckCall(const sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
               const sh_adam_segment* segments, int64_t num_segments) {
  Require(pool != nullptr, "pool is NULL");
  Require(!pool->forked(), "the pool was made before fork(); make one in this process");
  Require(weight_dtype >= SH_F32 && weight_dtype <= SH_BF16_LEAN, "unknown weight dtype");
  Require(grad_dtype >= SH_F32 && grad_dtype <= SH_F16, "unknown gradient dtype");
  Require(num_segments >= 0, "num_segments is negative");
  Require(num_segments == 0 || segments != nullptr, "segments is NULL");
  for (int64_t i = 0; i < num_segments; ++i) CheckArrays(segments[i], i, weight_dtype);
}

void RunJob(sh_pool* pool, AdamJob job, Loop loop, bool timed, sh_pool::Item chunk) {
  if (job.num_segments == 0) return;
  sh_pool::Call call(pool);
  std::vector<int64_t>& ends = call.offsets();
  ends.resize(job.num_segments);
  int64_t total = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    total += (job.segments[i].numel + kAlign - 1) / kAlign * kAlign;
    ends[i] = total;
  }
  job.kernels = &pool->kernels();
  job.ends = ends.data();
  PrefetchDistance& distance = call.distance(loop, job.weight_dtype, job.grad_dtype);
  if (timed) {
    job.distance = &distance;
    distance.Begin();
  }
  if (distance.chosen() != 0) {
    const int64_t claims = 4 * call.num_threads();  // at least, whoever is late
    while (job.chunk < kMostChunks * kChunk && total >= 2 * claims * job.chunk) job.chunk *= 2;
  }
  call.Run((total + job.chunk - 1) / job.chunk, chunk, &job);
  distance.End();
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

}  // namespace
}  // namespace sh

extern "C" {

int32_t sh_adam(sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
                const sh_adam_segment* segments, int64_t num_segments) {
  return sh::Guarded([&] {
    sh::CheckCall(pool, weight_dtype, grad_dtype, segments, num_segments);
    for (int64_t i = 0; i < num_segments; ++i) sh::CheckNumbers(segments[i], i);
    // The first step makes the moments' pages: its chunks would tell the time that this takes.
    bool timed = true;
    for (int64_t i = 0; i < num_segments; ++i) timed = timed && segments[i].step > 1;
    sh::RunJob(pool,
               {nullptr, weight_dtype, grad_dtype, segments, nullptr, num_segments, nullptr,
                sh::kChunk, nullptr},
               sh::Loop::kAdam, timed, sh::Chunk<sh::AdamPart>);
  });
}

int32_t sh_adam_traffic(sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
                        const sh_adam_segment* segments, const sh_adam_segment* to,
                        int64_t num_segments) {
  return sh::Guarded([&] {
    sh::CheckCall(pool, weight_dtype, grad_dtype, segments, num_segments);
    for (int64_t i = 0; to != nullptr && i < num_segments; ++i) {
      sh::CheckArrays(to[i], i, weight_dtype);
      sh::RequireAt(to[i].numel == segments[i].numel, i, "numel differs between the two lists");
      sh::RequireAt(sh::Aligned(to[i].weight) && sh::Aligned(to[i].low) &&
                        sh::Aligned(to[i].exp_avg) && sh::Aligned(to[i].exp_avg_sq) &&
                        sh::Aligned(to[i].exp_avg_scale) && sh::Aligned(to[i].exp_avg_sq_scale),
                    i, "arrays written past the caches must be aligned to 64 bytes");
    }
    sh::RunJob(pool,
               {nullptr, weight_dtype, grad_dtype, segments, to, num_segments, nullptr, sh::kChunk,
                nullptr},
               to == nullptr ? sh::Loop::kTrafficInPlace : sh::Loop::kTrafficElsewhere, true,
               sh::Chunk<sh::TrafficPart>);
  });
}

int32_t sh_adam_prefetch(sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
                         int64_t* elements) {
  return sh::Guarded([&] {
    sh::CheckCall(pool, weight_dtype, grad_dtype, nullptr, 0);
    sh::Require(elements != nullptr, "elements is NULL");
    sh_pool::Call call(pool);
    *elements = call.distance(sh::Loop::kAdam, weight_dtype, grad_dtype).chosen();
  });
}

}  // extern "C"
