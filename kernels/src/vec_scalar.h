// One float at a time, in portable C++: the definition that the other targets must match.
//
// Every store goes through the caches, also with kStream.

constexpr int kLanes = 1;
constexpr int kDoubleLanes = 1;
constexpr bool kTwoLoops = false;
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
template <bool kStream = false>
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

// high + rest, but high where the sign would change ([Note: masters]).
SH_INLINE F Join(uint32_t high, int32_t rest) {
  const uint32_t bits = high + static_cast<uint32_t>(rest);
  return FromBits((bits ^ high) >> 31 ? high : bits);
}
SH_INLINE F JoinBf16(const char* upper, const char* low) {
  return Join(static_cast<uint32_t>(LoadU16(upper)) << 16, static_cast<int16_t>(LoadU16(low)));
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

// ---- Lean states --------------------------------------------------------------------------------

struct Quad {
  F f[4];
};

SH_INLINE F SetFrom(const char* p) { return LoadF32(p); }
SH_INLINE F Abs(F a) { return FromBits(Bits(a) & 0x7FFFFFFFu); }
SH_INLINE F CopySign(F magnitude, F sign) {
  return FromBits(Bits(magnitude) | (Bits(sign) & 0x80000000u));
}
SH_INLINE F MaxBits(F a, F b) { return Bits(a) < Bits(b) ? b : a; }
SH_INLINE F Compress(F a) { return FromBits((Bits(a) >> 1) + 0x1FC00000u); }
SH_INLINE F CompressSigned(F a) { return CopySign(Compress(Abs(a)), a); }
SH_INLINE bool AnyNan(const Quad& a) {
  return a.f[0] != a.f[0] || a.f[1] != a.f[1] || a.f[2] != a.f[2] || a.f[3] != a.f[3];
}

SH_INLINE Quad QuadF32(const char* p) {
  return {{LoadF32(p), LoadF32(p + 4), LoadF32(p + 8), LoadF32(p + 12)}};
}
SH_INLINE Quad QuadBf16(const char* p) {
  return {{LoadBf16(p), LoadBf16(p + 2), LoadBf16(p + 4), LoadBf16(p + 6)}};
}
SH_INLINE Quad QuadF16(const char* p) {
  return {{LoadF16(p), LoadF16(p + 2), LoadF16(p + 4), LoadF16(p + 6)}};
}

// expand(code) of stronghold.h, for code >= 0.
SH_INLINE F Expand(int code) {
  return code == 0 ? 0.0f : FromBits((Bits(static_cast<float>(code)) << 1) - 0x3F800000u);
}
SH_INLINE Quad ExpandS8(const char* p) {
  Quad out;
  for (int i = 0; i < 4; ++i) {
    const int code = static_cast<signed char>(p[i]);
    out.f[i] = code < 0 ? -Expand(-code) : Expand(code);
  }
  return out;
}
SH_INLINE Quad ExpandU8(const char* p) {
  Quad out;
  for (int i = 0; i < 4; ++i) out.f[i] = Expand(static_cast<unsigned char>(p[i]));
  return out;
}

SH_INLINE Quad JoinLean(const char* weight, const char* low) {
  Quad out;
  for (int i = 0; i < 4; ++i) {
    out.f[i] = Join(static_cast<uint32_t>(LoadU16(weight + 2 * i)) << 16,
                    static_cast<signed char>(low[i]) * 256);
  }
  return out;
}
template <bool kStream>
SH_INLINE void SplitLean(char* weight, char* low, const Quad& p) {
  for (int i = 0; i < 4; ++i) {
    // Rounds to 24 bits and those to 16; the remainder comes out 128 too large.
    const uint32_t bits = Bits(p.f[i]) + 0x8080u;
    const uint16_t upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(weight + 2 * i, &upper, 2);
    low[i] = static_cast<char>((bits >> 8 & 0xFFu) ^ 0x80u);
  }
}
template <bool kStream>
SH_INLINE void NarrowS8(char* p, const Quad& q) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<char>(std::lrint(q.f[i]));
}
template <bool kStream>
SH_INLINE void NarrowU8(char* p, const Quad& q) {
  for (int i = 0; i < 4; ++i) {
    const long code = std::lrint(q.f[i]);
    p[i] = static_cast<char>(code < 1 ? 1 : code);
  }
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
    out.largest[i] = Bits(x[i]);
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
  uint32_t x = 0;
  std::memcpy(&x, from, kBytes);
  asm volatile("" : "+r"(x));
  std::memcpy(to, &x, kBytes);
}
SH_INLINE void Keep(F a) { asm volatile("" : : "r"(Bits(a))); }
SH_INLINE void StreamLine(const char* from, char* to) { std::memcpy(to, from, 64); }
SH_INLINE void StreamFence() {}

// ---- Packed weights -----------------------------------------------------------------------------


