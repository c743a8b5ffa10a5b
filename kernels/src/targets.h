// The kernels of one instruction set, as a table of functions, and the choice among tables.
#ifndef STRONGHOLD_TARGETS_H_
#define STRONGHOLD_TARGETS_H_

#include <cstdint>

namespace sh {

constexpr int kNumDtypes = 3;
constexpr int kNumLayouts = 4;         // of a weight and its states: the dtypes, and SH_BF16_LEAN
constexpr int64_t kLeanGroup = 64;     // elements that share a scale: part of the layout
constexpr int kMaxCores = 1024;  // of a cpu_set_t
// Elements in a block of the sum of squares: part of the result's definition. 65536 are 256 KiB of
// fp32, so a block's 10 us dwarf the cost of claiming it.
constexpr int64_t kSumBlock = 65536;

// Constants of one segment's step, each computed in double and rounded once.
struct AdamConstants {
  float grad_scale;
  float weight_decay;  // L2 form
  float decay_factor;  // AdamW form: 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_sqrt_bias_correction2;
  float eps;
  float neg_step_size;
};

// The arrays of one step, from the first element on.
struct AdamArrays {
  char* weight;
  char* low;
  char* exp_avg;
  char* exp_avg_sq;
  const char* grad;
  char* exp_avg_scale;  // of lean states alone
  char* exp_avg_sq_scale;
};

// Functions take any alignment and any numel >= 0. Indices are sh_dtype; arrays with lean states
// begin at a group. `ahead` is the distance of prefetching in elements: it changes no bit.
struct Kernels {
  using Adam = void (*)(const AdamConstants&, AdamArrays, int64_t numel, int64_t ahead);
  using Accumulate = void (*)(const char* grad, char* acc, bool add, int64_t numel);
  using SumSquares = double (*)(const char* x, int64_t numel);  // numel <= kSumBlock
  using Traffic = void (*)(AdamArrays from, AdamArrays to, bool in_place, int64_t numel,
                           int64_t ahead);

  const char* name;                       // as in sh_isa_at()
  Adam adam[kNumLayouts][kNumDtypes][2];  // [weight][grad][adamw]
  Accumulate accumulate[kNumDtypes];
  SumSquares sum_squares[kNumDtypes];
  Traffic traffic[kNumLayouts][kNumDtypes];
};

// The index-th table that this CPU can run, best first; nullptr past the end.
const Kernels* KernelsAt(int index);

// The table called `name`, or nullptr when it is unknown or this CPU lacks it.
const Kernels* KernelsNamed(const char* name);

}  // namespace sh

#endif  // STRONGHOLD_TARGETS_H_
