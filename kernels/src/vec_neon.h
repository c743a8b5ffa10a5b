// Four floats: Advanced SIMD of AArch64, which every such CPU has.
//
// Every store goes through the caches, also with kStream: there is no store past them worth having.

constexpr int kLanes = 4;
constexpr int kDoubleLanes = 2;
constexpr bool kTwoLoops = true;
using F = float32x4_t;
using D = float64x2_t;

SH_INLINE uint16x4_t Load4U16(const char* p) {
  return vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)));
}
SH_INLINE void Store4U16(char* p, uint16x4_t x) {
  vst1_u8(reinterpret_cast<uint8_t*>(p), vreinterpret_u8_u16(x));
}

SH_INLINE F Set(float x) { return vdupq_n_f32(x); }
SH_INLINE F Add(F a, F b) { return vaddq_f32(a, b); }
SH_INLINE F Mul(F a, F b) { return vmulq_f32(a, b); }
SH_INLINE F Div(F a, F b) { return vdivq_f32(a, b); }
SH_INLINE F Fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
SH_INLINE F Sqrt(F a) { return vsqrtq_f32(a); }
SH_INLINE F Or(F a, F b) {
  return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)));
}
SH_INLINE F Canonical(F a) {
  return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000u)));
}

// Bytes, not floats, are loaded: any alignment.
SH_INLINE F LoadF32(const char* p) {
  return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p)));
}
template <bool kStream = false>
SH_INLINE void StoreF32(char* p, F x) {
  vst1q_u8(reinterpret_cast<uint8_t*>(p), vreinterpretq_u8_f32(x));
}
SH_INLINE F LoadBf16(const char* p) { return vreinterpretq_f32_u32(vshll_n_u16(Load4U16(p), 16)); }
SH_INLINE F LoadF16(const char* p) { return vcvt_f32_f16(vreinterpret_f16_u16(Load4U16(p))); }
SH_INLINE void StoreF16(char* p, F x) { Store4U16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

SH_INLINE F RoundF16(F x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }
SH_INLINE F SelectEqual(F a, F b, F yes, F no) { return vbslq_f32(vceqq_f32(a, b), yes, no); }

// upper + rest, but upper where the sign would change ([Note: masters]).
SH_INLINE F Join(uint16x4_t upper, int32x4_t rest) {
  const uint32x4_t high = vshll_n_u16(upper, 16);
  const uint32x4_t bits = vaddq_u32(high, vreinterpretq_u32_s32(rest));
  const uint32x4_t changed = vcltzq_s32(vreinterpretq_s32_u32(veorq_u32(bits, high)));
  return vreinterpretq_f32_u32(vbslq_u32(changed, high, bits));
}
SH_INLINE F JoinBf16(const char* upper, const char* low) {
  return Join(Load4U16(upper), vmovl_s16(vreinterpret_s16_u16(Load4U16(low))));
}
SH_INLINE void SplitBf16(char* upper, char* low, F x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  Store4U16(upper, vshrn_n_u32(vaddq_u32(bits, vdupq_n_u32(0x8000u)), 16));
  Store4U16(low, vmovn_u32(bits));
}

SH_INLINE D ZeroD() { return vdupq_n_f64(0.0); }
SH_INLINE D Widen(F a, int part) {
  return part == 0 ? vcvt_f64_f32(vget_low_f32(a)) : vcvt_high_f64_f32(a);
}
SH_INLINE D FmaD(D a, D b, D c) { return vfmaq_f64(c, a, b); }
SH_INLINE void StoreD(double* p, D a) { vst1q_f64(p, a); }

// ---- Lean states --------------------------------------------------------------------------------

// Sixteen elements.
struct Quad {
  F f[4];
};

SH_INLINE uint8x16_t Load16U8(const char* p) {
  return vld1q_u8(reinterpret_cast<const uint8_t*>(p));
}
SH_INLINE uint32x4_t BitsOf(F x) { return vreinterpretq_u32_f32(x); }
SH_INLINE F FloatOf(uint32x4_t x) { return vreinterpretq_f32_u32(x); }

SH_INLINE F SetFrom(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return vdupq_n_f32(x);
}
SH_INLINE F Abs(F a) { return vabsq_f32(a); }
SH_INLINE F CopySign(F magnitude, F sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
SH_INLINE F MaxBits(F a, F b) { return FloatOf(vmaxq_u32(BitsOf(a), BitsOf(b))); }
SH_INLINE F Compress(F a) {
  return FloatOf(vaddq_u32(vshrq_n_u32(BitsOf(a), 1), vdupq_n_u32(0x1FC00000u)));
}
SH_INLINE F CompressSigned(F a) { return CopySign(Compress(Abs(a)), a); }
SH_INLINE bool AnyNan(const Quad& a) {
  const uint32x4_t numbers = vandq_u32(vandq_u32(vceqq_f32(a.f[0], a.f[0]), vceqq_f32(a.f[1], a.f[1])),
                                       vandq_u32(vceqq_f32(a.f[2], a.f[2]), vceqq_f32(a.f[3], a.f[3])));
  return vminvq_u32(numbers) == 0;
}

SH_INLINE Quad QuadF32(const char* p) {
  return {{LoadF32(p), LoadF32(p + 16), LoadF32(p + 32), LoadF32(p + 48)}};
}
SH_INLINE Quad QuadBf16(const char* p) {
  return {{LoadBf16(p), LoadBf16(p + 8), LoadBf16(p + 16), LoadBf16(p + 24)}};
}
SH_INLINE Quad QuadF16(const char* p) {
  return {{LoadF16(p), LoadF16(p + 8), LoadF16(p + 16), LoadF16(p + 24)}};
}

// expand(|code|) of stronghold.h: the exponent of 1 is taken off in 16-bit parts that stop at zero.
SH_INLINE F Expand(F x) {
  return FloatOf(vreinterpretq_u32_u16(
      vqsubq_u16(vreinterpretq_u16_u32(vshlq_n_u32(BitsOf(x), 1)),
                 vreinterpretq_u16_u32(vdupq_n_u32(0x3F800000u)))));
}
SH_INLINE Quad ExpandS8(const char* p) {
  const int8x16_t codes = vreinterpretq_s8_u8(Load16U8(p));
  const int16x8_t words[2] = {vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes))};
  Quad out;
  for (int i = 0; i < 4; ++i) {
    const int16x4_t half = i % 2 == 0 ? vget_low_s16(words[i / 2]) : vget_high_s16(words[i / 2]);
    const F signed_code = vcvtq_f32_s32(vmovl_s16(half));
    out.f[i] = CopySign(Expand(signed_code), signed_code);
  }
  return out;
}
SH_INLINE Quad ExpandU8(const char* p) {
  const uint8x16_t codes = Load16U8(p);
  const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(codes)), vmovl_u8(vget_high_u8(codes))};
  Quad out;
  for (int i = 0; i < 4; ++i) {
    const uint16x4_t half = i % 2 == 0 ? vget_low_u16(words[i / 2]) : vget_high_u16(words[i / 2]);
    out.f[i] = Expand(vcvtq_f32_u32(vmovl_u16(half)));
  }
  return out;
}

SH_INLINE Quad JoinLean(const char* weight, const char* low) {
  const int8x16_t rests = vreinterpretq_s8_u8(Load16U8(low));
  const int16x8_t words[2] = {vmovl_s8(vget_low_s8(rests)), vmovl_s8(vget_high_s8(rests))};
  Quad out;
  for (int i = 0; i < 4; ++i) {
    const int16x4_t half = i % 2 == 0 ? vget_low_s16(words[i / 2]) : vget_high_s16(words[i / 2]);
    out.f[i] = Join(Load4U16(weight + 8 * i), vshll_n_s16(half, 8));
  }
  return out;
}
template <bool kStream>
SH_INLINE void SplitLean(char* weight, char* low, const Quad& p) {
  uint16x4_t rest[4];
  for (int i = 0; i < 4; ++i) {
    // Rounds to 24 bits and those to 16; the remainder comes out 128 too large.
    const uint32x4_t bits = vaddq_u32(BitsOf(p.f[i]), vdupq_n_u32(0x8080u));
    Store4U16(weight + 8 * i, vshrn_n_u32(bits, 16));
    rest[i] = vshrn_n_u32(bits, 8);
  }
  const uint8x16_t bytes = vcombine_u8(vmovn_u16(vcombine_u16(rest[0], rest[1])),
                                       vmovn_u16(vcombine_u16(rest[2], rest[3])));
  vst1q_u8(reinterpret_cast<uint8_t*>(low), veorq_u8(bytes, vdupq_n_u8(128)));
}
SH_INLINE int16x8_t RoundTo16(F a, F b) {
  return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
}
template <bool kStream>
SH_INLINE void NarrowS8(char* p, const Quad& q) {
  vst1q_s8(reinterpret_cast<int8_t*>(p), vcombine_s8(vqmovn_s16(RoundTo16(q.f[0], q.f[1])),
                                                     vqmovn_s16(RoundTo16(q.f[2], q.f[3]))));
}
template <bool kStream>
SH_INLINE void NarrowU8(char* p, const Quad& q) {
  const uint8x16_t codes = vcombine_u8(vqmovun_s16(RoundTo16(q.f[0], q.f[1])),
                                       vqmovun_s16(RoundTo16(q.f[2], q.f[3])));
  vst1q_u8(reinterpret_cast<uint8_t*>(p), vmaxq_u8(codes, vdupq_n_u8(1)));
}

// Four groups' scales from their largest magnitudes, whose bits are compared as unsigned integers.
struct Scales4 {
  alignas(16) uint32_t largest[4];
  alignas(16) float scales[4];
  alignas(16) float reciprocals[4];
  bool finite;
};
SH_INLINE Scales4 MakeScales(const F* x, float top, float smallest) {
  Scales4 out;
  out.finite = true;
  for (int i = 0; i < 4; ++i) {
    out.largest[i] = vmaxvq_u32(BitsOf(x[i]));
    float scale;
    std::memcpy(&scale, &out.largest[i], 4);
    scale *= top;
    out.scales[i] = scale > smallest ? scale : smallest;
    out.reciprocals[i] = 1.0f / out.scales[i];
    out.finite &= out.largest[i] < 0x7F800000u;
  }
  return out;
}

// Copies kLanes elements of kBytes each, so that the compiler cannot see a copy.
template <int64_t kBytes, bool kStream>
SH_INLINE void CopyVector(const char* from, char* to) {
  if (kBytes == 4) {
    F x = LoadF32(from);
    asm volatile("" : "+w"(x));
    StoreF32(to, x);
  } else if (kBytes == 2) {
    uint16x4_t x = Load4U16(from);
    asm volatile("" : "+w"(x));
    Store4U16(to, x);
  }
}
SH_INLINE void Keep(F a) { asm volatile("" : : "w"(a)); }
SH_INLINE void StreamLine(const char* from, char* to) { std::memcpy(to, from, 64); }
SH_INLINE void StreamFence() {}

// ---- Packed weights -----------------------------------------------------------------------------

