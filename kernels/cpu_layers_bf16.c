/* The layers with weights in bfloat16, for processors with AVX512-BF16. Inputs of a product are rounded to bfloat16. */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

#include "cpu_decoder.h"

#pragma GCC target("avx512bf16")

typedef uint16_t bf16;

typedef __m512bh Factors;

INLINE __m512 read(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void write(bf16 *to, __m512 value) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(value));
}

INLINE Factors weights_at(const bf16 *panel) { return (Factors)_mm512_loadu_si512(panel); }

INLINE Factors inputs_at(const bf16 *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    return (Factors)_mm512_set1_epi32(two);
}

INLINE __m512 add_products(__m512 sum, Factors weights, Factors inputs) {
    return _mm512_dpbf16_ps(sum, weights, inputs);
}

#define ELEMENT bf16
#define TOGETHER 2
#define RUN decoder_run_bf16
#define SCRATCH decoder_scratch_bf16

#include "cpu_layers.h"

#endif
