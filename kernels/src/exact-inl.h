// The loop of every optimizer with exact states: fp32 masters and moments.
// Included by kernels-inl.h, once per instruction set.
//
// [Note: out of place]
// 1. The loops here and in lean-inl.h load from one list of arrays and store to another. In place
//    the compiler sees one list.
// 2. A store through the caches would first read the target's line from memory. 12 of Adam's 26
//    bytes would move three times instead of twice.
// 3. So out-of-place stores go past the caches, a line at a time. If a vector's items are half a
//    line, a group's items are put together first. That takes 5 % off a step of Adam in bf16.
// 4. All targets but the scales, which are few, begin at multiples of 64 bytes. update.cpp takes
//    other targets through a buffer in the first cache.
//
// [Note: tails] A tail has no scalar formula. The last numel % kLanes elements are copied into
// padded buffers, take the same vector operations, and are copied back.

template <class Formula, int kVariant, class Weight, class Grad, bool kStream>
SH_INLINE void ExactVector(const typename Formula::Vectors& c, const Arrays& a, const Arrays& to) {
  const F p = Weight::Load(a.weight, a.low);
  F moment[SH_MAX_MOMENTS];
  for (int k = 0; k < Formula::kMoments; ++k) moment[k] = LoadF32(a.moment(k));
  const F handed_on = Formula::template UpdateMoments<kVariant>(c, Grad::Load(a.grad), p, moment);
  for (int k = 0; k < Formula::kMoments; ++k) {
    StoreF32<kStream>(to.moment(k), Canonical(moment[k]));
  }
  const F updated = Formula::template UpdateWeight<kVariant>(c, p, moment, handed_on);
  Weight::template Store<kStream>(to.weight, to.low, Canonical(updated));
}

template <int kMoments, class Weight, class Grad>
SH_INLINE Arrays Offset(const Arrays& a, int64_t i) {
  return {a.weight + i * Weight::kBytes,
          a.low + i * Weight::kLowBytes,
          kMoments > 0 ? a.moment0 + i * 4 : nullptr,
          kMoments > 1 ? a.moment1 + i * 4 : nullptr,
          a.grad + i * Grad::kBytes,
          nullptr,
          nullptr};
}

// Elements whose 2-byte arrays fill one cache line, and 4-byte arrays two.
constexpr int64_t kGroup = 32;

// Past the end of an array this asks for a line that has no use; a prefetch cannot fault. The best
// distance differs: prefetch.h.
template <int64_t kBytes>
SH_INLINE void PrefetchGroup(const char* p) {
  for (int64_t line = 0; line < kGroup * kBytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + line));
  }
}

template <int kMoments, class Weight, class Grad>
SH_INLINE void PrefetchGroups(const Arrays& a, int64_t i) {
  PrefetchGroup<Weight::kBytes>(a.weight + i * Weight::kBytes);
  PrefetchGroup<Weight::kLowBytes>(a.low + i * Weight::kLowBytes);
  for (int k = 0; k < kMoments; ++k) PrefetchGroup<4>(a.moment(k) + i * 4);
  PrefetchGroup<Grad::kBytes>(a.grad + i * Grad::kBytes);
}

// A group, past the caches: [Note: out of place]. Results of 2-byte items are put together first.
template <class Formula, int kVariant, class Weight, class Grad>
SH_INLINE void StreamGroup(const typename Formula::Vectors& c, const Arrays& a, const Arrays& to,
                           int64_t i) {
  constexpr int kMoments = Formula::kMoments;
  alignas(64) char weight[64], low[64];
  for (int64_t j = 0; j < kGroup; j += kLanes) {
    Arrays at = Offset<kMoments, Weight, Grad>(to, i + j);
    if (Weight::kBytes == 2) at.weight = weight + j * 2;
    if (Weight::kLowBytes == 2) at.low = low + j * 2;
    ExactVector<Formula, kVariant, Weight, Grad, true>(
        c, Offset<kMoments, Weight, Grad>(a, i + j), at);
  }
  if (Weight::kBytes == 2) StreamLine(weight, to.weight + i * 2);
  if (Weight::kLowBytes == 2) StreamLine(low, to.low + i * 2);
}

// Room for one vector of every array of a step.
struct Padding {
  alignas(64) char weight[kLanes * 4] = {};
  alignas(64) char low[kLanes * 4] = {};
  alignas(64) char grad[kLanes * 4] = {};
  alignas(64) char moment[SH_MAX_MOMENTS][kLanes * 4] = {};

  Arrays arrays() { return {weight, low, moment[0], moment[1], grad, nullptr, nullptr}; }
};

template <int kMoments, class Weight>
inline void CopyWritten(const Arrays& from, const Arrays& to, int64_t n) {
  std::memcpy(to.weight, from.weight, n * Weight::kBytes);
  if (Weight::kLowBytes > 0) std::memcpy(to.low, from.low, n * Weight::kLowBytes);
  for (int k = 0; k < kMoments; ++k) std::memcpy(to.moment(k), from.moment(k), n * 4);
}

template <class Formula, int kVariant, class Weight, class Grad, bool kInPlace>
void Exact(const float* constants, Arrays a, Arrays targets, int64_t numel, int64_t ahead) {
  constexpr int kMoments = Formula::kMoments;
  const typename Formula::Vectors c(constants);
  int64_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) {
    PrefetchGroups<kMoments, Weight, Grad>(a, i + ahead);
    if constexpr (kInPlace) {
      for (int64_t j = i; j < i + kGroup; j += kLanes) {
        const Arrays at = Offset<kMoments, Weight, Grad>(a, j);
        ExactVector<Formula, kVariant, Weight, Grad, false>(c, at, at);
      }
    } else {
      StreamGroup<Formula, kVariant, Weight, Grad>(c, a, targets, i);
    }
  }
  const Arrays& to = kInPlace ? a : targets;
  for (; i + kLanes <= numel; i += kLanes) {
    ExactVector<Formula, kVariant, Weight, Grad, false>(c, Offset<kMoments, Weight, Grad>(a, i),
                                                        Offset<kMoments, Weight, Grad>(to, i));
  }
  if (!kInPlace) StreamFence();
  const int64_t rest = numel - i;
  if (rest <= 0) return;
  Padding padding;  // [Note: tails]
  const Arrays padded = padding.arrays();
  const Arrays tail = Offset<kMoments, Weight, Grad>(a, i);
  CopyWritten<kMoments, Weight>(tail, padded, rest);
  std::memcpy(padding.grad, tail.grad, rest * Grad::kBytes);
  ExactVector<Formula, kVariant, Weight, Grad, false>(c, padded, padded);
  CopyWritten<kMoments, Weight>(padded, Offset<kMoments, Weight, Grad>(to, i), rest);
}

// ---- The same bytes without the arithmetic ------------------------------------------------------

template <int kMoments, class Weight, class Grad, bool kInPlace>
void TrafficLoop(const Arrays& from, const Arrays& to, int64_t numel, int64_t ahead) {
  F seen = Set(0.0f);
  const int64_t whole = numel - numel % kGroup;
  for (int64_t i = 0; i < whole; i += kGroup) {
    PrefetchGroups<kMoments, Weight, Grad>(from, i + ahead);
    for (int64_t j = i; j < i + kGroup; j += kLanes) {
      const Arrays r = Offset<kMoments, Weight, Grad>(from, j);
      const Arrays w = Offset<kMoments, Weight, Grad>(to, j);
      seen = Or(seen, Grad::Load(r.grad));
      CopyVector<Weight::kBytes, !kInPlace>(r.weight, w.weight);
      CopyVector<Weight::kLowBytes, !kInPlace>(r.low, w.low);
      for (int k = 0; k < kMoments; ++k) CopyVector<4, !kInPlace>(r.moment(k), w.moment(k));
    }
  }
  Keep(seen);
  StreamFence();
  CopyWritten<kMoments, Weight>(Offset<kMoments, Weight, Grad>(from, whole),
                                Offset<kMoments, Weight, Grad>(to, whole),
                                kInPlace ? 0 : numel - whole);
}

template <int kMoments, class Weight, class Grad>
void Traffic(Arrays from, Arrays to, bool in_place, int64_t numel, int64_t ahead) {
  if (in_place) {
    TrafficLoop<kMoments, Weight, Grad, true>(from, to, numel, ahead);
  } else {
    TrafficLoop<kMoments, Weight, Grad, false>(from, to, numel, ahead);
  }
}
