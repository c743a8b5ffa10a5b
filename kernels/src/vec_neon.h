// Four floats: Advanced SIMD of AArch64, which every such CPU has.

constexpr int kLanes = 4;
constexpr int kDoubleLanes = 2;
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
SH_INLINE void StoreF32(char* p, F x) {
  vst1q_u8(reinterpret_cast<uint8_t*>(p), vreinterpretq_u8_f32(x));
}
SH_INLINE F LoadBf16(const char* p) { return vreinterpretq_f32_u32(vshll_n_u16(Load4U16(p), 16)); }
SH_INLINE F LoadF16(const char* p) { return vcvt_f32_f16(vreinterpret_f16_u16(Load4U16(p))); }
SH_INLINE void StoreF16(char* p, F x) { Store4U16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

SH_INLINE F RoundF16(F x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }
SH_INLINE F SelectEqual(F a, F b, F yes, F no) { return vbslq_f32(vceqq_f32(a, b), yes, no); }

SH_INLINE F JoinBf16(const char* upper, const char* low) {
  const uint32x4_t rest = vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(Load4U16(low))));
  return vreinterpretq_f32_u32(vaddq_u32(vshll_n_u16(Load4U16(upper), 16), rest));
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

// Copies kLanes elements of kBytes each, so that the compiler cannot see a copy. There is no
// store past the caches worth having.
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
SH_INLINE void StreamFence() {}
