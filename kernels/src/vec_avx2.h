// Eight floats: AVX2, FMA and F16C.

constexpr int kLanes = 8;
constexpr int kDoubleLanes = 4;
using F = __m256;
using D = __m256d;

SH_INLINE __m128i Load128(const char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
SH_INLINE void Store128(char* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }

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
SH_INLINE void StoreF32(char* p, F x) { _mm256_storeu_ps(reinterpret_cast<float*>(p), x); }
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

SH_INLINE F JoinBf16(const char* upper, const char* low) {
  const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(upper)), 16);
  return _mm256_castsi256_ps(_mm256_add_epi32(high, _mm256_cvtepi16_epi32(Load128(low))));
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

// Copies kLanes elements of kBytes each, so that the compiler cannot see a copy. kStream stores
// past the caches, `to` being aligned.
template <int64_t kBytes, bool kStream>
SH_INLINE void CopyVector(const char* from, char* to) {
  if (kBytes == 4) {
    F x = LoadF32(from);
    asm volatile("" : "+x"(x));
    kStream ? _mm256_stream_ps(reinterpret_cast<float*>(to), x) : StoreF32(to, x);
  } else if (kBytes == 2) {
    __m128i x = Load128(from);
    asm volatile("" : "+x"(x));
    kStream ? _mm_stream_si128(reinterpret_cast<__m128i*>(to), x) : Store128(to, x);
  }
}
SH_INLINE void Keep(F a) { asm volatile("" : : "x"(a)); }
SH_INLINE void StreamFence() { _mm_sfence(); }
