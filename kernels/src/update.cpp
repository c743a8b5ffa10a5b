// sh_update and sh_update_traffic, for every optimizer: checks, and the split over threads.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "pool.h"
#include "status.h"
#include "stronghold.h"
#include "targets.h"

namespace sh {
namespace {

// Elements that a thread claims at a time, over all segments laid end to end. Of Adam in bf16 they
// are 850 kB of traffic, some 20 us: claims are rare, and the last thread is not late. Once a
// loop's distance of prefetching is known, a claim has up to kMostChunks as many. That takes 4 %
// off a step of Adam with lean states: every claim begins and ends the overlap of [Note: strips].
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

// The index of an optimizer, the same in the table of every instruction set.
int OptimizerNamed(const char* name) {
  Require(name != nullptr, "optimizer is NULL");
  const Kernels& kernels = *KernelsAt(0);
  for (int i = 0; i < kernels.num_optimizers; ++i) {
    if (std::strcmp(kernels.optimizers[i].name, name) == 0) return i;
  }
  std::string message = std::string("optimizer is \"") + name + "\"; the kernels have";
  for (int i = 0; i < kernels.num_optimizers; ++i) {
    message += std::string(i == 0 ? " " : ", ") + kernels.optimizers[i].name;
  }
  throw Invalid(message);
}

// One call, as its chunks see it.
struct Job {
  const Optimizer* optimizer;
  int weight_dtype;
  int grad_dtype;
  const sh_segment* segments;
  const sh_segment* to;  // sh_update_traffic alone
  int64_t num_segments;
  const int64_t* ends;         // [num_segments], padded to kAlign
  int64_t chunk;               // elements
  PrefetchDistance* distance;  // nullptr: nothing is timed
};

// The segment's arrays from element i on.
Arrays ArraysFrom(const sh_segment& s, const Job& job, int64_t i) {
  const auto moment = [&s, &job, i](int k) {
    if (k >= job.optimizer->num_moments) return static_cast<char*>(nullptr);
    return static_cast<char*>(s.moment[k]) + i * kMomentBytes[job.weight_dtype];
  };
  const auto scale = [&s, &job, i](int k) {
    const bool lean = job.weight_dtype == SH_BF16_LEAN;
    if (!lean || k >= job.optimizer->num_moments) return static_cast<char*>(nullptr);
    return reinterpret_cast<char*>(s.scale[k]) + i / kLeanGroup * 4;
  };
  return {static_cast<char*>(s.weight) + i * kWeightBytes[job.weight_dtype],
          static_cast<char*>(s.low) + i * kLowBytes[job.weight_dtype],
          moment(0),
          moment(1),
          static_cast<const char*>(s.grad) + i * kGradBytes[job.grad_dtype],
          scale(0),
          scale(1)};
}

void CheckArrays(const sh_segment& s, int64_t index, sh_dtype weight_dtype, int num_moments) {
  RequireAt(s.numel >= 0, index, "numel is negative");
  if (s.numel == 0) return;
  RequireAt(s.weight != nullptr, index, "weight is NULL");
  RequireAt(s.grad != nullptr, index, "grad is NULL");
  RequireAt(s.low != nullptr || weight_dtype == SH_F32, index, "low is NULL");
  for (int k = 0; k < num_moments; ++k) {
    static constexpr const char* kNoMoment[] = {"moment0 is NULL", "moment1 is NULL"};
    static constexpr const char* kNoScale[] = {"scale0 is NULL", "scale1 is NULL"};
    static_assert(SH_MAX_MOMENTS == 2);
    RequireAt(s.moment[k] != nullptr, index, kNoMoment[k]);
    RequireAt(s.scale[k] != nullptr || weight_dtype != SH_BF16_LEAN, index, kNoScale[k]);
  }
}

void CheckNumbers(const Optimizer& optimizer, const sh_segment* segments, int64_t num_segments) {
  for (int64_t i = 0; i < num_segments; ++i) {
    const char* wrong = optimizer.wrong(segments[i]);
    RequireAt(wrong == nullptr, i, wrong);
  }
}

// Calls range(segment, begin, end) for the parts of segments that lie in chunk `index`.
template <class Range>
void ForEachPart(const Job& job, int64_t index, const Range& range) {
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
void AtDistance(const Job& job, int64_t index, const Chunk& chunk) {
  const bool whole = (index + 1) * job.chunk <= job.ends[job.num_segments - 1];
  if (job.distance == nullptr || !whole) return chunk(PrefetchDistance::kFar);
  const PrefetchDistance::Turn turn = job.distance->Next();
  if (turn.trial < 0) return chunk(turn.elements);
  const auto begun = std::chrono::steady_clock::now();
  chunk(turn.elements);
  const std::chrono::duration<float> took = std::chrono::steady_clock::now() - begun;
  job.distance->Record(turn.trial, took.count());
}

void UpdatePart(const Job& job, int64_t index, int64_t ahead) {
  ForEachPart(job, index, [&job, ahead](int64_t i, int64_t from, int64_t upto) {
    const sh_segment& s = job.segments[i];
    const Optimizer& optimizer = *job.optimizer;
    float constants[SH_MAX_CONSTANTS];
    optimizer.constants(s, constants);
    optimizer.update[job.weight_dtype][job.grad_dtype][optimizer.variant(s)](
        constants, ArraysFrom(s, job, from), upto - from, ahead);
  });
}

void TrafficPart(const Job& job, int64_t index, int64_t ahead) {
  const bool in_place = job.to == nullptr;
  ForEachPart(job, index, [&job, in_place, ahead](int64_t i, int64_t from, int64_t upto) {
    const Arrays source = ArraysFrom(job.segments[i], job, from);
    const Arrays target = in_place ? source : ArraysFrom(job.to[i], job, from);
    job.optimizer->traffic[job.weight_dtype][job.grad_dtype](source, target, in_place, upto - from,
                                                             ahead);
  });
}

template <void (*kPart)(const Job&, int64_t, int64_t)>
void Chunk(void* context, int64_t index) {
  const Job& job = *static_cast<const Job*>(context);
  AtDistance(job, index, [&job, index](int64_t ahead) { kPart(job, index, ahead); });
}

void CheckList(const sh_segment* segments, int64_t num_segments) {
  Require(num_segments >= 0, "num_segments is negative");
  Require(num_segments == 0 || segments != nullptr, "segments is NULL");
}

void CheckPool(const sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype) {
  Require(pool != nullptr, "pool is NULL");
  Require(!pool->forked(), "the pool was made before fork(); make one in this process");
  Require(weight_dtype >= SH_F32 && weight_dtype <= SH_BF16_LEAN, "unknown weight dtype");
  Require(grad_dtype >= SH_F32 && grad_dtype <= SH_F16, "unknown gradient dtype");
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

// The arrays that are written past the caches.
void CheckTargets(const Job& job, sh_dtype weight_dtype) {
  const int num_moments = job.optimizer->num_moments;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    const sh_segment& to = job.to[i];
    CheckArrays(to, i, weight_dtype, num_moments);
    RequireAt(to.numel == job.segments[i].numel, i, "numel differs between the two lists");
    bool aligned = Aligned(to.weight) && Aligned(to.low);
    for (int k = 0; k < num_moments; ++k) {
      aligned = aligned && Aligned(to.moment[k]) && Aligned(to.scale[k]);
    }
    RequireAt(aligned, i, "arrays written past the caches must be aligned to 64 bytes");
  }
}

void RunJob(sh_pool* pool, Job job, int optimizer, Loop loop, bool timed, sh_pool::Item chunk) {
  if (job.num_segments == 0) return;
  sh_pool::Call call(pool);
  std::vector<int64_t>& ends = call.offsets();
  ends.resize(job.num_segments);
  int64_t total = 0;
  for (int64_t i = 0; i < job.num_segments; ++i) {
    total += (job.segments[i].numel + kAlign - 1) / kAlign * kAlign;
    ends[i] = total;
  }
  job.ends = ends.data();
  PrefetchDistance& distance = call.distance(loop, optimizer, job.weight_dtype, job.grad_dtype);
  if (timed) {
    job.distance = &distance;
    distance.Begin();
  }
  if (distance.chosen() != 0) {
    const int64_t claims = 4 * call.num_threads();  // at least, whichever thread is late
    while (job.chunk < kMostChunks * kChunk && total >= 2 * claims * job.chunk) job.chunk *= 2;
  }
  call.Run((total + job.chunk - 1) / job.chunk, chunk, &job);
  distance.End();
}

// Refuses the arguments of an update that break their contract; returns the optimizer's index.
int CheckUpdate(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype, sh_dtype grad_dtype,
                const sh_segment* segments, int64_t num_segments) {
  CheckPool(pool, weight_dtype, grad_dtype);
  CheckList(segments, num_segments);
  const int index = OptimizerNamed(optimizer);
  const Optimizer& table = pool->kernels().optimizers[index];
  for (int64_t i = 0; i < num_segments; ++i) {
    CheckArrays(segments[i], i, weight_dtype, table.num_moments);
  }
  return index;
}

}  // namespace
}  // namespace sh

extern "C" {

const char* sh_optimizer_at(int32_t index) {
  const sh::Kernels& kernels = *sh::KernelsAt(0);
  const bool known = index >= 0 && index < kernels.num_optimizers;
  return known ? kernels.optimizers[index].name : nullptr;
}

int32_t sh_update(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype, sh_dtype grad_dtype,
                  const sh_segment* segments, int64_t num_segments) {
  return sh::Guarded([&] {
    const int index =
        sh::CheckUpdate(pool, optimizer, weight_dtype, grad_dtype, segments, num_segments);
    const sh::Optimizer& table = pool->kernels().optimizers[index];
    sh::CheckNumbers(table, segments, num_segments);
    // The first step makes the moments' pages, which takes time: its chunks are not timed.
    bool timed = true;
    for (int64_t i = 0; i < num_segments; ++i) timed = timed && segments[i].step > 1;
    sh::RunJob(pool,
               {&table, weight_dtype, grad_dtype, segments, nullptr, num_segments, nullptr,
                sh::kChunk, nullptr},
               index, sh::Loop::kUpdate, timed, sh::Chunk<sh::UpdatePart>);
  });
}

int32_t sh_update_traffic(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype,
                          sh_dtype grad_dtype, const sh_segment* segments, const sh_segment* to,
                          int64_t num_segments) {
  return sh::Guarded([&] {
    const int index =
        sh::CheckUpdate(pool, optimizer, weight_dtype, grad_dtype, segments, num_segments);
    const sh::Optimizer& table = pool->kernels().optimizers[index];
    const sh::Job job = {&table,       weight_dtype, grad_dtype, segments, to,
                         num_segments, nullptr,      sh::kChunk, nullptr};
    if (to != nullptr) sh::CheckTargets(job, weight_dtype);
    sh::RunJob(pool, job, index,
               to == nullptr ? sh::Loop::kTrafficInPlace : sh::Loop::kTrafficElsewhere, true,
               sh::Chunk<sh::TrafficPart>);
  });
}

int32_t sh_update_prefetch(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype,
                           sh_dtype grad_dtype, int64_t* elements) {
  return sh::Guarded([&] {
    sh::CheckPool(pool, weight_dtype, grad_dtype);
    sh::Require(elements != nullptr, "elements is NULL");
    const int index = sh::OptimizerNamed(optimizer);
    sh_pool::Call call(pool);
    *elements = call.distance(sh::Loop::kUpdate, index, weight_dtype, grad_dtype).chosen();
  });
}

int32_t sh_update_constants(const char* optimizer, const sh_segment* segments, int64_t num_segments,
                            float* out, int32_t* variant) {
  return sh::Guarded([&] {
    sh::CheckList(segments, num_segments);
    sh::Require(num_segments == 0 || (out != nullptr && variant != nullptr),
                "out or variant is NULL");
    const sh::Optimizer& table = sh::KernelsAt(0)->optimizers[sh::OptimizerNamed(optimizer)];
    sh::CheckNumbers(table, segments, num_segments);
    for (int64_t i = 0; i < num_segments; ++i) {
      float* constants = out + i * SH_MAX_CONSTANTS;
      std::fill(constants, constants + SH_MAX_CONSTANTS, 0.0f);
      table.constants(segments[i], constants);
      variant[i] = table.variant(segments[i]);
    }
  });
}

}  // extern "C"
