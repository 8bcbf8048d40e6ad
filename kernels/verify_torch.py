"""Verification on the host, one proposal after the other: a float32 softmax over its rows, then a walk over its tokens.

After the softmax only the supports of q̂ and the stopping row are read: with sparse q̂ the residual differs from p for at
most K tokens. The rule `sigmoid` needs a softmax of the row after the last draft only. Logits on another device are
copied to the host.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import apply
from kernels.rng import noise_rows
from kernels.sampling import bad_rows, gumbel_max, inverse_cdf, probabilities
from kernels.sigmoid import DraftLogits, Scores
from kernels.sparse import SparseDistribution
from kernels.verify import BAD_LOGITS, DraftDistribution, Proposed, Rule, Status, VerifyResult, adjustments_of


def verify(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """See `kernels.verify.verify`."""
    z = apply(logits.cpu(), adjustments_of(proposals))
    spans = pairwise(accumulate((len(each.tokens) + 1 for each in proposals), initial=0))
    return [_verify_one(z[start:end], each) for (start, end), each in zip(spans, proposals, strict=True)]


def _verify_one(z: Tensor, proposal: Proposed) -> VerifyResult:
    # z: [γ+1, V], adjusted
    if proposal.params.is_greedy:
        return _walk_greedily(z.to(torch.float32).numpy(), proposal)
    if proposal.rule is Rule.SIGMOID:
        return _walk_sigmoid(z, proposal)
    rows = probabilities(z, proposal.params).numpy()
    if proposal.rule is Rule.COUPLED:
        return _walk_coupled(rows, proposal)
    walk = _walk_block if proposal.rule is Rule.BLOCK else _walk_tokenwise
    accepted, P = walk(rows, proposal)
    if accepted < 0 or math.isnan(rows[accepted, 0]):
        return BAD_LOGITS
    return _resampled(rows, accepted, P, proposal)


def accepts(u: float, lenience: float, q: float, p: float) -> bool:
    """Return whether a drafted token is accepted: u · l · q̂ < p, strictly, so that p = 0 never is [L 2.3, A.5]."""
    return q > 0 and u * lenience * q < p


def residual(p: np.ndarray, ids: np.ndarray | slice, q: np.ndarray) -> np.ndarray:
    """Return max(0, p - q̂) of one row, float64 `[V]`, not normalised [L 2.3]; `ids` and `q` `[K]` are q̂'s support.

    Under `block`, `p` is P · p. Lenience does not change the residual [L A.5]; tests/kernels/reference.py has the
    reason.
    """
    rest = p.astype(np.float64)
    rest[ids] = np.maximum(0.0, rest[ids] - q)
    return rest


def block_step(P: float, p: float, q: float) -> float:
    """Return P_i = min(1, P_{i-1} · p(x_i)/q̂(x_i)); 0 if the token could not have been drafted."""
    return min(1.0, P * p / q) if q > 0 else 0.0


def block_reach(P: float, p: np.ndarray, q: np.ndarray) -> float:
    """Return h_i = Z/(Z + 1 - P) with Z = Σ max(P · p - q̂, 0), where p and q̂ `[K]` are given on the support of q̂ only.

    Since p sums to 1 over the vocabulary, Z = P - Σ min(P · p, q̂).
    """
    Z = P - float(np.minimum(P * p, q).sum(dtype=np.float64))
    return Z / (Z + (1 - P)) if Z > 0 else 0.0


def _chances(row: np.ndarray, token: int, q: DraftDistribution) -> tuple[float, float]:
    """Return p(x) and q̂(x) of a drafted token, where `row` `[V]` is p; both are 0 outside the vocabulary."""
    return (float(row[token]), _draft_probability(q, token, token)) if 0 <= token < len(row) else (0.0, 0.0)


def _support(row: np.ndarray, token: int, q: DraftDistribution) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
    """Return the ids of q̂'s support `[K]`, and q̂ and p at them; `row` `[V]` is p."""
    match q:
        case SparseDistribution():
            inside = slice(*q.ids.searchsorted((0, len(row))))
            ids = q.ids[inside]
            return ids, q.weights[inside] / q.total, row[ids].astype(np.float64)
        case DraftLogits():
            raise TypeError("draft logits are not a distribution")  # `verify` refuses them outside the rule sigmoid
        case None:
            inside = slice(token, token + 1) if 0 <= token < len(row) else slice(0)
            return inside, np.ones(len(row[inside])), row[inside].astype(np.float64)


def _walk_tokenwise(rows: np.ndarray, proposal: Proposed) -> tuple[int, float]:
    """Return the number accepted up to the first rejection [L Alg. 1], or -1 for a bad row; and 1."""
    for i, (row, token, q) in enumerate(zip(rows, proposal.tokens, proposal.q, strict=False)):
        if math.isnan(row[0]):  # a bad row is NaN throughout
            return -1, 1.0
        p_x, q_x = _chances(row, token, q)
        if not accepts(proposal.accept_uniform(i), proposal.lenience, q_x, p_x):
            return i, 1.0
    return len(proposal.tokens), 1.0


def _walk_block(rows: np.ndarray, proposal: Proposed) -> tuple[int, float]:
    """Return τ, the last success, or -1 for a bad row; and P_τ."""
    tokens, q = proposal.tokens, proposal.q
    P = P_tau = 1.0
    tau = 0
    for i in range(1, len(tokens) + 1):
        if math.isnan(rows[i - 1, 0]):
            return -1, 1.0
        P = block_step(P, *_chances(rows[i - 1], tokens[i - 1], q[i - 1]))
        if P == 0:
            break
        h = P
        if i < len(tokens):
            if math.isnan(rows[i, 0]):
                return -1, 1.0
            _, support_q, support_p = _support(rows[i], tokens[i], q[i])
            h = block_reach(P, support_p, support_q)
        if proposal.accept_uniform(i - 1) < h:
            tau, P_tau = i, P
    return tau, P_tau


def _walk_coupled(rows: np.ndarray, proposal: Proposed) -> VerifyResult:
    """Accept while argmax(log p + g) is the drafted token. The first that differs is the next token."""
    gamma, V = len(proposal.tokens), rows.shape[1]
    for i, p in enumerate(rows):
        if math.isnan(p[0]):
            return BAD_LOGITS
        noise = noise_rows([(proposal.seed, proposal.base_length + i)], V)
        (best,) = gumbel_max(torch.from_numpy(p[None, :]), noise)
        if i == gamma or best != proposal.tokens[i]:
            break
    return VerifyResult(Status.OK, i, best)


def _resampled(rows: np.ndarray, accepted: int, P: float, proposal: Proposed) -> VerifyResult:
    """Draw the next token from the stopping row: from p after the last draft, else from max(0, P · p - q̂)."""
    row, u = rows[accepted], proposal.resample_uniform(accepted)
    judged = zip(rows[: accepted + 1], proposal.tokens, proposal.q, strict=False)
    supports = [_support(*each) for each in judged]
    beta = tuple(float(np.minimum(p / proposal.lenience, q).sum(dtype=np.float64)) for _, q, p in supports)
    if accepted == len(proposal.tokens):
        return VerifyResult(Status.OK, accepted, inverse_cdf(row, u), beta)
    ids, q, _ = supports[accepted]
    rest = residual(row if P == 1 else P * row, ids, q)
    if rest.sum() > 0:
        return VerifyResult(Status.OK, accepted, inverse_cdf(rest, u), beta)
    return VerifyResult(Status.ZERO_RESIDUAL, accepted, inverse_cdf(row, u), beta)


def _walk_sigmoid(z: Tensor, proposal: Proposed) -> VerifyResult:
    """Accept by σ of scaled logits up to the first rejection, and sample from norm(max(0, p̂ - q̂)) there [W 3.2.2].
    Lossy.

    If all are accepted, the next token is drawn from the softmax of the last row. The code released with [W] takes the
    raw logits there, which seems to be a slip.
    """
    # z: [γ+1, V]
    bad = bad_rows(z).tolist()
    assert proposal.sigmoid is not None  # `kernels.verify.verify` checks it, and the type of each q
    gamma = len(proposal.tokens)
    drafts = [q for q in proposal.q if isinstance(q, DraftLogits)]
    scores = Scores(z[:gamma], proposal.params, drafts, proposal.sigmoid)
    for i, token in enumerate(proposal.tokens):
        if bad[i]:
            return BAD_LOGITS
        p, q = scores.at(i, token)
        if accepts(proposal.accept_uniform(i), proposal.lenience, q, p):
            continue
        u = proposal.resample_uniform(i)
        p_row, q_row = scores.rows(i)
        rest = residual(p_row, slice(None), q_row)
        if rest.any():
            return VerifyResult(Status.OK, i, inverse_cdf(rest, u))
        p_next = probabilities(z[i : i + 1], proposal.params)[0].numpy()
        return VerifyResult(Status.ZERO_RESIDUAL, i, inverse_cdf(p_next, u))
    if bad[gamma]:
        return BAD_LOGITS
    p_next = probabilities(z[gamma:], proposal.params)[0].numpy()
    return VerifyResult(Status.OK, gamma, inverse_cdf(p_next, proposal.resample_uniform(gamma)))


def _walk_greedily(rows: np.ndarray, proposal: Proposed) -> VerifyResult:
    """Accept the argmax at temperature 0, or with lenience tokens close to it [L A.5]."""
    # rows: [γ+1, V]
    best: list[int] = rows.argmax(axis=1).tolist()
    beta: list[float] = []
    for i, choice in enumerate(best):
        top = float(rows[i, choice])  # NaN if there is one
        if not math.isfinite(top):
            return BAD_LOGITS
        if i == len(proposal.tokens):
            break
        token, acceptable = proposal.tokens[i], _acceptable(rows[i], choice, top, proposal.lenience)
        if proposal.rule not in (Rule.COUPLED, Rule.SIGMOID):  # these rules have no q̂
            beta.append(sum(_draft_probability(proposal.q[i], token, int(each)) for each in acceptable))
        if token not in acceptable:
            break
    return VerifyResult(Status.OK, i, choice, tuple(beta))


def _draft_probability(q: DraftDistribution, token: int, choice: int) -> float:
    """Return q̂(choice); a point mass is on `token`."""
    return q.probability(choice) if isinstance(q, SparseDistribution) else float(choice == token)


def _acceptable(row: np.ndarray, best: int, top: float, lenience: float) -> Sequence[int]:
    """Return the acceptable ids at temperature 0: the argmax, and with l < 1 all with p(x) ≥ l · max p [L A.5]."""
    if lenience == 1:
        return (best,)
    # p(x) / max p is exp(z(x) - max z), without a normaliser. The first cut is generous, the second exact.
    near = np.flatnonzero(row >= top + math.log(lenience) - 1.0)
    chosen: list[int] = near[np.exp(row[near].astype(np.float64) - top) >= lenience].tolist()
    return chosen
