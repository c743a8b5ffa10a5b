// Decoding of packed weights. Included by kernels-inl.h, once per instruction set. The formats are
// [Note: packed formats] of stronghold.h.
//
// [Note: past the caches] A run whose target begins at a multiple of 64 bytes is stored past the
// caches. Otherwise the processor would first read the target from memory: 2 of nf4's 4.5 bytes.
//
// [Note: codes ahead]
// 1. Stores past the caches slow down the hardware's own prefetching of the codes. Loops then wait
//    for memory: AVX2 decoded int8 into bf16 at 0.28 of memory's rate on an Intel Xeon.
// 2. So each loop asks for the codes that follow kCodesAhead bytes later: 0.84 of memory's rate.
//    256 bytes give 0.38; 1024 and 4096 give the same.
// 3. Past the end of the codes this asks for a line that has no use; a prefetch cannot fault.

constexpr uintptr_t kCodesAhead = 1024;  // bytes
SH_INLINE void PrefetchCodes(const char* codes) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(codes) + kCodesAhead));
}

struct OutF32 {
  static constexpr int64_t kBytes = 4;
  template <bool kStream>
  SH_INLINE static void StoreTwo(char* p, F a, F b) {
    StoreF32<kStream>(p, a);
    StoreF32<kStream>(p + 4 * kLanes, b);
  }
  template <bool kStream>
  SH_INLINE static void LookUp(const char* codes, const char* table, char* out) {
    LookUp64Of4<kStream>(codes, table, out);
  }
};
struct OutBf16 {
  static constexpr int64_t kBytes = 2;
  template <bool kStream>
  SH_INLINE static void StoreTwo(char* p, F a, F b) {
    StoreBf16x2<kStream>(p, a, b);
  }
  template <bool kStream>
  SH_INLINE static void LookUp(const char* codes, const char* table, char* out) {
    LookUp64Of2<kStream>(codes, table, out);
  }
};
struct OutF16 {
  static constexpr int64_t kBytes = 2;
  template <bool kStream>
  SH_INLINE static void StoreTwo(char* p, F a, F b) {
    StoreF16x2<kStream>(p, a, b);
  }
  template <bool kStream>
  SH_INLINE static void LookUp(const char* codes, const char* table, char* out) {
    LookUp64Of2<kStream>(codes, table, out);
  }
};

SH_INLINE bool CanStream(const char* out) {
  return reinterpret_cast<uintptr_t>(out) % kStreamAlign == 0;
}
SH_INLINE const char* InnerAt(const sh_packed& packed, int index) {
  return static_cast<const char*>(packed.inner[index]);
}
SH_INLINE float FloatAt(const void* p, int64_t index) {
  float x;
  std::memcpy(&x, static_cast<const char*>(p) + index * 4, 4);
  return x;
}

// Writes 16 values times a scale, in the dtype of the weight.
template <class Out>
SH_INLINE void ProductsOf16(const float* values, float scale, char* table) {
  alignas(64) char padded[(16 + 2 * kLanes) * 4];
  for (int64_t i = 0; i < 16; i += 2 * kLanes) {
    // A vector of 16 has all values. Nothing after them is read.
    const int64_t second = std::min<int64_t>(i + kLanes, 16 - kLanes);
    const F a = Canonical(Mul(LoadF32(reinterpret_cast<const char*>(values + i)), Set(scale)));
    const F b = Canonical(Mul(LoadF32(reinterpret_cast<const char*>(values + second)), Set(scale)));
    Out::template StoreTwo<false>(padded + i * Out::kBytes, a, b);
  }
  std::memcpy(table, padded, 16 * Out::kBytes);
}

// ---- nf4 ----------------------------------------------------------------------------------------

constexpr int64_t kNf4Block = 64;
constexpr int64_t kNestedBlock = 256;
static_assert(kNf4Block == kCodeGroup);

// A block has 16 different values. They are computed first, and the codes choose among them.
template <class Out>
SH_INLINE void Nf4Table(float scale, char* table) {
  ProductsOf16<Out>(kNf4Values, scale, table);
}

SH_INLINE float Nf4Scale(const sh_packed& packed, int64_t block) {
  const unsigned char code = static_cast<unsigned char>(InnerAt(packed, 1)[block]);
  const float product = kDynamicValues[code] * FloatAt(packed.inner[2], block / kNestedBlock);
  return product + FloatAt(packed.inner[3], 0);
}

template <class Out>
void DecodeNf4(const sh_packed& packed, int64_t from, int64_t upto, char* out) {
  const char* codes = InnerAt(packed, 0);
  alignas(64) char table[16 * Out::kBytes];
  int64_t i = from;
  for (; i + kNf4Block <= upto; i += kNf4Block) {
    Nf4Table<Out>(Nf4Scale(packed, i / kNf4Block), table);
    char* to = out + (i - from) * Out::kBytes;
    PrefetchCodes(codes + i / 2);
    if (CanStream(to)) {
      Out::template LookUp<true>(codes + i / 2, table, to);
    } else {
      Out::template LookUp<false>(codes + i / 2, table, to);
    }
  }
  StreamFence();
  const int64_t rest = upto - i;
  if (rest <= 0) return;
  alignas(64) char padded_codes[kNf4Block / 2] = {};  // [Note: tails]
  alignas(64) char padded_out[kNf4Block * Out::kBytes];
  std::memcpy(padded_codes, codes + i / 2, (rest + 1) / 2);
  Nf4Table<Out>(Nf4Scale(packed, i / kNf4Block), table);
  Out::template LookUp<false>(padded_codes, table, padded_out);
  std::memcpy(out + (i - from) * Out::kBytes, padded_out, rest * Out::kBytes);
}

// ---- int8 and fp8 -------------------------------------------------------------------------------

struct CodeInt8 {
  SH_INLINE static bool AnyNan(const char*, int64_t) { return false; }
  SH_INLINE static F Load(const char* p) { return LoadS8(p); }
  SH_INLINE static void LoadTwo(const char* p, F* a, F* b) {
    *a = LoadS8(p);
    *b = LoadS8(p + kLanes);
  }
  SH_INLINE static F Value(F code, F scale) { return Mul(Mul(code, scale), Set(1.0f / 127.0f)); }
};
struct CodeE4m3 {
  SH_INLINE static bool AnyNan(const char* p, int64_t numel) { return MustLoadNan(p, numel); }
  SH_INLINE static F Load(const char* p) { return LoadE4m3(p); }
  SH_INLINE static void LoadTwo(const char* p, F* a, F* b) { LoadE4m3x2(p, a, b); }
  SH_INLINE static F Value(F code, F scale) { return Mul(code, scale); }
};

// kNumbers: the scale is finite, and no code is a NaN that LoadTwo cannot load.
template <class Code, class Out, bool kNumbers, bool kStream>
SH_INLINE void DecodeTwo(const char* codes, F scale, char* out) {
  if (kNumbers) {
    F a, b;
    Code::LoadTwo(codes, &a, &b);
    Out::template StoreTwo<kStream>(out, Code::Value(a, scale), Code::Value(b, scale));
  } else {
    const F a = Canonical(Code::Value(Code::Load(codes), scale));
    const F b = Canonical(Code::Value(Code::Load(codes + kLanes), scale));
    Out::template StoreTwo<kStream>(out, a, b);
  }
}

template <class Code, class Out, bool kNumbers, bool kStream>
SH_INLINE void DecodeRunAs(const char* codes, float scale_value, char* out, int64_t numel) {
  constexpr int64_t kStep = 2 * kLanes;
  const F scale = Set(scale_value);
  int64_t i = 0;
  for (; i + kStep <= numel; i += kStep) {
    PrefetchCodes(codes + i);
    DecodeTwo<Code, Out, kNumbers, kStream>(codes + i, scale, out + i * Out::kBytes);
  }
  const int64_t rest = numel - i;
  if (rest <= 0) return;
  alignas(64) char padded_codes[kStep] = {};  // [Note: tails]
  alignas(64) char padded_out[kStep * Out::kBytes];
  std::memcpy(padded_codes, codes + i, rest);
  DecodeTwo<Code, Out, kNumbers, false>(padded_codes, scale, padded_out);
  std::memcpy(out + i * Out::kBytes, padded_out, rest * Out::kBytes);
}

// Codes that share a scale.
template <class Code, class Out>
SH_INLINE void DecodeRun(const char* codes, float scale, char* out, int64_t numel) {
  const bool numbers = std::fabs(scale) < INFINITY && !Code::AnyNan(codes, numel);
  if (__builtin_expect(!numbers, 0)) {
    DecodeRunAs<Code, Out, false, false>(codes, scale, out, numel);
  } else if (CanStream(out)) {
    DecodeRunAs<Code, Out, true, true>(codes, scale, out, numel);
  } else {
    DecodeRunAs<Code, Out, true, false>(codes, scale, out, numel);
  }
}

template <class Out>
void DecodeInt8(const sh_packed& packed, int64_t from, int64_t upto, char* out) {
  int64_t row = from / packed.columns;
  for (int64_t i = from; i < upto; ++row) {
    const int64_t end = std::min(upto, (row + 1) * packed.columns);
    DecodeRun<CodeInt8, Out>(InnerAt(packed, 0) + i, FloatAt(packed.inner[1], row),
                             out + (i - from) * Out::kBytes, end - i);
    i = end;
  }
  StreamFence();
}

// [Note: e4m3 by table]
// 1. A magnitude below 16 is its index in kE4m3Values. The first 8 are zero and the denormals.
// 2. A larger magnitude is 2^k times one of the last 8 values. k is its exponent minus 1.
// 3. The product with the scale is rounded to fp32, then to bf16. Both roundings commute with 2^k
//    if the products of the last 8 values are normal and no product is infinite.
// 4. So a run computes 16 products. Each code takes one of them, and adds k to its exponent.
// 5. kLeastByTable and kMostByTable bound the scales for 3. Other scales are computed element by
//    element: among them zero, negative numbers, infinity and NaN. So is a group of codes with a
//    NaN.
alignas(64) constexpr float kE4m3Values[16] = {
    0.0f,     0x1p-9f,    0x2p-9f,    0x3p-9f,    0x4p-9f,    0x5p-9f,    0x6p-9f,    0x7p-9f,
    0x8p-9f,  0x9p-9f,    0xAp-9f,    0xBp-9f,    0xCp-9f,    0xDp-9f,    0xEp-9f,    0xFp-9f,
};
constexpr float kLeastByTable = 0x1p-120f;  // times 2^-6, the least normal e4m3: 2^-126
constexpr float kMostByTable = 0x1p119f;    // times 448, the largest e4m3: below 2^128

// Codes that share a scale, into fp32 or fp16.
template <class Out>
struct RunE4m3 {
  SH_INLINE static void Decode(const char* codes, float scale, char* out, int64_t numel) {
    DecodeRun<CodeE4m3, Out>(codes, scale, out, numel);
  }
};

// The same into bf16.
template <>
struct RunE4m3<OutBf16> {
  static void EachElement(const char* codes, float scale, char* out, int64_t numel) {
    DecodeRun<CodeE4m3, OutBf16>(codes, scale, out, numel);
  }
  template <bool kStream>
  SH_INLINE static void ByTable(const char* codes, float scale, char* out, int64_t numel) {
    alignas(64) char products[16 * OutBf16::kBytes];
    ProductsOf16<OutBf16>(kE4m3Values, scale, products);
    const E4m3Table table(products);
    int64_t i = 0;
    for (; i + kE4m3Group <= numel; i += kE4m3Group) {
      char* to = out + i * OutBf16::kBytes;
      PrefetchCodes(codes + i);
      const bool has_nan = !table.Store<kStream>(codes + i, to);
      if (__builtin_expect(has_nan, 0)) EachElement(codes + i, scale, to, kE4m3Group);
    }
    if (i < numel) EachElement(codes + i, scale, out + i * OutBf16::kBytes, numel - i);
  }
  SH_INLINE static void Decode(const char* codes, float scale, char* out, int64_t numel) {
    if (__builtin_expect(!(scale >= kLeastByTable && scale < kMostByTable), 0)) {
      EachElement(codes, scale, out, numel);
    } else if (CanStream(out)) {
      ByTable<true>(codes, scale, out, numel);
    } else {
      ByTable<false>(codes, scale, out, numel);
    }
  }
};

constexpr int64_t kFp8Block = 128;

// The blocks of one matrix, and their scales.
struct Fp8Blocks {
  explicit Fp8Blocks(const sh_packed& packed)
      : down((packed.matrix_rows + kFp8Block - 1) / kFp8Block),
        across((packed.columns + kFp8Block - 1) / kFp8Block) {}
  // The index of the first block that has elements of a row.
  int64_t At(const sh_packed& packed, int64_t row) const {
    const int64_t matrix = row / packed.matrix_rows;
    return (matrix * down + row % packed.matrix_rows / kFp8Block) * across;
  }
  int64_t down, across;
};

template <class Out>
void DecodeFp8(const sh_packed& packed, int64_t from, int64_t upto, char* out) {
  const Fp8Blocks blocks(packed);
  int64_t row = from / packed.columns;
  for (int64_t i = from; i < upto; ++row) {
    const int64_t first = blocks.At(packed, row);
    const int64_t row_begin = row * packed.columns;
    const int64_t row_end = std::min(upto, row_begin + packed.columns);
    while (i < row_end) {
      const int64_t block = (i - row_begin) / kFp8Block;
      const int64_t end = std::min(row_end, row_begin + (block + 1) * kFp8Block);
      RunE4m3<Out>::Decode(InnerAt(packed, 0) + i, FloatAt(packed.inner[1], first + block),
                           out + (i - from) * Out::kBytes, end - i);
      i = end;
    }
  }
  StreamFence();
}

// ---- The same bytes without the arithmetic ------------------------------------------------------

inline void DecodeTraffic(const char* codes, int64_t bytes, char* out, int64_t out_bytes) {
  alignas(64) const char zeros[64] = {};
  F seen = Set(0.0f);
  const int64_t lines = bytes / 64;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < 64; i += 4 * kLanes) seen = Or(seen, LoadF32(codes + 64 * line + i));
    const int64_t end = out_bytes / 64 * (line + 1) / lines;
    for (int64_t i = out_bytes / 64 * line / lines; i < end; ++i) StreamLine(zeros, out + 64 * i);
  }
  Keep(seen);
  StreamFence();
}
