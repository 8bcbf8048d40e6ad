/* Vectors of LANES values. Each source is compiled three times: with AVX512 defined, with AVX2, and with neither, for any
 * processor whose vectors have 128 bits (NEON of ARM, SSE of x86-64). Without BUILT the file has no content: the
 * compiler is not for such a processor.
 *
 * Arithmetic is by operators, also that of integers. A comparison returns a mask, which has a bit or a lane a value.
 */

#if !defined(AVX512) && !defined(AVX2)
#ifdef __GNUC__
#define BUILT
#endif
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define BUILT
#endif

#ifdef BUILT

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(AVX512)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define LANES 16
#elif defined(AVX2)
#pragma GCC target("avx2,fma")
#define LANES 8
#else
#define LANES 4
#endif

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

#if defined(AVX512)

typedef __m512 Floats;
typedef __m512d Doubles; /* of half the lanes */
typedef __mmask16 Mask;

INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Ints lane_numbers(void) { return (Ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE Floats load(const float *from) { return _mm512_loadu_ps(from); }
INLINE Bits load_bits(const void *from) { return (Bits)_mm512_loadu_si512(from); }
INLINE void store(float *to, Floats x) { _mm512_storeu_ps(to, x); }

/* The first `count` lanes. */
INLINE Mask first(int count) { return count >= LANES ? 0xffff : (Mask)((1u << count) - 1); }
INLINE Floats load_first(int count, const float *from, float rest) {
    return _mm512_mask_loadu_ps(all(rest), first(count), from);
}
INLINE void store_first(int count, float *to, Floats x) { _mm512_mask_storeu_ps(to, first(count), x); }

/* If one of two is NaN, `larger` and `smaller` return the second. */
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats rounded(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE Floats times_2_to(Floats n, Floats x) { return _mm512_scalef_ps(x, n); } /* n is an integer */
INLINE Floats of_unsigned(Bits x) { return _mm512_cvtepu32_ps((__m512i)x); }

INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
INLINE float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
INLINE float smallest_of(Floats x) { return _mm512_reduce_min_ps(x); }
INLINE Doubles low_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
INLINE Doubles high_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
INLINE double sum_of_doubles(Doubles x) { return _mm512_reduce_add_pd(x); }

INLINE Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
INLINE Mask is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE Mask is_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE Mask is_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE uint32_t lanes_of(Mask mask) { return mask; } /* a bit for each */
INLINE Floats zero_unless(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }

/* The values in the lanes of the mask, one after the other; LANES values are written. */
INLINE void compress(Mask mask, float *to, Floats x, int32_t *ids_to, Ints ids) {
    store(to, _mm512_maskz_compress_ps(mask, x));
    _mm512_storeu_si512(ids_to, _mm512_maskz_compress_epi32(mask, (__m512i)ids));
}

/* Of pairs of neighbours: exchanged; the first, or the second, in both places; a * b - c, then a * b + c. */
INLINE Floats exchanged(Floats x) { return _mm512_permute_ps(x, 0xb1); }
INLINE Floats firsts(Floats x) { return _mm512_moveldup_ps(x); }
INLINE Floats seconds(Floats x) { return _mm512_movehdup_ps(x); }
INLINE Floats multiply_sub_add(Floats a, Floats b, Floats c) { return _mm512_fmaddsub_ps(a, b, c); }

INLINE Bits load_halves(const uint16_t *from) {
    return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

#elif defined(AVX2)

typedef __m256 Floats;
typedef __m256d Doubles;
typedef __m256 Mask;

INLINE Floats all(float x) { return _mm256_set1_ps(x); }
INLINE Ints lane_numbers(void) { return (Ints){0, 1, 2, 3, 4, 5, 6, 7}; }
INLINE Floats load(const float *from) { return _mm256_loadu_ps(from); }
INLINE Bits load_bits(const void *from) { return (Bits)_mm256_loadu_si256(from); }
INLINE void store(float *to, Floats x) { _mm256_storeu_ps(to, x); }

INLINE __m256i first(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), (__m256i)lane_numbers()); }
INLINE Floats load_first(int count, const float *from, float rest) {
    if (count >= LANES) return load(from);
    return _mm256_blendv_ps(all(rest), _mm256_maskload_ps(from, first(count)), (Mask)first(count));
}
INLINE void store_first(int count, float *to, Floats x) {
    if (count >= LANES) store(to, x);
    else _mm256_maskstore_ps(to, first(count), x); /* slow on some processors */
}

INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Floats times_2_to(Floats n, Floats x) { /* in two steps, as 2^n may be too small; only the second one rounds */
    Ints both = (Ints)_mm256_cvtps_epi32(n), half = both >> 1;
    return x * (Floats)((half + 127) << 23) * (Floats)((both - half + 127) << 23);
}
INLINE Floats of_unsigned(Bits x) {
    Floats high = _mm256_cvtepi32_ps((__m256i)(x >> 16)), low = _mm256_cvtepi32_ps((__m256i)(x & 0xffff));
    return multiply_add(high, all(65536.0f), low);
}

INLINE float sum_of(Floats x) {
    __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1), two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
}
INLINE float largest_of(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
}
INLINE float smallest_of(Floats x) { return -largest_of(-x); }
INLINE Doubles low_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
INLINE Doubles high_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
INLINE double sum_of_doubles(Doubles x) { return x[0] + x[1] + (x[2] + x[3]); }

INLINE Mask is_nan(Floats x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
INLINE Mask is_equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
INLINE Mask is_above(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE Mask is_at_least(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
INLINE uint32_t lanes_of(Mask mask) { return (uint32_t)_mm256_movemask_ps(mask); }
INLINE Floats zero_unless(Mask mask, Floats x) { return _mm256_and_ps(mask, x); }

INLINE Floats exchanged(Floats x) { return _mm256_permute_ps(x, 0xb1); }
INLINE Floats firsts(Floats x) { return _mm256_moveldup_ps(x); }
INLINE Floats seconds(Floats x) { return _mm256_movehdup_ps(x); }
INLINE Floats multiply_sub_add(Floats a, Floats b, Floats c) { return _mm256_fmaddsub_ps(a, b, c); }

INLINE Bits load_halves(const uint16_t *from) {
    return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

#else

typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));
typedef Ints Mask;

INLINE Floats all(float x) { return (Floats){x, x, x, x}; }
INLINE Ints lane_numbers(void) { return (Ints){0, 1, 2, 3}; }
INLINE Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE Bits load_bits(const void *from) { return (Bits)load(from); }
INLINE void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

INLINE Floats load_first(int count, const float *from, float rest) {
    if (count >= LANES) return load(from);
    return (Floats){count > 0 ? from[0] : rest, count > 1 ? from[1] : rest, count > 2 ? from[2] : rest, rest};
}
INLINE void store_first(int count, float *to, Floats x) {
    if (count >= LANES) store(to, x);
    else if (count > 0) memcpy(to, &x, (size_t)count * sizeof(float));
}

INLINE Floats zero_unless(Mask mask, Floats x) { return (Floats)(mask & (Ints)x); }
INLINE Floats chosen(Mask mask, Floats a, Floats b) { return (Floats)((mask & (Ints)a) | (~mask & (Ints)b)); }
INLINE Floats larger(Floats a, Floats b) { return chosen(a > b, a, b); }
INLINE Floats smaller(Floats a, Floats b) { return chosen(a < b, a, b); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats rounded(Floats x) { return x + 0x1.8p23f - 0x1.8p23f; } /* to even; |x| is below 2^22 */
INLINE Floats times_2_to(Floats n, Floats x) {
    Ints both = __builtin_convertvector(n, Ints), half = both >> 1;
    return x * (Floats)((half + 127) << 23) * (Floats)((both - half + 127) << 23);
}
INLINE Floats of_unsigned(Bits x) { return __builtin_convertvector(x, Floats); }

INLINE float sum_of(Floats x) { return x[0] + x[2] + (x[1] + x[3]); }
INLINE float largest_of(Floats x) {
    x = larger(x, (Floats){x[2], x[3], x[0], x[1]});
    return x[0] > x[1] ? x[0] : x[1];
}
INLINE float smallest_of(Floats x) { return -largest_of(-x); }
INLINE Doubles low_doubles(Floats x) { return (Doubles){x[0], x[1]}; }
INLINE Doubles high_doubles(Floats x) { return (Doubles){x[2], x[3]}; }
INLINE double sum_of_doubles(Doubles x) { return x[0] + x[1]; }

INLINE Mask is_nan(Floats x) { return x != x; }
INLINE Mask is_equal(Floats a, Floats b) { return a == b; }
INLINE Mask is_above(Floats a, Floats b) { return a > b; }
INLINE Mask is_at_least(Floats a, Floats b) { return a >= b; }
INLINE uint32_t lanes_of(Mask mask) {
    mask &= (Ints){1, 2, 4, 8};
    return (uint32_t)(mask[0] | mask[1] | mask[2] | mask[3]);
}

INLINE Floats exchanged(Floats x) { return (Floats){x[1], x[0], x[3], x[2]}; }
INLINE Floats firsts(Floats x) { return (Floats){x[0], x[0], x[2], x[2]}; }
INLINE Floats seconds(Floats x) { return (Floats){x[1], x[1], x[3], x[3]}; }
INLINE Floats multiply_sub_add(Floats a, Floats b, Floats c) { return a * b + c * (Floats){-1.0f, 1.0f, -1.0f, 1.0f}; }

INLINE Bits load_halves(const uint16_t *from) { return (Bits){from[0], from[1], from[2], from[3]}; }

#endif

#ifndef AVX512
INLINE void compress(Mask mask, float *to, Floats x, int32_t *ids_to, Ints ids) {
    for (uint32_t left = lanes_of(mask); left; left &= left - 1, to++, ids_to++)
        *to = x[__builtin_ctz(left)], *ids_to = ids[__builtin_ctz(left)];
}
#endif

/* For a thread that waits for another one. */
INLINE void wait_a_little(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* e^x within 2 units in the last place, for x up to 88; 0 below -104. NaN stays NaN. */
INLINE Floats exponential(Floats x) {
    x = larger(all(-104.0f), smaller(all(88.0f), x));
    Floats n = rounded(x * 1.44269504f);
    Floats r = multiply_add(n, all(-0.693359375f), x);
    r = multiply_add(n, all(2.12194440e-4f), r);
    Floats y = all(1.9875691500e-4f);
    y = multiply_add(y, r, all(1.3981999507e-3f));
    y = multiply_add(y, r, all(8.3334519073e-3f));
    y = multiply_add(y, r, all(4.1665795894e-2f));
    y = multiply_add(y, r, all(1.6666665459e-1f));
    y = multiply_add(y, r, all(5.0000001201e-1f));
    y = multiply_add(y, r * r, r + 1.0f);
    return times_2_to(n, y);
}

#endif
