// The C ABI under load, for the sanitizers: many pools, many callers, odd sizes and addresses,
// every optimizer and format, and every instruction set against "scalar", bit for bit. Prints the instruction
// sets and a hash of all results, which is the same on every architecture with the same libm.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "../src/prefetch.h"
#include "stronghold.h"

namespace {

void Check(bool holds, const char* what, int line) {
  if (holds) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, what, sh_last_error());
  std::exit(1);
}
#define CHECK(x) Check((x), #x, __LINE__)

// xorshift: the same numbers on every machine.
struct Random {
  uint64_t state;
  uint64_t Next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545F4914F6CDD1Dull;
  }
};

// Memory from a line of the cache on.
template <class T>
struct AtLine {
  using value_type = T;
  static constexpr std::align_val_t kAlign{64};
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlign)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kAlign); }
  bool operator==(const AtLine&) const { return true; }
  bool operator!=(const AtLine&) const { return false; }
};

// An array of exactly `bytes`, `skip` bytes past a multiple of 64: the address sanitizer sees
// every byte that is touched beyond it.
struct Array {
  Array(int64_t bytes, int skip, Random* random) : storage(bytes + skip), skip(skip) {
    for (char& c : storage) c = random == nullptr ? 0 : static_cast<char>(random->Next() >> 40);
  }
  void* data() { return storage.data() + skip; }
  std::vector<char, AtLine<char>> storage;
  int skip;
};

// Every optimizer takes these, whatever they mean to it; "sgd" has no momentum.
void SetNumbers(const char* optimizer, sh_segment* segment) {
  const double numbers[SH_MAX_NUMBERS] = {1e-3, 0.9, 0.999, 1e-8, 0.1, 0.0};
  std::memcpy(segment->number, numbers, sizeof(numbers));
  if (std::strcmp(optimizer, "sgd") == 0) segment->number[1] = 0.0;
}

struct State {
  State(int64_t numel, int skip, uint64_t seed) : random{seed * 2 + 1} {
    for (int i = 0; i < 5; ++i) {
      // Random bits: every exponent, infinities, NaNs and denormals are among them. The second
      // moment starts at zero, as it is never negative.
      arrays.emplace_back(numel * 4, skip, i == 3 ? nullptr : &random);
    }
    // One of each for 64 elements: scales of lean states.
    for (int i = 0; i < 2; ++i) arrays.emplace_back((numel + 63) / 64 * 4, skip, &random);
    segment = {};
    segment.weight = arrays[0].data();
    segment.low = arrays[1].data();
    segment.moment[0] = arrays[2].data();
    segment.moment[1] = arrays[3].data();
    segment.grad = arrays[4].data();
    segment.numel = numel;
    segment.scale[0] = static_cast<float*>(arrays[5].data());
    segment.scale[1] = static_cast<float*>(arrays[6].data());
    segment.grad_scale = 0.5;
    segment.step = 1;
    segment.flags = 2;
    SetNumbers("adam", &segment);
  }
  Random random;
  std::vector<Array> arrays;
  sh_segment segment;
};

sh_target TargetOf(const sh_segment& s) {
  return {s.weight, s.low, {s.moment[0], s.moment[1]}, {s.scale[0], s.scale[1]}};
}

// A copy of the state, with arrays of its own at another address.
State CopyOf(const State& state, int64_t numel, int skip) {
  State copy(numel, skip, 0);
  for (size_t i = 0; i < copy.arrays.size(); ++i) {
    std::copy(state.arrays[i].storage.begin() + state.arrays[i].skip, state.arrays[i].storage.end(),
              copy.arrays[i].storage.begin() + skip);
  }
  return copy;
}

bool SameArrays(const State& a, const State& b) {
  for (size_t i = 0; i < a.arrays.size(); ++i) {
    if (!std::equal(a.arrays[i].storage.begin() + a.arrays[i].skip, a.arrays[i].storage.end(),
                    b.arrays[i].storage.begin() + b.arrays[i].skip)) {
      return false;
    }
  }
  return true;
}

std::vector<const char*> EveryOptimizer() {
  std::vector<const char*> names;
  while (const char* name = sh_optimizer_at(static_cast<int32_t>(names.size()))) {
    names.push_back(name);
  }
  return names;
}

// The results of these optimizers, of accumulation and of sums.
std::vector<char> RunAll(sh_pool* pool, const std::vector<const char*>& optimizers, int64_t numel,
                         int skip, uint64_t seed) {
  std::vector<char> out;
  const auto keep = [&out](const void* p, size_t bytes) {
    out.insert(out.end(), static_cast<const char*>(p), static_cast<const char*>(p) + bytes);
  };
  for (const char* optimizer : optimizers) {
    for (int weight = 0; weight < 4; ++weight) {
      for (int grad = 0; grad < 3; ++grad) {
        State a(numel, skip, seed), b(numel / 2, skip, seed + 1);
        for (int step = 1; step <= 3; ++step) {
          sh_segment both[2] = {a.segment, b.segment};
          both[0].step = both[1].step = step;
          both[0].flags = 2 | (step & 1);
          both[1].flags = 2;
          for (sh_segment& segment : both) SetNumbers(optimizer, &segment);
          CHECK(sh_update(pool, optimizer, static_cast<sh_dtype>(weight),
                          static_cast<sh_dtype>(grad), both, nullptr, 2) == SH_OK);
        }
        for (State* s : {&a, &b}) {
          for (Array& array : s->arrays) keep(array.storage.data(), array.storage.size());
        }
      }
    }
  }
  for (int grad = 0; grad < 3; ++grad) {
    State s(numel, skip, seed);
    const sh_dtype dtype = static_cast<sh_dtype>(grad);
    for (int64_t add : {0, 1}) {
      const sh_accumulate_segment segment = {s.segment.grad,
                                             static_cast<float*>(s.segment.moment[0]), numel, add};
      CHECK(sh_accumulate(pool, dtype, &segment, 1) == SH_OK);
    }
    keep(s.arrays[2].storage.data(), s.arrays[2].storage.size());
    const sh_array_segment x[2] = {{s.segment.grad, numel}, {s.segment.weight, numel / 3}};
    double sums[2];
    CHECK(sh_sum_squares(pool, dtype, x, 2, sums) == SH_OK);
    keep(sums, sizeof(sums));
  }
  return out;
}

// A step out of place has the bits of the step in place, and changes no source. What the step does
// not write is in the targets already.
void OutOfPlaceIsInPlace(sh_pool* pool, const std::vector<const char*>& optimizers, int64_t numel,
                         int skip, int target_skip) {
  for (const char* optimizer : optimizers) {
    for (int weight = 0; weight < 4; ++weight) {
      for (int grad = 0; grad < 3; ++grad) {
        State in_place(numel, skip, numel);
        SetNumbers(optimizer, &in_place.segment);
        const State before = CopyOf(in_place, numel, skip);
        State source = CopyOf(in_place, numel, skip), to = CopyOf(in_place, numel, target_skip);
        source.segment.step = in_place.segment.step;
        SetNumbers(optimizer, &source.segment);
        const sh_target target = TargetOf(to.segment);
        const sh_dtype dtypes[2] = {static_cast<sh_dtype>(weight), static_cast<sh_dtype>(grad)};
        CHECK(sh_update(pool, optimizer, dtypes[0], dtypes[1], &in_place.segment, nullptr, 1) ==
              SH_OK);
        CHECK(sh_update(pool, optimizer, dtypes[0], dtypes[1], &source.segment, &target, 1) ==
              SH_OK);
        CHECK(SameArrays(source, before));
        CHECK(SameArrays(to, in_place));
      }
    }
  }
}

sh_pool* MakePool(int num_threads, const char* isa) {
  sh_pool* pool = nullptr;
  CHECK(sh_pool_create(num_threads, nullptr, 0, isa, &pool) == SH_OK);
  return pool;
}

uint64_t SameBitsEverywhere() {
  uint64_t hash = 0xCBF29CE484222325ull;  // FNV-1a
  const std::vector<const char*> optimizers = EveryOptimizer();
  for (int64_t numel : {0, 1, 3, 15, 17, 31, 33, 4097, 70001}) {
    for (int skip : {0, 1, 4, 6}) {
      sh_pool* scalar = MakePool(1, "scalar");
      const std::vector<char> expected = RunAll(scalar, optimizers, numel, skip, numel + skip);
      sh_pool_destroy(scalar);
      for (char c : expected) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
      for (int i = 0; sh_isa_at(i) != nullptr; ++i) {
        sh_pool* pool = MakePool(1 + i % 3, sh_isa_at(i));
        CHECK(RunAll(pool, optimizers, numel, skip, numel + skip) == expected);
        if (skip <= 1) OutOfPlaceIsInPlace(pool, optimizers, numel, skip, 4 * skip);
        sh_pool_destroy(pool);
      }
    }
  }
  return hash;
}

void ManyCallersManyPools() {
  sh_pool* shared = MakePool(3, nullptr);
  const std::vector<const char*> optimizers = EveryOptimizer();
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([shared, caller, &optimizers] {
      sh_pool* own = MakePool(2, nullptr);
      const std::vector<const char*> one = {optimizers[caller % optimizers.size()]};
      for (int round = 0; round < 3; ++round) {
        CHECK(RunAll(shared, one, 70001, 0, caller) == RunAll(own, one, 70001, 0, caller));
      }
      sh_pool_destroy(own);
    });
  }
  for (std::thread& caller : callers) caller.join();
  sh_pool_destroy(shared);
}

void ShortCallsNeverWaitForever() {
  sh_pool* pool = MakePool(4, nullptr);
  State s(66000, 0, 7);
  for (int i = 1; i <= 2000; ++i) {
    s.segment.step = i;
    s.segment.numel = i % 33000;
    CHECK(sh_update(pool, "adam", SH_F32, SH_F32, &s.segment, nullptr, 1) == SH_OK);
  }
  sh_pool_destroy(pool);
  for (int i = 0; i < 50; ++i) sh_pool_destroy(MakePool(1 + i % 5, nullptr));
}

// The distance that is chosen when chunks near and far take these times, the slowest of each kind
// (every third) ten times as long.
int64_t ChosenAt(float near_s, float far_s) {
  sh::PrefetchDistance distance;
  distance.Begin();
  int64_t turns[2] = {0, 0};
  for (int64_t i = 0; i < sh::PrefetchDistance::kTrials; ++i) {
    distance.End();
    CHECK(distance.chosen() == 0);
    const sh::PrefetchDistance::Turn turn = distance.Next();
    const bool near = turn.elements == sh::PrefetchDistance::kNear;
    const bool late = turns[near]++ % 3 == 0;
    distance.Record(turn.trial, (near ? near_s : far_s) * (late ? 10.0f : 1.0f));
  }
  CHECK(turns[0] == turns[1]);
  CHECK(distance.Next().trial == -1);  // of the call that is still running
  distance.End();
  CHECK(distance.Next().elements == distance.chosen() && distance.Next().trial == -1);
  return distance.chosen();
}

void ThePrefetchDistanceIsTheFasterOne() {
  CHECK(ChosenAt(1.0f, 1.2f) == sh::PrefetchDistance::kNear);
  CHECK(ChosenAt(1.2f, 1.0f) == sh::PrefetchDistance::kFar);
  CHECK(ChosenAt(0.99f, 1.0f) == sh::PrefetchDistance::kFar);  // noise
  sh_pool* pool = MakePool(3, nullptr);
  const int64_t numel = 8 * 32768;
  State s(numel, 0, 3);
  int64_t found = 0;
  for (int step = 1; step <= 65; ++step) {
    CHECK(sh_update_prefetch(pool, "adam", SH_F32, SH_F16, &found) == SH_OK && found == 0);
    s.segment.step = step;
    CHECK(sh_update(pool, "adam", SH_F32, SH_F16, &s.segment, nullptr, 1) == SH_OK);
  }
  CHECK(sh_update_prefetch(pool, "adam", SH_F32, SH_F16, &found) == SH_OK);
  CHECK(found == sh::PrefetchDistance::kNear || found == sh::PrefetchDistance::kFar);
  sh_pool_destroy(pool);
}

}  // namespace

int main() {
  std::string isas;
  for (int i = 0; sh_isa_at(i) != nullptr; ++i) isas += std::string(" ") + sh_isa_at(i);
  const uint64_t hash = SameBitsEverywhere();
  ManyCallersManyPools();
  ShortCallsNeverWaitForever();
  ThePrefetchDistanceIsTheFasterOne();
  std::printf("%s: %016llx: ok\n", isas.c_str() + 1, static_cast<unsigned long long>(hash));
  return 0;
}
