// Eight floats: AVX2, FMA and F16C.
//
// A store with kStream goes past the caches. Its address is then a multiple of the vector's bytes.

constexpr int kLanes = 8;
constexpr int kDoubleLanes = 4;
constexpr bool kTwoLoops = true;
using F = __m256;
using D = __m256d;

SH_INLINE __m128i Load128(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
template <bool kStream = false>
SH_INLINE void Store128(char* p, __m128i x) {
  __m128i* to = reinterpret_cast<__m128i*>(p);
  kStream ? _mm_stream_si128(to, x) : _mm_storeu_si128(to, x);
}

SH_INLINE F Set(float x) { return _mm256_set1_ps(x); }
SH_INLINE F Add(F a, F b) { return _mm256_add_ps(a, b); }
SH_INLINE F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
SH_INLINE F Div(F a, F b) { return _mm256_div_ps(a, b); }
SH_INLINE F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
SH_INLINE F Sqrt(F a) { return _mm256_sqrt_ps(a); }
SH_INLINE F Or(F a, F b) { return _mm256_or_ps(a, b); }
SH_INLINE F Canonical(F a) {
  const F nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
  return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

SH_INLINE F LoadF32(const char* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
template <bool kStream = false>
SH_INLINE void StoreF32(char* p, F x) {
  float* to = reinterpret_cast<float*>(p);
  kStream ? _mm256_stream_ps(to, x) : _mm256_storeu_ps(to, x);
}
SH_INLINE F LoadBf16(const char* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p)), 16));
}
SH_INLINE F LoadF16(const char* p) { return _mm256_cvtph_ps(Load128(p)); }
SH_INLINE void StoreF16(char* p, F x) {
  Store128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

SH_INLINE F RoundF16(F x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
SH_INLINE F SelectEqual(F a, F b, F yes, F no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}

// upper + low, but upper where the sign would change ([Note: masters]).
SH_INLINE F JoinBf16(const char* upper, const char* low) {
  const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(upper)), 16);
  const __m256i bits = _mm256_add_epi32(high, _mm256_cvtepi16_epi32(Load128(low)));
  return _mm256_blendv_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(high),
                          _mm256_castsi256_ps(_mm256_xor_si256(bits, high)));
}
SH_INLINE void SplitBf16(char* upper, char* low, F x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  const __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF));
  // packus works within 128-bit halves: high 0-3, rest 0-3, high 4-7, rest 4-7.
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, rest), 0xD8);
  Store128(upper, _mm256_castsi256_si128(both));
  Store128(low, _mm256_extracti128_si256(both, 1));
}

SH_INLINE D ZeroD() { return _mm256_setzero_pd(); }
SH_INLINE D Widen(F a, int part) {
  return _mm256_cvtps_pd(part == 0 ? _mm256_castps256_ps128(a) : _mm256_extractf128_ps(a, 1));
}
SH_INLINE D FmaD(D a, D b, D c) { return _mm256_fmadd_pd(a, b, c); }
SH_INLINE void StoreD(double* p, D a) { _mm256_storeu_pd(p, a); }

// ---- Lean states --------------------------------------------------------------------------------

// Thirty-two elements in the order in which unpacking within 128-bit parts widens words; packing
// puts them back.
struct Quad {
  F f[4];
};

SH_INLINE __m256i Load256(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
template <bool kStream>
SH_INLINE void Store256(char* p, __m256i x) {
  __m256i* to = reinterpret_cast<__m256i*>(p);
  kStream ? _mm256_stream_si256(to, x) : _mm256_storeu_si256(to, x);
}
SH_INLINE __m256i BitsOf(F x) { return _mm256_castps_si256(x); }
SH_INLINE F FloatOf(__m256i x) { return _mm256_castsi256_ps(x); }

SH_INLINE F SetFrom(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_ps(x);
}
SH_INLINE F Abs(F a) {
  return FloatOf(_mm256_and_si256(BitsOf(a), _mm256_set1_epi32(0x7FFFFFFF)));
}
SH_INLINE F CopySign(F magnitude, F sign) {
  const __m256i bit = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  return FloatOf(_mm256_or_si256(BitsOf(magnitude), _mm256_and_si256(BitsOf(sign), bit)));
}
SH_INLINE F MaxBits(F a, F b) { return FloatOf(_mm256_max_epu32(BitsOf(a), BitsOf(b))); }
SH_INLINE F Compress(F a) {
  return FloatOf(_mm256_add_epi32(_mm256_srli_epi32(BitsOf(a), 1), _mm256_set1_epi32(0x1FC00000)));
}
SH_INLINE F CompressSigned(F a) {  // the shift makes two of the sign's bit
  const __m256i halved = _mm256_srai_epi32(BitsOf(a), 1);
  return FloatOf(
      _mm256_add_epi32(_mm256_and_si256(halved, _mm256_set1_epi32(static_cast<int>(0xBFFFFFFFu))),
                       _mm256_set1_epi32(0x1FC00000)));
}
SH_INLINE bool AnyNan(const Quad& a) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.f[0], a.f[1], _CMP_UNORD_Q),
                                         _mm256_cmp_ps(a.f[2], a.f[3], _CMP_UNORD_Q))) != 0;
}

SH_INLINE void Unpack(__m256i low_words, __m256i high_words, __m256i* out) {
  out[0] = _mm256_unpacklo_epi16(low_words, high_words);
  out[1] = _mm256_unpackhi_epi16(low_words, high_words);
}
SH_INLINE Quad QuadBf16(const char* p) {
  __m256i x[4];
  Unpack(_mm256_setzero_si256(), Load256(p), x);
  Unpack(_mm256_setzero_si256(), Load256(p + 32), x + 2);
  return {{FloatOf(x[0]), FloatOf(x[1]), FloatOf(x[2]), FloatOf(x[3])}};
}
SH_INLINE Quad InOrder(F a, F b, F c, F d) {
  return {{_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31),
           _mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31)}};
}
SH_INLINE Quad QuadF32(const char* p) {
  return InOrder(LoadF32(p), LoadF32(p + 32), LoadF32(p + 64), LoadF32(p + 96));
}
SH_INLINE Quad QuadF16(const char* p) {
  return InOrder(LoadF16(p), LoadF16(p + 16), LoadF16(p + 32), LoadF16(p + 48));
}

// expand(|code|) of stronghold.h for codes << 16, whose floats are 2^16 times theirs: the exponent
// of 1 is taken off in 16-bit parts that stop at zero.
SH_INLINE __m256i Expand(F x) {
  return _mm256_subs_epu16(_mm256_slli_epi32(BitsOf(x), 1), _mm256_set1_epi32(0x4F800000));
}
SH_INLINE Quad ExpandS8(const char* p) {
  __m256i x[4];
  Unpack(_mm256_setzero_si256(), _mm256_cvtepi8_epi16(Load128(p)), x);
  Unpack(_mm256_setzero_si256(), _mm256_cvtepi8_epi16(Load128(p + 16)), x + 2);
  Quad out;
  for (int i = 0; i < 4; ++i) {
    const F signed_code = _mm256_cvtepi32_ps(x[i]);
    out.f[i] = CopySign(FloatOf(Expand(signed_code)), signed_code);
  }
  return out;
}
SH_INLINE Quad ExpandU8(const char* p) {
  __m256i x[4];
  Unpack(_mm256_setzero_si256(), _mm256_cvtepu8_epi16(Load128(p)), x);
  Unpack(_mm256_setzero_si256(), _mm256_cvtepu8_epi16(Load128(p + 16)), x + 2);
  Quad out;
  for (int i = 0; i < 4; ++i) out.f[i] = FloatOf(Expand(_mm256_cvtepi32_ps(x[i])));
  return out;
}

SH_INLINE Quad JoinLean(const char* weight, const char* low) {
  __m256i x[4];
  for (int i = 0; i < 2; ++i) {
    const __m256i words = Load256(weight + 32 * i);
    __m256i rest = _mm256_cvtepi8_epi16(Load128(low + 16 * i));
    // A negative remainder borrows one from the weight, but from a zero.
    __m256i upper = _mm256_add_epi16(words, _mm256_srai_epi16(rest, 15));
    rest = _mm256_andnot_si256(_mm256_srai_epi16(_mm256_xor_si256(upper, words), 15), rest);
    upper = _mm256_add_epi16(words, _mm256_srai_epi16(rest, 15));
    Unpack(_mm256_slli_epi16(rest, 8), upper, x + 2 * i);
  }
  return {{FloatOf(x[0]), FloatOf(x[1]), FloatOf(x[2]), FloatOf(x[3])}};
}
// Eight-byte parts a0 b0 a1 b1 of two vectors' packed elements -> a0 a1 b0 b1
template <bool kStream>
SH_INLINE void StoreInOrder(char* p, __m256i x) {
  Store256<kStream>(p, _mm256_permute4x64_epi64(x, 0xD8));
}
template <bool kStream>
SH_INLINE void SplitLean(char* weight, char* low, const Quad& p) {
  // The weights of four elements to the lower half of a 128-bit part, what is below them after it.
  const __m256i sort = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 1, 5, 9, 13, -1, -1, -1, -1));
  __m256i x[4];
  for (int i = 0; i < 4; ++i) {
    // Rounds to 24 bits and those to 16; the remainder comes out 128 too large.
    x[i] = _mm256_shuffle_epi8(_mm256_add_epi32(BitsOf(p.f[i]), _mm256_set1_epi32(0x8080)), sort);
  }
  Store256<kStream>(weight, _mm256_unpacklo_epi64(x[0], x[1]));
  Store256<kStream>(weight + 32, _mm256_unpacklo_epi64(x[2], x[3]));
  const __m256i rest = _mm256_unpacklo_epi64(_mm256_unpackhi_epi32(x[0], x[1]),
                                             _mm256_unpackhi_epi32(x[2], x[3]));
  StoreInOrder<kStream>(low, _mm256_xor_si256(rest, _mm256_set1_epi8(-128)));
}
template <bool kStream>
SH_INLINE void NarrowS8(char* p, const Quad& q) {
  StoreInOrder<kStream>(p, _mm256_packs_epi16(
                      _mm256_packs_epi32(_mm256_cvtps_epi32(q.f[0]), _mm256_cvtps_epi32(q.f[1])),
                      _mm256_packs_epi32(_mm256_cvtps_epi32(q.f[2]), _mm256_cvtps_epi32(q.f[3]))));
}
template <bool kStream>
SH_INLINE void NarrowU8(char* p, const Quad& q) {
  const __m256i codes = _mm256_packus_epi16(
      _mm256_packs_epi32(_mm256_cvtps_epi32(q.f[0]), _mm256_cvtps_epi32(q.f[1])),
      _mm256_packs_epi32(_mm256_cvtps_epi32(q.f[2]), _mm256_cvtps_epi32(q.f[3])));
  StoreInOrder<kStream>(p, _mm256_max_epu8(codes, _mm256_set1_epi8(1)));
}

// The largest of each of four vectors' lanes, as unsigned integers.
SH_INLINE __m128i LargestOf4(const F* x) {
  const __m256i a = BitsOf(x[0]), b = BitsOf(x[1]), c = BitsOf(x[2]), d = BitsOf(x[3]);
  const __m256i ab = _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_max_epu32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all =
      _mm256_max_epu32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
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
    asm volatile("" : "+x"(x));
    StoreF32<kStream>(to, x);
  } else if (kBytes == 2) {
    __m128i x = Load128(from);
    asm volatile("" : "+x"(x));
    Store128<kStream>(to, x);
  }
}
SH_INLINE void Keep(F a) { asm volatile("" : : "x"(a)); }
// Copies 64 bytes past the caches. They are loaded in four parts, as they may just have been stored.
SH_INLINE void StreamLine(const char* from, char* to) {
  for (int i = 0; i < 64; i += 16) Store128<true>(to + i, Load128(from + i));
}
SH_INLINE void StreamFence() { _mm_sfence(); }

// ---- Packed weights -----------------------------------------------------------------------------

