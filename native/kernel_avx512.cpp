// The kernels for x86 processors with AVX-512 (F, VL, BW, DQ).
#include "add_kernel.hpp"
#include "kernel.hpp"

namespace cowalk {
const Kernel kernel_avx512 = measure_run<16>;
const AddKernel add_kernel_avx512 = add_run<16>;
}  // namespace cowalk
