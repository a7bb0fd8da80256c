// The kernel of adding: block by block, a gradient's numbers are brought into the sum's type where they are of another, added,
// and their squares summed, in one loop. Complex numbers are pairs of real ones to it.
//
// The norm of a block comes from plain squares, of the sum's type, unless those overflowed or nearly vanished: `careful_norm`
// goes over such a block once more, in the first cache.
//
// With a compensation the sum is a pair of numbers (Dekker): what an addition lost goes into the compensation, and the pair is
// put in order after each gradient, so that the sum alone is right to rounding (with Neumaier's compensation, which only
// collects, it is not). Kahan's summation would add the loss to the next gradient, where a large one swallows it. What was
// lost is found by Knuth's TwoSum, as a gradient may be larger than the sum. Fusing the product with what follows does no
// harm: the loss is then that of the exact product.
#pragma once

#include "adding.hpp"
#include "kernel.hpp"
#include "layout.hpp"

namespace cowalk {
namespace {

// Which sums of squares are right: none of the squares that count has vanished. (Above, overflow shows as infinity.)
template <class T> constexpr double LEAST_SQUARES = sizeof(T) == 4 ? 0x1p-100 : 0x1p-1000;

template <class T, class L> COWALK_INLINE void store(const L &lanes, T *to) { std::memcpy(to, &lanes, sizeof lanes); }

// The norm of numbers of any size: scaled by a power of two, so that the largest is near one.
template <class T, int N> double careful_norm(const T *x, int n) {
    using O = Ops<T, N>;
    using V = typename O::V;
    V most[UNROLL] = {}, sums[UNROLL] = {};
    int i = over_lanes<N>(n, [&](int start) {
        for (int k = 0; k < UNROLL; ++k) {
            const V size = O::abs(load<V>(x + start + k * N));
            most[k] = O::max(size, most[k]);
            sums[k] += size;  // NaN if any is, which the largest is not
        }
    });
    T largest = -least_lane<T, N>(-most[0], -most[1]), sum = 0;
    for (int k = 0; k < N; ++k) sum += lane<T, N>(sums[0], k) + lane<T, N>(sums[1], k);
    for (; i < n; ++i) {
        const T size = std::fabs(x[i]);
        if (size > largest) largest = size;
        sum += size;
    }
    if (sum != sum) return sum;
    if (largest == 0 || largest == infinity<T>()) return largest;

    constexpr int MOST = sizeof(T) == 4 ? 120 : 1000;
    const int exponent = std::ilogb(largest);
    const double scale = std::ldexp(1.0, exponent > MOST ? -MOST : exponent < -MOST ? MOST : -exponent);
    const T scale_by = static_cast<T>(scale);
    Sum<T, N> squares;
    i = over_lanes<N>(
        n,
        [&](int start) {
            for (int k = 0; k < UNROLL; ++k) {
                const V scaled = load<V>(x + start + k * N) * scale_by;
                squares.lanes[k] += scaled * scaled;
            }
        },
        squares);
    double total = squares.total();
    for (; i < n; ++i) total += static_cast<double>(x[i] * scale_by) * (x[i] * scale_by);
    return std::sqrt(total) / scale;
}

// Beside a sum that is infinite or NaN nothing is lost: the difference of infinities would make it NaN for ever.
template <class T, int N, class V> COWALK_INLINE V finite_or_zero(const V &lost) {
    using O = Ops<T, N>;
    return O::keep(O::less(O::abs(lost), O::all(infinity<T>())), lost);
}

template <class T, int N, bool COMPENSATED, class V>
COWALK_INLINE void add_lanes(T *sum, T *compensation, const V &gradient, const V &factor) {
    const V before = load<V>(sum);
    if constexpr (!COMPENSATED) {
        store(V(before + factor * gradient), sum);
    } else {
        const V addend = factor * gradient;
        const V after = before + addend;
        const V added = after - before;
        const V lost = finite_or_zero<T, N>((before - (after - added)) + (addend - added) + load<V>(compensation));
        const V ordered = after + lost;
        store(ordered, sum);
        store(finite_or_zero<T, N>(lost - (ordered - after)), compensation);
    }
}

// Adds a block; returns the norm of its gradient.
template <class T, int N, bool COMPENSATED> double add_block(T *sum, T *compensation, const T *gradient, int n, T factor) {
    using O = Ops<T, N>;
    using V = typename O::V;
    Sum<T, N> squares;
    const V factors = O::all(factor);
    const int done = over_lanes<N>(
        n,
        [&](int i) {
            for (int k = 0; k < UNROLL; ++k) {
                const int at = i + k * N;
                const V g = load<V>(gradient + at);
                squares.lanes[k] += g * g;
                add_lanes<T, N, COMPENSATED>(sum + at, COMPENSATED ? compensation + at : nullptr, g, factors);
            }
        },
        squares);
    double total = squares.total();
    for (int i = done; i < n; ++i) {
        total += static_cast<double>(gradient[i]) * gradient[i];
        add_lanes<T, 1, COMPENSATED>(sum + i, COMPENSATED ? compensation + i : nullptr, gradient[i], factor);
    }
    return total >= LEAST_SQUARES<T> && total < HUGE_VAL ? std::sqrt(total) : careful_norm<T, N>(gradient, n);
}

// Goes over n elements of a gradient, in C order, in runs along its last axis: visit(pointer, how many).
template <class Visit> void over_gradient(const Addition &addition, std::int64_t begin, int n, Visit visit) {
    const std::int64_t *shape = addition.shape, *strides = addition.strides;
    const int last = addition.axes - 1;
    std::int64_t index[MAX_AXES];
    const char *at = addition.gradient.data;
    for (int axis = last; axis >= 0; --axis) {
        index[axis] = begin % shape[axis];
        begin /= shape[axis];
        at += index[axis] * strides[axis];
    }
    for (;;) {
        const std::int64_t left = shape[last] - index[last];
        const int length = left < n ? static_cast<int>(left) : n;
        visit(at, length);
        n -= length;
        if (n == 0) return;
        at -= index[last] * strides[last];
        index[last] = 0;
        for (int axis = last - 1; axis >= 0; --axis) {
            at += strides[axis];
            if (++index[axis] < shape[axis]) break;
            at -= shape[axis] * strides[axis];
            index[axis] = 0;
        }
    }
}

template <class S, class T> void copy_parts(const char *from, std::int64_t stride, int n, T *to) {
    if (stride == 2 * static_cast<std::int64_t>(sizeof(S))) return convert<S>(from, sizeof(S), 2 * n, to, [](S part) { return part; });
    for (int i = 0; i < n; ++i, from += stride)
        for (int part = 0; part < 2; ++part) to[2 * i + part] = static_cast<T>(element<S>(from + part * sizeof(S)));
}

// n numbers of a gradient, for a sum of real numbers or of complex ones (then their parts by turns).
template <class T> void copy_gradient(const Addition &addition, const char *from, std::int64_t stride, int n, T *to) {
    const Array &gradient = addition.gradient;
    if (stride == 0 && n > 1) {  // an expanded one
        copy_gradient(addition, from, 0, 1, to);
        const T first = to[0], second = to[addition.complex()];
        if (!addition.complex())
            for (int i = 1; i < n; ++i) to[i] = first;
        else
            for (int i = 1; i < n; ++i) to[2 * i] = first, to[2 * i + 1] = second;
        return;
    }
    if (gradient.type == Type::c64) return copy_parts<float>(from, stride, n, to);
    if (gradient.type == Type::c128) return copy_parts<double>(from, stride, n, to);
    copy(gradient, from, stride, n, to);
    if (!addition.complex()) return;
    for (int i = n; i-- > 0;) {
        to[2 * i] = to[i];
        to[2 * i + 1] = 0;
    }
}

// T is the type of the sum's parts.
template <class T, int N> double add_parts(const Addition &addition, double factor, std::int64_t begin, std::int64_t end) {
    const int parts = addition.complex() ? 2 : 1, most = BLOCK / parts;
    const Array &gradient = addition.gradient;
    const std::int64_t size = parts * sizeof(T);
    const bool as_it_is = gradient.type == addition.type && addition.axes == 1 && addition.strides[0] == size &&
                          reinterpret_cast<std::uintptr_t>(gradient.data) % alignof(T) == 0;
    T *const sum = reinterpret_cast<T *>(addition.sum), *const compensation = reinterpret_cast<T *>(addition.compensation);
    alignas(64) T block[BLOCK];
    double norms[2 * RUN / BLOCK];
    int count = 0;
    for (std::int64_t start = begin; start < end; start += most) {
        const int n = static_cast<int>(end - start < most ? end - start : most);
        const T *numbers = block;
        if (as_it_is) {
            numbers = reinterpret_cast<const T *>(gradient.data) + start * parts;
        } else {
            T *to = block;
            over_gradient(addition, start, n, [&](const char *from, int length) {
                copy_gradient(addition, from, addition.strides[addition.axes - 1], length, to);
                to += length * parts;
            });
        }
        T *const into = sum + start * parts;
        norms[count++] = compensation ? add_block<T, N, true>(into, compensation + start * parts, numbers, n * parts, static_cast<T>(factor))
                                      : add_block<T, N, false>(into, nullptr, numbers, n * parts, static_cast<T>(factor));
    }
    return joined_norm(norms, count);
}

template <int LANES> double add_run(const Addition &addition, double factor, std::int64_t begin, std::int64_t end) {
    if (addition.type == Type::f32 || addition.type == Type::c64) return add_parts<float, LANES>(addition, factor, begin, end);
    return add_parts<double, LANES == 1 ? 1 : LANES / 2>(addition, factor, begin, end);
}

}  // namespace
}  // namespace cowalk
