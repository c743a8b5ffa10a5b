// Sixteen floats: AVX-512 F, BW, DQ and VL.
//
// A store with kStream goes past the caches. Its address is then a multiple of the vector's bytes.

constexpr int kLanes = 16;
constexpr int kDoubleLanes = 8;
constexpr bool kTwoLoops = true;
using F = __m512;
using D = __m512d;

SH_INLINE __m256i Load256(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
template <bool kStream = false>
SH_INLINE void Store256(char* p, __m256i x) {
  __m256i* to = reinterpret_cast<__m256i*>(p);
  kStream ? _mm256_stream_si256(to, x) : _mm256_storeu_si256(to, x);
}
template <bool kStream = false>
SH_INLINE void Store512(char* p, __m512i x) {
  kStream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x) : _mm512_storeu_si512(p, x);
}

SH_INLINE F Set(float x) { return _mm512_set1_ps(x); }
SH_INLINE F Add(F a, F b) { return _mm512_add_ps(a, b); }
SH_INLINE F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
SH_INLINE F Div(F a, F b) { return _mm512_div_ps(a, b); }
SH_INLINE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
SH_INLINE F Sqrt(F a) { return _mm512_sqrt_ps(a); }
SH_INLINE F Or(F a, F b) { return _mm512_or_ps(a, b); }
SH_INLINE F Canonical(F a) {
  const F nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan);
}

SH_INLINE F LoadF32(const char* p) { return _mm512_loadu_ps(p); }
template <bool kStream = false>
SH_INLINE void StoreF32(char* p, F x) {
  Store512<kStream>(p, _mm512_castps_si512(x));
}
SH_INLINE F LoadBf16(const char* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(p)), 16));
}
SH_INLINE F LoadF16(const char* p) { return _mm512_cvtph_ps(Load256(p)); }
SH_INLINE void StoreF16(char* p, F x) {
  Store256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

SH_INLINE F RoundF16(F x) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SH_INLINE F SelectEqual(F a, F b, F yes, F no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), yes);
}

// upper + low, but upper where the sign would change ([Note: masters]).
SH_INLINE F JoinBf16(const char* upper, const char* low) {
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(upper)), 16);
  const __m512i bits = _mm512_add_epi32(high, _mm512_cvtepi16_epi32(Load256(low)));
  const __mmask16 changed =
      _mm512_cmplt_epi32_mask(_mm512_xor_si512(bits, high), _mm512_setzero_si512());
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, changed, high));
}
SH_INLINE void SplitBf16(char* upper, char* low, F x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  Store256(upper, _mm512_cvtepi32_epi16(high));
  Store256(low, _mm512_cvtepi32_epi16(bits));
}

SH_INLINE D ZeroD() { return _mm512_setzero_pd(); }
SH_INLINE D Widen(F a, int part) {
  return _mm512_cvtps_pd(part == 0 ? _mm512_castps512_ps256(a) : _mm512_extractf32x8_ps(a, 1));
}
SH_INLINE D FmaD(D a, D b, D c) { return _mm512_fmadd_pd(a, b, c); }
SH_INLINE void StoreD(double* p, D a) { _mm512_storeu_pd(p, a); }

// ---- Lean states --------------------------------------------------------------------------------

// Sixty-four elements in the order in which unpacking within 128-bit parts widens words; packing
// puts them back.
struct Quad {
  F f[4];
};

SH_INLINE __m512i Load512(const char* p) { return _mm512_loadu_si512(p); }
SH_INLINE __m512i BitsOf(F x) { return _mm512_castps_si512(x); }
SH_INLINE F FloatOf(__m512i x) { return _mm512_castsi512_ps(x); }

SH_INLINE F SetFrom(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_ps(x);
}
SH_INLINE F Abs(F a) {
  return FloatOf(_mm512_and_si512(BitsOf(a), _mm512_set1_epi32(0x7FFFFFFF)));
}
SH_INLINE F CopySign(F magnitude, F sign) {  // magnitude | (sign & 0x80000000)
  return FloatOf(_mm512_ternarylogic_epi32(
      BitsOf(magnitude), BitsOf(sign), _mm512_set1_epi32(static_cast<int>(0x80000000u)), 0xF8));
}
SH_INLINE F MaxBits(F a, F b) { return FloatOf(_mm512_max_epu32(BitsOf(a), BitsOf(b))); }
SH_INLINE F Compress(F a) {
  return FloatOf(_mm512_add_epi32(_mm512_srli_epi32(BitsOf(a), 1), _mm512_set1_epi32(0x1FC00000)));
}
SH_INLINE F CompressSigned(F a) {  // the shift makes two of the sign's bit
  const __m512i halved = _mm512_srai_epi32(BitsOf(a), 1);
  return FloatOf(
      _mm512_add_epi32(_mm512_and_si512(halved, _mm512_set1_epi32(static_cast<int>(0xBFFFFFFFu))),
                       _mm512_set1_epi32(0x1FC00000)));
}
SH_INLINE bool AnyNan(const Quad& a) {
  return (_mm512_cmp_ps_mask(a.f[0], a.f[1], _CMP_UNORD_Q) |
          _mm512_cmp_ps_mask(a.f[2], a.f[3], _CMP_UNORD_Q)) != 0;
}

SH_INLINE void Unpack(__m512i low_words, __m512i high_words, __m512i* out) {
  out[0] = _mm512_unpacklo_epi16(low_words, high_words);
  out[1] = _mm512_unpackhi_epi16(low_words, high_words);
}
SH_INLINE Quad QuadBf16(const char* p) {
  __m512i x[4];
  Unpack(_mm512_setzero_si512(), Load512(p), x);
  Unpack(_mm512_setzero_si512(), Load512(p + 64), x + 2);
  return {{FloatOf(x[0]), FloatOf(x[1]), FloatOf(x[2]), FloatOf(x[3])}};
}
SH_INLINE Quad InOrder(F a, F b, F c, F d) {
  return {{_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD),
           _mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD)}};
}
SH_INLINE Quad QuadF32(const char* p) {
  return InOrder(LoadF32(p), LoadF32(p + 64), LoadF32(p + 128), LoadF32(p + 192));
}
SH_INLINE Quad QuadF16(const char* p) {
  return InOrder(LoadF16(p), LoadF16(p + 32), LoadF16(p + 64), LoadF16(p + 96));
}

// expand(|code|) of stronghold.h for codes << 16, whose floats are 2^16 times theirs: the exponent
// of 1 is taken off in 16-bit parts that stop at zero.
SH_INLINE __m512i Expand(F x) {
  return _mm512_subs_epu16(_mm512_slli_epi32(BitsOf(x), 1), _mm512_set1_epi32(0x4F800000));
}
SH_INLINE Quad ExpandS8(const char* p) {
  __m512i x[4];
  Unpack(_mm512_setzero_si512(), _mm512_cvtepi8_epi16(Load256(p)), x);
  Unpack(_mm512_setzero_si512(), _mm512_cvtepi8_epi16(Load256(p + 32)), x + 2);
  Quad out;
  for (int i = 0; i < 4; ++i) {
    const F signed_code = _mm512_cvtepi32_ps(x[i]);
    out.f[i] = CopySign(FloatOf(Expand(signed_code)), signed_code);
  }
  return out;
}
SH_INLINE Quad ExpandU8(const char* p) {
  __m512i x[4];
  Unpack(_mm512_setzero_si512(), _mm512_cvtepu8_epi16(Load256(p)), x);
  Unpack(_mm512_setzero_si512(), _mm512_cvtepu8_epi16(Load256(p + 32)), x + 2);
  Quad out;
  for (int i = 0; i < 4; ++i) out.f[i] = FloatOf(Expand(_mm512_cvtepi32_ps(x[i])));
  return out;
}

SH_INLINE Quad JoinLean(const char* weight, const char* low) {
  __m512i x[4];
  for (int i = 0; i < 2; ++i) {
    const __m512i words = Load512(weight + 64 * i);
    __m512i rest = _mm512_cvtepi8_epi16(Load256(low + 32 * i));
    // A negative remainder borrows one from the weight, but from a zero.
    const __mmask32 zero = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7FFF));
    rest = _mm512_mask_max_epi16(rest, zero, rest, _mm512_setzero_si512());
    const __m512i upper = _mm512_add_epi16(words, _mm512_srai_epi16(rest, 15));
    Unpack(_mm512_slli_epi16(rest, 8), upper, x + 2 * i);
  }
  return {{FloatOf(x[0]), FloatOf(x[1]), FloatOf(x[2]), FloatOf(x[3])}};
}
// Eight-byte parts a0 b0 a1 b1 ... of two vectors' packed elements -> a0 a1 ... b0 b1 ...
template <bool kStream>
SH_INLINE void StoreInOrder(char* p, __m512i x) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  Store512<kStream>(p, _mm512_permutexvar_epi64(order, x));
}
template <bool kStream>
SH_INLINE void SplitLean(char* weight, char* low, const Quad& p) {
  // The weights of four elements to the lower half of a 128-bit part, what is below them after it.
  const __m512i sort =
      _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 1, 5, 9, 13, -1, -1, -1, -1));
  __m512i x[4];
  for (int i = 0; i < 4; ++i) {
    // Rounds to 24 bits and those to 16; the remainder comes out 128 too large.
    x[i] = _mm512_shuffle_epi8(_mm512_add_epi32(BitsOf(p.f[i]), _mm512_set1_epi32(0x8080)), sort);
  }
  Store512<kStream>(weight, _mm512_unpacklo_epi64(x[0], x[1]));
  Store512<kStream>(weight + 64, _mm512_unpacklo_epi64(x[2], x[3]));
  const __m512i rest = _mm512_unpacklo_epi64(_mm512_unpackhi_epi32(x[0], x[1]),
                                             _mm512_unpackhi_epi32(x[2], x[3]));
  StoreInOrder<kStream>(low, _mm512_xor_si512(rest, _mm512_set1_epi8(-128)));
}
template <bool kStream>
SH_INLINE void NarrowS8(char* p, const Quad& q) {
  StoreInOrder<kStream>(p, _mm512_packs_epi16(
                      _mm512_packs_epi32(_mm512_cvtps_epi32(q.f[0]), _mm512_cvtps_epi32(q.f[1])),
                      _mm512_packs_epi32(_mm512_cvtps_epi32(q.f[2]), _mm512_cvtps_epi32(q.f[3]))));
}
template <bool kStream>
SH_INLINE void NarrowU8(char* p, const Quad& q) {
  const __m512i codes = _mm512_packus_epi16(
      _mm512_packs_epi32(_mm512_cvtps_epi32(q.f[0]), _mm512_cvtps_epi32(q.f[1])),
      _mm512_packs_epi32(_mm512_cvtps_epi32(q.f[2]), _mm512_cvtps_epi32(q.f[3])));
  StoreInOrder<kStream>(p, _mm512_max_epu8(codes, _mm512_set1_epi8(1)));
}

// The largest of each of four vectors' lanes, as unsigned integers.
SH_INLINE __m128i LargestOf4(const F* x) {
  const __m512i a = BitsOf(x[0]), b = BitsOf(x[1]), c = BitsOf(x[2]), d = BitsOf(x[3]);
  const __m512i ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_max_epu32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all =
      _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half =
      _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
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
  const __m128i largest = LargestOf4(x);
  const __m128 scales =
      _mm_max_ps(_mm_mul_ps(_mm_castsi128_ps(largest), _mm_set1_ps(top)), _mm_set1_ps(smallest));
  const __m128i infinity = _mm_set1_epi32(0x7F800000);
  const __m128i infinite = _mm_cmpeq_epi32(_mm_max_epu32(largest, infinity), largest);
  _mm_store_si128(reinterpret_cast<__m128i*>(out.largest), largest);
  _mm_store_ps(out.scales, scales);
  _mm_store_ps(out.reciprocals, _mm_div_ps(_mm_set1_ps(1.0f), scales));
  out.finite = _mm_movemask_epi8(infinite) == 0;
  return out;
}

// Copies kLanes elements of kBytes each, so that the compiler cannot see a copy.
template <int64_t kBytes, bool kStream>
SH_INLINE void CopyVector(const char* from, char* to) {
  if (kBytes == 4) {
    F x = LoadF32(from);
    asm volatile("" : "+v"(x));
    StoreF32<kStream>(to, x);
  } else if (kBytes == 2) {
    __m256i x = Load256(from);
    asm volatile("" : "+v"(x));
    Store256<kStream>(to, x);
  }
}
SH_INLINE void Keep(F a) { asm volatile("" : : "v"(a)); }
// Copies 64 bytes past the caches. They are loaded in two parts, as they may just have been stored.
SH_INLINE void StreamLine(const char* from, char* to) {
  const __m512i lower = _mm512_castsi256_si512(Load256(from));
  Store512<true>(to, _mm512_inserti64x4(lower, Load256(from + 32), 1));
}
SH_INLINE void StreamFence() { _mm_sfence(); }

// ---- Packed weights -----------------------------------------------------------------------------

