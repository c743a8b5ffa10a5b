// Compiles the kernels once per instruction set, each in a target region instead of a file with
// its own compiler flags, and chooses among them at run time.
//
// All headers of the kernels come before the first region. A standard header inside a region would
// leave code for the wrong CPU in functions that the linker may share.

#include "targets.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "code_books.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SH_INLINE inline __attribute__((always_inline))

#define SH_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define SH_TARGET_BEGIN(isa) \
  SH_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define SH_TARGET_END SH_PRAGMA(clang attribute pop)
#else
#define SH_TARGET_BEGIN(isa) SH_PRAGMA(GCC push_options) SH_PRAGMA(GCC target(isa))
#define SH_TARGET_END SH_PRAGMA(GCC pop_options)
#endif

// The baseline of the architecture. On x86-64 it has no fma instruction: std::fma is then a call.
#define SH_ISA_NAME "scalar"
namespace sh::scalar {
namespace {
#include "vec_scalar.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::scalar

#if defined(__x86_64__)
// The same code for CPUs with an fma instruction. It is called "scalar", too.
SH_TARGET_BEGIN("fma")
namespace sh::scalar_fma {
namespace {
#include "vec_scalar.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::scalar_fma
SH_TARGET_END
#undef SH_ISA_NAME

#define SH_ISA_NAME "avx2"
SH_TARGET_BEGIN("avx2,fma,f16c")
namespace sh::avx2 {
namespace {
#include "vec_avx2.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::avx2
SH_TARGET_END
#undef SH_ISA_NAME

#define SH_ISA_NAME "avx512"
SH_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace sh::avx512 {
namespace {
#include "vec_avx512.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::avx512
SH_TARGET_END
#undef SH_ISA_NAME
#endif  // __x86_64__

#if defined(__aarch64__)
#undef SH_ISA_NAME
#define SH_ISA_NAME "neon"
namespace sh::neon {
namespace {
#include "vec_neon.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::neon
#endif  // __aarch64__

namespace sh {

#if defined(__x86_64__)
namespace {

// Only newer compilers' __builtin_cpu_supports() knows "f16c". Its answer for "avx2" includes that
// the system saves the AVX registers.
bool HasF16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

const Kernels* KernelsAt(int index) {
  const Kernels* found[4];
  int count = 0;
#if defined(__x86_64__)
  const bool fma = __builtin_cpu_supports("fma");
  const bool avx2 = fma && __builtin_cpu_supports("avx2") && HasF16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) found[count++] = &avx512::kKernels;
  if (avx2) found[count++] = &avx2::kKernels;
  found[count++] = fma ? &scalar_fma::kKernels : &scalar::kKernels;
#else
#if defined(__aarch64__)
  found[count++] = &neon::kKernels;
#endif
  found[count++] = &scalar::kKernels;
#endif
  return index >= 0 && index < count ? found[index] : nullptr;
}

const Kernels* KernelsNamed(const char* name) {
  for (int i = 0; KernelsAt(i) != nullptr; ++i) {
    if (std::strcmp(KernelsAt(i)->name, name) == 0) return KernelsAt(i);
  }
  return nullptr;
}

}  // namespace sh
