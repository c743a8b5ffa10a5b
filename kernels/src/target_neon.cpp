// The kernels for NEON.
#include "target_region.h"

#if defined(__aarch64__)
#define SH_ISA_NAME "neon"
namespace sh::neon {
namespace {
#include "vec_neon.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::neon

namespace sh {
const Kernels& NeonKernels() { return neon::kKernels; }
}  // namespace sh
#endif  // __aarch64__
