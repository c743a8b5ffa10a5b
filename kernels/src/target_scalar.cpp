// The kernels for the baseline of the architecture. On x86-64 it has no fma instruction: std::fma is
// a call there, of a function that has the instruction where the CPU has it.
#include "target_region.h"

#define SH_ISA_NAME "scalar"
namespace sh::scalar {
namespace {
#include "vec_scalar.h"

#include "kernels-inl.h"
}  // namespace
}  // namespace sh::scalar

namespace sh {
const Kernels& ScalarKernels() { return scalar::kKernels; }
}  // namespace sh
