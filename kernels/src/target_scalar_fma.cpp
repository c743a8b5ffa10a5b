// The same code as target_scalar.cpp for CPUs with an fma instruction. It is called "scalar", too.
#include "target_region.h"

#if defined(__x86_64__)
#define SH_ISA_NAME "scalar"
SH_TARGET_BEGIN("fma")
namespace sh::scalar_fma {
namespace {
#include "vec_scalar.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::scalar_fma
SH_TARGET_END

namespace sh {
const Kernels& ScalarFmaKernels() { return scalar_fma::kKernels; }
}  // namespace sh
#endif  // __x86_64__
