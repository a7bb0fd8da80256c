// From arrays over their own axes to a leaf over axes in common, and back to the rows of one array.
#pragma once

#include "measure.hpp"

namespace cowalk {

constexpr int MAX_AXES = 64;  // as many as NumPy has

// One array in memory, over its own axes; strides in bytes.
struct View {
    Array array;
    int axes = 0;
    std::int64_t shape[MAX_AXES], strides[MAX_AXES];
};

// Puts the axes of a leaf into the order of memory, and joins those that are one run in all arrays. The views have one shape;
// those of absent arrays are not looked at. Arrays may overlap, repeat cells (stride 0) and run backwards.
// The leaf's shape and strides are put at the end of `list`.
void lay_out(Leaf &leaf, const View *views, std::vector<std::int64_t> &list);

// The slices of one array along its first axis.
struct Rows {
    std::size_t leaf;
    int operand;
    Array array;
    int axes;
    std::size_t place;  // of its shape in the list, and of its strides after that
    const std::int64_t *shape = nullptr, *strides = nullptr;

    std::int64_t length() const;  // elements of a row
    double count_zero() const;    // rows without anything but zeros
};

struct Histogram {
    int low[3] = {};
    std::vector<std::uint64_t> counts[3];
    void add(int operand, const std::uint64_t *powers);
};

// Fills one line a leaf. `rows` are those whose zero rows may have to be counted; `histograms` may be null.
void measure(const std::vector<Leaf> &leaves, const std::vector<Rows> &rows, Kernel kernel, int threads, Line *lines,
             std::vector<Histogram> *histograms);

}  // namespace cowalk
