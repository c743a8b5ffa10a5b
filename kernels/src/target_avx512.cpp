// The kernels for AVX-512.
#include "target_region.h"

#if defined(__x86_64__)
#define SH_ISA_NAME "avx512"
SH_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace sh::avx512 {
namespace {
#include "vec_avx512.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::avx512
SH_TARGET_END

namespace sh {
const Kernels& Avx512Kernels() { return avx512::kKernels; }
}  // namespace sh
#endif  // __x86_64__
