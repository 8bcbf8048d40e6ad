/* From logits to a distribution and a token: for the decode loop (`cpu_decode_loop.c`) and verification
 * (`cpu_verify.c`). Both draw the target's tokens by these functions, so they draw the same ones.
 *
 * A distribution is an array e, with 1 for the most probable token. Every sum is taken in one order.
 */

#include "cpu_decoder.h"

/* How logits become a distribution: `kernels.sampling.SamplingParams`. */
typedef struct {
    int32_t top_k; /* 0: off */
    float temperature, top_p, min_p;
} Params;

INLINE __mmask16 lanes(int left) { return left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1); }

INLINE __m512i first_ids(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

INLINE __m512 read(const float *z, int i, int size) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes(size - i), z + i);
}

INLINE float of_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The largest of z; NaN if there is one. */
static inline float largest(const float *z, int size) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __mmask16 is_nan = 0;
    for (int i = 0; i < size; i += 16) {
        __m512 v = read(z, i, size);
        is_nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, v);
    }
    return is_nan ? NAN : _mm512_reduce_max_ps(most);
}

/* The first element with this value; there is one. */
static inline int first_with(const float *z, int size, float value) {
    for (int i = 0;; i += 16) {
        __mmask16 found = _mm512_cmp_ps_mask(read(z, i, size), _mm512_set1_ps(value), _CMP_EQ_OQ);
        if (found) return i + __builtin_ctz(found);
    }
}

/* log of the probabilities, up to a constant: 0 for the largest logit. */
INLINE __m512 scaled(const float *z, int i, int size, float most, float temperature) {
    return _mm512_div_ps(_mm512_sub_ps(read(z, i, size), _mm512_set1_ps(most)), _mm512_set1_ps(temperature));
}

/* e^`scaled`; returns their sum. */
static inline float exponentials(const float *z, float *out, int size, float most, float temperature) {
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < size; i += 16) {
        __m512 e = exponential(scaled(z, i, size, most, temperature));
        total = _mm512_add_ps(total, e);
        _mm512_mask_storeu_ps(out + i, lanes(size - i), e);
    }
    return _mm512_reduce_add_ps(total);
}

/* Of the tokens with at least `least`, in nats. */
static inline float entropy_from(float least, const float *z, const float *e, int size, float most, float temperature) {
    __m512 total = _mm512_setzero_ps(), weighed = total;
    for (int i = 0; i < size; i += 16) {
        __m512 v = read(e, i, size), s = _mm512_max_ps(scaled(z, i, size, most, temperature), _mm512_set1_ps(-104.0f));
        __mmask16 stay = _mm512_cmp_ps_mask(v, _mm512_set1_ps(least), _CMP_GE_OQ);
        total = _mm512_mask_add_ps(total, stay, total, v);
        weighed = _mm512_mask_add_ps(weighed, stay, weighed, _mm512_mul_ps(v, s));
    }
    float sum = _mm512_reduce_add_ps(total);
    return logf(sum) - _mm512_reduce_add_ps(weighed) / sum;
}

/* Tokens by their e, at most 1. After the last one follow 16 values of -1. */
typedef struct {
    float *e;
    int32_t *ids;
    int size;
    float mass;
} Tokens;

/* Collects the tokens whose e is above `bound`, in the order of their ids. */
static inline void collect(const float *e, int size, float bound, Tokens *out) {
    __m512 mass = _mm512_setzero_ps();
    int count = 0;
    for (int i = 0; i < size; i += 16) {
        __m512 v = read(e, i, size);
        __mmask16 above = _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GT_OQ);
        if (!above) continue;
        mass = _mm512_mask_add_ps(mass, above, mass, v);
        _mm512_storeu_ps(out->e + count, _mm512_maskz_compress_ps(above, v));
        _mm512_storeu_si512(out->ids + count,
                            _mm512_maskz_compress_epi32(above, _mm512_add_epi32(first_ids(), _mm512_set1_epi32(i))));
        count += __builtin_popcount(above);
    }
    _mm512_storeu_ps(out->e + count, _mm512_set1_ps(-1.0f));
    out->size = count, out->mass = _mm512_reduce_add_ps(mass);
}

/* How many tokens reach `bound`; their sum goes to `mass`. */
static inline int count_from(const Tokens *tokens, float bound, float *mass) {
    __m512 sum = _mm512_setzero_ps();
    int count = 0;
    for (int i = 0; i < tokens->size; i += 16) {
        __m512 v = _mm512_loadu_ps(tokens->e + i);
        __mmask16 reaching = _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GE_OQ);
        sum = _mm512_mask_add_ps(sum, reaching, sum, v);
        count += __builtin_popcount(reaching);
    }
    *mass = _mm512_reduce_add_ps(sum);
    return count;
}

/* The largest bound that `count` tokens reach, or tokens with `mass` together; 0 if there are fewer. By bisection of
 * the bits, whose order is that of the values. */
static inline int32_t bound_of(const Tokens *tokens, int count, float mass) {
    int32_t low = 0, high = 0x3f800001; /* above 1 */
    float found;
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
static inline float filter(const Params *params, const float *e, int size, float ignored, float *total,
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

INLINE void add_doubles(__m512 v, __m512d *low, __m512d *high) {
    *low = _mm512_add_pd(*low, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
    *high = _mm512_add_pd(*high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
}

INLINE double sum_from(int begin, const float *e, int size) {
    int end = size - begin < SUMMED ? size : begin + SUMMED;
    __m512d low = _mm512_setzero_pd(), high = low;
    for (int i = begin; i < end; i += 16) add_doubles(_mm512_maskz_loadu_ps(lanes(end - i), e + i), &low, &high);
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

/* Sets every e below `least` to 0, and returns the sum of the rest. */
static inline double keep_from(float least, float *e, int size) {
    double total = 0.0;
    for (int i = 0; least > 0.0f && i < size; i += 16) {
        __mmask16 dropped = _mm512_cmp_ps_mask(read(e, i, size), _mm512_set1_ps(least), _CMP_LT_OQ);
        _mm512_mask_storeu_ps(e + i, dropped & lanes(size - i), _mm512_setzero_ps());
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
} Words;

/* Philox4x32-10, as `kernels.rng.philox4x32`. */
static inline Words philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
    }
    return (Words){{c0, c1, c2, c3}};
}

enum { ACCEPT = 1, RESAMPLE = 2, NOISE = 3 }; /* domains: `kernels.rng.Domain` */

/* The key of a position's noise: `kernels.rng.row_key`. */
static inline Words noise_key(uint64_t seed, uint32_t position) { return philox(seed, position, 0, NOISE, 0); }

INLINE __m512i shifted_xor(__m512i x, int bits) { return _mm512_xor_si512(x, _mm512_srli_epi32(x, (unsigned)bits)); }

/* -v of the tokens from `id` on, with v uniform in (0, 1): `kernels.rng.unit` of `kernels.rng.words`. */
INLINE __m512 unit(int id, const Words *key) {
    __m512i x = _mm512_add_epi32(_mm512_set1_epi32(id), first_ids());
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)0x9E3779B9u));
    x = _mm512_add_epi32(x, _mm512_set1_epi32((int)key->word[0]));
    x = _mm512_mullo_epi32(shifted_xor(x, 16), _mm512_set1_epi32(0x21F0AAAD));
    x = _mm512_add_epi32(shifted_xor(x, 15), _mm512_set1_epi32((int)key->word[1]));
    x = shifted_xor(_mm512_mullo_epi32(x, _mm512_set1_epi32(0x735A2D97)), 15);
    x = _mm512_xor_si512(x, _mm512_set1_epi32((int)key->word[2]));
    __m512 v = _mm512_add_ps(_mm512_cvtepu32_ps(x), _mm512_set1_ps(0.5f));
    return _mm512_max_ps(_mm512_mul_ps(v, _mm512_set1_ps(-0x1p-32f)), _mm512_set1_ps(0x1p-24f - 1.0f));
}

/* log(1 + x) within 1 unit in the last place, for x in (-1, 0]. The logarithm is that of the rounded 1 + x, and a term
 * of first order corrects it. */
INLINE __m512 log_of_1_plus(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), u = _mm512_add_ps(one, x);
    __m512 m = _mm512_getmant_ps(u, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero), k = _mm512_getexp_ps(u);
    __mmask16 is_large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
    m = _mm512_mask_mul_ps(m, is_large, m, _mm512_set1_ps(0.5f));
    k = _mm512_mask_add_ps(k, is_large, k, one);
    __m512 f = _mm512_sub_ps(m, one), square = _mm512_mul_ps(f, f);
    __m512 y = _mm512_set1_ps(7.0376836292e-2f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(-1.1514610310e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.1676998740e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(-1.2420140846e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.4249322787e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(-1.6668057665e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.0000714765e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(-2.4999993993e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(3.3333331174e-1f));
    y = _mm512_mul_ps(_mm512_mul_ps(y, f), square);
    y = _mm512_fmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), y);
    y = _mm512_fmadd_ps(square, _mm512_set1_ps(-0.5f), y);
    y = _mm512_add_ps(y, _mm512_div_ps(_mm512_sub_ps(x, _mm512_sub_ps(u, one)), u));
    return _mm512_fmadd_ps(k, _mm512_set1_ps(0.693359375f), _mm512_add_ps(f, y));
}

/* argmax(log e + g) of the tokens with at least `least`: e / log(1 - v) goes to `scores`, and the smallest wins, see
 * `kernels.sampling.gumbel_scores`. */
static inline int best_with_noise(const float *e, float least, const Words *key, int size, float *scores) {
    __m512 smallest = _mm512_setzero_ps(), bound = _mm512_set1_ps(least);
    for (int i = 0; i < size; i += 16) {
        __m512 v = read(e, i, size);
        v = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, bound, _CMP_GE_OQ), v);
        v = _mm512_div_ps(v, log_of_1_plus(unit(i, key)));
        smallest = _mm512_mask_min_ps(smallest, lanes(size - i), smallest, v);
        _mm512_mask_storeu_ps(scores + i, lanes(size - i), v);
    }
    return first_with(scores, size, _mm512_reduce_min_ps(smallest));
}
