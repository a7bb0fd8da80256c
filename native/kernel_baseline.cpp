// The kernels for any processor: 128 bits, which every x86-64 and every 64-bit ARM has.
#include "add_kernel.hpp"
#include "kernel.hpp"

namespace cowalk {
#if defined(__GNUC__)
const Kernel kernel_baseline = measure_run<4>;
const AddKernel add_kernel_baseline = add_run<4>;
#else
const Kernel kernel_baseline = measure_run<1>;
const AddKernel add_kernel_baseline = add_run<1>;
#endif
}  // namespace cowalk
