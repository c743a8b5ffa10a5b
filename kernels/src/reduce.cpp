// sh_accumulate and sh_sum_squares: checks and the split over threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "pool.h"
#include "status.h"
#include "stronghold.h"
#include "targets.h"

namespace sh {
namespace {

constexpr int64_t kBytes[kNumDtypes] = {4, 2, 2};

void CheckCall(const sh_pool* pool, sh_dtype dtype, const void* segments, int64_t num_segments) {
  Require(pool != nullptr, "pool is NULL");
  Require(!pool->forked(), "the pool was made before fork(); make one in this process");
  Require(dtype >= SH_F32 && dtype <= SH_F16, "unknown dtype");
  Require(num_segments >= 0, "num_segments is negative");
  Require(num_segments == 0 || segments != nullptr, "segments is NULL");
}

// The list of all segments' blocks of kSumBlock elements; blocks never span two segments, so that
// a segment's sum does not depend on its neighbours. An item of work may have several small ones.
struct Blocks {
  const int64_t* ends;  // [num_segments], the number of blocks up to and with this segment
  int64_t num_segments;
  int64_t per_item;

  int64_t count() const { return num_segments == 0 ? 0 : ends[num_segments - 1]; }
  int64_t num_items() const { return (count() + per_item - 1) / per_item; }

  // Calls block(segment, first_element, index of the block) for the blocks of one item.
  template <class Block>
  void ForEach(int64_t item, const Block& block) const {
    const int64_t last = std::min((item + 1) * per_item, count());
    int64_t b = item * per_item;
    int64_t i = std::upper_bound(ends, ends + num_segments, b) - ends;
    for (; b < last; ++b) {
      while (ends[i] <= b) ++i;
      block(i, (b - (i == 0 ? 0 : ends[i - 1])) * kSumBlock, b);
    }
  }
};

template <class Segment>
Blocks SplitIntoBlocks(std::vector<int64_t>& ends, const Segment* segments, int64_t num_segments) {
  ends.resize(num_segments);
  int64_t blocks = 0, elements = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    blocks += (segments[i].numel + kSumBlock - 1) / kSumBlock;
    elements += segments[i].numel;
    ends[i] = blocks;
  }
  // Items of at least about one full block each.
  const int64_t full = std::max<int64_t>(elements / kSumBlock, 1);
  return {ends.data(), num_segments, std::max<int64_t>(blocks / full, 1)};
}

struct AccumulateJob {
  const Kernels* kernels;
  int dtype;
  const sh_accumulate_segment* segments;
  Blocks blocks;
};

void AccumulateItem(void* context, int64_t item) {
  const AccumulateJob& job = *static_cast<const AccumulateJob*>(context);
  job.blocks.ForEach(item, [&job](int64_t i, int64_t first, int64_t) {
    const sh_accumulate_segment& s = job.segments[i];
    job.kernels->accumulate[job.dtype](static_cast<const char*>(s.grad) + first * kBytes[job.dtype],
                                       reinterpret_cast<char*>(s.acc) + first * 4, s.add != 0,
                                       std::min(kSumBlock, s.numel - first));
  });
}

struct SumJob {
  const Kernels* kernels;
  int dtype;
  const sh_array_segment* segments;
  Blocks blocks;
  double* partials;  // one per block
};

void SumItem(void* context, int64_t item) {
  const SumJob& job = *static_cast<const SumJob*>(context);
  job.blocks.ForEach(item, [&job](int64_t i, int64_t first, int64_t block) {
    const sh_array_segment& s = job.segments[i];
    job.partials[block] = job.kernels->sum_squares[job.dtype](
        static_cast<const char*>(s.x) + first * kBytes[job.dtype],
        std::min(kSumBlock, s.numel - first));
  });
}

}  // namespace
}  // namespace sh

extern "C" {

int32_t sh_accumulate(sh_pool* pool, sh_dtype grad_dtype, const sh_accumulate_segment* segments,
                      int64_t num_segments) {
  return sh::Guarded([&] {
    sh::CheckCall(pool, grad_dtype, segments, num_segments);
    for (int64_t i = 0; i < num_segments; ++i) {
      const sh_accumulate_segment& s = segments[i];
      sh::RequireAt(s.numel >= 0, i, "numel is negative");
      sh::RequireAt(s.numel == 0 || (s.grad != nullptr && s.acc != nullptr), i, "an array is NULL");
    }
    sh_pool::Call call(pool);
    sh::AccumulateJob job{&pool->kernels(), grad_dtype, segments,
                          sh::SplitIntoBlocks(call.offsets(), segments, num_segments)};
    call.Run(job.blocks.num_items(), sh::AccumulateItem, &job);
  });
}

int32_t sh_sum_squares(sh_pool* pool, sh_dtype dtype, const sh_array_segment* segments,
                       int64_t num_segments, double* out) {
  return sh::Guarded([&] {
    sh::CheckCall(pool, dtype, segments, num_segments);
    sh::Require(num_segments == 0 || out != nullptr, "out is NULL");
    for (int64_t i = 0; i < num_segments; ++i) {
      sh::RequireAt(segments[i].numel >= 0, i, "numel is negative");
      sh::RequireAt(segments[i].numel == 0 || segments[i].x != nullptr, i, "x is NULL");
    }
    sh_pool::Call call(pool);
    const sh::Blocks blocks = sh::SplitIntoBlocks(call.offsets(), segments, num_segments);
    call.partials().resize(blocks.count());
    sh::SumJob job{&pool->kernels(), dtype, segments, blocks, call.partials().data()};
    call.Run(blocks.num_items(), sh::SumItem, &job);
    int64_t block = 0;
    for (int64_t i = 0; i < num_segments; ++i) {
      double sum = 0.0;
      for (; block < blocks.ends[i]; ++block) sum += job.partials[block];
      out[i] = std::isnan(sum) ? std::numeric_limits<double>::quiet_NaN() : sum;
    }
  });
}

}  // extern "C"
