// N numbers that are worked on at once. GCC and Clang turn the vector types into the instructions of the set that a
// translation unit is compiled for; elsewhere N is 1 and a lane is a plain number.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__GNUC__)
#define COWALK_INLINE inline __attribute__((always_inline))
#else
#define COWALK_INLINE inline
#endif

namespace cowalk {
namespace {  // a copy for each translation unit, each with its own instruction set

template <class T> struct Integer;
template <> struct Integer<float> { using type = std::int32_t; };
template <> struct Integer<double> { using type = std::int64_t; };

template <class T, int N> struct Lanes;

template <class T> struct Lanes<T, 1> {
    using type = T;
    using mask = typename Integer<T>::type;
    using wide = double;
};

#if defined(__GNUC__)
template <class T, int N> struct Lanes {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
    typedef typename Integer<T>::type mask __attribute__((vector_size(N * sizeof(T))));
    typedef double wide __attribute__((vector_size(N * sizeof(double))));
};
#endif

template <class L, class T> COWALK_INLINE L load(const T *from) {
    L lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// Asks for memory that is needed soon, in the second cache; the address need not be anyone's.
template <class T> COWALK_INLINE void prefetch([[maybe_unused]] const T *at) {
#if defined(__GNUC__)
    __builtin_prefetch(at, 0, 2);
#endif
}

template <class To, class From> COWALK_INLINE To bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T, int N> struct Ops {
    using V = typename Lanes<T, N>::type;
    using M = typename Lanes<T, N>::mask;
    using W = typename Lanes<T, N>::wide;
    using I = typename Integer<T>::type;

    static COWALK_INLINE V all(T value) { return V{} + value; }
    static COWALK_INLINE V min(V a, V b) { return a < b ? a : b; }  // b where a is NaN
    static COWALK_INLINE V max(V a, V b) { return a > b ? a : b; }
    static COWALK_INLINE V abs(V a) { return bits<V>(bits<M>(a) & (M{} + SIGN)); }
    static COWALK_INLINE V keep(M mask, V a) { return bits<V>(bits<M>(a) & mask); }  // zero where the mask is
    static COWALK_INLINE V either(M mask, V a, V b) { return bits<V>((bits<M>(a) & mask) | (bits<M>(b) & ~mask)); }
    // Masks are −1 where true and 0 where false.
    static COWALK_INLINE M not_zero(V a) {
        if constexpr (N == 1) return -static_cast<M>(a != 0);
        else return a != V{};
    }
    static COWALK_INLINE M less(V a, V b) {
        if constexpr (N == 1) return -static_cast<M>(a < b);
        else return a < b;
    }
    static COWALK_INLINE M signs_differ(V a, V b) { return (bits<M>(a) ^ bits<M>(b)) >> (8 * sizeof(T) - 1); }
    static COWALK_INLINE W widen(V a) {
        if constexpr (N == 1) return static_cast<double>(a);
        else return __builtin_convertvector(a, W);
    }

    static constexpr I SIGN = static_cast<I>(~(static_cast<std::uint64_t>(1) << (8 * sizeof(T) - 1)));
};

template <class T, int N, class V> COWALK_INLINE T lane(const V &lanes, int i) {
    if constexpr (N == 1) return lanes;
    else return lanes[i];
}

}  // namespace
}  // namespace cowalk
