// The layouts of gradients and weights in memory, by dtype.
//
// Included by each target_*.cpp inside a target region, in the namespace of that target, after the
// vec_*.h that gives F (a vector of kLanes floats) and its operations.
//
// [Note: masters]
// 1. A kernel never writes a bf16 zero with a negative remainder.
// 2. The caller may write a zero: it prunes or clamps the weight. The old remainder stays.
// 3. The sum of the two would be the bits of a NaN. So the master is the zero.

struct GradF32 {
  static constexpr int64_t kBytes = 4;
  SH_INLINE static F Load(const char* p) { return LoadF32(p); }
  SH_INLINE static Quad LoadQuad(const char* p) { return QuadF32(p); }
};
struct GradBf16 {
  static constexpr int64_t kBytes = 2;
  SH_INLINE static F Load(const char* p) { return LoadBf16(p); }
  SH_INLINE static Quad LoadQuad(const char* p) { return QuadBf16(p); }
};
struct GradF16 {
  static constexpr int64_t kBytes = 2;
  SH_INLINE static F Load(const char* p) { return LoadF16(p); }
  SH_INLINE static Quad LoadQuad(const char* p) { return QuadF16(p); }
};

// Store() with kStream: arrays of 4-byte items are written past the caches.
struct WeightF32 {
  static constexpr int64_t kBytes = 4, kLowBytes = 0;
  SH_INLINE static F Load(const char* weight, const char*) { return LoadF32(weight); }
  template <bool kStream>
  SH_INLINE static void Store(char* weight, char*, F x) {
    StoreF32<kStream>(weight, x);
  }
};
struct WeightBf16 {
  static constexpr int64_t kBytes = 2, kLowBytes = 2;
  SH_INLINE static F Load(const char* weight, const char* low) { return JoinBf16(weight, low); }
  template <bool>
  SH_INLINE static void Store(char* weight, char* low, F x) {
    SplitBf16(weight, low, x);
  }
};
struct WeightF16 {
  static constexpr int64_t kBytes = 2, kLowBytes = 4;
  // A weight that is not its master's rounding was written by the caller. It becomes the master.
  SH_INLINE static F Load(const char* weight, const char* low) {
    const F master = LoadF32(low);
    const F seen = LoadF16(weight);
    return SelectEqual(RoundF16(master), seen, master, seen);
  }
  template <bool kStream>
  SH_INLINE static void Store(char* weight, char* low, F x) {
    StoreF16(weight, x);
    StoreF32<kStream>(low, x);
  }
};
