/* The layers with weights in float32, for processors with AVX512. */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

#include "cpu_decoder.h"

typedef __m512 Factors;

INLINE __m512 read(const float *from) { return _mm512_loadu_ps(from); }
INLINE void write(float *to, __m512 value) { _mm512_storeu_ps(to, value); }
INLINE Factors weights_at(const float *panel) { return _mm512_loadu_ps(panel); }
INLINE Factors inputs_at(const float *x) { return _mm512_set1_ps(*x); }

INLINE __m512 add_products(__m512 sum, Factors weights, Factors inputs) {
    return _mm512_fmadd_ps(weights, inputs, sum);
}

#define ELEMENT float
#define TOGETHER 1
#define RUN decoder_run_f32
#define SCRATCH decoder_scratch_f32

#include "cpu_layers.h"

#endif
