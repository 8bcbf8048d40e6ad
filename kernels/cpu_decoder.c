/* All layers of a Llama-like decoder in one call, for processors with AVX512-BF16. See kernels/cpu_decoder.py.
 *
 * Weights are bfloat16, everything else is float32; inputs of a product are rounded to bfloat16. A row's result depends
 * on its own sequence alone: each sum is taken in one order, whatever else the pass holds. So passes over one row and
 * over many give the same logits, bit for bit, on any number of threads.
 */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "cpu_decoder.h"

#define PANEL 32      /* outputs of a panel of weights */
#define VECTORS (PANEL / 16)
#define MOST_ROWS 12  /* of one walk over a panel: 12 * 2 sums, 2 weights and an input fit 32 registers */
#define MOST_THREADS 256

typedef struct {
    float *x, *qkv;        /* [rows, hidden], [rows, (heads + 2 kv_heads) head_dim] */
    bf16 *attended, *mid;  /* [rows, heads * head_dim], [rows, mlp] */
    bf16 *normed;          /* of this thread: [rows, hidden] */
    float *scores;         /* of this thread: [heads / kv_heads, longest + 16] */
} Scratch;

/* ------------------------------------------------------------------------------------------------------- threads */

typedef struct {
    pthread_mutex_t pass_lock, lock; /* one pass at a time; and for `wake` */
    pthread_cond_t wake;
    atomic_int generation, working, arrived, phase;
    int started, threads;
    const Model *model;
    const Pass *pass;
} Pool;

#define NEW_POOL \
    {.pass_lock = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER}
static Pool pool = NEW_POOL;

#define SPINS 4000 /* some 0.1 ms */

/* All threads of the pass have arrived when it returns. */
static void barrier(int threads) {
    if (threads == 1) return;
    int phase = atomic_load(&pool.phase);
    if (atomic_fetch_add(&pool.arrived, 1) == threads - 1) {
        atomic_store(&pool.arrived, 0);
        atomic_fetch_add(&pool.phase, 1);
        return;
    }
    for (int spins = 0; atomic_load(&pool.phase) == phase; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield(); /* another process has the other thread's core */
    }
}

static void run(const Model *model, const Pass *pass, int thread);

/* `argument`: the number of the thread, and the generation at its start. */
static void *work(void *argument) {
    int thread = (int)((intptr_t)argument % MOST_THREADS), seen = (int)((intptr_t)argument / MOST_THREADS);
    for (;;) {
        for (int spins = 0; spins < SPINS && atomic_load(&pool.generation) == seen; spins++) _mm_pause();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.generation);
        const Model *model = pool.model;
        const Pass *pass = pool.pass;
        int takes_part = thread < pool.threads;
        pthread_mutex_unlock(&pool.lock);
        if (takes_part) {
            run(model, pass, thread);
            atomic_fetch_sub(&pool.working, 1);
        }
    }
    return NULL;
}

/* A forked process has none of the threads. */
static void forget_threads(void) {
    pool = (Pool)NEW_POOL;
}

/* Starts threads up to `wanted`, this one included; returns how many there are. */
static int start_threads(int wanted) {
    if (!pool.started) {
        pool.started = 1;
        pthread_atfork(NULL, NULL, forget_threads);
    }
    for (; pool.started < wanted; pool.started++) {
        pthread_t thread;
        intptr_t argument = (intptr_t)atomic_load(&pool.generation) * MOST_THREADS + pool.started;
        if (pthread_create(&thread, NULL, work, (void *)argument)) break;
        pthread_detach(thread);
    }
    return pool.started < wanted ? pool.started : wanted;
}

/* -------------------------------------------------------------------------------------------------------- vectors */

INLINE __m512 read_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void write_bf16(bf16 *to, __m512 value) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(value));
}

/* The sums of 16 vectors, as one vector. */
INLINE __m512 sums(__m512 *v) {
    for (int i = 0; i < 8; i++) /* lanes 2k of the pair, then 2k + 1 */
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        v[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(v[2 * i]), _mm512_castps_pd(v[2 * i + 1]))),
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(v[2 * i]), _mm512_castps_pd(v[2 * i + 1]))));
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

/* ------------------------------------------------------------------------------------------------------- products */

/* `rows` rows of x times one panel, into `out` or added to it; only the first `columns` outputs. */
INLINE void multiply(const int rows, const bf16 *panel, const bf16 *x, int64_t inputs, const float *bias, float *out,
                     int64_t stride, int columns, int adds) {
    __m512 sum[MOST_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int b = 0; b < VECTORS; b++) sum[r][b] = bias ? _mm512_loadu_ps(bias + 16 * b) : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < inputs / 2; pair++, panel += 2 * PANEL) {
        __m512bh weight[VECTORS];
#pragma GCC unroll 2
        for (int b = 0; b < VECTORS; b++) weight[b] = (__m512bh)_mm512_loadu_si512(panel + 32 * b);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t two;
            memcpy(&two, x + r * inputs + 2 * pair, sizeof two);
            __m512bh input = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 2
            for (int b = 0; b < VECTORS; b++) sum[r][b] = _mm512_dpbf16_ps(sum[r][b], weight[b], input);
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
static void product(int rows, const bf16 *panel, const bf16 *x, int64_t inputs, const float *bias, float *out,
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
static void products(const Pass *pass, int thread, int rows, const bf16 *weight, const bf16 *x, int64_t inputs,
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

static void norm(const float *x, const float *weight, int size, float eps, bf16 *out) {
    __m512 scale = norm_scale(x, size, eps);
    for (int i = 0; i < size; i += 16) write_bf16(out + i, normed(x + i, scale, weight + i));
}

static void norm_rows(const Model *model, const float *x, const float *weight, int rows, bf16 *out) {
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

/* Queries and keys of a row are normed and rotated; its key and value go to memory. */
static void place_row(const Model *model, const Pass *pass, const Layer *layer, float *memory, float *qkv, int row) {
    int size = model->head_dim, heads = model->heads, kv_heads = model->kv_heads, position = pass->positions[row];
    for (int h = 0; h < heads + kv_heads; h++) {
        if (layer->head_norm) head_norm(qkv + h * size, layer->head_norm + h * size, size, model->eps);
        rotate(qkv + h * size, pass->rotations + (int64_t)position * size, size);
    }
    int64_t place = place_of(pass, row, position);
    for (int h = 0; h < 2 * kv_heads; h++)
        memcpy(memory + (h * pass->places + place) * size, qkv + (heads + h) * size, size * sizeof(float));
}

/* Values times shares, for `heads` query heads and 16 * `vectors` elements. */
INLINE void weigh(const int heads, const int vectors, const Pass *pass, int row, int first, int end,
                  const float *values, int size, const float *scores, int64_t stride, const float *scale, bf16 *out) {
    __m512 sum[5][4];
#pragma GCC unroll 5
    for (int g = 0; g < heads; g++)
#pragma GCC unroll 4
        for (int b = 0; b < vectors; b++) sum[g][b] = _mm512_setzero_ps();
    for (int position = first; position < end;) {
        int rest = pass->block_tokens - position % pass->block_tokens;
        int count = rest < end - position ? rest : end - position;
        const float *value = values + place_of(pass, row, position) * size;
        for (int j = position - first; count--; j++, position++, value += size) {
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
            write_bf16(out + g * size + 16 * b, _mm512_mul_ps(sum[g][b], _mm512_set1_ps(scale[g])));
}

#define WEIGH(heads, vectors) \
    case heads: \
        weigh(heads, vectors, pass, row, first, end, values + at, size, scores + g * stride, stride, scale, \
              out + g * size + at); \
        break;
#define WEIGH_CASES(vectors) \
    switch (count) { WEIGH(1, vectors) WEIGH(2, vectors) WEIGH(3, vectors) WEIGH(4, vectors) WEIGH(5, vectors) }

/* Attention of one row, for the query heads of one head of keys. */
static void attend(const Model *model, const Pass *pass, const Layer *layer, const float *memory, const float *query,
                   float *scores, bf16 *out, int row, int kv_head) {
    int size = model->head_dim, group = model->heads / model->kv_heads, end = pass->positions[row] + 1;
    int first = layer->window && layer->window < end ? end - layer->window : 0, seen = end - first;
    int64_t stride = pass->longest + 16;
    const float *keys = memory + kv_head * pass->places * size, *values = keys + model->kv_heads * pass->places * size;
    query += kv_head * group * size, out += kv_head * group * size;
    for (int j = 0; j < seen; j += 16) {
        const float *key[16];
        for (int i = 0; i < 16; i++)
            key[i] = keys + place_of(pass, row, first + (j + i < seen ? j + i : seen - 1)) * size;
        for (int g = 0; g < group; g++) {
            __m512 sum[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
            for (int at = 0; at < size; at += 16) {
                __m512 q = _mm512_loadu_ps(query + g * size + at);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(q, _mm512_loadu_ps(key[i] + at), sum[i]);
            }
            _mm512_storeu_ps(scores + g * stride + j, _mm512_mul_ps(sums(sum), _mm512_set1_ps(layer->scaling)));
        }
    }
    for (int g = 0; g < group; g += 5) {
        int count = group - g < 5 ? group - g : 5;
        float scale[5];
        for (int i = 0; i < count; i++) {
            float *own = scores + (g + i) * stride;
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
static void gate_and_up(const Model *model, const Pass *pass, const Layer *layer, const bf16 *normed, bf16 *mid,
                        int thread) {
    int hidden = model->hidden, mlp = model->mlp;
    int64_t units = mlp / PANEL;
    int begin = (int)(units * thread / pass->threads), end = (int)(units * (thread + 1) / pass->threads);
    for (int unit = begin; unit < end; unit++) {
        const bf16 *gate = layer->gate_up + (int64_t)unit * 2 * PANEL * hidden, *up = gate + (int64_t)PANEL * hidden;
        const float *bias = layer->gate_up_bias ? layer->gate_up_bias + (int64_t)unit * 2 * PANEL : NULL;
        for (int first = 0, count; first < pass->rows; first += count) {
            float gates[MOST_ROWS * PANEL], ups[MOST_ROWS * PANEL];
            count = rows_of_walk(pass->rows - first);
            const bf16 *x = normed + (int64_t)first * hidden;
            product(count, gate, x, hidden, bias, gates, PANEL, PANEL, 0);
            product(count, up, x, hidden, bias ? bias + PANEL : NULL, ups, PANEL, PANEL, 0);
            for (int i = 0; i < count * PANEL; i += 16) {
                __m512 g = _mm512_loadu_ps(gates + i), one = _mm512_set1_ps(1.0f);
                __m512 divisor = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), g)));
                __m512 value = _mm512_mul_ps(_mm512_div_ps(g, divisor), _mm512_loadu_ps(ups + i));
                write_bf16(mid + (int64_t)(first + i / PANEL) * mlp + (int64_t)unit * PANEL + i % PANEL, value);
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
    TAKE(attended, bf16, rows * model->heads * model->head_dim);
    TAKE(mid, bf16, rows * model->mlp);
    for (int i = 0; i <= thread; i++) {
        TAKE(normed, bf16, rows * model->hidden);
        TAKE(scores, float, group * (pass->longest + 16));
    }
#undef TAKE
    if (bytes) *bytes = used;
    return found;
}

static void run(const Model *model, const Pass *pass, int thread) {
    int rows = pass->rows, hidden = model->hidden, threads = pass->threads, size = model->head_dim;
    int width = (model->heads + 2 * model->kv_heads) * size, attended = model->heads * size;
    Scratch s = scratch_of(model, pass, thread, NULL);
    for (int row = thread; row < rows; row += threads)
        for (int i = 0; i < hidden; i += 16)
            _mm512_storeu_ps(s.x + (int64_t)row * hidden + i,
                             read_bf16(model->embedding + pass->tokens[row] * hidden + i));
    barrier(threads);
    for (int n = 0; n < model->layers; n++) {
        const Layer *layer = model->layer + n;
        float *memory = pass->memory + (int64_t)n * 2 * model->kv_heads * pass->places * size;
        norm_rows(model, s.x, layer->attention_norm, rows, s.normed);
        products(pass, thread, rows, layer->qkv, s.normed, hidden, layer->qkv_bias, s.qkv, width, 0);
        barrier(threads);
        for (int row = thread; row < rows; row += threads)
            place_row(model, pass, layer, memory, s.qkv + (int64_t)row * width, row);
        barrier(threads);
        for (int task = thread; task < rows * model->kv_heads; task += threads) {
            int row = task / model->kv_heads;
            attend(model, pass, layer, memory, s.qkv + (int64_t)row * width, s.scores,
                   s.attended + (int64_t)row * attended, row, task % model->kv_heads);
        }
        barrier(threads);
        products(pass, thread, rows, layer->output, s.attended, attended, layer->output_bias, s.x, hidden, 1);
        barrier(threads);
        norm_rows(model, s.x, layer->mlp_norm, rows, s.normed);
        gate_and_up(model, pass, layer, s.normed, s.mid, thread);
        barrier(threads);
        products(pass, thread, rows, layer->down, s.mid, model->mlp, layer->down_bias, s.x, hidden, 1);
        barrier(threads);
    }
    for (int i = 0; i < pass->wanted; i++)
        norm(s.x + (int64_t)wanted_rows(pass)[i] * hidden, model->norm, hidden, model->eps,
             s.normed + (int64_t)i * hidden);
    products(pass, thread, pass->wanted, model->head, s.normed, hidden, model->head_bias, pass->logits,
             model->vocab_size, 0);
}

/* ------------------------------------------------------------------------------------------------------ interface */

/* Whether this processor can run it. */
int decoder_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

/* Sizes of panels and structures, which Python's must have: an old library stays behind when the sources change. */
void decoder_sizes(int32_t *sizes) {
    sizes[0] = PANEL, sizes[1] = sizeof(Layer), sizes[2] = sizeof(Model), sizes[3] = sizeof(Pass);
}

/* Bytes of scratch memory that a pass needs. */
int64_t decoder_scratch(const Model *model, const Pass *pass) {
    int64_t bytes;
    scratch_of(model, pass, pass->threads - 1, &bytes);
    return bytes;
}

void decoder_run(const Model *model, Pass *pass) {
    if (pass->threads > MOST_THREADS) pass->threads = MOST_THREADS;
    if (pass->threads == 1) {
        run(model, pass, 0);
        return;
    }
    pthread_mutex_lock(&pool.pass_lock);
    pass->threads = start_threads(pass->threads);
    pthread_mutex_lock(&pool.lock);
    pool.model = model, pool.pass = pass, pool.threads = pass->threads;
    atomic_store(&pool.working, pass->threads - 1);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run(model, pass, 0);
    for (int spins = 0; atomic_load(&pool.working); spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.pass_lock);
}

#else

int decoder_supported(void) { return 0; }

#endif
