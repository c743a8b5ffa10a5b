// The one formula, and the loops around it, compiled once per instruction set.
//
// Included by targets.cpp inside a target region, in the namespace of that target, after the
// vec_*.h that gives F (a vector of kLanes floats) and its operations.
//
// [Note: tails] There is no scalar tail formula. The last numel % kLanes elements are copied into
// padded buffers, take the same vector operations, and are copied back.
//
// [Note: masters] A zero in bf16 never has a negative remainder, unless somebody else wrote it: the
// weight pruned, or clamped. Added to its bits that would be a NaN; the master is the zero.

// ---- How a dtype lies in memory -----------------------------------------------------------------

struct GradF32 {
  static constexpr int64_t kBytes = 4;
  SH_INLINE static F Load(const char* p) { return LoadF32(p); }
  SH_INLINE static Quad LoadQuad(const char* p) { return QuadF32(p); }
};
struct GradBf16 {
  static constexpr int64_t kBytes = 2;
  SH_INLINE static F Load(const char* p) { return LoadBf16(p); }
  SH_INLINE static Quad LoadQuad(const char* p) { return QuadBf16(p); }
};
struct GradF16 {
  static constexpr int64_t kBytes = 2;
  SH_INLINE static F Load(const char* p) { return LoadF16(p); }
  SH_INLINE static Quad LoadQuad(const char* p) { return QuadF16(p); }
};

struct WeightF32 {
  static constexpr int64_t kBytes = 4, kLowBytes = 0;
  SH_INLINE static F Load(const char* weight, const char*) { return LoadF32(weight); }
  SH_INLINE static void Store(char* weight, char*, F x) { StoreF32(weight, x); }
};
struct WeightBf16 {
  static constexpr int64_t kBytes = 2, kLowBytes = 2;
  SH_INLINE static F Load(const char* weight, const char* low) { return JoinBf16(weight, low); }
  SH_INLINE static void Store(char* weight, char* low, F x) { SplitBf16(weight, low, x); }
};
struct WeightF16 {
  static constexpr int64_t kBytes = 2, kLowBytes = 4;
  // A weight that is not its master's rounding was written by somebody else, who meant it.
  SH_INLINE static F Load(const char* weight, const char* low) {
    const F master = LoadF32(low);
    const F seen = LoadF16(weight);
    return SelectEqual(RoundF16(master), seen, master, seen);
  }
  SH_INLINE static void Store(char* weight, char* low, F x) {
    StoreF16(weight, x);
    StoreF32(low, x);
  }
};

// ---- Adam ---------------------------------------------------------------------------------------

struct AdamVectors {
  F grad_scale, weight_decay, decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2,
      inv_sqrt_bias_correction2, eps, neg_step_size;

  SH_INLINE explicit AdamVectors(const AdamConstants& c)
      : grad_scale(Set(c.grad_scale)),
        weight_decay(Set(c.weight_decay)),
        decay_factor(Set(c.decay_factor)),
        beta1(Set(c.beta1)),
        one_minus_beta1(Set(c.one_minus_beta1)),
        beta2(Set(c.beta2)),
        one_minus_beta2(Set(c.one_minus_beta2)),
        inv_sqrt_bias_correction2(Set(c.inv_sqrt_bias_correction2)),
        eps(Set(c.eps)),
        neg_step_size(Set(c.neg_step_size)) {}
};

// The formula of stronghold.h on kLanes elements, in two halves, NaNs as they come. The order of
// operations is the contract. First the moments; returns sqrt(v).
template <bool kAdamW>
SH_INLINE F AdamMoments(const AdamVectors& c, F grad, F p, F& m, F& v) {
  F g = Mul(grad, c.grad_scale);
  if (!kAdamW) g = Fma(c.weight_decay, p, g);
  m = Fma(c.beta1, m, Mul(c.one_minus_beta1, g));
  v = Fma(c.beta2, v, Mul(Mul(c.one_minus_beta2, g), g));
  return Sqrt(v);
}
// Then p's decay, and its step along m.
template <bool kAdamW>
SH_INLINE F AdamWeight(const AdamVectors& c, F p, F m, F root) {
  if (kAdamW) p = Mul(p, c.decay_factor);
  const F d = Fma(root, c.inv_sqrt_bias_correction2, c.eps);
  return Fma(c.neg_step_size, Div(m, d), p);
}

template <class Weight, class Grad, bool kAdamW>
SH_INLINE void AdamVector(const AdamVectors& c, const AdamArrays& a) {
  const F p = Weight::Load(a.weight, a.low);
  F m = LoadF32(a.exp_avg);
  F v = LoadF32(a.exp_avg_sq);
  const F root = AdamMoments<kAdamW>(c, Grad::Load(a.grad), p, m, v);
  StoreF32(a.exp_avg, Canonical(m));
  StoreF32(a.exp_avg_sq, Canonical(v));
  Weight::Store(a.weight, a.low, Canonical(AdamWeight<kAdamW>(c, p, m, root)));
}

template <class Weight, class Grad>
SH_INLINE AdamArrays Offset(const AdamArrays& a, int64_t i) {
  return {a.weight + i * Weight::kBytes, a.low + i * Weight::kLowBytes, a.exp_avg + i * 4,
          a.exp_avg_sq + i * 4, a.grad + i * Grad::kBytes, nullptr, nullptr};
}

// Elements whose 2-byte arrays fill one cache line, and 4-byte arrays two.
constexpr int64_t kGroup = 32;

// Past the end of an array this asks for a line that nobody needs; a prefetch cannot fault. How far
// ahead is best differs: prefetch.h.
template <int64_t kBytes>
SH_INLINE void PrefetchGroup(const char* p) {
  for (int64_t line = 0; line < kGroup * kBytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + line));
  }
}

template <class Weight, class Grad>
SH_INLINE void PrefetchGroups(const AdamArrays& a, int64_t i) {
  PrefetchGroup<Weight::kBytes>(a.weight + i * Weight::kBytes);
  PrefetchGroup<Weight::kLowBytes>(a.low + i * Weight::kLowBytes);
  PrefetchGroup<4>(a.exp_avg + i * 4);
  PrefetchGroup<4>(a.exp_avg_sq + i * 4);
  PrefetchGroup<Grad::kBytes>(a.grad + i * Grad::kBytes);
}

// Room for one vector of every array of a step.
struct AdamPadding {
  alignas(64) char weight[kLanes * 4] = {};
  alignas(64) char low[kLanes * 4] = {};
  alignas(64) char exp_avg[kLanes * 4] = {};
  alignas(64) char exp_avg_sq[kLanes * 4] = {};
  alignas(64) char grad[kLanes * 4] = {};
  AdamArrays arrays() { return {weight, low, exp_avg, exp_avg_sq, grad, nullptr, nullptr}; }
};

template <class Weight, class Grad>
inline void CopyWritten(const AdamArrays& from, const AdamArrays& to, int64_t n) {
  std::memcpy(to.weight, from.weight, n * Weight::kBytes);
  if (Weight::kLowBytes > 0) std::memcpy(to.low, from.low, n * Weight::kLowBytes);
  std::memcpy(to.exp_avg, from.exp_avg, n * 4);
  std::memcpy(to.exp_avg_sq, from.exp_avg_sq, n * 4);
}

template <class Weight, class Grad, bool kAdamW>
void Adam(const AdamConstants& constants, AdamArrays a, int64_t numel, int64_t ahead) {
  const AdamVectors c(constants);
  int64_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) {
    PrefetchGroups<Weight, Grad>(a, i + ahead);
    for (int64_t j = i; j < i + kGroup; j += kLanes) {
      AdamVector<Weight, Grad, kAdamW>(c, Offset<Weight, Grad>(a, j));
    }
  }
  for (; i + kLanes <= numel; i += kLanes) {
    AdamVector<Weight, Grad, kAdamW>(c, Offset<Weight, Grad>(a, i));
  }
  const int64_t rest = numel - i;
  if (rest <= 0) return;
  AdamPadding padding;  // [Note: tails]
  const AdamArrays tail = Offset<Weight, Grad>(a, i);
  CopyWritten<Weight, Grad>(tail, padding.arrays(), rest);
  std::memcpy(padding.grad, tail.grad, rest * Grad::kBytes);
  AdamVector<Weight, Grad, kAdamW>(c, padding.arrays());
  CopyWritten<Weight, Grad>(padding.arrays(), tail, rest);
}

// ---- The same bytes without the arithmetic ------------------------------------------------------

template <class Weight, class Grad, bool kInPlace>
void TrafficLoop(const AdamArrays& from, const AdamArrays& to, int64_t numel, int64_t ahead) {
  F seen = Set(0.0f);
  const int64_t whole = numel - numel % kGroup;
  for (int64_t i = 0; i < whole; i += kGroup) {
    PrefetchGroups<Weight, Grad>(from, i + ahead);
    for (int64_t j = i; j < i + kGroup; j += kLanes) {
      const AdamArrays r = Offset<Weight, Grad>(from, j);
      const AdamArrays w = Offset<Weight, Grad>(to, j);
      seen = Or(seen, Grad::Load(r.grad));
      CopyVector<Weight::kBytes, !kInPlace>(r.weight, w.weight);
      CopyVector<Weight::kLowBytes, !kInPlace>(r.low, w.low);
      CopyVector<4, !kInPlace>(r.exp_avg, w.exp_avg);
      CopyVector<4, !kInPlace>(r.exp_avg_sq, w.exp_avg_sq);
    }
  }
  Keep(seen);
  StreamFence();
  CopyWritten<Weight, Grad>(Offset<Weight, Grad>(from, whole), Offset<Weight, Grad>(to, whole),
                            kInPlace ? 0 : numel - whole);
}

template <class Weight, class Grad>
void Traffic(AdamArrays from, AdamArrays to, bool in_place, int64_t numel, int64_t ahead) {
  if (in_place) {
    TrafficLoop<Weight, Grad, true>(from, to, numel, ahead);
  } else {
    TrafficLoop<Weight, Grad, false>(from, to, numel, ahead);
  }
}
