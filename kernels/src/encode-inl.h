// Encoding of packed weights, and its error. Included by kernels-inl.h, once per instruction set.
// The formats are [Note: packed formats] of stronghold.h.
//
// The loops over one group of floats are plain: the compiler makes vectors of them. Each operation
// is rounded correctly, so the bits are those of one float at a time.

constexpr int64_t kGroupFloats = 64;
constexpr float kSmallestAbsmax = 1e-38f;

// A group's floats, with zeros after the last.
template <class Weight>
SH_INLINE void LoadGroup(const char* weight, int64_t numel, float* x) {
  alignas(64) char padded[kGroupFloats * Weight::kBytes] = {};
  if (numel < kGroupFloats) {
    std::memcpy(padded, weight, numel * Weight::kBytes);
    weight = padded;
  }
  for (int64_t i = 0; i < kGroupFloats; i += kLanes) {
    StoreF32(reinterpret_cast<char*>(x + i), Weight::Load(weight + i * Weight::kBytes));
  }
}

// Magnitudes are compared as unsigned integers: that of a NaN is the largest.
SH_INLINE uint32_t LargestBits(const float* x, uint32_t largest) {
  uint32_t bits[kGroupFloats];
  std::memcpy(bits, x, sizeof(bits));
  for (int64_t i = 0; i < kGroupFloats; ++i) {
    const uint32_t magnitude = bits[i] & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}
SH_INLINE float FloatOfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The factors that bring an absmax to a format's largest number.
struct Scaling {
  Scaling(float absmax, float top) {
    lift = absmax < 0x1p-100f ? 0x1p100f : 1.0f;
    factor = absmax == 0.0f ? 0.0f : 1.0f / (absmax * lift) * top;
  }
  float lift, factor;
};

template <class T>
SH_INLINE void StoreAt(void* p, int64_t index, T x) {
  std::memcpy(static_cast<char*>(p) + index * sizeof(T), &x, sizeof(T));
}

// ---- nf4 ----------------------------------------------------------------------------------------

constexpr int64_t kNf4Unit = 16384;  // elements

inline int64_t Nf4Units(const sh_packed& packed) {
  return (packed.rows * packed.columns + kNf4Unit - 1) / kNf4Unit;
}

// The scaled floats become codes, two in a byte.
SH_INLINE void Nf4Codes(const float* scaled, char* out, int64_t num_bytes) {
  int32_t codes[kNf4Block] = {};
  for (int k = 0; k < 15; ++k) {
    const float bound = (kNf4Values[k] + kNf4Values[k + 1]) / 2.0f;
    for (int64_t i = 0; i < kNf4Block; ++i) codes[i] += scaled[i] > bound;
  }
  char bytes[kNf4Block / 2];
  for (int64_t i = 0; i < kNf4Block / 2; ++i) {
    bytes[i] = static_cast<char>(codes[2 * i] << 4 | codes[2 * i + 1]);
  }
  std::memcpy(out, bytes, num_bytes);
}

template <class Weight>
void EncodeNf4(const sh_packed& packed, int64_t unit) {
  static_assert(kNf4Block == kGroupFloats);
  const int64_t numel = packed.rows * packed.columns;
  const int64_t upto = std::min(numel, (unit + 1) * kNf4Unit);
  for (int64_t i = unit * kNf4Unit; i < upto; i += kNf4Block) {
    const int64_t count = std::min(kNf4Block, upto - i);
    alignas(64) float x[kNf4Block];
    LoadGroup<Weight>(static_cast<const char*>(packed.weight) + i * Weight::kBytes, count, x);
    float absmax = FloatOfBits(LargestBits(x, 0));
    const float divisor = absmax < kSmallestAbsmax ? kSmallestAbsmax : absmax;
    if (count == kNf4Block) {
      const float reciprocal = 1.0f / divisor;
      for (float& value : x) value *= reciprocal;
    } else {
      absmax = divisor;
      for (float& value : x) value /= divisor;
    }
    Nf4Codes(x, static_cast<char*>(packed.inner[0]) + i / 2, (count + 1) / 2);
    StoreAt(packed.inner[2], i / kNf4Block, absmax);
  }
}

// ---- int8 ---------------------------------------------------------------------------------------

SH_INLINE int64_t Int8UnitRows(const sh_packed& packed) {
  return std::max<int64_t>(kNf4Unit / std::max<int64_t>(packed.columns, 1), 1);
}
inline int64_t Int8Units(const sh_packed& packed) {
  return (packed.rows + Int8UnitRows(packed) - 1) / Int8UnitRows(packed);
}

template <class Weight>
void EncodeInt8Row(const sh_packed& packed, int64_t row) {
  const int64_t begin = row * packed.columns;
  const char* weight = static_cast<const char*>(packed.weight) + begin * Weight::kBytes;
  char* out = static_cast<char*>(packed.inner[0]) + begin;
  alignas(64) float x[kGroupFloats];
  uint32_t largest = 0;
  for (int64_t i = 0; i < packed.columns; i += kGroupFloats) {
    LoadGroup<Weight>(weight + i * Weight::kBytes, std::min(kGroupFloats, packed.columns - i), x);
    largest = LargestBits(x, largest);
  }
  const float absmax = FloatOfBits(largest);
  StoreAt(packed.inner[1], row, absmax);
  if (!(absmax < INFINITY)) return;
  const Scaling scaling(absmax, 127.0f);
  for (int64_t i = 0; i < packed.columns; i += kGroupFloats) {
    const int64_t count = std::min(kGroupFloats, packed.columns - i);
    LoadGroup<Weight>(weight + i * Weight::kBytes, count, x);
    signed char codes[kGroupFloats];
    for (int64_t j = 0; j < kGroupFloats; ++j) {
      // The sum with 1.5 * 2^23 has no fraction: it is rounded to nearest even.
      const float rounded = (x[j] * scaling.lift * scaling.factor + 0x1.8p23f) - 0x1.8p23f;
      const float least = rounded < -127.0f ? -127.0f : rounded;
      codes[j] = static_cast<signed char>(static_cast<int32_t>(least > 127.0f ? 127.0f : least));
    }
    std::memcpy(out + i, codes, count);
  }
}

template <class Weight>
void EncodeInt8(const sh_packed& packed, int64_t unit) {
  const int64_t first = unit * Int8UnitRows(packed);
  const int64_t end = std::min(packed.rows, first + Int8UnitRows(packed));
  for (int64_t row = first; row < end; ++row) EncodeInt8Row<Weight>(packed, row);
}

// ---- fp8 ----------------------------------------------------------------------------------------

// A unit is a row of blocks of one matrix.
inline int64_t Fp8Units(const sh_packed& packed) {
  return packed.rows / packed.matrix_rows * Fp8Blocks(packed).down;
}

SH_INLINE char RoundE4m3(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Rebias, round to nearest even by the 20 bits that go.
  const uint32_t normal = (magnitude - (120u << 23) + 0x7FFFFu + ((magnitude >> 20) & 1)) >> 20;
  // Below 2^-6: adding 2^14 rounds to units of 2^-9.
  const float shifted = FloatOfBits(magnitude) + 0x1p14f;
  uint32_t denormal;
  std::memcpy(&denormal, &shifted, 4);
  denormal -= 0x46800000u;
  const uint32_t code = magnitude < 0x3C800000u ? denormal : normal;
  return static_cast<char>(code | (bits >> 24 & 0x80u));
}

template <class Weight>
void EncodeFp8Block(const sh_packed& packed, int64_t first, int64_t num_rows, int64_t num_columns,
                    int64_t block) {
  const char* weight = static_cast<const char*>(packed.weight);
  alignas(64) float x[kGroupFloats];
  uint32_t largest = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < num_columns; i += kGroupFloats) {
      const int64_t at = first + row * packed.columns + i;
      LoadGroup<Weight>(weight + at * Weight::kBytes, std::min(kGroupFloats, num_columns - i), x);
      largest = LargestBits(x, largest);
    }
  }
  const float absmax = FloatOfBits(largest);
  const Scaling scaling(absmax, 448.0f);
  const bool finite = absmax < INFINITY;
  const float inverse = scaling.factor == 0.0f ? 1.0f : 1.0f / scaling.factor * scaling.lift;
  StoreAt(packed.inner[1], block, finite ? inverse : absmax);
  if (!finite) return;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < num_columns; i += kGroupFloats) {
      const int64_t at = first + row * packed.columns + i;
      const int64_t count = std::min(kGroupFloats, num_columns - i);
      LoadGroup<Weight>(weight + at * Weight::kBytes, count, x);
      char codes[kGroupFloats];
      for (int64_t j = 0; j < kGroupFloats; ++j) {
        const float scaled = x[j] * scaling.lift * scaling.factor;
        const float least = scaled < -448.0f ? -448.0f : scaled;
        codes[j] = RoundE4m3(least > 448.0f ? 448.0f : least);
      }
      std::memcpy(static_cast<char*>(packed.inner[0]) + at, codes, count);
    }
  }
}

template <class Weight>
void EncodeFp8(const sh_packed& packed, int64_t unit) {
  const Fp8Blocks blocks(packed);
  const int64_t first = unit / blocks.down * packed.matrix_rows + unit % blocks.down * kFp8Block;
  const int64_t matrix_end = (unit / blocks.down + 1) * packed.matrix_rows;
  const int64_t num_rows = std::min(kFp8Block, matrix_end - first);
  for (int64_t block = 0; block < blocks.across; ++block) {
    const int64_t column = block * kFp8Block;
    EncodeFp8Block<Weight>(packed, first * packed.columns + column, num_rows,
                           std::min(kFp8Block, packed.columns - column),
                           unit * blocks.across + block);
  }
}

// ---- The error ----------------------------------------------------------------------------------

template <class Weight>
void Compare(const char* a, const char* b, int64_t numel, double* square_sum, double* largest) {
  double sums[kGroupFloats] = {}, most[kGroupFloats] = {};
  for (int64_t i = 0; i < numel; i += kGroupFloats) {
    const int64_t count = std::min(kGroupFloats, numel - i);
    alignas(64) float x[kGroupFloats], y[kGroupFloats];
    LoadGroup<Weight>(a + i * Weight::kBytes, count, x);
    LoadGroup<Weight>(b + i * Weight::kBytes, count, y);
    for (int64_t j = 0; j < kGroupFloats; ++j) {
      const double difference = static_cast<double>(x[j]) - static_cast<double>(y[j]);
      const double magnitude = difference < 0.0 ? -difference : difference;
      const double finite = magnitude < INFINITY ? magnitude : static_cast<double>(INFINITY);
      sums[j] += finite * finite;
      most[j] = finite > most[j] ? finite : most[j];
    }
  }
  for (int64_t j = 0; j < kGroupFloats; ++j) {
    *square_sum += sums[j];
    *largest = most[j] > *largest ? most[j] : *largest;
  }
}
