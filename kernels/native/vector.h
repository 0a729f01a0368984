// Vectors of float32 as wide as the instruction set that this is compiled for, and how storage becomes one.
//
// Written with the vector extensions that GCC and Clang share, so that one source serves every instruction set.
// float32 and bfloat16 are storage; all arithmetic is float32.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace servetwin {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecInt __attribute__((vector_size(LANES * 4)));
typedef uint32_t VecBits __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(LANES * 2)));

struct bfloat16 {
    uint16_t bits;
};

constexpr float INFINITE = std::numeric_limits<float>::infinity();

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A difference, since compilers know that x - 0 is x (x + 0 is not, for -0).
inline Vec broadcast(float x) { return x - Vec{}; }

template <typename To, typename From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Vec load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Vec load(const bfloat16* from) {
    VecHalf half;
    std::memcpy(&half, from, sizeof half);
    return bit_cast<Vec>(__builtin_convertvector(half, VecBits) << 16);
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

// The upper half of each float32, rounded to nearest even; a NaN stays one (rounding could carry it to infinity).
inline VecBits bfloat16_bits(Vec x) {
    VecBits bits = bit_cast<VecBits>(x);
    VecBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? rounded : VecBits{} + 0x7fc0;
}

inline void store(bfloat16* to, Vec x) {
    VecHalf half = __builtin_convertvector(bfloat16_bits(x), VecHalf);
    std::memcpy(to, &half, sizeof half);
}

// The first `count` elements, 0 beyond; nothing beyond is read.
template <typename T>
inline Vec load_part(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <typename T>
inline void store_part(T* to, Vec x, int64_t count) {
    if (count >= LANES) return store(to, x);
    T padded[LANES];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

// What remains of x once it has been stored as T.
inline Vec rounded_to(const float*, Vec x) { return x; }
inline Vec rounded_to(const bfloat16*, Vec x) { return bit_cast<Vec>(bfloat16_bits(x) << 16); }

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

template <int DISTANCE, int... LANE>
inline Vec rotated(Vec x, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(x, x, ((LANE + DISTANCE) % LANES)...);
}

// Combines all lanes pairwise; every lane of the result holds the outcome.
template <int DISTANCE = LANES / 2, typename Combine>
inline Vec across_lanes(Vec x, Combine combine) {
    x = combine(x, rotated<DISTANCE>(x, std::make_integer_sequence<int, LANES>{}));
    if constexpr (DISTANCE > 1) return across_lanes<DISTANCE / 2>(x, combine);
    return x;
}

inline Vec sum_of_lanes(Vec x) {
    return across_lanes(x, [](Vec a, Vec b) { return a + b; });
}

inline Vec max_of_lanes(Vec x) { return across_lanes(x, maximum); }

// e^x as 2^n (1 + tail), with tail = e^r - 1 for |r| <= ln(2) / 2 kept apart: e^x - 1 would lose its digits.
struct Exponential {
    Vec power, tail;
};

inline Exponential exponential(Vec x) {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const Vec shift = broadcast(12582912.0f);
    Vec shifted = x * 1.44269504f + shift;
    VecInt n = bit_cast<VecInt>(shifted) - bit_cast<VecInt>(shift);
    Vec whole = shifted - shift;
    // ln(2) in two parts; the first has few enough digits for exact products.
    Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    // Taylor's series to the seventh term: the eighth is below 1e-8 here.
    Vec tail = broadcast(1.0f / 5040);
    tail = tail * r + 1.0f / 720;
    tail = tail * r + 1.0f / 120;
    tail = tail * r + 1.0f / 24;
    tail = tail * r + 1.0f / 6;
    tail = tail * r + 0.5f;
    tail = (tail * r + 1.0f) * r;
    return {bit_cast<Vec>((n + 127) << 23), tail};
}

// e^x; 0 below the smallest normal number, infinity above the largest, NaN for NaN.
inline Vec exp(Vec x) {
    Exponential e = exponential(x);
    Vec y = e.power * e.tail + e.power;
    y = x < -87.0f ? Vec{} : y;
    return x > 88.0f ? broadcast(INFINITE) : y;
}

inline Vec tanh(Vec x) {
    // Beyond 10 the result is 1 in float32. With y = e^2x - 1: tanh(x) = y / (y + 2).
    Vec clamped = x > 10.0f ? broadcast(10.0f) : x < -10.0f ? broadcast(-10.0f) : x;
    Exponential e = exponential(2 * clamped);
    Vec y = e.power * e.tail + (e.power - 1.0f);
    return y / (y + 2.0f);
}

template <int DISTANCE, int... LANE>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, LANE...>) {
    Vec low = __builtin_shufflevector(a, b, ((LANE & DISTANCE) ? LANE - DISTANCE + LANES : LANE)...);
    Vec high = __builtin_shufflevector(a, b, ((LANE & DISTANCE) ? LANE + LANES : LANE + DISTANCE)...);
    a = low;
    b = high;
}

// Transposes the square of LANES vectors in place: blocks of halving size change places across the diagonal.
template <int DISTANCE = LANES / 2>
inline void transpose(Vec (&rows)[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & DISTANCE))
            exchange<DISTANCE>(rows[i], rows[i + DISTANCE], std::make_integer_sequence<int, LANES>{});
    if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(rows);
}

// Lane i: the sum of all lanes of rows[i].
template <int COUNT = LANES>
inline Vec sums_of_rows(Vec (&rows)[LANES]) {
    if constexpr (COUNT == 1) return rows[0];
    constexpr int HALF = COUNT / 2;
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i) {
        exchange<HALF>(rows[i], rows[i + HALF], std::make_integer_sequence<int, LANES>{});
        rows[i] += rows[i + HALF];
    }
    if constexpr (COUNT > 1) return sums_of_rows<HALF>(rows);
}

}  // namespace servetwin
