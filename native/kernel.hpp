// The kernel: all statistics of a run of one leaf, block by block. A block is small enough to stay in the first cache, so
// that memory is read once however often a block is gone over.
//
// A block is measured in the quickest way that is right for it:
//   quick<float>    finite numbers whose squares and products stay within float's range: short sums in float, which are added up in double
//   quick<double>   the same in double, for double arrays and for floats of extreme size
//   careful         doubles of extreme size: one number after the other, scaled where it must be
// NaN and infinities are counted and taken out first (any_moments, any_pair).
//
// Included once in each translation unit that is compiled for an instruction set; LANES is its number of floats.
#pragma once

#include <utility>

#include "lanes.hpp"
#include "measure.hpp"

namespace cowalk {
namespace {

constexpr int BLOCK = 2048;
static_assert(RUN % BLOCK == 0);

template <class T> constexpr T infinity() { return static_cast<T>(HUGE_VAL); }

// How far numbers may reach before their squares, products or quotients leave the range of T.
template <class T> struct Range;
template <> struct Range<float> {
    static constexpr double LARGEST = 0x1p60, SMALLEST = 0x1p-50;
    static constexpr double LARGEST_PRODUCT = 0x1p100, SMALLEST_PRODUCT = 0x1p-80, SMALLEST_QUOTIENT = 0x1p-125;
};
template <> struct Range<double> {
    static constexpr double LARGEST = 0x1p480, SMALLEST = 0x1p-400;
    static constexpr double LARGEST_PRODUCT = 0x1p900, SMALLEST_PRODUCT = 0x1p-700, SMALLEST_QUOTIENT = 0x1p-1000;
};

// Sums in T that become double before they lose digits: a lane is added to STEPS times, then to `middle`, and that GROUPS times
// before it is added to `wide`. 7 + 1 + 7 roundings of 2⁻²⁴ are below the 10⁻⁶ that is promised.
constexpr int STEPS = 8, GROUPS = 8, UNROLL = 2;
template <class T, int N> struct Sum {
    using O = Ops<T, N>;
    typename O::V lanes[UNROLL] = {}, middle = {};
    typename O::W wide = {};

    COWALK_INLINE void gather() {
        middle += lanes[0] + lanes[1];
        lanes[0] = lanes[1] = typename O::V{};
    }
    COWALK_INLINE void widen() {
        wide += O::widen(middle);
        middle = typename O::V{};
    }
    COWALK_INLINE double total() const {
        double sum = 0;
        for (int i = 0; i < N; ++i) sum += lane<double, N>(wide, i);
        return sum;
    }
};
static_assert(UNROLL == 2);

template <class T, int N, class V> COWALK_INLINE T least_lane(const V &a, const V &b) {
    T least = infinity<T>();
    for (int i = 0; i < N; ++i) {
        if (lane<T, N>(a, i) < least) least = lane<T, N>(a, i);
        if (lane<T, N>(b, i) < least) least = lane<T, N>(b, i);
    }
    return least;
}

template <class T, int N, class M> COWALK_INLINE double count(const M &a, const M &b) {  // of the masks subtracted in a and b
    double sum = 0;
    for (int i = 0; i < N; ++i) sum += static_cast<double>(lane<typename Integer<T>::type, N>(a + b, i));
    return sum;
}

template <int STRIDE, class Step, int... K> COWALK_INLINE void unrolled(int i, Step step, std::integer_sequence<int, K...>) {
    (step(i + K * STRIDE), ...);
}

// Calls step(i) for whole lanes, `UNROLL` at a time, and gathers and widens the sums often enough. Returns how far it came.
template <int N, class Step, class... Sums> COWALK_INLINE int over_lanes(int n, Step step, Sums &...sums) {
    constexpr int STRIDE = UNROLL * N;
    int i = 0;
    for (int group = 0; i + STEPS * STRIDE <= n; i += STEPS * STRIDE) {
        unrolled<STRIDE>(i, step, std::make_integer_sequence<int, STEPS>());
        (sums.gather(), ...);
        if (++group == GROUPS) {
            (sums.widen(), ...);
            group = 0;
        }
    }
    (sums.widen(), ...);
    for (; i + STRIDE <= n; i += STRIDE) step(i);
    (sums.gather(), ...);
    (sums.widen(), ...);
    return i;
}

// --- quick: one array ---

struct Scan {
    double sum_abs = 0, sum = 0, squares = 0;  // the latter two of x − shift
    double min = HUGE_VAL, max = -HUGE_VAL, min_abs = HUGE_VAL;

    COWALK_INLINE void add(const Scan &other) {
        sum_abs += other.sum_abs, sum += other.sum, squares += other.squares;
        if (other.min < min) min = other.min;
        if (other.max > max) max = other.max;
        if (other.min_abs < min_abs) min_abs = other.min_abs;
    }
};

template <class T, int N> COWALK_INLINE int scan_lanes(const T *x, int n, T shift_by, Scan &scan) {
    using O = Ops<T, N>;
    using V = typename O::V;
    Sum<T, N> sum_abs, sum, squares;
    const V shift = O::all(shift_by);
    V least[UNROLL], most[UNROLL], least_abs[UNROLL];
    for (int k = 0; k < UNROLL; ++k) least[k] = least_abs[k] = O::all(infinity<T>()), most[k] = O::all(-infinity<T>());
    const int done = over_lanes<N>(
        n,
        [&](int i) {
            for (int k = 0; k < UNROLL; ++k) {
                const V a = load<V>(x + i + k * N), size = O::abs(a), d = a - shift;
                least[k] = O::min(a, least[k]);
                most[k] = O::max(a, most[k]);
                least_abs[k] = O::min(size, least_abs[k]);
                sum_abs.lanes[k] += size;
                sum.lanes[k] += d;
                squares.lanes[k] += d * d;
            }
        },
        sum_abs, sum, squares);
    scan.add({sum_abs.total(), sum.total(), squares.total(), static_cast<double>(least_lane<T, N>(least[0], least[1])),
              -static_cast<double>(least_lane<T, N>(-most[0], -most[1])),
              static_cast<double>(least_lane<T, N>(least_abs[0], least_abs[1]))});
    return done;
}

template <class T, int N> Scan scan(const T *x, int n, T shift) {
    Scan scan;
    const int done = scan_lanes<T, N>(x, n, shift, scan);
    if (done < n) {
        const int rest = scan_lanes<T, 1>(x + done, n - done, shift, scan);
        if (done + rest < n) {  // the last one, where two are worked on at once
            const T last = x[n - 1], d = last - shift, size = last < 0 ? -last : last;
            scan.add({size, d, static_cast<double>(d) * d, last, last, size});
        }
    }
    return scan;
}

// Sum and squares about another shift.
template <class T, int N> COWALK_INLINE int spread_lanes(const T *x, int n, T shift_by, double &sum_of, double &squares_of) {
    using O = Ops<T, N>;
    using V = typename O::V;
    Sum<T, N> sum, squares;
    const V shift = O::all(shift_by);
    const int done = over_lanes<N>(
        n,
        [&](int i) {
            for (int k = 0; k < UNROLL; ++k) {
                const V d = load<V>(x + i + k * N) - shift;
                sum.lanes[k] += d;
                squares.lanes[k] += d * d;
            }
        },
        sum, squares);
    sum_of += sum.total();
    squares_of += squares.total();
    return done;
}

template <class T, int N> void spread(const T *x, int n, T shift, double &sum, double &squares) {
    sum = squares = 0;
    for (int i = spread_lanes<T, N>(x, n, shift, sum, squares); i < n; ++i) {
        const double d = static_cast<T>(x[i] - shift);
        sum += d, squares += d * d;
    }
}

template <class T, int N>
COWALK_INLINE int small_lanes(const T *x, int n, T tiny_at, double &zeros, double &subnormals, double &min_abs) {
    using O = Ops<T, N>;
    using V = typename O::V;
    using M = typename O::M;
    M no_zero[UNROLL] = {}, tiny[UNROLL] = {};
    V least[UNROLL];
    for (V &each : least) each = O::all(infinity<T>());
    const V limit = O::all(tiny_at);
    const int done = over_lanes<N>(
        n,
        [&](int i) {
            for (int k = 0; k < UNROLL; ++k) {
                const V size = O::abs(load<V>(x + i + k * N));
                const M some = O::not_zero(size);
                no_zero[k] -= some;
                tiny[k] -= O::less(size, limit) & some;
                least[k] = O::min(O::either(some, size, O::all(infinity<T>())), least[k]);
            }
        });
    zeros += done - count<T, N>(no_zero[0], no_zero[1]);
    subnormals += count<T, N>(tiny[0], tiny[1]);
    const double found = least_lane<T, N>(least[0], least[1]);
    if (found < min_abs) min_abs = found;
    return done;
}

// What is known of a block once its moments are: for the pairs it is in.
struct Extent {
    bool quick = false;
    double zeros = 0, min_abs = HUGE_VAL, max_abs = 0, squares = 0;  // min_abs: of those that are not zero
};

// The moments of many blocks, as plain sums: finite numbers within range only.
struct QuickMoments {
    double n = 0, mean = 0, squares = 0, sum_abs = 0, min = HUGE_VAL, max = -HUGE_VAL, zeros = 0, subnormals = 0;
    double shift = 0;  // where the next block is expected to lie

    Moments moments() const {
        if (n == 0) return no_moments();
        return {n, 0, 0, 0, zeros, subnormals, 0, mean, std::sqrt(squares / n), min, max, sum_abs / n};
    }
};

template <class T, int N> Extent quick(const T *x, int n, double tiny, QuickMoments &all) {
    T shift = static_cast<T>(all.shift);
    Scan found = scan<T, N>(x, n, shift);
    Extent extent;
    extent.max_abs = -found.min > found.max ? -found.min : found.max;
    if (!(found.sum_abs < static_cast<double>(infinity<T>()) && extent.max_abs <= Range<T>::LARGEST &&
          (extent.max_abs >= Range<T>::SMALLEST || extent.max_abs == 0)))
        return extent;
    double spread_about = found.squares - found.sum * found.sum / n;
    if (found.min == found.max) {
        shift = static_cast<T>(found.min);
        found.sum = spread_about = 0;
    } else if (!(spread_about > found.squares / 4)) {  // the shift was so far away that digits were lost
        shift = static_cast<T>(shift + found.sum / n);
        spread<T, N>(x, n, shift, found.sum, found.squares);
        spread_about = found.squares - found.sum * found.sum / n;
        if (spread_about < 0) spread_about = 0;
    }
    const double mean = shift + found.sum / n;

    extent.quick = true;
    extent.min_abs = found.min_abs;
    extent.squares = spread_about + n * mean * mean;
    double subnormals = 0;
    if (found.min_abs < tiny || found.min_abs == 0) {
        extent.min_abs = HUGE_VAL;
        const int done = small_lanes<T, N>(x, n, static_cast<T>(tiny), extent.zeros, subnormals, extent.min_abs);
        for (int i = done; i < n; ++i) {
            const double size = x[i] < 0 ? -x[i] : x[i];
            extent.zeros += size == 0;
            subnormals += size != 0 && size < tiny;
            if (size != 0 && size < extent.min_abs) extent.min_abs = size;
        }
    }

    const double delta = mean - all.mean, total = all.n + n;
    all.mean = all.n == 0 ? mean : all.mean + delta * (n / total);
    all.squares += spread_about + (all.n == 0 ? 0 : delta * delta * (all.n * n / total));
    all.n = total;
    all.sum_abs += found.sum_abs;
    if (found.min < all.min) all.min = found.min;
    if (found.max > all.max) all.max = found.max;
    all.zeros += extent.zeros;
    all.subnormals += subnormals;
    all.shift = mean;
    return extent;
}

// --- quick: a pair ---

struct QuickPair {
    double n = 0, defined = 0, x_by_zero = 0, zero_by_zero = 0, sum = 0, sum_abs = 0, min = HUGE_VAL, max = -HUGE_VAL;
    double dot = 0, squares_x = 0, squares_y = 0, equal_signs = 0, signed_ = 0;

    Pair pair() const {
        if (n == 0) return no_pair();
        const double norm_x = std::sqrt(squares_x), norm_y = std::sqrt(squares_y);
        const bool any = defined > 0;
        return {n,
                defined,
                x_by_zero,
                zero_by_zero,
                0,
                any ? sum / defined : NONE,
                any ? min : NONE,
                any ? max : NONE,
                any ? sum_abs / defined : NONE,
                norm_x,
                norm_y,
                norm_x > 0 && norm_y > 0 ? dot / norm_x / norm_y : NONE,
                equal_signs,
                signed_};
    }
};

// Where the next block lies in memory. It is fetched while a pair is gone over, for which no memory is read.
struct Next {
    const char *x = nullptr, *y = nullptr;
    std::int64_t stride_x = 0, stride_y = 0;
};

template <class T, int N, bool ZEROS>
COWALK_INLINE int pair_lanes(const T *x, const T *y, int n, QuickPair &found, const Next &next) {
    using O = Ops<T, N>;
    using V = typename O::V;
    using M = typename O::M;
    Sum<T, N> sum, sum_abs, dot;
    M differ[UNROLL] = {}, defined[UNROLL] = {}, signs[UNROLL] = {}, nothing[UNROLL] = {};
    V least[UNROLL], most[UNROLL];
    const V one = O::all(1), far = O::all(infinity<T>());
    for (int k = 0; k < UNROLL; ++k) least[k] = far, most[k] = -far;
    const int done = over_lanes<N>(
        n,
        [&](int i) {
            for (int k = 0; k < UNROLL; ++k) {
                const V a = load<V>(x + i + k * N), b = load<V>(y + i + k * N);
                prefetch(next.x + (i + k * N) * next.stride_x);
                prefetch(next.y + (i + k * N) * next.stride_y);
                dot.lanes[k] += a * b;
                M unlike = O::signs_differ(a, b);
                if constexpr (ZEROS) {
                    const M some = O::not_zero(b), both = O::not_zero(a) & some;
                    const V quotient = O::keep(some, a / O::either(some, b, one));
                    defined[k] -= some;
                    signs[k] -= both;
                    nothing[k] -= ~(O::not_zero(a) | some);
                    differ[k] -= unlike & both;
                    least[k] = O::min(O::either(some, quotient, far), least[k]);
                    most[k] = O::max(O::either(some, quotient, -far), most[k]);
                    sum.lanes[k] += quotient;
                    sum_abs.lanes[k] += O::abs(quotient);
                } else {
                    const V quotient = a / b;
                    differ[k] -= unlike;
                    least[k] = O::min(quotient, least[k]);
                    most[k] = O::max(quotient, most[k]);
                    sum.lanes[k] += quotient;
                    sum_abs.lanes[k] += O::abs(quotient);
                }
            }
        },
        sum, sum_abs, dot);
    found.sum += sum.total();
    found.sum_abs += sum_abs.total();
    found.dot += dot.total();
    const double low = least_lane<T, N>(least[0], least[1]), high = -least_lane<T, N>(-most[0], -most[1]);
    if (low < found.min) found.min = low;
    if (high > found.max) found.max = high;
    const double with_quotient = ZEROS ? count<T, N>(defined[0], defined[1]) : done;
    const double with_signs = ZEROS ? count<T, N>(signs[0], signs[1]) : done;
    const double empty = ZEROS ? count<T, N>(nothing[0], nothing[1]) : 0;
    found.defined += with_quotient;
    found.zero_by_zero += empty;
    found.x_by_zero += done - with_quotient - empty;
    found.signed_ += with_signs;
    found.equal_signs += with_signs - count<T, N>(differ[0], differ[1]);
    return done;
}

template <class T, int N>
bool quick(const T *x, const T *y, int n, const Extent &of_x, const Extent &of_y, QuickPair &all, const Next &next = {}) {
    using R = Range<T>;
    if (!of_x.quick || !of_y.quick || of_x.max_abs / of_y.min_abs > R::LARGEST_PRODUCT ||
        of_x.min_abs / of_y.max_abs < R::SMALLEST_QUOTIENT || of_x.max_abs * of_y.max_abs > R::LARGEST_PRODUCT ||
        (of_x.max_abs * of_y.max_abs < R::SMALLEST_PRODUCT && of_x.max_abs != 0 && of_y.max_abs != 0))
        return false;
    const bool zeros = of_x.zeros > 0 || of_y.zeros > 0;
    const int done = zeros ? pair_lanes<T, N, true>(x, y, n, all, next) : pair_lanes<T, N, false>(x, y, n, all, next);
    for (int i = done; i < n; ++i) {
        const T a = x[i], b = y[i];
        all.dot += static_cast<double>(a) * b;
        if (b == 0) {
            all.zero_by_zero += a == 0;
            all.x_by_zero += a != 0;
            continue;
        }
        const double quotient = static_cast<T>(a / b);
        all.defined += 1;
        all.sum += quotient;
        all.sum_abs += quotient < 0 ? -quotient : quotient;
        if (quotient < all.min) all.min = quotient;
        if (quotient > all.max) all.max = quotient;
        all.signed_ += a != 0;
        all.equal_signs += a != 0 && (a < 0) == (b < 0);
    }
    all.n += n;
    all.squares_x += of_x.squares;
    all.squares_y += of_y.squares;
    return true;
}

// --- careful ---

inline bool is_finite(double x) { return x - x == 0; }

// The sum of many numbers each times this does not overflow.
constexpr double SHARE = 1.0 / BLOCK;

inline double size_of_largest(const double *x, int n) {
    double largest = 0;
    for (int i = 0; i < n; ++i)
        if (std::fabs(x[i]) > largest) largest = std::fabs(x[i]);
    return largest;
}

inline double unit_of(double largest) {  // a power of two: numbers divided by it have squares within range
    if (!(largest > 0)) return 1.0;
    const int exponent = std::ilogb(largest);
    return std::scalbn(1.0, exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent);
}

struct Mean {
    double sum = 0, sum_abs = 0, min = HUGE_VAL, max = -HUGE_VAL, n = 0;
    // Shares of the smallest numbers lose digits, but their plain sums do not overflow.
    void add(double value, double share) {
        sum += value * share;
        sum_abs += std::fabs(value) * share;
        if (value < min) min = value;
        if (value > max) max = value;
        n += 1;
    }
    double mean(double share) const { return min == max ? min : sum / n / share; }
    double mean_abs(double share) const { return min == max ? std::fabs(min) : sum_abs / n / share; }
};

// Finite numbers of any size.
Moments careful(const double *x, int n, double tiny) {
    Moments found = no_moments();
    found.n = n;
    if (n == 0) return found;
    const double largest = size_of_largest(x, n), share = largest < 0x1p-900 ? 1 : SHARE;
    Mean all;
    for (int i = 0; i < n; ++i) {
        all.add(x[i], share);
        found.zeros += x[i] == 0;
        found.subnormals += x[i] != 0 && std::fabs(x[i]) < tiny;
    }
    found.min = all.min;
    found.max = all.max;
    found.mean = all.mean(share);
    found.mean_abs = all.mean_abs(share);
    const double unit = unit_of(largest), per_unit = 1 / unit;
    double squares = 0;
    for (int i = 0; i < n; ++i) {
        const double d = x[i] * per_unit - found.mean * per_unit;
        squares += d * d;
    }
    found.std = std::sqrt(squares / n) * unit;
    return found;
}

// Finite numbers of any size; `parts` of complex numbers: real and imaginary parts by turns, x and y are then their moduli.
Pair careful(const double *x, const double *y, const double *parts_x, const double *parts_y, int n) {
    Pair found = no_pair();
    found.n = n;
    Mean all;
    double largest = 0;
    for (int i = 0; i < n; ++i)
        if (y[i] != 0 && is_finite(x[i] / y[i]) && std::fabs(x[i] / y[i]) > largest) largest = std::fabs(x[i] / y[i]);
    const double share = largest < 0x1p-900 ? 1 : SHARE;
    for (int i = 0; i < n; ++i) {
        const double a = x[i], b = y[i];
        if (!parts_x && a != 0 && b != 0) {
            found.signed_ += 1;
            found.equal_signs += (a < 0) == (b < 0);
        }
        if (b == 0) {
            found.zero_by_zero += a == 0;
            found.x_by_zero += a != 0;
        } else if (const double quotient = a / b; is_finite(quotient)) {
            all.add(quotient, share);
        } else {
            found.nonfinite += 1;
        }
    }
    found.defined = all.n;
    if (all.n > 0) {
        found.min = all.min;
        found.max = all.max;
        found.mean = all.mean(share);
        found.mean_abs = all.mean_abs(share);
    }
    const double unit_x = unit_of(size_of_largest(x, n)), unit_y = unit_of(size_of_largest(y, n));
    const double per_x = 1 / unit_x, per_y = 1 / unit_y;
    double squares_x = 0, squares_y = 0, dot = 0;
    for (int i = 0; i < n; ++i) {
        const double a = x[i] * per_x, b = y[i] * per_y;
        squares_x += a * a;
        squares_y += b * b;
        dot += !parts_x ? a * b
                        : (parts_x[2 * i] * per_x) * (parts_y[2 * i] * per_y) +
                              (parts_x[2 * i + 1] * per_x) * (parts_y[2 * i + 1] * per_y);
    }
    found.norm_x = std::sqrt(squares_x) * unit_x;
    found.norm_y = std::sqrt(squares_y) * unit_y;
    if (squares_x > 0 && squares_y > 0) found.cosine = dot / std::sqrt(squares_x) / std::sqrt(squares_y);
    return found;
}

// Where finite numbers go when those that are not are taken out.
struct Filtered {
    alignas(64) double x[BLOCK], y[BLOCK], parts_x[2 * BLOCK], parts_y[2 * BLOCK];
};

// The moments of a block of any numbers. What is returned is quick only if all of them are finite and within range.
template <int N> Extent any_moments(const double *x, int n, double tiny, QuickMoments &all, Moments &others, Filtered &filtered) {
    const Extent extent = quick<double, N>(x, n, tiny, all);
    if (extent.quick) return extent;
    int count = 0;
    for (int i = 0; i < n; ++i) {
        filtered.x[count] = x[i];
        count += is_finite(x[i]);
        others.nan += x[i] != x[i];
        others.posinf += x[i] == HUGE_VAL;
        others.neginf += x[i] == -HUGE_VAL;
    }
    others.n += n - count;
    if (count > 0 && !quick<double, N>(filtered.x, count, tiny, all).quick) merge(others, careful(filtered.x, count, tiny));
    return extent;
}

template <int N>
void any_pair(const double *x, const double *y, const double *parts_x, const double *parts_y, int n, const Extent &of_x,
              const Extent &of_y, QuickPair &all, Pair &others, Filtered &filtered) {
    if (!parts_x && quick<double, N>(x, y, n, of_x, of_y, all)) return;
    int count = 0;
    for (int i = 0; i < n; ++i) {
        filtered.x[count] = x[i], filtered.y[count] = y[i];
        if (parts_x)
            for (int part = 0; part < 2; ++part) {
                filtered.parts_x[2 * count + part] = parts_x[2 * i + part];
                filtered.parts_y[2 * count + part] = parts_y[2 * i + part];
            }
        count += is_finite(x[i]) && is_finite(y[i]);
    }
    others.n += n - count;
    others.nonfinite += n - count;
    if (count == 0) return;
    if (!parts_x && count < n) {
        QuickMoments unused_x, unused_y;
        const Extent x_now = quick<double, N>(filtered.x, count, 0, unused_x);
        const Extent y_now = quick<double, N>(filtered.y, count, 0, unused_y);
        if (quick<double, N>(filtered.x, filtered.y, count, x_now, y_now, all)) return;
    }
    merge(others, careful(filtered.x, filtered.y, parts_x ? filtered.parts_x : nullptr, filtered.parts_y, count));
}

// g, m and v as doubles (moduli of complex numbers); m may be null.
Adam adam(const double *g, const double *m, const double *v, int n, const Leaf &leaf) {
    double defined = 0, below = 0, squares = 0, steps = 0;
    const double epsilon = leaf.epsilon;
    for (int i = 0; i < n; ++i) {
        const bool good = is_finite(g[i]) && is_finite(v[i]) && v[i] >= 0 && (!m || is_finite(m[i]));
        const double root = std::sqrt(good ? v[i] * leaf.v_scale : 1.0);
        const double slow = root > epsilon ? root : epsilon;
        const double r = good && g[i] != 0 ? g[i] / slow : 0;
        const double step = m && good && m[i] != 0 ? m[i] * leaf.m_scale / (root + epsilon) : 0;
        defined += good;
        below += good && root < epsilon;
        squares += r * r;
        steps += step * step;
    }
    Adam found = no_adam();
    found.n = n;
    found.defined = defined;
    found.below_epsilon = below;
    if (defined > 0) found.rms = std::sqrt(squares / defined);
    if (defined > 0 && m && !is_none(leaf.lr)) found.step = leaf.lr * std::sqrt(steps / defined);
    return found;
}

void count_powers(const double *x, int n, std::uint64_t *counts) {
    for (int i = 0; i < n; ++i) {
        const std::uint64_t size = bits<std::uint64_t>(x[i]) & ~(std::uint64_t{1} << 63);
        const int exponent = static_cast<int>(size >> 52);
        if (exponent == 0x7ff || size == 0) continue;
        counts[(exponent ? exponent - 1023 : std::ilogb(x[i])) - LEAST_POWER] += 1;
    }
}

// --- from memory into blocks ---

inline float from_half(std::uint16_t half) {
    // The exponent's bias is mended by a product, which is right for subnormal numbers too.
    const std::uint32_t magnitude = half & 0x7fffu, sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const float scaled = bits<float>(magnitude << 13) * 0x1p112f;
    const std::uint32_t value = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude << 13) : bits<std::uint32_t>(scaled);
    return bits<float>(value | sign);
}

inline float from_brain(std::uint16_t brain) { return bits<float>(static_cast<std::uint32_t>(brain) << 16); }

template <class S> COWALK_INLINE S element(const char *at) {
    S value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <class S, class To, class Convert>
COWALK_INLINE void convert(const char *from, std::int64_t stride, int n, To *to, Convert as) {
    if (stride == static_cast<std::int64_t>(sizeof(S))) {
        for (int i = 0; i < n; ++i) to[i] = static_cast<To>(as(element<S>(from + i * sizeof(S))));
    } else {
        for (int i = 0; i < n; ++i) to[i] = static_cast<To>(as(element<S>(from + i * stride)));
    }
}

// n real numbers of an array, `stride` bytes apart.
template <class To> void copy(const Array &array, const char *from, std::int64_t stride, int n, To *to) {
    switch (array.type) {
    case Type::f16: return convert<std::uint16_t>(from, stride, n, to, from_half);
    case Type::bf16: return convert<std::uint16_t>(from, stride, n, to, from_brain);
    case Type::f32: return convert<float>(from, stride, n, to, [](float value) { return value; });
    case Type::f64: return convert<double>(from, stride, n, to, [](double value) { return value; });
    case Type::byte: return convert<std::uint8_t>(from, stride, n, to, [&](std::uint8_t byte) { return array.values[byte]; });
    default: return;
    }
}

// n complex numbers: their parts by turns, and their moduli. Of an array of real numbers the imaginary parts are zero.
void copy_complex(const Array &array, const char *from, std::int64_t stride, int n, double *parts, double *moduli) {
    for (int i = 0; i < n; ++i, from += stride) {
        double real = 0, imaginary = 0;
        if (array.type == Type::c64) {
            real = element<float>(from), imaginary = element<float>(from + sizeof(float));
        } else if (array.type == Type::c128) {
            real = element<double>(from), imaginary = element<double>(from + sizeof(double));
        } else {
            copy(array, from, stride, 1, &real);
        }
        parts[2 * i] = real, parts[2 * i + 1] = imaginary;
        const double squares = real * real + imaginary * imaginary;
        moduli[i] = squares > 0x1p-900 && squares < 0x1p1000 ? std::sqrt(squares) : std::hypot(real, imaginary);
    }
}

// Goes over the elements [begin, end) of a leaf in runs along its last axis: visit(pointers, how many).
template <class Visit> void over_rows(const Leaf &leaf, std::int64_t begin, std::int64_t end, Visit visit) {
    const int last = leaf.axes - 1;
    while (begin < end) {
        std::int64_t rest = begin / leaf.shape[last], along = begin % leaf.shape[last];
        const std::int64_t length = leaf.shape[last] - along < end - begin ? leaf.shape[last] - along : end - begin;
        const char *at[OPERANDS];
        for (int k = 0; k < OPERANDS; ++k)
            at[k] = leaf.arrays[k].present() ? leaf.arrays[k].data + along * leaf.strides[k][last] : nullptr;
        for (int axis = last - 1; axis >= 0; --axis) {
            const std::int64_t index = rest % leaf.shape[axis];
            rest /= leaf.shape[axis];
            for (int k = 0; k < OPERANDS; ++k)
                if (at[k]) at[k] += index * leaf.strides[k][axis];
        }
        visit(at, static_cast<int>(length));
        begin += length;
    }
}

constexpr int MEASURED = 3;
constexpr int PAIRS[2][2] = {{PARAMETER, GRADIENT}, {UPDATE, PARAMETER}};

template <class T> struct Blocks {
    alignas(64) T values[OPERANDS][BLOCK];
};

// A leaf of real numbers none of which needs more than T.
template <class T, int N> void measure_real(const Leaf &leaf, std::int64_t begin, std::int64_t end, Line &line, Powers *powers) {
    constexpr bool NARROW = sizeof(T) < sizeof(double);
    constexpr int WIDE = NARROW && N > 1 ? N / 2 : N;  // doubles in as many bits
    Blocks<T> blocks;
    alignas(64) double wide[OPERANDS][NARROW ? BLOCK : 1];
    Filtered filtered;
    QuickMoments moments[MEASURED];
    QuickPair pairs[2];
    const int last = leaf.axes - 1;

    for (std::int64_t start = begin; start < end; start += BLOCK) {
        const int n = static_cast<int>(end - start < BLOCK ? end - start : BLOCK);
        const T *block[OPERANDS] = {};
        const char *after[OPERANDS] = {};
        int filled = 0;
        over_rows(leaf, start, start + n, [&](const char *const *at, int length) {
            for (int k = 0; k < OPERANDS; ++k) {
                if (!at[k]) continue;
                const Array &array = leaf.arrays[k];
                const std::int64_t stride = leaf.strides[k][last];
                after[k] = at[k] + length * stride;
                const bool as_it_is = array.type == (sizeof(T) == 4 ? Type::f32 : Type::f64) && length == n && stride == sizeof(T) &&
                                      reinterpret_cast<std::uintptr_t>(at[k]) % alignof(T) == 0;
                if (as_it_is) {
                    block[k] = reinterpret_cast<const T *>(at[k]);
                } else {
                    copy(array, at[k], stride, length, blocks.values[k] + filled);
                    block[k] = blocks.values[k];
                }
            }
            filled += length;
        });

        bool widened[OPERANDS] = {};
        const auto as_double = [&](int k) -> const double * {
            if constexpr (!NARROW) {
                return block[k];
            } else {
                if (!widened[k])
                    for (int i = 0; i < n; ++i) wide[k][i] = block[k][i];
                widened[k] = true;
                return wide[k];
            }
        };

        Extent extents[MEASURED], wide_extents[MEASURED];
        for (int k = 0; k < MEASURED; ++k) {
            if (!block[k]) continue;
            const double tiny = leaf.arrays[k].tiny;
            if constexpr (NARROW) wide_extents[k] = extents[k] = quick<T, N>(block[k], n, tiny, moments[k]);
            if (!extents[k].quick)
                wide_extents[k] = any_moments<WIDE>(as_double(k), n, tiny, moments[k], line.moments[k], filtered);
            if (powers) count_powers(as_double(k), n, powers->counts[k]);
        }
        for (int i = 0; i < 2; ++i) {
            const int x = PAIRS[i][0], y = PAIRS[i][1];
            if (!block[x] || !block[y]) continue;
            if constexpr (NARROW)
                if (quick<T, N>(block[x], block[y], n, extents[x], extents[y], pairs[i],
                                {after[x], after[y], leaf.strides[x][last], leaf.strides[y][last]}))
                    continue;
            any_pair<WIDE>(as_double(x), as_double(y), nullptr, nullptr, n, wide_extents[x], wide_extents[y], pairs[i],
                           line.pairs[i], filtered);
        }
        if (leaf.has_adam)
            merge(line.adam, adam(as_double(GRADIENT), block[FIRST_MOMENT] ? as_double(FIRST_MOMENT) : nullptr,
                                  as_double(SECOND_MOMENT), n, leaf));
    }
    for (int k = 0; k < MEASURED; ++k) merge(line.moments[k], moments[k].moments());
    for (int i = 0; i < 2; ++i) merge(line.pairs[i], pairs[i].pair());
}

// A leaf with complex numbers in it: rare, and right rather than quick.
template <int N> void measure_complex(const Leaf &leaf, std::int64_t begin, std::int64_t end, Line &line, Powers *powers) {
    Blocks<double> numbers, moduli;  // the numbers of a real array, and of all arrays the moduli
    alignas(64) double parts[OPERANDS][2 * BLOCK];
    Filtered filtered;
    QuickMoments moments[MEASURED];
    QuickPair pairs[2];
    const int last = leaf.axes - 1;
    for (std::int64_t start = begin; start < end; start += BLOCK) {
        const int n = static_cast<int>(end - start < BLOCK ? end - start : BLOCK);
        int filled = 0;
        over_rows(leaf, start, start + n, [&](const char *const *at, int length) {
            for (int k = 0; k < OPERANDS; ++k)
                if (at[k])
                    copy_complex(leaf.arrays[k], at[k], leaf.strides[k][last], length, parts[k] + 2 * filled, moduli.values[k] + filled);
            filled += length;
        });
        for (int k = 0; k < OPERANDS; ++k)
            for (int i = 0; i < n; ++i)
                numbers.values[k][i] = leaf.arrays[k].complex() ? moduli.values[k][i] : parts[k][2 * i];
        Extent extents[MEASURED];
        for (int k = 0; k < MEASURED; ++k) {
            if (!leaf.arrays[k].present()) continue;
            extents[k] = any_moments<N>(numbers.values[k], n, leaf.arrays[k].tiny, moments[k], line.moments[k], filtered);
            if (powers) count_powers(numbers.values[k], n, powers->counts[k]);
        }
        for (int i = 0; i < 2; ++i) {
            const int x = PAIRS[i][0], y = PAIRS[i][1];
            if (!leaf.arrays[x].present() || !leaf.arrays[y].present()) continue;
            const bool complex = leaf.arrays[x].complex() || leaf.arrays[y].complex();
            const Blocks<double> &blocks = complex ? moduli : numbers;
            any_pair<N>(blocks.values[x], blocks.values[y], complex ? parts[x] : nullptr, complex ? parts[y] : nullptr, n, extents[x],
                        extents[y], pairs[i], line.pairs[i], filtered);
        }
        if (!leaf.has_adam) continue;
        // torch keeps a v for each part of a complex number; that of the real part stands for both.
        for (int i = 0; i < n; ++i) numbers.values[SECOND_MOMENT][i] = parts[SECOND_MOMENT][2 * i];
        merge(line.adam, adam(moduli.values[GRADIENT],
                              leaf.arrays[FIRST_MOMENT].present() ? moduli.values[FIRST_MOMENT] : nullptr,
                              numbers.values[SECOND_MOMENT], n, leaf));
    }
    for (int k = 0; k < MEASURED; ++k) merge(line.moments[k], moments[k].moments());
    for (int i = 0; i < 2; ++i) merge(line.pairs[i], pairs[i].pair());
}

template <int LANES> void measure_run(const Leaf &leaf, std::int64_t begin, std::int64_t end, Line &line, Powers *powers) {
    constexpr int DOUBLES = LANES == 1 ? 1 : LANES / 2;
    if (leaf.complex()) return measure_complex<DOUBLES>(leaf, begin, end, line, powers);
    if (leaf.wide()) return measure_real<double, DOUBLES>(leaf, begin, end, line, powers);
    return measure_real<float, LANES>(leaf, begin, end, line, powers);
}

}  // namespace
}  // namespace cowalk
