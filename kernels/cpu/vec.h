// A vector of the unit's native width, and the few things on it that plain C++ cannot say.
//
// Vec is GCC's vector type: + - * / and comparisons need no wrapper. LANES divides PANEL / 2, so
// loops over padded buffers have no tail. Rounding to bf16 is to nearest even, NaN stays NaN.
#pragma once
#include <string.h>

#include "api.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecU __attribute__((vector_size(4 * LANES)));
typedef int32_t VecI __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

INLINE Vec all(float x) { return x - Vec{}; }

template <class T>
INLINE T load_as(const void* from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE Vec load(const float* from) { return load_as<Vec>(from); }
INLINE void store(float* to, Vec x) { memcpy(to, &x, sizeof x); }

INLINE Vec widen(Half x) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
    return (Vec)(__builtin_convertvector(x, VecU) << 16);
#endif
}

INLINE Half narrow(Vec x) {
#if defined(__AVX512BF16__)
    return (Half)_mm512_cvtneps_pbh((__m512)x);
#else
    VecU bits = (VecU)x;
    VecU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    VecU is_nan = (VecU)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), Half);
#endif
}

INLINE Vec rounded(Vec x) { return widen(narrow(x)); }

INLINE Vec load(const bf16* from) { return widen(load_as<Half>(from)); }
INLINE void store(bf16* to, Vec x) {
    Half half = narrow(x);
    memcpy(to, &half, sizeof half);
}

// The first count values, and zeros; at most LANES.
INLINE Vec load_part(const bf16* from, int64_t count) {
    if (count >= LANES) return load(from);
#if defined(__AVX512BF16__)
    return widen((Half)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from));
#else
    Half half = {};
    memcpy(&half, from, count * sizeof(bf16));
    return widen(half);
#endif
}

INLINE void store_part(bf16* to, Vec x, int64_t count) {
    if (count >= LANES) return store(to, x);
#if defined(__AVX512BF16__)
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << count) - 1), (__m256i)narrow(x));
#else
    Half half = narrow(x);
    memcpy(to, &half, count * sizeof(bf16));
#endif
}

template <class T>
INLINE T larger(T x, T y) { return x > y ? x : y; }
template <class T>
INLINE T smaller(T x, T y) { return x < y ? x : y; }

// In a fixed order of lanes, as everything here: results must not depend on who else is there.
INLINE float sum_of(Vec x) {
    for (int step = LANES / 2; step > 0; step /= 2) {
        for (int lane = 0; lane < step; lane++) x[lane] += x[lane + step];
    }
    return x[0];
}

INLINE float largest_of(Vec x) {
    for (int step = LANES / 2; step > 0; step /= 2) {
        for (int lane = 0; lane < step; lane++) {
            x[lane] = x[lane] > x[lane + step] ? x[lane] : x[lane + step];
        }
    }
    return x[0];
}

// 2 ** x, relative error below 3e-7; at most 2 ** 127, and 0 below 2 ** -126: arithmetic on
// denormals is some 30 times slower.
INLINE Vec exp2_of(Vec x) {
    // In this order of arguments NaN stays NaN.
    x = smaller(all(127.0f), x);
#if defined(__AVX512BF16__)
    Vec rest = (Vec)_mm512_reduce_ps((__m512)x, 0);  // from the nearest integer
#else
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const Vec magic = all(12582912.0f);
    Vec clamped = larger(all(-126.0f), x), shifted = clamped + magic;
    Vec rest = clamped - (shifted - magic);
#endif
    Vec value = all(1.5403530e-4f);
    value = value * rest + 1.3333558e-3f;
    value = value * rest + 9.6181291e-3f;
    value = value * rest + 5.5504109e-2f;
    value = value * rest + 2.4022651e-1f;
    value = value * rest + 6.9314718e-1f;
    value = value * rest + 1.0f;
#if defined(__AVX512BF16__)
    return (Vec)_mm512_scalef_ps((__m512)value, (__m512)(x - rest));
#else
    Vec power = (Vec)(((VecI)shifted << 23) + 0x3f800000);
    return x < -126.0f ? Vec{} : value * power;
#endif
}

// 1 / x, to the last bit or two; a division takes as long as 10 products.
INLINE Vec inverse_of(Vec x) {
#if defined(__AVX512BF16__)
    Vec y = (Vec)_mm512_rcp14_ps((__m512)x);
    return y + y * (1.0f - x * y);
#else
    return 1.0f / x;
#endif
}

// acc + a0 * b0 + a1 * b1, for LANES pairs of bf16 on each side.
typedef uint32_t Pairs __attribute__((vector_size(4 * LANES)));

INLINE Pairs load_pairs(const bf16* from) { return load_as<Pairs>(from); }
INLINE Pairs all_pairs(const bf16* from) { return load_as<uint32_t>(from) - Pairs{}; }

INLINE Vec dot(Vec acc, Pairs a, Pairs b) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (Vec)(a << 16) * (Vec)(b << 16);
    return acc + (Vec)(a & 0xffff0000) * (Vec)(b & 0xffff0000);
#endif
}
