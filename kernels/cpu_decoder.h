/* What the parts of the decoder in C share: `cpu_decoder.c` divides a pass between threads, `cpu_layers.h` runs its
 * layers, and `cpu_decode_loop.c` draws tokens.
 */

#include "cpu_vectors.h"

#ifdef BUILT

#define PANEL 32 /* outputs of a panel of weights */

/* Weights of a product are panels, with outputs filled up with zeros: bfloat16 [outputs / 32, inputs / 2, 32, 2], or
 * float32 [outputs / 32, inputs, 32, 1]. Inputs are float32; with BF16_DOT they are rounded to bfloat16, as the dot
 * product of AVX512-BF16 takes them.
 */
enum { F32, BF16, BF16_DOT };

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
    int32_t weights;       /* F32, BF16 or BF16_DOT */
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

/* One thread's part of a pass, and the bytes of scratch memory that a pass needs, by the kind of weights. */
void decoder_run_f32(const Model *model, const Pass *pass, int thread);
void decoder_run_bf16(const Model *model, const Pass *pass, int thread);
void decoder_run_bf16_dot(const Model *model, const Pass *pass, int thread);
int64_t decoder_scratch_f32(const Model *model, const Pass *pass);
int64_t decoder_scratch_bf16(const Model *model, const Pass *pass);
int64_t decoder_scratch_bf16_dot(const Model *model, const Pass *pass);

/* All threads of the pass have arrived when it returns. */
void decoder_barrier(int threads);

#endif
