// The loop of every optimizer with lean states: the formula between decoding and encoding, in one
// pass over memory. Included by kernels-inl.h, once per instruction set. The layout is
// [Note: lean states] of stronghold.h.
//
// [Note: strips] A scale is known once its whole group has been updated. So a strip of four groups
// goes through three steps:
//  1. Decode and update the moments of its groups. They stay in the first cache.
//  2. Compute the scales of its four groups, side by side.
//  3. Compute the weights and the codes of its groups. A group's step 3 follows step 1 of one group
//     of the next strip.
// The chains of instructions are short: Adam's step 1 ends with a square root, and its step 3 has a
// division. So a processor can run independent instructions at once. Four groups share the cost of
// their scales.

constexpr int64_t kStripGroups = 4;
constexpr int64_t kStrip = kStripGroups * kLeanGroup;
constexpr int64_t kQuad = 4 * kLanes;
constexpr int64_t kGroupQuads = kLeanGroup / kQuad;

// The reciprocal of the largest code's value, in units of the scale.
constexpr float TopOf(Coded coded) {
  return coded == Coded::kSigned ? 1.0f / 16128.0f : 1.0f / 65024.0f;
}
constexpr float kSmallestScale = 0x1p-126f;  // its reciprocal is normal

template <int kMoments>
SH_INLINE Arrays LeanOffset(const Arrays& a, int64_t i, int64_t grad_bytes) {
  const int64_t scale = i / kLeanGroup * 4;
  return {a.weight + i * 2,
          a.low + i,
          kMoments > 0 ? a.moment0 + i : nullptr,
          kMoments > 1 ? a.moment1 + i : nullptr,
          a.grad + i * grad_bytes,
          kMoments > 0 ? a.scale0 + scale : nullptr,
          kMoments > 1 ? a.scale1 + scale : nullptr};
}

// The values between the steps of a strip's groups.
struct LeanStrip {
  Quad moment[SH_MAX_MOMENTS][kStripGroups][kGroupQuads];  // moments that are coded with a sign
  Quad handed_on[kStripGroups][kGroupQuads];  // from UpdateMoments to UpdateWeight; the root
  F largest[SH_MAX_MOMENTS][kStripGroups];    // bits of the magnitudes, as unsigned integers
  float reciprocals[SH_MAX_MOMENTS][kStripGroups];
};

template <class Formula, int kVariant, class Grad>
SH_INLINE void LeanMoments(const typename Formula::Vectors& c, const Arrays& a, LeanStrip& strip,
                           int64_t group) {
  constexpr int kMoments = Formula::kMoments;
  F scale[SH_MAX_MOMENTS], largest[SH_MAX_MOMENTS];
  for (int k = 0; k < kMoments; ++k) {
    scale[k] = SetFrom(a.scale(k));
    largest[k] = Set(0.0f);
  }
  for (int64_t j = 0; j < kGroupQuads; ++j) {
    const int64_t at = j * kQuad;
    const Quad p = Formula::template kMomentsReadWeight<kVariant>
                       ? JoinLean(a.weight + at * 2, a.low + at)
                       : Quad{};
    const Quad g = Grad::LoadQuad(a.grad + at * Grad::kBytes);
    Quad values[SH_MAX_MOMENTS];
    for (int k = 0; k < kMoments; ++k) {
      const char* codes = a.moment(k) + at;
      values[k] = Formula::kCoded[k] == Coded::kSigned ? ExpandS8(codes) : ExpandU8(codes);
    }
    for (int i = 0; i < 4; ++i) {
      F moment[SH_MAX_MOMENTS];
      for (int k = 0; k < kMoments; ++k) {
        moment[k] = Mul(values[k].f[i], scale[k]);
        if (Formula::kCoded[k] == Coded::kRoot) moment[k] = Mul(moment[k], moment[k]);
      }
      const F handed_on = Formula::template UpdateMoments<kVariant>(c, g.f[i], p.f[i], moment);
      for (int k = 0; k < kMoments; ++k) {
        if (Formula::kCoded[k] == Coded::kSigned) {
          largest[k] = MaxBits(largest[k], Abs(moment[k]));
          strip.moment[k][group][j].f[i] = moment[k];
        } else {
          largest[k] = MaxBits(largest[k], handed_on);
        }
      }
      strip.handed_on[group][j].f[i] = handed_on;
    }
  }
  for (int k = 0; k < kMoments; ++k) strip.largest[k][group] = largest[k];
}

template <class Formula, int kVariant, bool kStream>
SH_INLINE void LeanWeights(const typename Formula::Vectors& c, const Arrays& a, const Arrays& to,
                           const LeanStrip& strip, int64_t group) {
  for (int64_t j = 0; j < kGroupQuads; ++j) {
    const int64_t at = j * kQuad;
    Quad p = JoinLean(a.weight + at * 2, a.low + at);
    for (int i = 0; i < 4; ++i) {
      F moment[SH_MAX_MOMENTS];
      for (int k = 0; k < Formula::kMoments; ++k) {
        if (Formula::kCoded[k] == Coded::kSigned) moment[k] = strip.moment[k][group][j].f[i];
      }
      p.f[i] = Formula::template UpdateWeight<kVariant>(c, p.f[i], moment,
                                                        strip.handed_on[group][j].f[i]);
    }
    if (__builtin_expect(AnyNan(p), 0)) {
      for (int i = 0; i < 4; ++i) p.f[i] = Canonical(p.f[i]);
    }
    SplitLean<kStream>(to.weight + at * 2, to.low + at, p);
  }
}

// The scales of moment k of a strip, and their reciprocals: 0 for a group that is not finite.
template <class Formula, int k>
SH_INLINE void LeanScales(const Arrays& to, LeanStrip& strip) {
  const Scales4 made = MakeScales(strip.largest[k], TopOf(Formula::kCoded[k]), kSmallestScale);
  char* scales = to.scale(k);
  float* reciprocals = strip.reciprocals[k];
  std::memcpy(scales, made.scales, sizeof(made.scales));
  std::memcpy(reciprocals, made.reciprocals, sizeof(made.reciprocals));
  if (__builtin_expect(made.finite, 1)) return;
  for (int64_t group = 0; group < kStripGroups; ++group) {
    if (made.largest[group] < 0x7F800000u) continue;
    const uint32_t nan = 0x7FC00000u;
    std::memcpy(scales + 4 * group, &nan, 4);
    reciprocals[group] = 0.0f;
  }
}

// The codes of moment k of one group.
template <class Formula, int k, bool kStream>
SH_INLINE void LeanCodes(const Arrays& to, const LeanStrip& strip, int64_t group) {
  if (__builtin_expect(strip.reciprocals[k][group] == 0.0f, 0)) {
    std::memset(to.moment(k), 0, kLeanGroup);
    return;
  }
  const F reciprocal = Set(strip.reciprocals[k][group]);
  for (int64_t j = 0; j < kGroupQuads; ++j) {
    char* codes = to.moment(k) + j * kQuad;
    Quad q;
    if (Formula::kCoded[k] == Coded::kSigned) {
      for (int i = 0; i < 4; ++i) {
        q.f[i] = CompressSigned(Mul(strip.moment[k][group][j].f[i], reciprocal));
      }
      NarrowS8<kStream>(codes, q);
    } else {
      for (int i = 0; i < 4; ++i) {
        q.f[i] = Compress(Mul(strip.handed_on[group][j].f[i], reciprocal));
      }
      NarrowU8<kStream>(codes, q);
    }
  }
}

// The arrays from which a strip's step loads, and those to which it stores.
struct LeanPlaces {
  Arrays from, to;
};

template <class Formula, int kVariant, bool kStream>
SH_INLINE void LeanWrite(const typename Formula::Vectors& c, const LeanPlaces& places,
                         const LeanStrip& strip, int64_t group) {
  constexpr int kMoments = Formula::kMoments;
  const Arrays from = LeanOffset<kMoments>(places.from, group * kLeanGroup, 0);
  const Arrays to = LeanOffset<kMoments>(places.to, group * kLeanGroup, 0);
  LeanWeights<Formula, kVariant, kStream>(c, from, to, strip, group);
  if constexpr (kMoments > 0) LeanCodes<Formula, 0, kStream>(to, strip, group);
  if constexpr (kMoments > 1) LeanCodes<Formula, 1, kStream>(to, strip, group);
}

// Steps 1 and 2 of a strip, and between its groups step 3 of the strip before.
template <class Formula, int kVariant, class Grad, bool kFirst, bool kStream>
SH_INLINE void LeanStripStep(const typename Formula::Vectors& c, const LeanPlaces& places,
                             LeanStrip& strip, const LeanPlaces& before,
                             const LeanStrip& strip_before) {
  constexpr int kMoments = Formula::kMoments;
  for (int64_t group = 0; group < kStripGroups; ++group) {
    LeanMoments<Formula, kVariant, Grad>(
        c, LeanOffset<kMoments>(places.from, group * kLeanGroup, Grad::kBytes), strip, group);
    if (!kFirst) LeanWrite<Formula, kVariant, kStream>(c, before, strip_before, group);
  }
  if constexpr (kMoments > 0) LeanScales<Formula, 0>(places.to, strip);
  if constexpr (kMoments > 1) LeanScales<Formula, 1>(places.to, strip);
}

// Step 3 of the last strip.
template <class Formula, int kVariant, bool kStream>
SH_INLINE void LeanStripEnd(const typename Formula::Vectors& c, const LeanPlaces& places,
                            const LeanStrip& strip) {
  for (int64_t group = 0; group < kStripGroups; ++group) {
    LeanWrite<Formula, kVariant, kStream>(c, places, strip, group);
  }
}

template <int kMoments, class Grad>
SH_INLINE void PrefetchStrip(const Arrays& a, int64_t i) {
  const auto lines = [](const char* p, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + line));
    }
  };
  lines(a.weight + i * 2, kStrip * 2);
  lines(a.low + i, kStrip);
  for (int k = 0; k < kMoments; ++k) lines(a.moment(k) + i, kStrip);
  lines(a.grad + i * Grad::kBytes, kStrip * Grad::kBytes);
}

// One strip's arrays, for the last groups of a segment: [Note: tails].
struct LeanPadding {
  alignas(64) char weight[kStrip * 2] = {};
  alignas(64) char low[kStrip] = {};
  alignas(64) char grad[kStrip * 4] = {};
  alignas(64) char moment[SH_MAX_MOMENTS][kStrip] = {};
  alignas(64) char scale[SH_MAX_MOMENTS][kStripGroups * 4] = {};

  Arrays arrays() { return {weight, low, moment[0], moment[1], grad, scale[0], scale[1]}; }
};

template <int kMoments>
inline void CopyWrittenLean(const Arrays& from, const Arrays& to, int64_t n) {
  const int64_t groups = (n + kLeanGroup - 1) / kLeanGroup;
  std::memcpy(to.weight, from.weight, n * 2);
  std::memcpy(to.low, from.low, n);
  for (int k = 0; k < kMoments; ++k) {
    std::memcpy(to.moment(k), from.moment(k), n);
    std::memcpy(to.scale(k), from.scale(k), groups * 4);
  }
}

template <class Formula, int kVariant, class Grad, bool kInPlace>
void Lean(const float* constants, Arrays a, Arrays targets, int64_t numel, int64_t ahead) {
  constexpr int kMoments = Formula::kMoments;
  constexpr bool kStream = !kInPlace;  // [Note: out of place] of exact-inl.h
  const typename Formula::Vectors c(constants);
  const Arrays& to = kInPlace ? a : targets;
  const auto places = [&a, &to](int64_t i) -> LeanPlaces {
    return {LeanOffset<kMoments>(a, i, Grad::kBytes), LeanOffset<kMoments>(to, i, Grad::kBytes)};
  };
  LeanStrip strips[2];
  const int64_t whole = numel - numel % kStrip;
  for (int64_t i = 0; i < whole; i += kStrip) {
    PrefetchStrip<kMoments, Grad>(a, i + ahead);
    const LeanPlaces now = places(i);
    LeanStrip& strip = strips[i / kStrip % 2];
    if (i == 0) {
      LeanStripStep<Formula, kVariant, Grad, true, kStream>(c, now, strip, now, strip);
    } else {
      LeanStripStep<Formula, kVariant, Grad, false, kStream>(c, now, strip, places(i - kStrip),
                                                             strips[(i / kStrip + 1) % 2]);
    }
  }
  if (whole > 0) {
    LeanStripEnd<Formula, kVariant, kStream>(c, places(whole - kStrip),
                                             strips[(whole / kStrip + 1) % 2]);
  }
  if (kStream) StreamFence();
  const int64_t rest = numel - whole;
  if (rest <= 0) return;
  LeanPadding padding;
  const LeanPlaces padded = {padding.arrays(), padding.arrays()};
  const LeanPlaces tail = places(whole);
  CopyWrittenLean<kMoments>(tail.from, padded.from, rest);
  std::memcpy(padding.grad, tail.from.grad, rest * Grad::kBytes);
  LeanStripStep<Formula, kVariant, Grad, true, false>(c, padded, strips[0], padded, strips[1]);
  LeanStripEnd<Formula, kVariant, false>(c, padded, strips[0]);
  CopyWrittenLean<kMoments>(padded.to, tail.to, rest);
}

// ---- The same bytes without the arithmetic ------------------------------------------------------

template <int kMoments, class Grad, bool kStream>
void TrafficLeanLoop(const Arrays& from, const Arrays& to, int64_t numel, int64_t ahead) {
  F seen = Set(0.0f);
  const auto copy = [](const char* p, char* q, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLanes * 4) CopyVector<4, kStream>(p + i, q + i);
  };
  constexpr int64_t kBlock = 16 * kLeanGroup;  // whose scales fill a cache line
  const int64_t whole = numel - numel % kBlock;
  for (int64_t i = 0; i < whole; i += kBlock) {
    const Arrays r = LeanOffset<kMoments>(from, i, Grad::kBytes);
    const Arrays w = LeanOffset<kMoments>(to, i, Grad::kBytes);
    for (int64_t j = 0; j < kBlock; j += kLeanGroup) {
      if (j % kStrip == 0) PrefetchStrip<kMoments, Grad>(from, i + j + ahead);
      for (int64_t b = 0; b < kLeanGroup * Grad::kBytes; b += kLanes * 4) {
        seen = Or(seen, LoadF32(r.grad + j * Grad::kBytes + b));
      }
      copy(r.weight + j * 2, w.weight + j * 2, kLeanGroup * 2);
      copy(r.low + j, w.low + j, kLeanGroup);
      for (int k = 0; k < kMoments; ++k) copy(r.moment(k) + j, w.moment(k) + j, kLeanGroup);
    }
    for (int k = 0; k < kMoments; ++k) copy(r.scale(k), w.scale(k), 64);
  }
  Keep(seen);
  StreamFence();
  if (kStream) {
    CopyWrittenLean<kMoments>(LeanOffset<kMoments>(from, whole, Grad::kBytes),
                              LeanOffset<kMoments>(to, whole, Grad::kBytes), numel - whole);
  }
}

template <int kMoments, class Grad>
void TrafficLean(Arrays from, Arrays to, bool in_place, int64_t numel, int64_t ahead) {
  if (in_place) {
    TrafficLeanLoop<kMoments, Grad, false>(from, to, numel, ahead);
  } else {
    TrafficLeanLoop<kMoments, Grad, true>(from, to, numel, ahead);
  }
}
