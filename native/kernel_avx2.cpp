// The kernel for x86 processors with AVX2 and FMA.
#include "kernel.hpp"

namespace cowalk {
const Kernel kernel_avx2 = measure_run<8>;
}  // namespace cowalk
