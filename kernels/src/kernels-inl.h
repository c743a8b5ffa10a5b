// All kernels of one target and their tables. Included by each target_*.cpp inside the target's
// region and namespace, after its vec_*.h.

#include "layouts-inl.h"

#include "exact-inl.h"
#include "lean-inl.h"
#include "reduce-inl.h"

// ---- Optimizers ---------------------------------------------------------------------------------

#include "adam-inl.h"
#include "lion-inl.h"
#include "sgd-inl.h"

// With kTwoLoops a target has a loop in place, too, which is faster. Without, the loop out of place
// serves both, and half as much is compiled.
template <class Formula, int kVariant, class Weight, class Grad>
constexpr Update UpdateExact = {Exact<Formula, kVariant, Weight, Grad, kTwoLoops>,
                                Exact<Formula, kVariant, Weight, Grad, false>};

template <class Formula, int kVariant, class Grad>
constexpr Update UpdateLean = {Lean<Formula, kVariant, Grad, kTwoLoops>,
                               Lean<Formula, kVariant, Grad, false>};

template <class Formula, class Weight, class Grad>
constexpr void AddExact(Optimizer& table, sh_dtype weight, sh_dtype grad) {
  constexpr int kLast = Formula::kVariants - 1;
  table.update[weight][grad][0] = UpdateExact<Formula, 0, Weight, Grad>;
  table.update[weight][grad][kLast] = UpdateExact<Formula, kLast, Weight, Grad>;
  table.traffic[weight][grad] = Traffic<Formula::kMoments, Weight, Grad>;
}

template <class Formula, class Grad>
constexpr void AddGrad(Optimizer& table, sh_dtype grad) {
  AddExact<Formula, WeightF32, Grad>(table, SH_F32, grad);
  AddExact<Formula, WeightBf16, Grad>(table, SH_BF16, grad);
  AddExact<Formula, WeightF16, Grad>(table, SH_F16, grad);
  constexpr int kLast = Formula::kVariants - 1;
  table.update[SH_BF16_LEAN][grad][0] = UpdateLean<Formula, 0, Grad>;
  table.update[SH_BF16_LEAN][grad][kLast] = UpdateLean<Formula, kLast, Grad>;
  table.traffic[SH_BF16_LEAN][grad] = TrafficLean<Formula::kMoments, Grad>;
}

template <class Formula>
constexpr Optimizer TableOf(const char* name) {
  static_assert(Formula::kMoments <= SH_MAX_MOMENTS);
  static_assert(Formula::Constant::kCount <= SH_MAX_CONSTANTS);
  static_assert(Formula::kVariants == 1 || Formula::kVariants == 2);
  Optimizer table = {
      name, Formula::kMoments, Formula::Wrong, Formula::Variant, Formula::ConstantsOf, {}, {}};
  AddGrad<Formula, GradF32>(table, SH_F32);
  AddGrad<Formula, GradBf16>(table, SH_BF16);
  AddGrad<Formula, GradF16>(table, SH_F16);
  return table;
}

// An optimizer is a struct of a header above, and a line here.
constexpr Optimizer kOptimizers[] = {
    TableOf<Adam>("adam"),
    TableOf<Lion>("lion"),
    TableOf<SgdMomentum>("sgd_momentum"),
    TableOf<Sgd>("sgd"),
};

// ---- The target's table -------------------------------------------------------------------------

constexpr Kernels kKernels = {
    SH_ISA_NAME,
    kOptimizers,
    sizeof(kOptimizers) / sizeof(kOptimizers[0]),
    {Accumulate<GradF32>, Accumulate<GradBf16>, Accumulate<GradF16>},
    {SumSquares<GradF32>, SumSquares<GradBf16>, SumSquares<GradF16>},
};
