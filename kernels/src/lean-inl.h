// Adam with lean states: the one formula between decoding and encoding, in one pass over memory.
// Included after adam-inl.h, once per instruction set. The layout is [Note: lean states] of
// stronghold.h.
//
// [Note: strips] A scale is known when its whole group has been updated. The moments of strips of
// four groups are decoded, updated and kept in the first cache; then the four pairs of scales are
// made, side by side; then the weights and the codes, each group's after the moments of one of the
// next strip. So the chains of instructions are short (a square root ends the one, a division is in
// the other), a processor finds independent ones within its reach, and a scale's cost is shared.

constexpr int64_t kStripGroups = 4;
constexpr int64_t kStrip = kStripGroups * kLeanGroup;
constexpr int64_t kQuad = 4 * kLanes;
constexpr int64_t kGroupQuads = kLeanGroup / kQuad;

// The largest code's value in units of the scale, and the least scale: its reciprocal is normal.
constexpr float kExpAvgTop = 1.0f / 16128.0f;
constexpr float kExpAvgSqTop = 1.0f / 65024.0f;
constexpr float kSmallestScale = 0x1p-126f;

SH_INLINE AdamArrays LeanOffset(const AdamArrays& a, int64_t i, int64_t grad_bytes) {
  return {a.weight + i * 2,
          a.low + i,
          a.exp_avg + i,
          a.exp_avg_sq + i,
          a.grad + i * grad_bytes,
          a.exp_avg_scale + i / kLeanGroup * 4,
          a.exp_avg_sq_scale + i / kLeanGroup * 4};
}

// What is between the stages of a strip's groups.
struct LeanStrip {
  Quad exp_avg[kStripGroups][kGroupQuads];
  Quad root[kStripGroups][kGroupQuads];
  F largest_exp_avg[kStripGroups];  // bits of the magnitudes, as unsigned integers
  F largest_root[kStripGroups];
  float exp_avg_reciprocals[kStripGroups];
  float root_reciprocals[kStripGroups];
};

template <class Grad, bool kAdamW>
SH_INLINE void LeanMoments(const AdamVectors& c, const AdamArrays& a, LeanStrip& strip, int64_t k) {
  const F exp_avg_scale = SetFrom(a.exp_avg_scale);
  const F root_scale = SetFrom(a.exp_avg_sq_scale);
  F largest_exp_avg = Set(0.0f), largest_root = Set(0.0f);
  for (int64_t j = 0; j < kGroupQuads; ++j) {
    const int64_t at = j * kQuad;
    const Quad p = kAdamW ? Quad{} : JoinLean(a.weight + at * 2, a.low + at);
    const Quad g = Grad::LoadQuad(a.grad + at * Grad::kBytes);
    const Quad exp_avg = ExpandS8(a.exp_avg + at);
    const Quad root = ExpandU8(a.exp_avg_sq + at);
    for (int i = 0; i < 4; ++i) {
      F m = Mul(exp_avg.f[i], exp_avg_scale);
      const F u = Mul(root.f[i], root_scale);
      F v = Mul(u, u);
      const F r = AdamMoments<kAdamW>(c, g.f[i], p.f[i], m, v);
      largest_exp_avg = MaxBits(largest_exp_avg, Abs(m));
      largest_root = MaxBits(largest_root, r);
      strip.exp_avg[k][j].f[i] = m;
      strip.root[k][j].f[i] = r;
    }
  }
  strip.largest_exp_avg[k] = largest_exp_avg;
  strip.largest_root[k] = largest_root;
}

template <bool kAdamW>
SH_INLINE void LeanWeights(const AdamVectors& c, const AdamArrays& a, const LeanStrip& strip,
                           int64_t k) {
  for (int64_t j = 0; j < kGroupQuads; ++j) {
    const int64_t at = j * kQuad;
    Quad p = JoinLean(a.weight + at * 2, a.low + at);
    for (int i = 0; i < 4; ++i) {
      p.f[i] =
          AdamWeight<kAdamW>(c, p.f[i], strip.exp_avg[k][j].f[i], strip.root[k][j].f[i]);
    }
    if (__builtin_expect(AnyNan(p), 0)) {
      for (int i = 0; i < 4; ++i) p.f[i] = Canonical(p.f[i]);
    }
    SplitLean(a.weight + at * 2, a.low + at, p);
  }
}

// Writes the scales of a strip and gives their reciprocals; 0 for a group that is not finite.
SH_INLINE void LeanScales(const F* largest, float top, char* scales, float* reciprocals) {
  const Scales4 made = MakeScales(largest, top, kSmallestScale);
  std::memcpy(scales, made.scales, sizeof(made.scales));
  std::memcpy(reciprocals, made.reciprocals, sizeof(made.reciprocals));
  if (__builtin_expect(made.finite, 1)) return;
  for (int64_t k = 0; k < kStripGroups; ++k) {
    if (made.largest[k] < 0x7F800000u) continue;
    const uint32_t nan = 0x7FC00000u;
    std::memcpy(scales + 4 * k, &nan, 4);
    reciprocals[k] = 0.0f;
  }
}

SH_INLINE void LeanCodes(const AdamArrays& a, const LeanStrip& strip, int64_t k) {
  const float exp_avg_reciprocal = strip.exp_avg_reciprocals[k];
  const float root_reciprocal = strip.root_reciprocals[k];
  if (__builtin_expect(exp_avg_reciprocal == 0.0f, 0)) {
    std::memset(a.exp_avg, 0, kLeanGroup);
  } else {
    const F reciprocal = Set(exp_avg_reciprocal);
    for (int64_t j = 0; j < kGroupQuads; ++j) {
      Quad q;
      for (int i = 0; i < 4; ++i) {
        q.f[i] = CompressSigned(Mul(strip.exp_avg[k][j].f[i], reciprocal));
      }
      NarrowS8(a.exp_avg + j * kQuad, q);
    }
  }
  if (__builtin_expect(root_reciprocal == 0.0f, 0)) {
    std::memset(a.exp_avg_sq, 0, kLeanGroup);
  } else {
    const F reciprocal = Set(root_reciprocal);
    for (int64_t j = 0; j < kGroupQuads; ++j) {
      Quad q;
      for (int i = 0; i < 4; ++i) q.f[i] = Compress(Mul(strip.root[k][j].f[i], reciprocal));
      NarrowU8(a.exp_avg_sq + j * kQuad, q);
    }
  }
}

template <bool kAdamW>
SH_INLINE void LeanWrite(const AdamVectors& c, const AdamArrays& strip_arrays,
                         const LeanStrip& strip, int64_t k) {
  const AdamArrays a = LeanOffset(strip_arrays, k * kLeanGroup, 0);
  LeanWeights<kAdamW>(c, a, strip, k);
  LeanCodes(a, strip, k);
}

// The moments of a strip's groups, and between them what the strip before has come to.
template <class Grad, bool kAdamW, bool kFirst>
SH_INLINE void LeanStripStep(const AdamVectors& c, const AdamArrays& a, LeanStrip& strip,
                             const AdamArrays& before, const LeanStrip& strip_before) {
  for (int64_t k = 0; k < kStripGroups; ++k) {
    LeanMoments<Grad, kAdamW>(c, LeanOffset(a, k * kLeanGroup, Grad::kBytes), strip, k);
    if (!kFirst) LeanWrite<kAdamW>(c, before, strip_before, k);
  }
  LeanScales(strip.largest_exp_avg, kExpAvgTop, a.exp_avg_scale, strip.exp_avg_reciprocals);
  LeanScales(strip.largest_root, kExpAvgSqTop, a.exp_avg_sq_scale, strip.root_reciprocals);
}

// What is left of the last strip.
template <bool kAdamW>
SH_INLINE void LeanStripEnd(const AdamVectors& c, const AdamArrays& a, const LeanStrip& strip) {
  for (int64_t k = 0; k < kStripGroups; ++k) LeanWrite<kAdamW>(c, a, strip, k);
}

template <class Grad>
SH_INLINE void PrefetchStrip(const AdamArrays& a, int64_t i) {
  const auto lines = [](const char* p, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + line));
    }
  };
  lines(a.weight + i * 2, kStrip * 2);
  lines(a.low + i, kStrip);
  lines(a.exp_avg + i, kStrip);
  lines(a.exp_avg_sq + i, kStrip);
  lines(a.grad + i * Grad::kBytes, kStrip * Grad::kBytes);
}

// One strip's arrays, for the last groups of a segment: [Note: tails].
struct LeanPadding {
  alignas(64) char weight[kStrip * 2] = {};
  alignas(64) char low[kStrip] = {};
  alignas(64) char exp_avg[kStrip] = {};
  alignas(64) char exp_avg_sq[kStrip] = {};
  alignas(64) char grad[kStrip * 4] = {};
  alignas(64) char exp_avg_scale[kStripGroups * 4] = {};
  alignas(64) char exp_avg_sq_scale[kStripGroups * 4] = {};
  AdamArrays arrays() {
    return {weight, low, exp_avg, exp_avg_sq, grad, exp_avg_scale, exp_avg_sq_scale};
  }
};

inline void CopyWrittenLean(const AdamArrays& from, const AdamArrays& to, int64_t n) {
  const int64_t groups = (n + kLeanGroup - 1) / kLeanGroup;
  std::memcpy(to.weight, from.weight, n * 2);
  std::memcpy(to.low, from.low, n);
  std::memcpy(to.exp_avg, from.exp_avg, n);
  std::memcpy(to.exp_avg_sq, from.exp_avg_sq, n);
  std::memcpy(to.exp_avg_scale, from.exp_avg_scale, groups * 4);
  std::memcpy(to.exp_avg_sq_scale, from.exp_avg_sq_scale, groups * 4);
}

template <class Grad, bool kAdamW>
void AdamLean(const AdamConstants& constants, AdamArrays a, int64_t numel, int64_t ahead) {
  const AdamVectors c(constants);
  LeanStrip strips[2];
  const int64_t whole = numel - numel % kStrip;
  const AdamArrays last = LeanOffset(a, whole - kStrip, Grad::kBytes);
  for (int64_t i = 0; i < whole; i += kStrip) {
    PrefetchStrip<Grad>(a, i + ahead);
    const AdamArrays now = LeanOffset(a, i, Grad::kBytes);
    LeanStrip& strip = strips[i / kStrip % 2];
    if (i == 0) {
      LeanStripStep<Grad, kAdamW, true>(c, now, strip, now, strip);
    } else {
      LeanStripStep<Grad, kAdamW, false>(c, now, strip, LeanOffset(a, i - kStrip, Grad::kBytes),
                                         strips[(i / kStrip + 1) % 2]);
    }
  }
  if (whole > 0) LeanStripEnd<kAdamW>(c, last, strips[(whole / kStrip + 1) % 2]);
  const int64_t rest = numel - whole;
  if (rest <= 0) return;
  LeanPadding padding;
  const AdamArrays tail = LeanOffset(a, whole, Grad::kBytes);
  CopyWrittenLean(tail, padding.arrays(), rest);
  std::memcpy(padding.grad, tail.grad, rest * Grad::kBytes);
  LeanStripStep<Grad, kAdamW, true>(c, padding.arrays(), strips[0], tail, strips[1]);
  LeanStripEnd<kAdamW>(c, padding.arrays(), strips[0]);
  CopyWrittenLean(padding.arrays(), tail, rest);
}

// ---- The same bytes without the arithmetic ------------------------------------------------------

template <class Grad, bool kStream>
void TrafficLeanLoop(const AdamArrays& from, const AdamArrays& to, int64_t numel, int64_t ahead) {
  F seen = Set(0.0f);
  const auto copy = [](const char* p, char* q, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLanes * 4) CopyVector<4, kStream>(p + i, q + i);
  };
  constexpr int64_t kBlock = 16 * kLeanGroup;  // whose scales fill a cache line
  const int64_t whole = numel - numel % kBlock;
  for (int64_t i = 0; i < whole; i += kBlock) {
    const AdamArrays r = LeanOffset(from, i, Grad::kBytes), w = LeanOffset(to, i, Grad::kBytes);
    for (int64_t j = 0; j < kBlock; j += kLeanGroup) {
      if (j % kStrip == 0) PrefetchStrip<Grad>(from, i + j + ahead);
      for (int64_t b = 0; b < kLeanGroup * Grad::kBytes; b += kLanes * 4) {
        seen = Or(seen, LoadF32(r.grad + j * Grad::kBytes + b));
      }
      copy(r.weight + j * 2, w.weight + j * 2, kLeanGroup * 2);
      copy(r.low + j, w.low + j, kLeanGroup);
      copy(r.exp_avg + j, w.exp_avg + j, kLeanGroup);
      copy(r.exp_avg_sq + j, w.exp_avg_sq + j, kLeanGroup);
    }
    copy(r.exp_avg_scale, w.exp_avg_scale, 64);
    copy(r.exp_avg_sq_scale, w.exp_avg_sq_scale, 64);
  }
  Keep(seen);
  StreamFence();
  if (kStream) {
    CopyWrittenLean(LeanOffset(from, whole, Grad::kBytes), LeanOffset(to, whole, Grad::kBytes),
                    numel - whole);
  }
}

template <class Grad>
void TrafficLean(AdamArrays from, AdamArrays to, bool in_place, int64_t numel, int64_t ahead) {
  if (in_place) {
    TrafficLeanLoop<Grad, false>(from, to, numel, ahead);
  } else {
    TrafficLeanLoop<Grad, true>(from, to, numel, ahead);
  }
}
