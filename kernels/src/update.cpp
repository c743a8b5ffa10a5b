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

// The arguments of one call, for its chunks.
struct Job {
  const Optimizer* optimizer;
  int weight_dtype;
  int grad_dtype;
  const sh_segment* segments;
  const sh_target* targets;  // [num_segments]; nullptr: all in place
  int64_t num_segments;
  const int64_t* ends;         // [num_segments], padded to kAlign
  int64_t chunk;               // elements
  PrefetchDistance* distance;  // nullptr: nothing is timed
};

// The segment's arrays from element i on; NULL for an array that the layout or optimizer lacks.
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
  const int64_t low_bytes = kLowBytes[job.weight_dtype];
  return {static_cast<char*>(s.weight) + i * kWeightBytes[job.weight_dtype],
          low_bytes == 0 ? nullptr : static_cast<char*>(s.low) + i * low_bytes,
          moment(0),
          moment(1),
          static_cast<const char*>(s.grad) + i * kGradBytes[job.grad_dtype],
          scale(0),
          scale(1)};
}

// The segment with its targets' addresses: the arrays that its step writes.
sh_segment TargetOf(const sh_segment& s, const sh_target& target) {
  sh_segment to = s;
  if (target.weight != nullptr) to.weight = target.weight;
  if (target.low != nullptr) to.low = target.low;
  for (int k = 0; k < SH_MAX_MOMENTS; ++k) {
    if (target.moment[k] != nullptr) to.moment[k] = target.moment[k];
    if (target.scale[k] != nullptr) to.scale[k] = target.scale[k];
  }
  return to;
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

// Calls range(segment, begin, end) for the elements of every segment in chunk `index`.
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

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kStreamAlign == 0; }

// True if stores past the caches may write all arrays but the scales: they are aligned.
bool AlignedArrays(const Arrays& a) {
  return Aligned(a.weight) && Aligned(a.low) && Aligned(a.moment0) && Aligned(a.moment1);
}

bool SameArrays(const Arrays& a, const Arrays& b) {
  return a.weight == b.weight && a.low == b.low && a.moment0 == b.moment0 &&
         a.moment1 == b.moment1 && a.scale0 == b.scale0 && a.scale1 == b.scale1;
}

// Copies the arrays that a step writes.
void CopyWritten(const Job& job, const Arrays& from, const Arrays& to, int64_t numel) {
  const int64_t moment_bytes = numel * kMomentBytes[job.weight_dtype];
  const int64_t scale_bytes = (numel + kLeanGroup - 1) / kLeanGroup * 4;
  const auto copy = [](const char* source, char* target, int64_t bytes) {
    if (bytes > 0) std::memcpy(target, source, bytes);
  };
  copy(from.weight, to.weight, numel * kWeightBytes[job.weight_dtype]);
  copy(from.low, to.low, numel * kLowBytes[job.weight_dtype]);
  for (int k = 0; k < job.optimizer->num_moments; ++k) {
    copy(from.moment(k), to.moment(k), moment_bytes);
    if (job.weight_dtype == SH_BF16_LEAN) copy(from.scale(k), to.scale(k), scale_bytes);
  }
}

// A step to targets at any byte: in place in a buffer in the first cache, block after block.
void UpdateThroughBuffer(const Job& job, Update::Loop in_place, const float* constants,
                         const sh_segment& from, const sh_segment& to, int64_t begin, int64_t end,
                         int64_t ahead) {
  constexpr int64_t kBlock = 1024;
  static_assert(kBlock % kAlign == 0);
  alignas(64) char weight[kBlock * 4], low[kBlock * 4], moment[SH_MAX_MOMENTS][kBlock * 4],
      scale[SH_MAX_MOMENTS][kBlock / kLeanGroup * 4];
  Arrays buffer = {weight, low, moment[0], moment[1], nullptr, scale[0], scale[1]};
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t numel = std::min(kBlock, end - i);
    const Arrays source = ArraysFrom(from, job, i);
    CopyWritten(job, source, buffer, numel);
    buffer.grad = source.grad;
    in_place(constants, buffer, buffer, numel, ahead);
    CopyWritten(job, buffer, ArraysFrom(to, job, i), numel);
  }
}

void UpdatePart(const Job& job, int64_t index, int64_t ahead) {
  ForEachPart(job, index, [&job, ahead](int64_t i, int64_t from, int64_t upto) {
    const sh_segment& s = job.segments[i];
    const Optimizer& optimizer = *job.optimizer;
    float constants[SH_MAX_CONSTANTS];
    optimizer.constants(s, constants);
    const Update& update = optimizer.update[job.weight_dtype][job.grad_dtype][optimizer.variant(s)];
    const Arrays source = ArraysFrom(s, job, from);
    if (job.targets == nullptr) {
      return update.in_place(constants, source, source, upto - from, ahead);
    }
    const sh_segment to = TargetOf(s, job.targets[i]);
    const Arrays target = ArraysFrom(to, job, from);
    if (SameArrays(source, target)) {
      update.in_place(constants, source, source, upto - from, ahead);
    } else if (AlignedArrays(target)) {
      update.out_of_place(constants, source, target, upto - from, ahead);
    } else {
      UpdateThroughBuffer(job, update.in_place, constants, s, to, from, upto, ahead);
    }
  });
}

void TrafficPart(const Job& job, int64_t index, int64_t ahead) {
  const bool in_place = job.targets == nullptr;
  ForEachPart(job, index, [&job, in_place, ahead](int64_t i, int64_t from, int64_t upto) {
    const sh_segment& s = job.segments[i];
    const Arrays source = ArraysFrom(s, job, from);
    const Arrays target = in_place ? source : ArraysFrom(TargetOf(s, job.targets[i]), job, from);
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

void CheckDtypes(sh_dtype weight_dtype, sh_dtype grad_dtype) {
  Require(weight_dtype >= SH_F32 && weight_dtype <= SH_BF16_LEAN, "unknown weight dtype");
  Require(grad_dtype >= SH_F32 && grad_dtype <= SH_F16, "unknown gradient dtype");
}

void CheckPool(const sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype) {
  Require(pool != nullptr, "pool is NULL");
  Require(!pool->forked(), "the pool was made before fork(); make one in this process");
  CheckDtypes(weight_dtype, grad_dtype);
}

// An array of a segment, for messages.
struct NamedArray {
  const char* name;
  const void* begin;
  int64_t bytes;
};

bool Overlap(const NamedArray& a, const NamedArray& b) {
  const uintptr_t a_begin = reinterpret_cast<uintptr_t>(a.begin);
  const uintptr_t b_begin = reinterpret_cast<uintptr_t>(b.begin);
  return a_begin < b_begin + b.bytes && b_begin < a_begin + a.bytes;
}

// The arrays that a step writes, in the order of sh_target; returns their number.
constexpr int kMostWritten = 2 + 2 * SH_MAX_MOMENTS;
int WrittenArrays(const sh_segment& s, sh_dtype weight_dtype, int num_moments, NamedArray* out) {
  static constexpr const char* kMoment[] = {"moment0", "moment1"};
  static constexpr const char* kScale[] = {"scale0", "scale1"};
  static_assert(SH_MAX_MOMENTS == 2);
  int count = 0;
  out[count++] = {"weight", s.weight, s.numel * kWeightBytes[weight_dtype]};
  if (weight_dtype != SH_F32) out[count++] = {"low", s.low, s.numel * kLowBytes[weight_dtype]};
  for (int k = 0; k < num_moments; ++k) {
    out[count++] = {kMoment[k], s.moment[k], s.numel * kMomentBytes[weight_dtype]};
    if (weight_dtype != SH_BF16_LEAN) continue;
    out[count++] = {kScale[k], s.scale[k], (s.numel + kLeanGroup - 1) / kLeanGroup * 4};
  }
  return count;
}

// Refuses a target that overlaps an array of its segment, or another target of the segment. True if
// the segment has a target that is not its source.
bool CheckTarget(const sh_segment& s, const sh_target& target, int64_t index, sh_dtype weight_dtype,
                 sh_dtype grad_dtype, int num_moments) {
  if (s.numel == 0) return false;
  NamedArray from[kMostWritten + 1], to[kMostWritten];
  const int count = WrittenArrays(s, weight_dtype, num_moments, from);
  WrittenArrays(TargetOf(s, target), weight_dtype, num_moments, to);
  from[count] = {"grad", s.grad, s.numel * kGradBytes[grad_dtype]};
  bool out_of_place = false;
  for (int i = 0; i < count; ++i) {
    if (to[i].begin == from[i].begin) continue;
    out_of_place = true;
    const auto refuse = [&](const char* of, const NamedArray& other) {
      if (!Overlap(to[i], other)) return;
      const std::string message =
          std::string("the target of ") + to[i].name + " overlaps " + of + other.name;
      RequireAt(false, index, message.c_str());
    };
    for (int j = 0; j <= count; ++j) refuse("", from[j]);
    for (int j = 0; j < i; ++j) refuse("the target of ", to[j]);
  }
  return out_of_place;
}

// Refuses targets that break their contract. Returns the targets that the update needs: none if all
// are in place.
const sh_target* CheckTargets(const Optimizer& optimizer, sh_dtype weight_dtype,
                              sh_dtype grad_dtype, const sh_segment* segments,
                              const sh_target* targets, int64_t num_segments) {
  if (targets == nullptr) return nullptr;
  bool out_of_place = false;
  for (int64_t i = 0; i < num_segments; ++i) {
    out_of_place |= CheckTarget(segments[i], targets[i], i, weight_dtype, grad_dtype,
                                optimizer.num_moments);
  }
  return out_of_place ? targets : nullptr;
}

// sh_update_traffic writes every target past the caches, whether it is the source or not.
void CheckTrafficTargets(const Job& job) {
  for (int64_t i = 0; job.targets != nullptr && i < job.num_segments; ++i) {
    const Arrays to = ArraysFrom(TargetOf(job.segments[i], job.targets[i]), job, 0);
    RequireAt(AlignedArrays(to) && Aligned(to.scale0) && Aligned(to.scale1), i,
              "arrays written past the caches must be aligned to 64 bytes");
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

// Refuses arguments that break their contract. Returns the optimizer's index.
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
                  const sh_segment* segments, const sh_target* targets, int64_t num_segments) {
  return sh::Guarded([&] {
    const int index =
        sh::CheckUpdate(pool, optimizer, weight_dtype, grad_dtype, segments, num_segments);
    const sh::Optimizer& table = pool->kernels().optimizers[index];
    sh::CheckNumbers(table, segments, num_segments);
    const sh_target* needed =
        sh::CheckTargets(table, weight_dtype, grad_dtype, segments, targets, num_segments);
    // The first step touches the moments' pages first, which takes time. Its chunks are not timed.
    bool timed = true;
    for (int64_t i = 0; i < num_segments; ++i) timed = timed && segments[i].step > 1;
    sh::RunJob(pool,
               {&table, weight_dtype, grad_dtype, segments, needed, num_segments, nullptr,
                sh::kChunk, nullptr},
               index, needed == nullptr ? sh::Loop::kUpdateInPlace : sh::Loop::kUpdateOutOfPlace,
               timed, sh::Chunk<sh::UpdatePart>);
  });
}

int32_t sh_update_traffic(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype,
                          sh_dtype grad_dtype, const sh_segment* segments, const sh_target* targets,
                          int64_t num_segments) {
  return sh::Guarded([&] {
    const int index =
        sh::CheckUpdate(pool, optimizer, weight_dtype, grad_dtype, segments, num_segments);
    const sh::Optimizer& table = pool->kernels().optimizers[index];
    const sh_target* needed =
        sh::CheckTargets(table, weight_dtype, grad_dtype, segments, targets, num_segments);
    const sh::Job job = {&table,       weight_dtype, grad_dtype, segments, needed,
                         num_segments, nullptr,      sh::kChunk, nullptr};
    sh::CheckTrafficTargets(job);
    sh::RunJob(pool, job, index,
               needed == nullptr ? sh::Loop::kTrafficInPlace : sh::Loop::kTrafficOutOfPlace, true,
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
    *elements = call.distance(sh::Loop::kUpdateInPlace, index, weight_dtype, grad_dtype).chosen();
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
