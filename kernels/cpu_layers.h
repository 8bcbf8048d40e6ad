/* A pass over all layers, for one kind of weights: `cpu_layers_f32.c`, `cpu_layers_bf16.c` and `cpu_layers_bf16_dot.c`
 * include this file. Before that they define
 *   Weight, Input: the types of weights, and of inputs of products;
 *   Factors: a vector of weights, or of one input: what an instruction multiplies for LANES outputs;
 *   STEP: how many inputs lie together in a panel; PARTS: how many instructions multiply them;
 *   read, write, weights_at, inputs_at, add_products;
 *   RUN, SCRATCH: names of the functions that this file defines.
 */

#define VECTORS (PANEL / LANES)

/* Sums, weights and an input of a walk over a panel fit the registers: 32 of AVX512 and of ARM, 16 of AVX2. */
#ifdef AVX512
#define MOST_ROWS 14
#define MOST_WIDE_ROWS 14 /* with more rows a walk is over half of the outputs */
#define PREFETCH_ROWS 5   /* with fewer rows memory is the bound, and the processor's own prefetching is better */
#define HEAD_SUMS 4       /* vectors of sums for each of 5 query heads */
#else
#define MOST_ROWS 6
#define MOST_WIDE_ROWS 2
#define PREFETCH_ROWS 1
#define HEAD_SUMS (16 / LANES)
#endif

#define PREFETCH_BYTES 8192
#define MLP_ROWS 24 /* rows of gate and of up that are computed together */

typedef struct {
    float *x, *qkv;           /* [rows, hidden], [rows, (heads + 2 kv_heads) head_dim] */
    Input *attended, *mid;    /* [rows, heads * head_dim], [rows, mlp] */
    Input *normed;            /* of this thread: [rows, hidden] */
    float *scores;            /* of this thread: [heads / kv_heads, longest + 32] */
} Scratch;

/* ------------------------------------------------------------------------------------------------------- products */

/* `rows` rows of x times `vectors` vectors of a panel, into `out` or added to it; only the first `columns` outputs.
 * Each step prefetches `share` bytes, from `ahead` on. */
INLINE void multiply(const int rows, const int vectors, const Weight *panel, const Input *x, int64_t inputs,
                     const float *bias, float *out, int64_t stride, int columns, int adds, const char *ahead,
                     int64_t share) {
    Floats sum[MOST_ROWS][VECTORS];
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) sum[r][b] = bias ? load(bias + LANES * b) : all(0.0f);
    for (int64_t i = 0; i < inputs; i += STEP, panel += STEP * PANEL) {
        if (rows >= PREFETCH_ROWS) {
            __builtin_prefetch(ahead, 0, 2);
            if (share > 64) __builtin_prefetch(ahead + 64, 0, 2);
            ahead += share;
        }
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Factors weight[VECTORS];
#pragma GCC unroll 8
            for (int b = 0; b < vectors; b++) weight[b] = weights_at(panel + LANES * STEP * b, part);
#pragma GCC unroll 14
            for (int r = 0; r < rows; r++) {
                Factors input = inputs_at(x + r * inputs + i + part);
#pragma GCC unroll 8
                for (int b = 0; b < vectors; b++) sum[r][b] = add_products(sum[r][b], weight[b], input);
            }
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) {
            int left = columns - LANES * b;
            if (left <= 0) continue;
            float *to = out + r * stride + LANES * b;
            if (adds) sum[r][b] += load_first(left, to, 0.0f);
            store_first(left, to, sum[r][b]);
        }
}

/* A function for each number of rows: their sums stay in registers. */
#define WALK(n) \
    static __attribute__((noinline)) void walk_##n(const Weight *panel, const Input *x, int64_t inputs, \
                                                   const float *bias, float *out, int64_t stride, int columns, \
                                                   int adds, const char *ahead, int64_t share) { \
        multiply(n, (n) <= MOST_WIDE_ROWS ? VECTORS : VECTORS / 2, panel, x, inputs, bias, out, stride, columns, adds, \
                 ahead, share); \
    }
WALK(1) WALK(2) WALK(3) WALK(4) WALK(5) WALK(6)
#if MOST_ROWS > 6
WALK(7) WALK(8) WALK(9) WALK(10) WALK(11) WALK(12) WALK(13) WALK(14)
#endif

static void (*const walks_by_rows[])(const Weight *, const Input *, int64_t, const float *, float *, int64_t, int, int,
                                     const char *, int64_t) = {
    walk_1, walk_2, walk_3, walk_4, walk_5, walk_6,
#if MOST_ROWS > 6
    walk_7, walk_8, walk_9, walk_10, walk_11, walk_12, walk_13, walk_14,
#endif
};

/* All rows of x [rows, inputs] times one panel. Its weights are read from memory once: while several walks go over a
 * panel, each prefetches its share of the next one. A single walk prefetches what it reads a little later. */
static void product(int rows, const Weight *panel, const Input *x, int64_t inputs, const float *bias, float *out,
                    int64_t stride, int columns, int adds) {
    if (!rows) return;
    int walks = (rows + MOST_ROWS - 1) / MOST_ROWS, most = (rows + walks - 1) / walks;
    int vectors = most <= MOST_WIDE_ROWS ? VECTORS : VECTORS / 2, parts = walks * VECTORS / vectors;
    int64_t share = STEP * PANEL * (int64_t)sizeof(Weight) / parts;
    const char *ahead = parts == 1 ? (const char *)panel + PREFETCH_BYTES : (const char *)(panel + PANEL * inputs);
    for (int b = 0; b < VECTORS; b += vectors)
        for (int64_t row = 0, left = walks, count; left; left--, row += count, ahead += inputs / STEP * share) {
            count = (rows - row + left - 1) / left;
            walks_by_rows[count - 1](panel + STEP * LANES * b, x + row * inputs, inputs, bias ? bias + LANES * b : NULL,
                                     out + row * stride + LANES * b, stride, columns - LANES * b, adds, ahead, share);
        }
}

/* This thread's panels of a product: out [rows, outputs]. */
static void products(const Pass *pass, int thread, int rows, const Weight *weight, const Input *x, int64_t inputs,
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
INLINE float norm_scale(const float *x, int size, float eps) {
    Floats square = all(0.0f);
    for (int i = 0; i < size; i += LANES) square = multiply_add(load(x + i), load(x + i), square);
    return 1.0f / sqrtf(sum_of(square) / (float)size + eps);
}

INLINE Floats normed(const float *x, Floats scale, const float *weight) { return load(x) * scale * load(weight); }

static void norm(const float *x, const float *weight, int size, float eps, Input *out) {
    Floats scale = all(norm_scale(x, size, eps));
    for (int i = 0; i < size; i += LANES) write(out + i, normed(x + i, scale, weight + i));
}

static void norm_rows(const Model *model, const float *x, const float *weight, int rows, Input *out) {
    int64_t hidden = model->hidden;
    for (int row = 0; row < rows; row++) norm(x + row * hidden, weight, hidden, model->eps, out + row * hidden);
}

/* As `norm`, of one head, in place and in float32. */
static void head_norm(float *x, const float *weight, int size, float eps) {
    Floats scale = all(norm_scale(x, size, eps));
    for (int i = 0; i < size; i += LANES) store(x + i, normed(x + i, scale, weight + i));
}

/* The elements of a rotated pair are neighbours. */
static void rotate(float *x, const float *rotation, int size) {
    for (int i = 0; i < size; i += LANES) {
        Floats v = load(x + i), both = load(rotation + i);
        store(x + i, multiply_sub_add(v, firsts(both), exchanged(v) * seconds(both)));
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

/* Scores of `heads` query heads and LANES * `vectors` positions. */
INLINE void score(const int heads, const int vectors, const float *const *keys, int size, const float *query,
                  Floats scaling, float *out, int64_t stride) {
    Floats sum[5][HEAD_SUMS];
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) sum[g][b] = all(0.0f);
    for (int at = 0; at < size; at++) {
        Floats key[HEAD_SUMS];
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) key[b] = load(keys[b] + 16 * at);
#pragma GCC unroll 5
        for (int g = 0; g < heads; g++) {
            Floats q = all(query[g * size + at]);
#pragma GCC unroll 8
            for (int b = 0; b < vectors; b++) sum[g][b] = multiply_add(q, key[b], sum[g][b]);
        }
    }
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) store(out + g * stride + LANES * b, sum[g][b] * scaling);
}

#define SCORE(heads, vectors) \
    case heads: score(heads, vectors, key, size, query + g * size, scaling, scores + g * stride + j, stride); break;
#define SCORE_CASES(vectors) \
    switch (count) { SCORE(1, vectors) SCORE(2, vectors) SCORE(3, vectors) SCORE(4, vectors) SCORE(5, vectors) }

/* Values times shares, for `heads` query heads and LANES * `vectors` elements. `scores` begin at position `base`. */
INLINE void weigh(const int heads, const int vectors, const Pass *pass, int row, int base, int first, int end,
                  const float *values, int size, const float *scores, int64_t stride, const float *scale, Input *out) {
    Floats sum[5][HEAD_SUMS];
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) sum[g][b] = all(0.0f);
    for (int position = first; position < end;) {
        int rest = pass->block_tokens - position % pass->block_tokens;
        int count = rest < end - position ? rest : end - position;
        const float *value = values + place_of(pass, row, position) * size;
        for (int j = position - base; count--; j++, position++, value += size) {
#pragma GCC unroll 5
            for (int g = 0; g < heads; g++) {
                Floats share = all(scores[g * stride + j]);
#pragma GCC unroll 8
                for (int b = 0; b < vectors; b++)
                    sum[g][b] = multiply_add(share, load(value + LANES * b), sum[g][b]);
            }
        }
    }
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 8
        for (int b = 0; b < vectors; b++) write(out + g * size + LANES * b, sum[g][b] * scale[g]);
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
                   float *scores, Input *out, int row, int kv_head) {
    int size = model->head_dim, group = model->heads / model->kv_heads, end = pass->positions[row] + 1;
    int first = layer->window && layer->window < end ? end - layer->window : 0;
    int base = first / 16 * 16, seen = end - base; /* so that the order of a sum depends on the positions alone */
    int64_t stride = pass->longest + 32;
    const float *keys = memory + kv_head * pass->places * size, *values = keys + model->kv_heads * pass->places * size;
    Floats scaling = all(layer->scaling);
    query += kv_head * group * size, out += kv_head * group * size;
    for (int j = 0, vectors; j < seen; j += LANES * vectors) {
        const float *key[HEAD_SUMS];
        for (vectors = HEAD_SUMS; LANES * vectors - 16 >= seen - j;) vectors /= 2; /* whole blocks of keys */
        for (int b = 0; b < vectors; b++)
            key[b] = keys + place_of_key(place_of(pass, row, base + j + LANES * b), size, 0);
        for (int g = 0; g < group; g += 5) {
            int count = group - g < 5 ? group - g : 5;
            if (vectors == HEAD_SUMS) SCORE_CASES(HEAD_SUMS)
#ifdef AVX512
            else if (vectors == 2) SCORE_CASES(2)
            else SCORE_CASES(1)
#endif
        }
    }
    for (int g = 0; g < group; g += 5) {
        int count = group - g < 5 ? group - g : 5;
        float scale[5];
        for (int i = 0; i < count; i++) {
            float *own = scores + (g + i) * stride;
            for (int j = 0; j < first - base; j++) own[j] = -INFINITY;
            for (int j = seen; j % 16; j++) own[j] = -INFINITY;
            Floats most = all(-INFINITY), total = all(0.0f);
            for (int j = 0; j < seen; j += LANES) most = larger(most, load(own + j));
            most = all(largest_of(most));
            for (int j = 0; j < seen; j += LANES) {
                Floats share = exponential(load(own + j) - most);
                total += share;
                store(own + j, share);
            }
            scale[i] = 1.0f / sum_of(total);
        }
        int at = 0;
        for (; at + LANES * HEAD_SUMS <= size; at += LANES * HEAD_SUMS) WEIGH_CASES(HEAD_SUMS)
#ifdef AVX512
        for (; at < size; at += LANES) WEIGH_CASES(1)
#endif
    }
}

/* This thread's panels of gate and up, and silu(gate) * up. */
static void gate_and_up(const Model *model, const Pass *pass, const Layer *layer, const Input *normed, Input *mid,
                        int thread) {
    int hidden = model->hidden, mlp = model->mlp;
    int64_t units = mlp / PANEL;
    int begin = (int)(units * thread / pass->threads), end = (int)(units * (thread + 1) / pass->threads);
    for (int unit = begin; unit < end; unit++) {
        const Weight *gate = (const Weight *)layer->gate_up + (int64_t)unit * 2 * PANEL * hidden;
        const Weight *up = gate + (int64_t)PANEL * hidden;
        const float *bias = layer->gate_up_bias ? layer->gate_up_bias + (int64_t)unit * 2 * PANEL : NULL;
        for (int first = 0, count; first < pass->rows; first += count) {
            float gates[MLP_ROWS * PANEL], ups[MLP_ROWS * PANEL];
            count = pass->rows - first < MLP_ROWS ? pass->rows - first : MLP_ROWS;
            const Input *x = normed + (int64_t)first * hidden;
            product(count, gate, x, hidden, bias, gates, PANEL, PANEL, 0);
            product(count, up, x, hidden, bias ? bias + PANEL : NULL, ups, PANEL, PANEL, 0);
            for (int i = 0; i < count * PANEL; i += LANES) {
                Floats g = load(gates + i), value = g / (exponential(-g) + 1.0f) * load(ups + i);
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
    TAKE(attended, Input, rows * model->heads * model->head_dim);
    TAKE(mid, Input, rows * model->mlp);
    for (int i = 0; i <= thread; i++) {
        TAKE(normed, Input, rows * model->hidden);
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
        for (int i = 0; i < hidden; i += LANES)
            store(s.x + (int64_t)row * hidden + i,
                  read((const Weight *)model->embedding + pass->tokens[row] * hidden + i));
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
