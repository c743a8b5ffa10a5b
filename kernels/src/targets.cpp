// Chooses among the kernels of the instruction sets at run time.
//
// Each set has a file target_*.cpp, which compiles the kernels in a target region instead of with
// compiler flags of its own. A build compiles them side by side.

#include "targets.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) found[count++] = &Avx512Kernels();
  if (avx2) found[count++] = &Avx2Kernels();
#elif defined(__aarch64__)
  found[count++] = &NeonKernels();
#endif
  found[count++] = &ScalarKernels();
  return index >= 0 && index < count ? found[index] : nullptr;
}

const Kernels* KernelsNamed(const char* name) {
  for (int i = 0; KernelsAt(i) != nullptr; ++i) {
    if (std::strcmp(KernelsAt(i)->name, name) == 0) return KernelsAt(i);
  }
  return nullptr;
}

}  // namespace sh
