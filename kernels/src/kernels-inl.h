// All kernels of one target and their table. Included by targets.cpp inside the target's region and
// namespace, after its vec_*.h.

#include "adam-inl.h"
#include "lean-inl.h"
#include "reduce-inl.h"

#define SH_ADAM(W, G) \
  { Adam<W, G, false>, Adam<W, G, true> }
#define SH_ADAM_ROW(W) \
  { SH_ADAM(W, GradF32), SH_ADAM(W, GradBf16), SH_ADAM(W, GradF16) }
#define SH_TRAFFIC_ROW(W) \
  { Traffic<W, GradF32>, Traffic<W, GradBf16>, Traffic<W, GradF16> }

#define SH_LEAN(G) \
  { AdamLean<G, false>, AdamLean<G, true> }

constexpr Kernels kKernels = {
    SH_ISA_NAME,
    {SH_ADAM_ROW(WeightF32),
     SH_ADAM_ROW(WeightBf16),
     SH_ADAM_ROW(WeightF16),
     {SH_LEAN(GradF32), SH_LEAN(GradBf16), SH_LEAN(GradF16)}},
    {Accumulate<GradF32>, Accumulate<GradBf16>, Accumulate<GradF16>},
    {SumSquares<GradF32>, SumSquares<GradBf16>, SumSquares<GradF16>},
    {SH_TRAFFIC_ROW(WeightF32),
     SH_TRAFFIC_ROW(WeightBf16),
     SH_TRAFFIC_ROW(WeightF16),
     {TrafficLean<GradF32>, TrafficLean<GradBf16>, TrafficLean<GradF16>}},
};

#undef SH_LEAN
#undef SH_TRAFFIC_ROW
#undef SH_ADAM_ROW
#undef SH_ADAM
