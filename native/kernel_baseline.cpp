// The kernel for any processor: 128 bits, which every x86-64 and every 64-bit ARM has.
#include "kernel.hpp"

namespace cowalk {
#if defined(__GNUC__)
const Kernel kernel_baseline = measure_run<4>;
#else
const Kernel kernel_baseline = measure_run<1>;
#endif
}  // namespace cowalk
