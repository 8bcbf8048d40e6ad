/* From logits to a distribution and a token: for the decode loop (`cpu_decode_loop.c`) and verification
 * (`cpu_verify.c`). Both draw the target's tokens by these functions, so they draw the same ones.
 *
 * A distribution is an array e, with 1 for the most probable token. Every sum is taken in one order.
 */

#include "cpu_decoder.h"

#ifdef BUILT

/* How logits become a distribution: `kernels.sampling.SamplingParams`. */
typedef struct {
    int32_t top_k; /* 0: off */
    float temperature, top_p, min_p;
} Params;

/* -inf behind the last one. */
INLINE Floats read(const float *z, int i, int size) { return load_first(size - i, z + i, -INFINITY); }

INLINE float of_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The largest of z; NaN if there is one. */
static inline float largest(const float *z, int size) {
    Floats most = all(-INFINITY);
    uint32_t is_bad = 0;
    for (int i = 0; i < size; i += LANES) {
        Floats v = read(z, i, size);
        is_bad |= lanes_of(is_nan(v));
        most = larger(most, v);
    }
    return is_bad ? NAN : largest_of(most);
}

/* The first element with this value; there is one. */
static inline int first_with(const float *z, int size, float value) {
    for (int i = 0;; i += LANES) {
        uint32_t found = lanes_of(is_equal(read(z, i, size), all(value)));
        if (found) return i + __builtin_ctz(found);
    }
}

/* log of the probabilities, up to a constant: 0 for the largest logit. */
INLINE Floats scaled(const float *z, int i, int size, float most, float temperature) {
    return (read(z, i, size) - most) / temperature;
}

/* In double precision: among 150,000 tokens the sum of the improbable ones is lost in float32. */
INLINE Doubles sum_of_halves(Floats x) { return low_doubles(x) + high_doubles(x); }

/* e^`scaled` */
static inline void exponentials(const float *z, float *out, int size, float most, float temperature) {
    for (int i = 0; i < size; i += LANES)
        store_first(size - i, out + i, exponential(scaled(z, i, size, most, temperature)));
}

/* Of the tokens with at least `least`, in nats. */
static inline float entropy_from(float least, const float *z, const float *e, int size, float most, float temperature) {
    Floats total = all(0.0f), weighed = total;
    for (int i = 0; i < size; i += LANES) {
        Floats v = read(e, i, size), s = larger(scaled(z, i, size, most, temperature), all(-104.0f));
        Mask stay = is_at_least(v, all(least));
        total += zero_unless(stay, v);
        weighed += zero_unless(stay, v * s);
    }
    float sum = sum_of(total);
    return logf(sum) - sum_of(weighed) / sum;
}

/* Tokens by their e, at most 1. LANES values of -1 follow the last one. */
typedef struct {
    float *e;
    int32_t *ids;
    int size;
    double mass;
} Tokens;

/* Collects the tokens whose e is above `bound`, in the order of their ids. */
static inline void collect(const float *e, int size, float bound, Tokens *out) {
    Doubles mass = {0.0};
    int count = 0;
    for (int i = 0; i < size; i += LANES) {
        Floats v = read(e, i, size);
        Mask above = is_above(v, all(bound));
        if (!lanes_of(above)) continue;
        mass += sum_of_halves(zero_unless(above, v));
        compress(above, out->e + count, v, out->ids + count, lane_numbers() + i);
        count += __builtin_popcount(lanes_of(above));
    }
    store(out->e + count, all(-1.0f));
    out->size = count, out->mass = sum_of_doubles(mass);
}

/* How many tokens reach `bound`; their sum goes to `mass`. */
static inline int count_from(const Tokens *tokens, float bound, double *mass) {
    Doubles sum = {0.0};
    int count = 0;
    for (int i = 0; i < tokens->size; i += LANES) {
        Floats v = load(tokens->e + i);
        Mask reaching = is_at_least(v, all(bound));
        sum += sum_of_halves(zero_unless(reaching, v));
        count += __builtin_popcount(lanes_of(reaching));
    }
    *mass = sum_of_doubles(sum);
    return count;
}

/* The largest bound that `count` tokens reach, or tokens with `mass` together; 0 if there are fewer. By bisection of
 * the bits, whose order is that of the values. */
static inline int32_t bound_of(const Tokens *tokens, int count, double mass) {
    int32_t low = 0, high = 0x3f800001; /* above 1 */
    double found;
    if (count_from(tokens, 0.0f, &found) < count && found < mass) return 0;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (count_from(tokens, of_bits(middle), &found) >= count || found >= mass) low = middle;
        else high = middle;
    }
    return low;
}

/* Removes the mass of tokens that the filters drop from `total`, and returns the least e of those that stay. Tokens up
 * to `ignored` are not looked at. */
static inline float filter(const Params *params, const float *e, int size, float ignored, double *total,
                           Tokens *tokens) {
    float bound = 0.0f;
    int has_top_k = 0 < params->top_k && params->top_k < size;
    if (!has_top_k && params->top_p >= 1.0f && params->min_p <= 0.0f) return bound;
    collect(e, size, ignored, tokens);
    int32_t bits;
    if (has_top_k && (bits = bound_of(tokens, params->top_k, INFINITY)))
        count_from(tokens, bound = of_bits(bits), total);
    if (params->top_p < 1.0f && (bits = bound_of(tokens, INT32_MAX, params->top_p * *total)))
        count_from(tokens, bound = of_bits(bits), total);
    if (params->min_p > bound) count_from(tokens, bound = params->min_p, total);
    return bound;
}

#define SUMMED 1024 /* tokens that are summed together */

INLINE double sum_from(int begin, const float *e, int size) {
    int end = size - begin < SUMMED ? size : begin + SUMMED;
    Doubles sum = {0.0};
    for (int i = begin; i < end; i += LANES) {
        Floats v = load_first(end - i, e + i, 0.0f);
        sum += sum_of_halves(v);
    }
    return sum_of_doubles(sum);
}

/* Sets every e below `least` to 0, and returns the sum of the rest. */
static inline double keep_from(float least, float *e, int size) {
    double total = 0.0;
    for (int i = 0; least > 0.0f && i < size; i += LANES) {
        Floats v = read(e, i, size);
        store_first(size - i, e + i, zero_unless(is_at_least(v, all(least)), v));
    }
    for (int i = 0; i < size; i += SUMMED) total += sum_from(i, e, size);
    return total;
}

/* The first token whose e and all before it sum to more than `target`, which is below the sum of all. */
static inline int inverse_cdf(const float *e, int size, double target) {
    double below = 0.0;
    int token = -1;
    for (int i = 0; i < size && token < 0; i += SUMMED) {
        double sum = sum_from(i, e, size);
        if (below + sum <= target) {
            below += sum;
            continue;
        }
        for (int j = i; j < size && j < i + SUMMED && below <= target; j++)
            if (e[j] > 0.0f) token = j, below += e[j];
    }
    return token;
}

/* ---------------------------------------------------------------------------------------------- random numbers */

typedef struct {
    uint32_t word[4];
} Philox;

/* Philox4x32-10, as `kernels.rng.philox4x32`. */
static inline Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
    }
    return (Philox){{c0, c1, c2, c3}};
}

enum { ACCEPT = 1, RESAMPLE = 2, NOISE = 3 }; /* domains: `kernels.rng.Domain` */

/* The key of a position's noise: `kernels.rng.row_key`. */
static inline Philox noise_key(uint64_t seed, uint32_t position) { return philox(seed, position, 0, NOISE, 0); }

INLINE Bits shifted_xor(Bits x, int bits) { return x ^ x >> bits; }

/* -v of the tokens from `id` on, with v uniform in (0, 1): `kernels.rng.unit` of `kernels.rng.words`. */
INLINE Floats unit(int id, const Philox *key) {
    Bits x = ((Bits)lane_numbers() + (uint32_t)id) * 0x9E3779B9u + key->word[0];
    x = shifted_xor(x, 16) * 0x21F0AAADu;
    x = shifted_xor(x, 15) + key->word[1];
    x = shifted_xor(x * 0x735A2D97u, 15) ^ key->word[2];
    return larger((of_unsigned(x) + 0.5f) * -0x1p-32f, all(0x1p-24f - 1.0f));
}

/* log(1 + x) within 1 unit in the last place, for x in [2^-24 - 1, 0]. The logarithm is that of the rounded 1 + x, and
 * a term of first order corrects it. */
INLINE Floats log_of_1_plus(Floats x) {
    Floats u = x + 1.0f;
    Bits bits = (Bits)u;
    /* u = m 2^k, with m in [sqrt(1/2), sqrt(2)) */
    Ints exponent = (Ints)(bits - 0x3f3504f3u) >> 23;
    Floats m = (Floats)(bits - ((Bits)exponent << 23)), k = __builtin_convertvector(exponent, Floats);
    Floats f = m - 1.0f, square = f * f;
    Floats y = all(7.0376836292e-2f);
    y = multiply_add(y, f, all(-1.1514610310e-1f));
    y = multiply_add(y, f, all(1.1676998740e-1f));
    y = multiply_add(y, f, all(-1.2420140846e-1f));
    y = multiply_add(y, f, all(1.4249322787e-1f));
    y = multiply_add(y, f, all(-1.6668057665e-1f));
    y = multiply_add(y, f, all(2.0000714765e-1f));
    y = multiply_add(y, f, all(-2.4999993993e-1f));
    y = multiply_add(y, f, all(3.3333331174e-1f));
    y = y * f * square;
    y = multiply_add(k, all(-2.12194440e-4f), y);
    y = multiply_add(square, all(-0.5f), y);
    y += (x - (u - 1.0f)) / u;
    return multiply_add(k, all(0.693359375f), f + y);
}

/* argmax(log e + g) of the tokens with at least `least`: e / log(1 - v) goes to `scores`, and the smallest wins, see
 * `kernels.sampling.gumbel_scores`. */
static inline int best_with_noise(const float *e, float least, const Philox *key, int size, float *scores) {
    Floats best = all(0.0f);
    for (int i = 0; i < size; i += LANES) {
        Floats v = read(e, i, size);
        v = zero_unless(is_at_least(v, all(least)), v) / log_of_1_plus(unit(i, key));
        best = smaller(best, v);
        store_first(size - i, scores + i, v);
    }
    return first_with(scores, size, smallest_of(best));
}

#endif
