/* Verification on the host: the acceptance rules over the target's logits. See kernels/verify_c.py.
 *
 * The logits of a row become e in scratch memory when the walk reaches it, and p(x) = e(x) / Σ e. The residual replaces
 * e: it differs on the support of q̂ only.
 */

#include "cpu_sampling.h"

#ifdef BUILT

enum { TOKENWISE, BLOCK, COUPLED };     /* rules */
enum { OK, ZERO_RESIDUAL, BAD_LOGITS }; /* statuses */

#define MAX_SUPPORT 256 /* `kernels.sparse.MAX_SUPPORT` */

typedef struct {
    int32_t rule, gamma;
    Params params;
    uint32_t base_length;
    uint64_t seed;
    double lenience;
    const double *uniforms; /* [gamma + 1]: of the tests, and of the next token; NULL: by seed and base_length */
    const float *logits;    /* [gamma + 1, V], `stride` apart */
    int64_t stride;
    const int32_t *tokens;  /* [gamma]; -1: outside the vocabulary */
    const int32_t *ends;    /* [gamma]: where the support of each q̂ ends; one without tokens: a point mass */
    const uint32_t *ids;    /* of all supports, one after the other */
    const uint16_t *weights;
    double *beta; /* [gamma], written up to the stopping row; not under coupled */
    int32_t status, accepted, next_token;
} Proposal;

/* q̂ of a drafted token. */
typedef struct {
    const uint32_t *ids;
    const uint16_t *weights;
    int size;
    double total;
} Draft;

/* p of a row. */
typedef struct {
    float *e;
    double total;
    Tokens tokens; /* scratch */
    int size;
} Row;

/* ------------------------------------------------------------------------------------------------------ uniforms */

/* As `kernels.rng.uniform`. */
static double uniform(const Proposal *proposal, int index, uint32_t domain) {
    Philox found = philox(proposal->seed, proposal->base_length, (uint32_t)index, domain, 0);
    return (double)(((uint64_t)found.word[0] << 32 | found.word[1]) >> 11) / 9007199254740992.0;
}

static double accept_uniform(const Proposal *proposal, int index) {
    return proposal->uniforms ? proposal->uniforms[index] : uniform(proposal, index, ACCEPT);
}

static double resample_uniform(const Proposal *proposal, int accepted) {
    return proposal->uniforms ? proposal->uniforms[proposal->gamma] : uniform(proposal, accepted, RESAMPLE);
}

/* ------------------------------------------------------------------------------------------------------ p and q̂ */

static const float *logits_of(const Proposal *proposal, int row) { return proposal->logits + row * proposal->stride; }

/* Returns 0 if the logits of the row have no distribution. */
static int load_row(const Proposal *proposal, int row, Row *p) {
    const float *z = logits_of(proposal, row);
    float most = largest(z, p->size);
    if (!isfinite(most)) return 0;
    exponentials(z, p->e, p->size, most, proposal->params.temperature);
    p->total = keep_from(0.0f, p->e, p->size);
    float least = filter(&proposal->params, p->e, p->size, 0.0f, &p->total, &p->tokens);
    if (least > 0.0f) p->total = keep_from(least, p->e, p->size);
    return 1;
}

static double probability(const Row *p, int token) { return token < 0 ? 0.0 : p->e[token] / p->total; }

static Draft draft_of(const Proposal *proposal, int index) {
    static const uint16_t unit = 1;
    int begin = index ? proposal->ends[index - 1] : 0, size = proposal->ends[index] - begin;
    if (!size) return (Draft){(const uint32_t *)proposal->tokens + index, &unit, 1, 1.0};
    Draft q = {proposal->ids + begin, proposal->weights + begin, size, 0.0};
    for (int k = 0; k < size; k++) q.total += q.weights[k];
    return q;
}

static double chance_of(const Draft *q, int token) {
    if (token < 0) return 0.0;
    for (int k = 0; k < q->size; k++)
        if (q->ids[k] == (uint32_t)token) return q->weights[k] / q->total;
    return 0.0;
}

/* Σ min(scale · p, q̂) */
static double overlap(const Row *p, const Draft *q, double scale) {
    double sum = 0.0, own_unit = scale / p->total, other_unit = 1.0 / q->total;
    for (int k = 0; k < q->size; k++) {
        if (q->ids[k] >= (uint32_t)p->size) continue;
        double own = p->e[q->ids[k]] * own_unit, other = q->weights[k] * other_unit;
        sum += own < other ? own : other;
    }
    return sum;
}

/* Replaces p by max(0, p - q̂ / P), which is the residual up to a constant; returns its mass. */
static double subtract(Row *p, const Draft *q, double P) {
    double weight_unit = p->total / P / q->total;
    for (int k = 0; k < q->size; k++) {
        if (q->ids[k] >= (uint32_t)p->size) continue;
        double rest = p->e[q->ids[k]] - q->weights[k] * weight_unit;
        p->e[q->ids[k]] = rest > 0.0 ? (float)rest : 0.0f;
    }
    return keep_from(0.0f, p->e, p->size);
}

/* ------------------------------------------------------------------------------------------------------ the rules */

static void fail(Proposal *proposal) {
    proposal->status = BAD_LOGITS, proposal->accepted = 0, proposal->next_token = -1;
}

static void finish(Proposal *proposal, int accepted, int next_token) {
    proposal->status = OK, proposal->accepted = accepted, proposal->next_token = next_token;
}

/* Draws the next token from the stopping row, which is loaded: from p after the last draft, else from
 * max(0, P · p - q̂). */
static void resample(Proposal *proposal, int accepted, double P, Row *p) {
    double u = resample_uniform(proposal, accepted);
    if (accepted < proposal->gamma) {
        Draft q = draft_of(proposal, accepted);
        double mass = subtract(p, &q, P);
        if (mass > 0.0) {
            finish(proposal, accepted, inverse_cdf(p->e, p->size, u * mass));
            return;
        }
        load_row(proposal, accepted, p);
    }
    finish(proposal, accepted, inverse_cdf(p->e, p->size, u * p->total));
    if (accepted < proposal->gamma) proposal->status = ZERO_RESIDUAL;
}

/* Accepts up to the first rejection [L Alg. 1]. */
static void tokenwise(Proposal *proposal, Row *p) {
    int i = 0;
    for (;; i++) {
        if (!load_row(proposal, i, p)) {
            fail(proposal);
            return;
        }
        if (i == proposal->gamma) break;
        Draft q = draft_of(proposal, i);
        proposal->beta[i] = overlap(p, &q, 1.0 / proposal->lenience);
        double own = probability(p, proposal->tokens[i]), other = chance_of(&q, proposal->tokens[i]);
        if (!(other > 0.0 && accept_uniform(proposal, i) * proposal->lenience * other < own)) break;
    }
    resample(proposal, i, 1.0, p);
}

/* Accepts up to the last success (Sun et al., 2024). P is the weight that the block so far may keep. */
static void block(Proposal *proposal, Row *p) {
    int gamma = proposal->gamma, tau = 0, row = 0;
    double P = 1.0, P_tau = 1.0;
    for (; row < gamma; row++) {
        if (!load_row(proposal, row, p)) {
            fail(proposal);
            return;
        }
        Draft q = draft_of(proposal, row);
        proposal->beta[row] = overlap(p, &q, 1.0);
        if (row > 0) {
            double Z = P - (P == 1.0 ? proposal->beta[row] : overlap(p, &q, P));
            double reach = Z > 0.0 ? Z / (Z + (1.0 - P)) : 0.0;
            if (accept_uniform(proposal, row - 1) < reach) tau = row, P_tau = P;
        }
        double own = probability(p, proposal->tokens[row]), other = chance_of(&q, proposal->tokens[row]);
        P = other > 0.0 ? P * own / other : 0.0;
        if (P > 1.0) P = 1.0;
        if (P == 0.0) break;
    }
    if (row == gamma && gamma > 0 && accept_uniform(proposal, gamma - 1) < P) tau = gamma, P_tau = P;
    int is_loaded = row == tau && row < gamma;
    if (is_loaded || load_row(proposal, tau, p)) resample(proposal, tau, P_tau, p);
    else fail(proposal);
}

/* Accepts while the best of target and noise is the drafted token. */
static void coupled(Proposal *proposal, Row *p) {
    for (int i = 0;; i++) {
        if (!load_row(proposal, i, p)) {
            fail(proposal);
            return;
        }
        Philox key = noise_key(proposal->seed, proposal->base_length + (uint32_t)i);
        int best = best_with_noise(p->e, 0.0f, &key, p->size, p->e);
        if (i < proposal->gamma && best == proposal->tokens[i]) continue;
        finish(proposal, i, best);
        return;
    }
}

/* Accepts while the drafted token is the argmax. */
static void greedy(Proposal *proposal, int size) {
    for (int i = 0;; i++) {
        float most = largest(logits_of(proposal, i), size);
        if (!isfinite(most)) {
            fail(proposal);
            return;
        }
        int best = first_with(logits_of(proposal, i), size, most);
        if (i < proposal->gamma && proposal->rule != COUPLED) {
            Draft q = draft_of(proposal, i);
            proposal->beta[i] = chance_of(&q, best);
        }
        if (i < proposal->gamma && best == proposal->tokens[i]) continue;
        finish(proposal, i, best);
        return;
    }
}

/* Verifies proposals. `scratch` has 3 * (size + 32) values. */
void verify_proposals(Proposal *proposals, int32_t count, int32_t size, float *scratch) {
    Row p = {scratch, 0.0, {scratch + size + 32, (int32_t *)(scratch + 2 * (size + 32)), 0, 0.0}, size};
    for (Proposal *proposal = proposals; proposal < proposals + count; proposal++) {
        if (proposal->params.temperature == 0.0f) greedy(proposal, size);
        else if (proposal->rule == COUPLED) coupled(proposal, &p);
        else if (proposal->rule == BLOCK) block(proposal, &p);
        else tokenwise(proposal, &p);
    }
}

/* Checks the supports of several q̂, one after the other: ids ascend and are below the size of the vocabulary, no weight
 * is 0, and the drafted token is among the ids. Returns whether all are valid; `totals` gets the sums of the weights. */
int32_t valid_supports(int32_t count, const uint32_t *ids, const uint16_t *weights, const int32_t *sizes,
                       const int32_t *drafted, uint32_t vocab_size, int32_t *totals) {
    for (int i = 0; i < count; ids += sizes[i], weights += sizes[i], i++) {
        if (sizes[i] < 1 || sizes[i] > MAX_SUPPORT || ids[sizes[i] - 1] >= vocab_size) return 0;
        int has_token = 0, is_valid = 1;
        totals[i] = 0;
        for (int k = 0; k < sizes[i]; k++) {
            is_valid &= weights[k] > 0 && (k == 0 || ids[k] > ids[k - 1]);
            has_token |= ids[k] == (uint32_t)drafted[i];
            totals[i] += weights[k];
        }
        if (!is_valid || !has_token) return 0;
    }
    return 1;
}

/* Size of the structure, as `decoder_sizes`. */
void verify_sizes(int32_t *sizes) { sizes[0] = sizeof(Proposal); }

#endif
