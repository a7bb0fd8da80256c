// What is measured of one leaf, laid out as the columns of cowalk.measure.backend: the specification of every field and of
// every merge is cowalk/measure/moments.py. All are doubles, so that a Line is a line of the matrix; NaN is "there is none".
//
// The functions are static: each translation unit, compiled for an instruction set of its own, must keep its own copy.
#pragma once

#include <cmath>
#include <limits>

namespace cowalk {

constexpr double NONE = std::numeric_limits<double>::quiet_NaN();

struct Moments {
    double n, nan, posinf, neginf, zeros, subnormals, zero_rows, mean, std, min, max, mean_abs;
};

struct Pair {
    double n, defined, x_by_zero, zero_by_zero, nonfinite, mean, min, max, mean_abs, norm_x, norm_y, cosine, equal_signs, signed_;
};

struct Adam {
    double n, defined, below_epsilon, rms, step;
};

struct Line {
    Moments moments[3];  // parameter, gradient, update
    Pair pairs[2];       // parameter / gradient, update / parameter
    Adam adam;
};

constexpr int LINE_WIDTH = sizeof(Line) / sizeof(double);

static inline Moments no_moments() { return {0, 0, 0, 0, 0, 0, 0, NONE, NONE, NONE, NONE, NONE}; }
static inline Pair no_pair() { return {0, 0, 0, 0, 0, NONE, NONE, NONE, NONE, 0, 0, NONE, 0, 0}; }
static inline Adam no_adam() { return {0, 0, 0, NONE, NONE}; }

static inline bool is_none(double value) { return value != value; }

static inline double merged_mean(double one, double weight, double other, double other_weight) {
    if (is_none(one)) return other;
    if (is_none(other)) return one;
    const double total = weight + other_weight;
    return one == other ? one : one * (weight / total) + other * (other_weight / total);
}

static inline double least(double one, double other) { return is_none(one) || other < one ? other : one; }
static inline double greatest(double one, double other) { return is_none(one) || other > one ? other : one; }

// sqrt(a² + b² + c²) without overflow.
static inline double root_of_squares(double a, double b, double c) {
    a = std::fabs(a), b = std::fabs(b), c = std::fabs(c);
    double largest = a > b ? a : b;
    if (c > largest) largest = c;
    if ((largest < 1e150 && largest > 1e-140) || largest == 0 || !(largest < HUGE_VAL))
        return std::sqrt(a * a + b * b + c * c);
    const int exponent = std::ilogb(largest);
    a = std::scalbn(a, -exponent), b = std::scalbn(b, -exponent), c = std::scalbn(c, -exponent);
    return std::scalbn(std::sqrt(a * a + b * b + c * c), exponent);
}

static inline void merge(Moments &into, const Moments &from) {
    const double weight = into.n - into.nan - into.posinf - into.neginf;
    const double other = from.n - from.nan - from.posinf - from.neginf;
    if (is_none(into.mean)) {
        into.std = from.std;
    } else if (!is_none(from.mean)) {
        const double p = weight / (weight + other), q = other / (weight + other);
        const double root = std::sqrt(p * q);  // each mean times it, for their difference may not fit
        const double apart = into.mean == from.mean ? 0 : root * into.mean - root * from.mean;
        into.std = root_of_squares(std::sqrt(p) * into.std, std::sqrt(q) * from.std, apart);
    }
    into.mean = merged_mean(into.mean, weight, from.mean, other);
    into.mean_abs = merged_mean(into.mean_abs, weight, from.mean_abs, other);
    into.min = least(into.min, from.min);
    into.max = greatest(into.max, from.max);
    into.n += from.n;
    into.nan += from.nan;
    into.posinf += from.posinf;
    into.neginf += from.neginf;
    into.zeros += from.zeros;
    into.subnormals += from.subnormals;
    into.zero_rows += from.zero_rows;
}

static inline void merge(Pair &into, const Pair &from) {
    if (from.n == 0) return;
    if (into.n == 0) {  // as it is: an infinite norm would lose the cosine
        into = from;
        return;
    }
    into.mean = merged_mean(into.mean, into.defined, from.mean, from.defined);
    into.mean_abs = merged_mean(into.mean_abs, into.defined, from.mean_abs, from.defined);
    into.min = least(into.min, from.min);
    into.max = greatest(into.max, from.max);
    const double norm_x = root_of_squares(into.norm_x, from.norm_x, 0);
    const double norm_y = root_of_squares(into.norm_y, from.norm_y, 0);
    double cosine = NONE;
    if (norm_x > 0 && norm_y > 0) {
        cosine = 0;
        for (const Pair *part : {static_cast<const Pair *>(&into), &from})
            if (!is_none(part->cosine)) cosine += part->cosine * (part->norm_x / norm_x) * (part->norm_y / norm_y);
    }
    into.norm_x = norm_x;
    into.norm_y = norm_y;
    into.cosine = cosine;
    into.n += from.n;
    into.defined += from.defined;
    into.x_by_zero += from.x_by_zero;
    into.zero_by_zero += from.zero_by_zero;
    into.nonfinite += from.nonfinite;
    into.equal_signs += from.equal_signs;
    into.signed_ += from.signed_;
}

static inline double merged_root(double one, double weight, double other, double other_weight) {
    if (is_none(one)) return other;
    if (is_none(other)) return one;
    const double total = weight + other_weight;
    return root_of_squares(std::sqrt(weight / total) * one, std::sqrt(other_weight / total) * other, 0);
}

static inline void merge(Adam &into, const Adam &from) {
    into.rms = merged_root(into.rms, into.defined, from.rms, from.defined);
    into.step = merged_root(into.step, into.defined, from.step, from.defined);
    into.n += from.n;
    into.defined += from.defined;
    into.below_epsilon += from.below_epsilon;
}

}  // namespace cowalk
