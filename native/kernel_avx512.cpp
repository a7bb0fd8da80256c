// The kernel for x86 processors with AVX-512 (F, VL, BW, DQ).
#include "kernel.hpp"

namespace cowalk {
const Kernel kernel_avx512 = measure_run<16>;
}  // namespace cowalk
