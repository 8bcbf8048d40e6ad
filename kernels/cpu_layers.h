/* A pass over all layers, for one type of weights. `cpu_layers_bf16.c` and `cpu_layers_f32.c` include this file. Before
 * that they define
 *   ELEMENT: the type of weights and of inputs of products;
 *   TOGETHER: how many inputs one instruction multiplies;
 *   Factors: a vector of weights, or of one input; TOGETHER for each of 16 outputs;
 *   read, write, weights_at, inputs_at, add_products: on elements;
 *   RUN, SCRATCH: names of the functions that this file defines.
 */

#define VECTORS (PANEL / 16)
#define MOST_ROWS 12  /* of one walk over a panel: 12 * 2 sums, 2 weights and an input fit 32 registers */

/* A walk over so many rows takes longer than its weights take to be read, so it asks for them this many bytes ahead. With
 * fewer rows memory is the bound, and the processor's own prefetching is better. */
#define PREFETCH_ROWS 7
#define PREFETCH_BYTES 8192

typedef struct {
    float *x, *qkv;           /* [rows, hidden], [rows, (heads + 2 kv_heads) head_dim] */
    ELEMENT *attended, *mid;  /* [rows, heads * head_dim], [rows, mlp] */
    ELEMENT *normed;          /* of this thread: [rows, hidden] */
    float *scores;            /* of this thread: [heads / kv_heads, longest + 32] */
} Scratch;

/* ------------------------------------------------------------------------------------------------------- products */

/* `rows` rows of x times one panel, into `out` or added to it; only the first `columns` outputs. */
INLINE void multiply(const int rows, const ELEMENT *panel, const ELEMENT *x, int64_t inputs, const float *bias,
                     float *out, int64_t stride, int columns, int adds) {
    __m512 sum[MOST_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int b = 0; b < VECTORS; b++) sum[r][b] = bias ? _mm512_loadu_ps(bias + 16 * b) : _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += TOGETHER, panel += TOGETHER * PANEL) {
        if (rows >= PREFETCH_ROWS)
            for (int b = 0; b < VECTORS; b++)
                _mm_prefetch((const char *)(panel + 16 * TOGETHER * b) + PREFETCH_BYTES, _MM_HINT_T1);
        Factors weight[VECTORS];
#pragma GCC unroll 2
        for (int b = 0; b < VECTORS; b++) weight[b] = weights_at(panel + 16 * TOGETHER * b);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            Factors input = inputs_at(x + r * inputs + i);
#pragma GCC unroll 2
            for (int b = 0; b < VECTORS; b++) sum[r][b] = add_products(sum[r][b], weight[b], input);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int b = 0; b < VECTORS; b++) {
            int left = columns - 16 * b;
            if (left <= 0) continue;
            __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
            float *to = out + r * stride + 16 * b;
            __m512 value = adds ? _mm512_add_ps(sum[r][b], _mm512_maskz_loadu_ps(mask, to)) : sum[r][b];
            _mm512_mask_storeu_ps(to, mask, value);
        }
}

/* Rows of the next walk over a panel, of `left` rows: walks are about equally long. */
static int rows_of_walk(int left) {
    int walks = (left + MOST_ROWS - 1) / MOST_ROWS;
    return (left + walks - 1) / walks;
}

#define MULTIPLY(n) case n: multiply(n, panel, x, inputs, bias, out, stride, columns, adds); break;

/* All rows of x [rows, inputs] times one panel. */
static void product(int rows, const ELEMENT *panel, const ELEMENT *x, int64_t inputs, const float *bias, float *out,
                    int64_t stride, int columns, int adds) {
    while (rows) {
        int count = rows_of_walk(rows);
        switch (count) {
            MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4) MULTIPLY(5) MULTIPLY(6)
            MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
        }
        x += count * inputs, out += count * stride, rows -= count;
    }
}

/* This thread's panels of a product: out [rows, outputs]. */
static void products(const Pass *pass, int thread, int rows, const ELEMENT *weight, const ELEMENT *x, int64_t inputs,
                     const float *bias, float *out, int64_t outputs, int adds) {
    int64_t panels = (outputs + PANEL - 1) / PANEL;
    int first = (int)(panels * thread / pass->threads), end = (int)(panels * (thread + 1) / pass->threads);
    for (int i = first; i < end; i++) {
        int64_t column = (int64_t)i * PANEL, left = outputs - column;
        product(rows, weight + column * inputs, x, inputs, bias ? bias + column : NULL, out + column, outputs,
                (int)(left < PANEL ? left : PANEL), adds);
    }
}

/* ---------------------------------------------------------------------------------------------------------- parts */

/* What an RMS norm multiplies x by, beside its weight. */
INLINE __m512 norm_scale(const float *x, int size, float eps) {
    __m512 square = _mm512_setzero_ps();
    for (int i = 0; i < size; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        square = _mm512_fmadd_ps(v, v, square);
    }
    return _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(square) / (float)size + eps));
}

INLINE __m512 normed(const float *x, __m512 scale, const float *weight) {
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), scale), _mm512_loadu_ps(weight));
}

static void norm(const float *x, const float *weight, int size, float eps, ELEMENT *out) {
    __m512 scale = norm_scale(x, size, eps);
    for (int i = 0; i < size; i += 16) write(out + i, normed(x + i, scale, weight + i));
}

static void norm_rows(const Model *model, const float *x, const float *weight, int rows, ELEMENT *out) {
    int64_t hidden = model->hidden;
    for (int row = 0; row < rows; row++) norm(x + row * hidden, weight, hidden, model->eps, out + row * hidden);
}

/* As `norm`, of one head, in place and in float32. */
static void head_norm(float *x, const float *weight, int size, float eps) {
    __m512 scale = norm_scale(x, size, eps);
    for (int i = 0; i < size; i += 16) _mm512_storeu_ps(x + i, normed(x + i, scale, weight + i));
}

/* The elements of a rotated pair are neighbours. */
static void rotate(float *x, const float *rotation, int size) {
    for (int i = 0; i < size; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i), both = _mm512_loadu_ps(rotation + i);
        __m512 crossed = _mm512_mul_ps(_mm512_permute_ps(v, 0xb1), _mm512_movehdup_ps(both));
        _mm512_storeu_ps(x + i, _mm512_fmaddsub_ps(v, _mm512_moveldup_ps(both), crossed));
    }
}

INLINE int64_t place_of(const Pass *pass, int row, int position) {
    int size = pass->block_tokens;
    return (int64_t)blocks(pass)[first_blocks(pass)[row] + position / size] * size + position % size;
}

/* Where element `at` of a key is. Of 16 positions that follow each other, the same elements are neighbours: a product with
 * one element of a query adds to 16 scores. */
INLINE int64_t place_of_key(int64_t place, int size, int at) { return place / 16 * 16 * size + at * 16 + place % 16; }

/* Queries and keys of a row are normed and rotated; its key and value go to memory. */
static void place_row(const Model *model, const Pass *pass, const Layer *layer, float *memory, float *qkv, int row) {
    int size = model->head_dim, heads = model->heads, kv_heads = model->kv_heads, position = pass->positions[row];
    for (int h = 0; h < heads + kv_heads; h++) {
        if (layer->head_norm) head_norm(qkv + h * size, layer->head_norm + h * size, size, model->eps);
        rotate(qkv + h * size, pass->rotations + (int64_t)position * size, size);
    }
    int64_t place = place_of(pass, row, position);
    const float *own = qkv + heads * size;
    for (int h = 0; h < kv_heads; h++, own += size)
        for (int at = 0; at < size; at++) memory[h * pass->places * size + place_of_key(place, size, at)] = own[at];
    for (int h = kv_heads; h < 2 * kv_heads; h++, own += size)
        memcpy(memory + (h * pass->places + place) * size, own, size * sizeof(float));
}

/* Scores of `heads` query heads and 16 * `vectors` positions. */
INLINE void score(const int heads, const int vectors, const float *const *keys, int size, const float *query,
                  __m512 scaling, float *out, int64_t stride) {
    __m512 sum[5][4];
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int b = 0; b < vectors; b++) sum[g][b] = _mm512_setzero_ps();
    for (int at = 0; at < size; at++) {
        __m512 key[4];
#pragma GCC unroll 4
        for (int b = 0; b < vectors; b++) key[b] = _mm512_loadu_ps(keys[b] + 16 * at);
#pragma GCC unroll 5
        for (int g = 0; g < heads; g++) {
            __m512 q = _mm512_set1_ps(query[g * size + at]);
#pragma GCC unroll 4
            for (int b = 0; b < vectors; b++) sum[g][b] = _mm512_fmadd_ps(q, key[b], sum[g][b]);
        }
    }
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int b = 0; b < vectors; b++)
            _mm512_storeu_ps(out + g * stride + 16 * b, _mm512_mul_ps(sum[g][b], scaling));
}

#define SCORE(heads, vectors) \
    case heads: score(heads, vectors, key, size, query + g * size, scaling, scores + g * stride + j, stride); break;
#define SCORE_CASES(vectors) \
    switch (count) { SCORE(1, vectors) SCORE(2, vectors) SCORE(3, vectors) SCORE(4, vectors) SCORE(5, vectors) }

/* Values times shares, for `heads` query heads and 16 * `vectors` elements. `scores` begin at position `base`. */
INLINE void weigh(const int heads, const int vectors, const Pass *pass, int row, int base, int first, int end,
                  const float *values, int size, const float *scores, int64_t stride, const float *scale,
                  ELEMENT *out) {
    __m512 sum[5][4];
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int b = 0; b < vectors; b++) sum[g][b] = _mm512_setzero_ps();
    for (int position = first; position < end;) {
        int rest = pass->block_tokens - position % pass->block_tokens;
        int count = rest < end - position ? rest : end - position;
        const float *value = values + place_of(pass, row, position) * size;
        for (int j = position - base; count--; j++, position++, value += size) {
#pragma GCC unroll 5
            for (int g = 0; g < heads; g++) {
                __m512 share = _mm512_set1_ps(scores[g * stride + j]);
#pragma GCC unroll 4
                for (int b = 0; b < vectors; b++)
                    sum[g][b] = _mm512_fmadd_ps(share, _mm512_loadu_ps(value + 16 * b), sum[g][b]);
            }
        }
    }
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int b = 0; b < vectors; b++)
            write(out + g * size + 16 * b, _mm512_mul_ps(sum[g][b], _mm512_set1_ps(scale[g])));
}

#define WEIGH(heads, vectors) \
    case heads: \
        weigh(heads, vectors, pass, row, base, first, end, values + at, size, scores + g * stride, stride, scale, \
              out + g * size + at); \
        break;
#define WEIGH_CASES(vectors) \
    switch (count) { WEIGH(1, vectors) WEIGH(2, vectors) WEIGH(3, vectors) WEIGH(4, vectors) WEIGH(5, vectors) }

/* Attention of one row, for the query heads of one head of keys. */
static void attend(const Model *model, const Pass *pass, const Layer *layer, const float *memory, const float *query,
                   float *scores, ELEMENT *out, int row, int kv_head) {
    int size = model->head_dim, group = model->heads / model->kv_heads, end = pass->positions[row] + 1;
    int first = layer->window && layer->window < end ? end - layer->window : 0;
    int base = first / 16 * 16, seen = end - base; /* so that the order of a sum depends on the positions alone */
    int64_t stride = pass->longest + 32;
    const float *keys = memory + kv_head * pass->places * size, *values = keys + model->kv_heads * pass->places * size;
    __m512 scaling = _mm512_set1_ps(layer->scaling);
    query += kv_head * group * size, out += kv_head * group * size;
    for (int j = 0, vectors; j < seen; j += 16 * vectors) {
        const float *key[4];
        vectors = j + 48 < seen ? 4 : j + 16 < seen ? 2 : 1;
        for (int b = 0; b < vectors; b++) key[b] = keys + place_of(pass, row, base + j + 16 * b) * size;
        for (int g = 0; g < group; g += 5) {
            int count = group - g < 5 ? group - g : 5;
            if (vectors == 4) SCORE_CASES(4) else if (vectors == 2) SCORE_CASES(2) else SCORE_CASES(1)
        }
    }
    for (int g = 0; g < group; g += 5) {
        int count = group - g < 5 ? group - g : 5;
        float scale[5];
        for (int i = 0; i < count; i++) {
            float *own = scores + (g + i) * stride;
            for (int j = 0; j < first - base; j++) own[j] = -INFINITY;
            for (int j = seen; j % 16; j++) own[j] = -INFINITY;
            __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
            for (int j = 0; j < seen; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(own + j));
            most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
            for (int j = 0; j < seen; j += 16) {
                __m512 share = exponential(_mm512_sub_ps(_mm512_loadu_ps(own + j), most));
                total = _mm512_add_ps(total, share);
                _mm512_storeu_ps(own + j, share);
            }
            scale[i] = 1.0f / _mm512_reduce_add_ps(total);
        }
        int at = 0;
        for (; at + 64 <= size; at += 64) WEIGH_CASES(4)
        for (; at < size; at += 16) WEIGH_CASES(1)
    }
}

/* This thread's panels of gate and up, and silu(gate) * up. */
static void gate_and_up(const Model *model, const Pass *pass, const Layer *layer, const ELEMENT *normed, ELEMENT *mid,
                        int thread) {
    int hidden = model->hidden, mlp = model->mlp;
    int64_t units = mlp / PANEL;
    int begin = (int)(units * thread / pass->threads), end = (int)(units * (thread + 1) / pass->threads);
    for (int unit = begin; unit < end; unit++) {
        const ELEMENT *gate = (const ELEMENT *)layer->gate_up + (int64_t)unit * 2 * PANEL * hidden;
        const ELEMENT *up = gate + (int64_t)PANEL * hidden;
        const float *bias = layer->gate_up_bias ? layer->gate_up_bias + (int64_t)unit * 2 * PANEL : NULL;
        for (int first = 0, count; first < pass->rows; first += count) {
            float gates[MOST_ROWS * PANEL], ups[MOST_ROWS * PANEL];
            count = rows_of_walk(pass->rows - first);
            const ELEMENT *x = normed + (int64_t)first * hidden;
            product(count, gate, x, hidden, bias, gates, PANEL, PANEL, 0);
            product(count, up, x, hidden, bias ? bias + PANEL : NULL, ups, PANEL, PANEL, 0);
            for (int i = 0; i < count * PANEL; i += 16) {
                __m512 g = _mm512_loadu_ps(gates + i), one = _mm512_set1_ps(1.0f);
                __m512 divisor = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), g)));
                __m512 value = _mm512_mul_ps(_mm512_div_ps(g, divisor), _mm512_loadu_ps(ups + i));
                write(mid + (int64_t)(first + i / PANEL) * mlp + (int64_t)unit * PANEL + i % PANEL, value);
            }
        }
    }
}

static Scratch scratch_of(const Model *model, const Pass *pass, int thread, int64_t *bytes) {
    int64_t rows = pass->rows, group = model->heads / model->kv_heads, used = 0;
    Scratch found;
#define TAKE(field, type, count) \
    found.field = (type *)(pass->scratch + used), used += ((int64_t)sizeof(type) * (count) + 63) / 64 * 64
    TAKE(x, float, rows * model->hidden);
    TAKE(qkv, float, rows * (model->heads + 2 * model->kv_heads) * model->head_dim);
    TAKE(attended, ELEMENT, rows * model->heads * model->head_dim);
    TAKE(mid, ELEMENT, rows * model->mlp);
    for (int i = 0; i <= thread; i++) {
        TAKE(normed, ELEMENT, rows * model->hidden);
        TAKE(scores, float, group * (pass->longest + 32));
    }
#undef TAKE
    if (bytes) *bytes = used;
    return found;
}

void RUN(const Model *model, const Pass *pass, int thread) {
    int rows = pass->rows, hidden = model->hidden, threads = pass->threads, size = model->head_dim;
    int width = (model->heads + 2 * model->kv_heads) * size, attended = model->heads * size;
    Scratch s = scratch_of(model, pass, thread, NULL);
    for (int row = thread; row < rows; row += threads)
        for (int i = 0; i < hidden; i += 16)
            _mm512_storeu_ps(s.x + (int64_t)row * hidden + i,
                             read((const ELEMENT *)model->embedding + pass->tokens[row] * hidden + i));
    decoder_barrier(threads);
    for (int n = 0; n < model->layers; n++) {
        const Layer *layer = model->layer + n;
        float *memory = pass->memory + (int64_t)n * 2 * model->kv_heads * pass->places * size;
        norm_rows(model, s.x, layer->attention_norm, rows, s.normed);
        products(pass, thread, rows, layer->qkv, s.normed, hidden, layer->qkv_bias, s.qkv, width, 0);
        decoder_barrier(threads);
        for (int row = thread; row < rows; row += threads)
            place_row(model, pass, layer, memory, s.qkv + (int64_t)row * width, row);
        decoder_barrier(threads);
        for (int task = thread; task < rows * model->kv_heads; task += threads) {
            int row = task / model->kv_heads;
            attend(model, pass, layer, memory, s.qkv + (int64_t)row * width, s.scores,
                   s.attended + (int64_t)row * attended, row, task % model->kv_heads);
        }
        decoder_barrier(threads);
        products(pass, thread, rows, layer->output, s.attended, attended, layer->output_bias, s.x, hidden, 1);
        decoder_barrier(threads);
        norm_rows(model, s.x, layer->mlp_norm, rows, s.normed);
        gate_and_up(model, pass, layer, s.normed, s.mid, thread);
        decoder_barrier(threads);
        products(pass, thread, rows, layer->down, s.mid, model->mlp, layer->down_bias, s.x, hidden, 1);
        decoder_barrier(threads);
    }
    for (int i = 0; i < pass->wanted; i++)
        norm(s.x + (int64_t)wanted_rows(pass)[i] * hidden, model->norm, hidden, model->eps,
             s.normed + (int64_t)i * hidden);
    products(pass, thread, pass->wanted, model->head, s.normed, hidden, model->head_bias, pass->logits,
             model->vocab_size, 0);
}

/* Bytes of scratch memory that a pass needs. */
int64_t SCRATCH(const Model *model, const Pass *pass) {
    int64_t bytes;
    scratch_of(model, pass, pass->threads - 1, &bytes);
    return bytes;
}
