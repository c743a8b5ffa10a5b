// Accumulation and sums of squares. Included by kernels-inl.h, once per instruction set.

// ---- Accumulation -------------------------------------------------------------------------------

template <class Grad, bool kAdd>
SH_INLINE void AccumulateVector(const char* grad, char* acc) {
  F x = Grad::Load(grad);
  if (kAdd) x = Add(LoadF32(acc), x);
  StoreF32(acc, Canonical(x));
}

template <class Grad, bool kAdd>
void AccumulateLoop(const char* grad, char* acc, int64_t numel) {
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    AccumulateVector<Grad, kAdd>(grad + i * Grad::kBytes, acc + i * 4);
  }
  const int64_t rest = numel - i;
  if (rest <= 0) return;
  alignas(64) char padded_grad[kLanes * 4] = {};  // [Note: tails]
  alignas(64) char padded_acc[kLanes * 4] = {};
  std::memcpy(padded_grad, grad + i * Grad::kBytes, rest * Grad::kBytes);
  std::memcpy(padded_acc, acc + i * 4, rest * 4);
  AccumulateVector<Grad, kAdd>(padded_grad, padded_acc);
  std::memcpy(acc + i * 4, padded_acc, rest * 4);
}

template <class Grad>
void Accumulate(const char* grad, char* acc, bool add, int64_t numel) {
  if (add) {
    AccumulateLoop<Grad, true>(grad, acc, numel);
  } else {
    AccumulateLoop<Grad, false>(grad, acc, numel);
  }
}

// ---- Sum of squares -----------------------------------------------------------------------------

// Virtual lanes of the tree: enough vectors of doubles in flight on AVX-512 to hide an addition.
constexpr int kSumLanes = 32;
constexpr int kSumVectors = kSumLanes / kDoubleLanes;

// The square of a float is exact in double: one rounding per element, with or without fma.
template <class Grad>
SH_INLINE void SumGroup(const char* x, D* sums) {
  for (int j = 0; j < kSumLanes / kLanes; ++j) {
    const F f = Grad::Load(x + j * kLanes * Grad::kBytes);
    for (int part = 0; part < kLanes / kDoubleLanes; ++part) {
      const D d = Widen(f, part);
      D& sum = sums[j * (kLanes / kDoubleLanes) + part];
      sum = FmaD(d, d, sum);
    }
  }
}

template <class Grad>
double SumSquares(const char* x, int64_t numel) {
  D sums[kSumVectors];
  for (D& sum : sums) sum = ZeroD();
  int64_t i = 0;
  for (; i + kSumLanes <= numel; i += kSumLanes) SumGroup<Grad>(x + i * Grad::kBytes, sums);
  if (i < numel) {
    alignas(64) char padded[kSumLanes * 4] = {};  // zeros add nothing
    std::memcpy(padded, x + i * Grad::kBytes, (numel - i) * Grad::kBytes);
    SumGroup<Grad>(padded, sums);
  }
  double lanes[kSumLanes];
  for (int j = 0; j < kSumVectors; ++j) StoreD(lanes + j * kDoubleLanes, sums[j]);
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}
