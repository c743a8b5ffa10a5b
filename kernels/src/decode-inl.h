// Decoding of packed weights. Included by kernels-inl.h, once per instruction set. The formats are
// [Note: packed formats] of stronghold.h.
//
// [Note: past the caches] A run whose target begins at a multiple of 64 bytes is stored past the
// caches. Otherwise the processor would first read the target from memory: 2 of nf4's 4.5 bytes.
//
// [Note: codes ahead]
// 1. Stores past the caches slow down the hardware's own prefetching of the codes. Loops then wait
//    for memory.
// 2. So each loop asks for the codes that follow kCodesAhead bytes later.
// 3. Past the end of the codes this asks for a line that has no use; a prefetch cannot fault.

constexpr uintptr_t kCodesAhead = 1024;  // bytes
SH_INLINE void PrefetchCodes(const char* codes) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(codes) + kCodesAhead));
}

struct OutF32 {
  static constexpr int64_t kBytes = 4;
  SH_INLINE static void StoreTwo(char* p, F a, F b) {
    StoreF32(p, a);
    StoreF32(p + 4 * kLanes, b);
  }
  template <bool kStream>
  SH_INLINE static void LookUp(const char* codes, const char* table, char* out) {
    LookUp64Of4<kStream>(codes, table, out);
  }
};
struct OutBf16 {
  static constexpr int64_t kBytes = 2;
  SH_INLINE static void StoreTwo(char* p, F a, F b) {
    StoreBf16x2(p, a, b);
  }
  template <bool kStream>
  SH_INLINE static void LookUp(const char* codes, const char* table, char* out) {
    LookUp64Of2<kStream>(codes, table, out);
  }
};
struct OutF16 {
  static constexpr int64_t kBytes = 2;
  SH_INLINE static void StoreTwo(char* p, F a, F b) {
    StoreF16x2(p, a, b);
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

// ---- nf4 ----------------------------------------------------------------------------------------

constexpr int64_t kNf4Block = 64;
constexpr int64_t kNestedBlock = 256;
static_assert(kNf4Block == kCodeGroup);

// A block has 16 different values. They are computed first, in the dtype of the weight, and the codes
// choose among them.
template <class Out>
SH_INLINE void Nf4Table(float scale, char* table) {
  alignas(64) char padded[(16 + 2 * kLanes) * 4];
  for (int64_t i = 0; i < 16; i += 2 * kLanes) {
    // A vector of 16 has all values. Nothing after them is read.
    const int64_t second = std::min<int64_t>(i + kLanes, 16 - kLanes);
    const char* values = reinterpret_cast<const char*>(kNf4Values);
    const F a = Canonical(Mul(LoadF32(values + 4 * i), Set(scale)));
    const F b = Canonical(Mul(LoadF32(values + 4 * second), Set(scale)));
    Out::StoreTwo(padded + i * Out::kBytes, a, b);
  }
  std::memcpy(table, padded, 16 * Out::kBytes);
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
