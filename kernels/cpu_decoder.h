/* What the parts of the decoder in C share: `cpu_decoder.c` divides a pass between threads, `cpu_layers.h` runs its
 * layers, and `cpu_decode_loop.c` draws tokens.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")

#define INLINE static inline __attribute__((always_inline))

#define PANEL 32 /* outputs of a panel of weights */

/* Weights of a product are panels, with outputs filled up with zeros: bfloat16 [outputs / 32, inputs / 2, 32, 2], or
 * float32 [outputs / 32, inputs, 32, 1].
 */
typedef struct {
    const float *attention_norm, *mlp_norm;        /* [hidden] */
    const void *qkv, *output, *gate_up, *down;     /* gate_up: panels of gate and of up by turns */
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias; /* as the outputs of the panels; or NULL */
    const float *head_norm;                        /* [heads + kv_heads, head_dim], or NULL */
    float scaling;
    int32_t window;                                /* positions that a row sees; 0: all */
} Layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, mlp /* a multiple of 32 */, vocab_size;
    int32_t is_bf16;       /* weights are bfloat16, else float32 */
    float eps;
    const void *embedding; /* [vocab_size, hidden] */
    const float *norm;     /* [hidden] */
    const void *head;
    const float *head_bias;
    const Layer *layer;
} Model;

typedef struct {
    int32_t rows, wanted, threads, block_tokens /* a multiple of 16 */;
    int32_t longest;              /* positions of the longest sequence */
    const int64_t *tokens;        /* [rows] */
    /* One after the other: the position of each row in its sequence, where the blocks of its sequence begin in
     * `blocks`, the rows whose logits are wanted, and the blocks of all sequences. */
    const int32_t *positions;
    const float *rotations;       /* [positions, head_dim / 2, 2]: cosine, sine */
    float *memory;                /* [layers, 2, kv_heads, places, head_dim]; keys [places / 16, head_dim, 16] */
    int64_t places;
    float *logits;                /* [wanted, vocab_size] */
    char *scratch;                /* `decoder_scratch` bytes, aligned to 64 */
} Pass;

INLINE const int32_t *first_blocks(const Pass *pass) { return pass->positions + pass->rows; }
INLINE const int32_t *wanted_rows(const Pass *pass) { return first_blocks(pass) + pass->rows; }
INLINE const int32_t *blocks(const Pass *pass) { return wanted_rows(pass) + pass->wanted; }

/* Runs a pass. Keys and values of its rows are in memory afterwards. */
void decoder_run(const Model *model, Pass *pass);

/* One thread's part of a pass, and the bytes of scratch memory that a pass needs, by the dtype of the weights. */
void decoder_run_bf16(const Model *model, const Pass *pass, int thread);
void decoder_run_f32(const Model *model, const Pass *pass, int thread);
int64_t decoder_scratch_bf16(const Model *model, const Pass *pass);
int64_t decoder_scratch_f32(const Model *model, const Pass *pass);

/* All threads of the pass have arrived when it returns. */
void decoder_barrier(int threads);

/* e^x within 2 units in the last place, for x up to 88; 0 below -104. NaN stays NaN: both bounds return the second
 * operand then. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), x));
    __m512 n = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    n = _mm512_roundscale_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}
