/* The decode loop in C: draws a token of each sequence, runs those, and so on, by our own decoder or by llama.cpp. See
 * kernels/cpu_decode_loop.py.
 *
 * A draft token is drawn as in kernels/sampling.py and kernels/sparse.py: filters, truncation, rounding to integers,
 * then the inverse CDF of the integers. Sums are of float32 in one order, so a bound may fall one token beside Python's.
 * q̂ is the distribution that was drawn from all the same. A token of the target is drawn from p, which is not truncated.
 */

#include "cpu_sampling.h"

#ifdef BUILT

#define NO_LOGITS -1
#define UNSURE -2
#define LARGEST_WEIGHT 65535.0f
#define LEAST (0.50001f / LARGEST_WEIGHT) /* relative to the most probable token; below it the weight rounds to 0 */
#define FIRST_SHARE 64 /* a first bound: tokens below 1/64 of the mass that may be dropped are seldom kept */

/* The changes to a sequence's logits: `kernels.adjustments.CountedChanges`. The arrays have room for each drawn token. */
typedef struct {
    int32_t size, counts_tokens;
    int32_t *ids, *counts;
    float *repetition, *bias;
    double *constant_bias;
    float repetition_penalty;
    double presence_penalty, frequency_penalty;
} Changes;

/* How the tokens of a sequence are drawn: `kernels.sampling.Draw`. */
typedef struct {
    int32_t tokens; /* to draw, at least 1 */
    int32_t stops;
    Params params;
    const float *max_entropy; /* [tokens] */
    const int64_t *uniforms;  /* [tokens], integers below 2^53 */
    const uint64_t *noise;    /* [tokens, 2]: seed and position; NULL: by uniforms */
    const int32_t *stop;      /* [stops]: nothing is drawn after one of these tokens */
    Changes *changes;         /* NULL: none */
} Draw;

typedef struct {
    int32_t token, row /* of the logits */, support, total;
} Sample;

typedef struct {
    int32_t sequences, most_tokens, vocab_size /* tokens that may be drawn */, mask_token /* -1: none */;
    int32_t max_support; /* of q̂; 0: draw from p */
    float keep_mass;
    const Draw *draw;  /* [sequences] */
    Sample *sample;    /* [sequences, most_tokens] */
    uint32_t *ids;     /* [sequences, most_tokens, max_support] */
    uint16_t *weights; /* the same */
    float *scratch;    /* [3, vocab_size + 32] */
    int32_t *active;   /* [4, sequences], scratch */
    int64_t *next;     /* [sequences] */
    const volatile int32_t *interrupted; /* not 0: the loop ends after the token that it draws */
} Loop;

/* Rounds a product before a sum, as Python does; the compiler would be free to fuse the two. */
#define ROUNDED(x) __asm__("" : "+m"(x))

/* As `kernels.adjustments.apply`. */
static void change(const Changes *changes, float *z) {
    for (int i = 0; i < changes->size; i++) {
        float *at = z + changes->ids[i];
        float scaled = *at > 0.0f ? *at / changes->repetition[i] : *at * changes->repetition[i];
        ROUNDED(scaled);
        *at = scaled + changes->bias[i];
    }
}

/* As `kernels.adjustments.Adjuster.push`. */
static void count_token(Changes *changes, int token) {
    if (!changes->counts_tokens) return;
    int i = 0;
    while (i < changes->size && changes->ids[i] != token) i++;
    if (i == changes->size) {
        changes->ids[i] = token, changes->counts[i] = 0, changes->constant_bias[i] = 0.0;
        changes->size++;
    }
    double frequency = changes->frequency_penalty * ++changes->counts[i];
    ROUNDED(frequency);
    double penalty = changes->presence_penalty + frequency;
    changes->repetition[i] = changes->repetition_penalty;
    changes->bias[i] = (float)(changes->constant_bias[i] - penalty);
}

/* q̂ of unnormalised probabilities e. */
static void truncate(const Loop *loop, const Draw *draw, const float *e, double total, Tokens *tokens, uint32_t *ids,
                     uint16_t *weights, Sample *sample) {
    int size = loop->vocab_size, most = loop->max_support;
    float least = filter(&draw->params, e, size, LEAST, &total, tokens);
    least = least > 0.0f ? nextafterf(least, 0.0f) : 0.0f; /* `collect` takes what is above */
    if (least < LEAST) least = LEAST;
    double kept_mass = loop->keep_mass * total;
    float first = (float)(total * (1.0f - loop->keep_mass) / FIRST_SHARE);
    collect(e, size, first > least ? first : least, tokens);
    if (first > least && tokens->size < most && tokens->mass < kept_mass) collect(e, size, least, tokens);
    /* All tokens above the bound are kept, and as many of those at it as are needed: the lower ids. */
    float bound = of_bits(bound_of(tokens, most, kept_mass));
    double mass;
    int count = count_from(tokens, nextafterf(bound, 2.0f), &mass), at_bound = 0;
    while (count + at_bound < most && (at_bound == 0 || mass + (double)at_bound * bound < kept_mass)) at_bound++;
    sample->support = sample->total = 0;
    for (int i = 0; i < tokens->size; i++) {
        if (tokens->e[i] < bound || (tokens->e[i] == bound && at_bound-- <= 0)) continue;
        int weight = (int)rintf(tokens->e[i] * LARGEST_WEIGHT);
        ids[sample->support] = (uint32_t)tokens->ids[i], weights[sample->support] = (uint16_t)weight;
        sample->support++, sample->total += weight;
    }
}

static int token_at(const Sample *sample, const uint32_t *ids, const uint16_t *weights, int64_t uniform) {
    int target = (int)((unsigned __int128)uniform * (unsigned)sample->total >> 53), below = 0, i = 0;
    while ((below += weights[i]) <= target) i++;
    return (int)ids[i];
}

static float entropy_of_weights(const Sample *sample, const uint16_t *weights) {
    double sum = 0.0;
    for (int i = 0; i < sample->support; i++) sum += weights[i] * log(weights[i]);
    return (float)(log(sample->total) - sum / sample->total);
}

/* Draws token `t` of a sequence from its logits, which become scores where noise decides. */
static void draw_token(const Loop *loop, int sequence, int t, float *z) {
    const Draw *draw = loop->draw + sequence;
    int size = loop->vocab_size;
    int64_t place = (int64_t)sequence * loop->most_tokens + t, first = place * loop->max_support;
    Sample *sample = loop->sample + place;
    if (loop->mask_token >= 0 && loop->mask_token < size) z[loop->mask_token] = -INFINITY;
    if (draw->changes) change(draw->changes, z);
    float ignored = loop->max_support ? LEAST : 0.0f;
    float *e = loop->scratch, most = largest(z, size), entropy = 0.0f, max_entropy = draw->max_entropy[t];
    Tokens tokens = {e + size + 32, (int32_t *)(e + 2 * (size + 32)), 0, 0.0};
    if (!isfinite(most)) {
        sample->token = NO_LOGITS;
    } else if (draw->params.temperature == 0.0f) {
        if (max_entropy < INFINITY) {
            exponentials(z, e, size, most, 1.0f);
            entropy = entropy_from(0.0f, z, e, size, most, 1.0f);
        }
        sample->token = first_with(z, size, most);
    } else {
        exponentials(z, e, size, most, draw->params.temperature);
        double total = keep_from(0.0f, e, size);
        if (loop->max_support && !draw->noise) {
            uint32_t *ids = loop->ids + first;
            uint16_t *weights = loop->weights + first;
            truncate(loop, draw, e, total, &tokens, ids, weights, sample);
            if (max_entropy < INFINITY) entropy = entropy_of_weights(sample, weights);
            sample->token = token_at(sample, ids, weights, draw->uniforms[t]);
        } else {
            float least = filter(&draw->params, e, size, ignored, &total, &tokens);
            if (max_entropy < INFINITY) entropy = entropy_from(least, z, e, size, most, draw->params.temperature);
            if (draw->noise) {
                Philox key = noise_key(draw->noise[2 * t], (uint32_t)draw->noise[2 * t + 1]);
                sample->token = best_with_noise(e, least, &key, size, z);
            } else {
                double mass = least > 0.0f ? keep_from(least, e, size) : total;
                sample->token = inverse_cdf(e, size, (double)draw->uniforms[t] / 9007199254740992.0 * mass);
            }
        }
    }
    if (sample->token >= 0 && entropy > max_entropy) sample->token = UNSURE;
}

static int is_stop(const Draw *draw, int token) {
    for (int i = 0; i < draw->stops; i++)
        if (draw->stop[i] == token) return 1;
    return 0;
}

/* Runs one token of each sequence that goes on, and returns their logits; NULL if it fails. `going`, ascending, has the
 * indices of these sequences in the pass before. */
typedef float *Next(void *runner, int count, const int32_t *going, const int64_t *tokens);

/* Draws a token of each sequence from the first logits, runs those that another one follows, and so on. Logits have
 * `size` columns. Those of all tokens of a draft lie in one array, [all tokens, size], in the order of the draws. A
 * target's loop ends for all sequences where one ends. */
static void draw_and_run(const Loop *loop, float *logits, int size, Next *next, void *runner) {
    int count = loop->sequences, drawn = 0;
    int32_t *active = loop->active, *going = active + count;
    for (int i = 0; i < count; i++) active[i] = i;
    for (int t = 0; logits; t++) {
        int left = 0;
        for (int i = 0; i < count; i++) {
            int sequence = active[i];
            Sample *sample = loop->sample + (int64_t)sequence * loop->most_tokens + t;
            sample->row = drawn++;
            draw_token(loop, sequence, t, logits + (int64_t)i * size);
            const Draw *draw = loop->draw + sequence;
            if (sample->token < 0 || t + 1 == draw->tokens || is_stop(draw, sample->token)) continue;
            if (draw->changes) count_token(draw->changes, sample->token);
            active[left] = sequence, going[left] = i, loop->next[left++] = sample->token;
        }
        int is_over = loop->max_support ? !left : left < loop->sequences;
        if (is_over || *loop->interrupted) return;
        logits = next(runner, count = left, going, loop->next);
    }
}

/* ------------------------------------------------------------------------------------------------- our own decoder */

typedef struct {
    const Model *model;
    Pass *pass;
    int keeps_logits;
    int32_t *blocks; /* of all sequences */
    int32_t *position, *first_block; /* of each sequence in the last pass */
} Own;

static float *run_next(void *runner, int count, const int32_t *going, const int64_t *tokens) {
    Own *own = runner;
    Pass *pass = own->pass;
    if (own->keeps_logits) pass->logits += (int64_t)pass->wanted * own->model->vocab_size;
    int32_t *numbers = own->blocks - 3 * count; /* as `Pass.positions` */
    for (int i = 0; i < count; i++) {
        own->position[i] = own->position[going[i]] + 1, own->first_block[i] = own->first_block[going[i]];
        numbers[i] = own->position[i], numbers[count + i] = own->first_block[i], numbers[2 * count + i] = i;
    }
    pass->positions = numbers, pass->tokens = tokens, pass->rows = pass->wanted = count;
    decoder_run(own->model, pass);
    return pass->logits;
}

/* Runs `pass`, whose wanted rows are the last ones of the sequences, and draws. Logits of a draft's passes follow those
 * of the pass before. */
void decoder_loop(const Model *model, Pass *pass, const Loop *loop) {
    int count = loop->sequences;
    int32_t *position = loop->active + 2 * count;
    Own own = {model, pass, loop->max_support > 0, (int32_t *)blocks(pass), position, position + count};
    for (int i = 0; i < count; i++) {
        int row = wanted_rows(pass)[i];
        own.position[i] = pass->positions[row], own.first_block[i] = first_blocks(pass)[row];
    }
    decoder_run(model, pass);
    draw_and_run(loop, pass->logits, model->vocab_size, run_next, &own);
}

/* ------------------------------------------------------------------------------------------------------- llama.cpp */

typedef struct { /* `llama_batch` of llama.h */
    int32_t rows;
    int32_t *token;
    float *embedding;
    int32_t *position, *sequence_counts;
    int32_t **sequences;
    int8_t *wanted;
} LlamaBatch;

typedef struct {
    void *context;
    int32_t (*decode)(void *context, LlamaBatch batch); /* `llama_decode` */
    float *(*get_logits)(void *context);                /* `llama_get_logits` */
    LlamaBatch batch; /* the last row of each sequence; all are wanted */
    float *logits;    /* [sequences, size] of these rows; of a draft [all tokens, size], filled here */
    int32_t size, keeps_logits;
    int32_t code;     /* of `llama_decode`; not 0 ends the loop */
} Llama;

static float *llama_next(void *runner, int count, const int32_t *going, const int64_t *tokens) {
    Llama *llama = runner;
    LlamaBatch *batch = &llama->batch;
    if (llama->keeps_logits) llama->logits += (int64_t)batch->rows * llama->size;
    for (int i = 0; i < count; i++) {
        batch->token[i] = (int32_t)tokens[i];
        batch->position[i] = batch->position[going[i]] + 1, batch->sequences[i] = batch->sequences[going[i]];
    }
    batch->rows = count;
    llama->code = llama->decode(llama->context, *batch);
    if (llama->code) return NULL;
    float *logits = llama->get_logits(llama->context);
    if (!llama->keeps_logits) return logits;
    return memcpy(llama->logits, logits, sizeof(float) * (size_t)count * llama->size);
}

void decoder_loop_llama(Llama *llama, const Loop *loop) {
    draw_and_run(loop, llama->logits, llama->size, llama_next, llama);
}

/* Sizes of the structures, as `decoder_sizes`. */
void decoder_loop_sizes(int32_t *sizes) {
    sizes[0] = sizeof(Draw), sizes[1] = sizeof(Sample), sizes[2] = sizeof(Loop), sizes[3] = sizeof(Llama);
    sizes[4] = sizeof(Changes);
}

#endif
