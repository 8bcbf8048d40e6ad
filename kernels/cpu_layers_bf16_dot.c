/* The layers with weights in bfloat16, by the dot product of AVX512-BF16, which rounds inputs to bfloat16. */

#ifdef AVX512

#include "cpu_decoder.h"

#ifdef BUILT

#pragma GCC target("avx512bf16")

typedef uint16_t Weight, Input;
typedef __m512bh Factors; /* two inputs for each output */

INLINE Floats read(const Weight *from) { return (Floats)(load_halves(from) << 16); }
INLINE void write(Input *to, Floats x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE Factors weights_at(const Weight *panel, int part) { return (Factors)load_bits(panel); }

INLINE Factors inputs_at(const Input *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    return (Factors)_mm512_set1_epi32(two);
}

INLINE Floats add_products(Floats sum, Factors weights, Factors inputs) {
    return _mm512_dpbf16_ps(sum, weights, inputs);
}

#define STEP 2
#define PARTS 1
#define RUN decoder_run_bf16_dot
#define SCRATCH decoder_scratch_bf16_dot

#include "cpu_layers.h"

#endif
#endif
