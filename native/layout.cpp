#include "layout.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace cowalk {

void lay_out(Leaf &leaf, const View *views, std::vector<std::int64_t> &list) {
    int present[OPERANDS], count = 0;
    for (int k = 0; k < OPERANDS; ++k)
        if (leaf.arrays[k].present()) present[count++] = k;
    const View &lead = views[present[0]];

    leaf.n = 1;
    int order[MAX_AXES], axes = 0;
    std::int64_t reach[MAX_AXES];
    bool backwards[MAX_AXES];
    for (int axis = 0; axis < lead.axes; ++axis) {
        const std::int64_t length = lead.shape[axis];
        leaf.n *= length;
        if (length == 1) continue;
        order[axes++] = axis;
        reach[axis] = 0;
        backwards[axis] = lead.strides[axis] < 0 && length > 0;
        for (int i = 0; i < count; ++i) {
            const std::int64_t stride = views[present[i]].strides[axis];
            reach[axis] += std::abs(stride);
            if (backwards[axis]) leaf.arrays[present[i]].data += (length - 1) * stride;  // the order of elements does not matter
        }
    }
    std::stable_sort(order, order + axes, [&](int one, int other) { return reach[one] > reach[other]; });

    std::int64_t shape[MAX_AXES] = {1}, strides[OPERANDS][MAX_AXES];
    for (auto &each : strides) each[0] = 0;
    int joined = 0;
    for (int i = 0; i < axes; ++i) {
        const int axis = order[i];
        std::int64_t step[OPERANDS] = {};
        bool joins = joined > 0;
        for (int j = 0; j < count; ++j) {
            const int k = present[j];
            step[k] = backwards[axis] ? -views[k].strides[axis] : views[k].strides[axis];
            joins = joins && strides[k][joined - 1] == step[k] * lead.shape[axis];
        }
        if (!joins) shape[joined++] = 1;
        shape[joined - 1] *= lead.shape[axis];
        for (int k = 0; k < OPERANDS; ++k) strides[k][joined - 1] = step[k];
    }
    leaf.axes = joined > 0 ? joined : 1;
    leaf.place = list.size();
    list.insert(list.end(), shape, shape + leaf.axes);
    for (const auto &each : strides) list.insert(list.end(), each, each + leaf.axes);
}

namespace {

// Whether the bits of an element, but for its sign, are all zero.
template <class Word, int WORDS> bool is_zero_at(const char *at) {
    Word words[WORDS];
    std::memcpy(words, at, sizeof words);
    for (const Word word : words)
        if (static_cast<Word>(word << 1) != 0) return false;
    return true;
}

template <class IsZero>
bool all_zero(const char *at, const std::int64_t *shape, const std::int64_t *strides, int axes, IsZero is_zero) {
    if (axes == 0) return is_zero(at);
    for (std::int64_t i = 0; i < *shape; ++i)
        if (!all_zero(at + i * *strides, shape + 1, strides + 1, axes - 1, is_zero)) return false;
    return true;
}

template <class IsZero> double count_zero_rows(const Rows &rows, IsZero is_zero) {
    double count = 0;
    for (std::int64_t i = 0; i < rows.shape[0]; ++i)
        count += all_zero(rows.array.data + i * rows.strides[0], rows.shape + 1, rows.strides + 1, rows.axes - 1, is_zero);
    return count;
}

}  // namespace

std::int64_t Rows::length() const {
    return std::accumulate(shape + 1, shape + axes, std::int64_t{1}, std::multiplies<>());
}

double Rows::count_zero() const {
    switch (array.type) {
    case Type::f16:
    case Type::bf16: return count_zero_rows(*this, is_zero_at<std::uint16_t, 1>);
    case Type::f32: return count_zero_rows(*this, is_zero_at<std::uint32_t, 1>);
    case Type::f64: return count_zero_rows(*this, is_zero_at<std::uint64_t, 1>);
    case Type::c64: return count_zero_rows(*this, is_zero_at<std::uint32_t, 2>);
    case Type::c128: return count_zero_rows(*this, is_zero_at<std::uint64_t, 2>);
    case Type::byte:
        return count_zero_rows(*this, [this](const char *at) { return array.values[static_cast<unsigned char>(*at)] == 0; });
    case Type::absent: break;
    }
    return 0;
}

}  // namespace cowalk
