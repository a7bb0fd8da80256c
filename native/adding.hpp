// Adding gradients into sums: what one addition is to the kernels, and what one kernel does. adding.cpp cuts additions into
// runs as measure.cpp does leaves; the norms do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "measure.hpp"

namespace cowalk {

// A gradient and where it is added. The sum and its compensation lie in C order without a gap. The gradient may lie anyhow,
// repeat cells (stride 0) and run backwards; its axes, in C order too, are joined where they are one run. Their shape and
// strides, in bytes, lie in a list that all additions share.
struct Addition {
    Type type = Type::absent;  // of the sum and of the compensation: f32, f64, c64 or c128
    char *sum = nullptr, *compensation = nullptr;  // the latter may be absent
    Array gradient;
    std::int64_t n = 0;
    int axes = 0;
    std::size_t place = 0;  // in that list: where `shape` begins; then the strides
    const std::int64_t *shape = nullptr, *strides = nullptr;

    bool complex() const { return type == Type::c64 || type == Type::c128; }
};

// sum += factor · gradient for the elements [begin, end) in C order, at most RUN of them. Returns the gradient's 2-norm there.
using AddKernel = double (*)(const Addition &addition, double factor, std::int64_t begin, std::int64_t end);

extern const AddKernel add_kernel_baseline;
#ifdef COWALK_X86_LEVELS
extern const AddKernel add_kernel_avx2;
extern const AddKernel add_kernel_avx512;
#endif

// The 2-norm of parts that have these norms, whatever their magnitude; NaN if any is.
double joined_norm(const double *norms, std::size_t count);

}  // namespace cowalk
