// The kernels of one instruction set, as tables of functions, and the choice among the sets.
#ifndef STRONGHOLD_TARGETS_H_
#define STRONGHOLD_TARGETS_H_

#include <cstdint>

#include "stronghold.h"

namespace sh {

constexpr int kNumDtypes = 3;
constexpr int kNumLayouts = 4;      // of a weight and its states: the dtypes, and SH_BF16_LEAN
constexpr int kMaxVariants = 2;     // of an optimizer's formula
constexpr int64_t kLeanGroup = 64;  // elements that share a scale: part of the layout
constexpr int kMaxCores = 1024;     // of a cpu_set_t
// Elements in a block of the sum of squares. The definition of the result has this number. 65536
// are 256 KiB of fp32, so a block's 10 us are much longer than the cost of claiming it.
constexpr int64_t kSumBlock = 65536;

// How lean states code a moment.
enum class Coded {
  kSigned,  // the moment, as int8
  kRoot     // the square root of a moment that is never negative, as uint8
};

// The arrays of one step, from the first element on. An optimizer uses the first moments. The
// moments' fields are no arrays, because gcc would keep the addresses of arrays in memory, and the
// lean loop would take 2 % longer.
struct Arrays {
  char* weight;
  char* low;
  char* moment0;
  char* moment1;
  const char* grad;
  char* scale0;  // of lean states alone
  char* scale1;

  char* moment(int k) const { return k == 0 ? moment0 : moment1; }
  char* scale(int k) const { return k == 0 ? scale0 : scale1; }
};
static_assert(SH_MAX_MOMENTS == 2);

// One step of an optimizer, from `from` to `to`: two loops around one formula. The gradient of `to`
// is not used. The first loop takes any alignment, and `to` is `from`. The second one stores past
// the caches if the instruction set can. For it weight, low and moments of `to` begin at multiples
// of kStreamAlign bytes, and an array of `to` is that of `from` or overlaps no array of `from`.
struct Update {
  using Loop = void (*)(const float* constants, Arrays from, Arrays to, int64_t numel,
                        int64_t ahead);

  Loop in_place;
  Loop out_of_place;
};
constexpr int64_t kStreamAlign = 64;

// One optimizer. Functions take any numel >= 0, and any alignment unless a comment has another
// rule. Indices are sh_dtype; arrays with lean states begin at a group. `ahead` is the distance of
// prefetching in elements: it changes no bit.
struct Optimizer {
  using Traffic = void (*)(Arrays from, Arrays to, bool in_place, int64_t numel, int64_t ahead);

  const char* name;  // as in sh_optimizer_at()
  int num_moments;

  // Functions of a segment's numbers, grad_scale, step and flags.
  const char* (*wrong)(const sh_segment&);  // the reason to refuse them, or nullptr
  int (*variant)(const sh_segment&);
  void (*constants)(const sh_segment&, float* out);  // writes the first of SH_MAX_CONSTANTS

  Update update[kNumLayouts][kNumDtypes][kMaxVariants];  // [weight][grad][variant]
  Traffic traffic[kNumLayouts][kNumDtypes];
};

struct Kernels {
  using Accumulate = void (*)(const char* grad, char* acc, bool add, int64_t numel);
  using SumSquares = double (*)(const char* x, int64_t numel);  // numel <= kSumBlock

  const char* name;             // as in sh_isa_at()
  const Optimizer* optimizers;  // the same ones, in the same order, in every table
  int num_optimizers;
  Accumulate accumulate[kNumDtypes];
  SumSquares sum_squares[kNumDtypes];
};

// The tables of the instruction sets. A function exists for sets of this architecture alone, and its
// table's kernels run on CPUs that have the set.
const Kernels& ScalarKernels();
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();
const Kernels& NeonKernels();

// The index-th table that this CPU can run, best first; nullptr past the end.
const Kernels* KernelsAt(int index);

// The table called `name`; nullptr if it is unknown or this CPU lacks it.
const Kernels* KernelsNamed(const char* name);

}  // namespace sh

#endif  // STRONGHOLD_TARGETS_H_
