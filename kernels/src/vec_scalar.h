// One float at a time, in portable C++: the definition that the other targets must match.

constexpr int kLanes = 1;
constexpr int kDoubleLanes = 1;
using F = float;
using D = double;

SH_INLINE uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
SH_INLINE float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

SH_INLINE F Set(float x) { return x; }
SH_INLINE F Add(F a, F b) { return a + b; }
SH_INLINE F Mul(F a, F b) { return a * b; }
SH_INLINE F Div(F a, F b) { return a / b; }
SH_INLINE F Fma(F a, F b, F c) { return std::fma(a, b, c); }
SH_INLINE F Sqrt(F a) { return std::sqrt(a); }
SH_INLINE F Or(F a, F b) { return FromBits(Bits(a) | Bits(b)); }
SH_INLINE F Canonical(F a) { return a == a ? a : FromBits(0x7FC00000u); }

SH_INLINE uint16_t LoadU16(const char* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

SH_INLINE F LoadF32(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}
SH_INLINE void StoreF32(char* p, F x) { std::memcpy(p, &x, 4); }
SH_INLINE F LoadBf16(const char* p) { return FromBits(static_cast<uint32_t>(LoadU16(p)) << 16); }

SH_INLINE F LoadF16(const char* p) {
  const uint32_t half = LoadU16(p);
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 31) return FromBits(sign | 0x7F800000u | mantissa << 13);
  // Zero and denormals: mantissa units of 2^-24, exact in fp32.
  if (exponent == 0) return FromBits(sign | Bits(static_cast<float>(mantissa) * 0x1p-24f));
  return FromBits(sign | (exponent + 112) << 23 | mantissa << 13);
}

SH_INLINE void StoreF16(char* p, F x) {
  const uint32_t bits = Bits(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // 65520 and above round to infinity
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to units of 2^-24
    half = Bits(FromBits(magnitude) + 0.5f) - 0x3F000000u;
  } else {  // rebias, round to nearest even by the 13 bits that go
    half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1)) >> 13;
  }
  const uint16_t out = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
  std::memcpy(p, &out, 2);
}

SH_INLINE F RoundF16(F x) {
  char half[2];
  StoreF16(half, x);
  return LoadF16(half);
}
SH_INLINE F SelectEqual(F a, F b, F yes, F no) { return a == b ? yes : no; }

SH_INLINE F JoinBf16(const char* upper, const char* low) {
  const int32_t rest = static_cast<int16_t>(LoadU16(low));
  return FromBits((static_cast<uint32_t>(LoadU16(upper)) << 16) + static_cast<uint32_t>(rest));
}
SH_INLINE void SplitBf16(char* upper, char* low, F x) {
  const uint32_t bits = Bits(x);
  const uint16_t high = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  const uint16_t rest = static_cast<uint16_t>(bits);
  std::memcpy(upper, &high, 2);
  std::memcpy(low, &rest, 2);
}

SH_INLINE D ZeroD() { return 0.0; }
SH_INLINE D Widen(F a, int) { return a; }
SH_INLINE D FmaD(D a, D b, D c) { return a * b + c; }  // a * b is exact
SH_INLINE void StoreD(double* p, D a) { *p = a; }

// Copies kLanes elements of kBytes each, so that the compiler cannot see a copy.
template <int64_t kBytes, bool kStream>
SH_INLINE void CopyVector(const char* from, char* to) {
  uint32_t x = 0;
  std::memcpy(&x, from, kBytes);
  asm volatile("" : "+r"(x));
  std::memcpy(to, &x, kBytes);
}
SH_INLINE void Keep(F a) { asm volatile("" : : "r"(Bits(a))); }
SH_INLINE void StreamFence() {}
