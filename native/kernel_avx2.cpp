// The kernels for x86 processors with AVX2 and FMA.
#include "add_kernel.hpp"
#include "kernel.hpp"

namespace cowalk {
const Kernel kernel_avx2 = measure_run<8>;
const AddKernel add_kernel_avx2 = add_run<8>;
}  // namespace cowalk
