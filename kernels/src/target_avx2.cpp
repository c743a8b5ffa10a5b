// The kernels for AVX2.
#include "target_region.h"

#if defined(__x86_64__)
#define SH_ISA_NAME "avx2"
SH_TARGET_BEGIN("avx2,fma,f16c")
namespace sh::avx2 {
namespace {
#include "vec_avx2.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::avx2
SH_TARGET_END

namespace sh {
const Kernels& Avx2Kernels() { return avx2::kKernels; }
}  // namespace sh
#endif  // __x86_64__
