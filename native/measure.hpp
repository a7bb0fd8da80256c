// Measuring leaves: what a leaf is to the kernels, and what one kernel does. A kernel measures a run of one leaf's elements;
// measure.cpp cuts leaves into runs, hands them to threads and merges what comes back, always in the same order, so that the
// result does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "statistics.hpp"

namespace cowalk {

enum class Type : std::uint8_t { absent, f16, bf16, f32, f64, c64, c128, byte };

constexpr int OPERANDS = 5;  // parameter, gradient, update, and Adam's m and v
enum Operand { PARAMETER, GRADIENT, UPDATE, FIRST_MOMENT, SECOND_MOMENT };

struct Array {
    const char *data = nullptr;
    Type type = Type::absent;
    const float *values = nullptr;  // of a one-byte type: what each byte stands for
    double tiny = 0;                // the smallest normal number; 0 if the type has no subnormal ones
    bool present() const { return type != Type::absent; }
    bool complex() const { return type == Type::c64 || type == Type::c128; }
    bool wide() const { return type == Type::f64 || complex(); }
};

// One leaf: its arrays, over axes that they share, one axis at least. Strides are in bytes; axes are joined where all arrays
// allow it. Shape and strides lie in a list that all leaves share.
struct Leaf {
    Array arrays[OPERANDS];
    std::int64_t n = 0;
    int axes = 0;
    std::size_t place = 0;  // in that list: where `shape` begins; then the strides of each operand
    const std::int64_t *shape = nullptr;
    const std::int64_t *strides[OPERANDS] = {};
    bool has_adam = false;
    double epsilon = 0, m_scale = 1, v_scale = 1, lr = NONE;

    bool complex() const {
        for (const Array &array : arrays)
            if (array.complex()) return true;
        return false;
    }
    bool wide() const {  // whether any of its arrays needs float64
        for (const Array &array : arrays)
            if (array.wide()) return true;
        return false;
    }
};

// Counts of ⌊log₂|x|⌋ of one array, from −1074 (the least subnormal double) to 1023.
constexpr int LEAST_POWER = -1074, POWERS = 1024 - LEAST_POWER;
struct Powers {
    std::uint64_t counts[3][POWERS] = {};
};

// Measures the elements [begin, end) of a leaf, in the order of its axes. `powers` may be null.
using Kernel = void (*)(const Leaf &leaf, std::int64_t begin, std::int64_t end, Line &line, Powers *powers);

extern const Kernel kernel_baseline;
#ifdef COWALK_X86_LEVELS
extern const Kernel kernel_avx2;
extern const Kernel kernel_avx512;
#endif

constexpr std::int64_t RUN = 1 << 16;  // elements that one call of a kernel measures; a multiple of its blocks

}  // namespace cowalk
