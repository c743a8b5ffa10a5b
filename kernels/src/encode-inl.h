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
