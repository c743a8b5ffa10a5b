// Sixteen floats: AVX-512 F, BW, DQ and VL.

constexpr int kLanes = 16;
constexpr int kDoubleLanes = 8;
using F = __m512;
using D = __m512d;

SH_INLINE __m256i Load256(const char* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
SH_INLINE void Store256(char* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
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
SH_INLINE void StoreF32(char* p, F x) { _mm512_storeu_ps(p, x); }
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

SH_INLINE F JoinBf16(const char* upper, const char* low) {
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(upper)), 16);
  return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_cvtepi16_epi32(Load256(low))));
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

// Copies kLanes elements of kBytes each, so that the compiler cannot see a copy. kStream stores
// past the caches, `to` being aligned.
template <int64_t kBytes, bool kStream>
SH_INLINE void CopyVector(const char* from, char* to) {
  if (kBytes == 4) {
    F x = LoadF32(from);
    asm volatile("" : "+v"(x));
    kStream ? _mm512_stream_ps(reinterpret_cast<float*>(to), x) : StoreF32(to, x);
  } else if (kBytes == 2) {
    __m256i x = Load256(from);
    asm volatile("" : "+v"(x));
    kStream ? _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x) : Store256(to, x);
  }
}
SH_INLINE void Keep(F a) { asm volatile("" : : "v"(a)); }
SH_INLINE void StreamFence() { _mm_sfence(); }
