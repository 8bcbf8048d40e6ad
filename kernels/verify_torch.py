"""Verification on the host: a float32 softmax over all rows, then a little work on each proposal.

Rows with the same sampling parameters share one softmax. p and q̂ of all drafted tokens and of the supports are gathered
in flat arrays, so a batch takes a few numpy calls. After the softmax only the supports and the stopping row of each
sequence are read: with sparse q̂ the residual differs from p for at most K tokens. The rule `sigmoid` needs a softmax of
the row after the last draft only. Logits on another device are copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import apply
from kernels.dense import DenseDistribution, DraftLogits
from kernels.rng import noise_rows
from kernels.sampling import bad_rows, gumbel_max, inverse_cdf, probabilities
from kernels.sigmoid import Scores
from kernels.sparse import SparseDistribution
from kernels.verify import BAD_LOGITS, DraftDistribution, Proposed, Rule, Status, VerifyResult, adjustments_of

_ROUNDING = 1e-6
"""A residual with less than this share of the mass is float32 rounding of p = q̂."""


def verify(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """See `kernels.verify.verify`."""
    z = apply(logits.cpu(), adjustments_of(proposals))
    kinds = [(proposal.params, proposal.rule is Rule.SIGMOID) for proposal in proposals]
    if len(set(kinds)) == 1:
        return _verify_group(z, proposals)

    spans = list(_spans(proposals))
    results: list[VerifyResult | None] = [None] * len(proposals)
    for kind in dict.fromkeys(kinds):
        members = [b for b, each in enumerate(kinds) if each == kind]
        rows = [row for b in members for row in range(*spans[b])]
        for b, result in zip(members, _verify_group(z[rows], [proposals[b] for b in members]), strict=True):
            results[b] = result
    return [result for result in results if result is not None]


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


def _verify_group(z: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """Verify proposals with equal sampling parameters, all or none `sigmoid`; adjusted logits `z` are `[n, V]`."""
    if proposals[0].params.is_greedy:
        return _verify_greedy(z, proposals)
    if proposals[0].rule is Rule.SIGMOID:
        return _verify_sigmoid(z, proposals)
    rows = probabilities(z, proposals[0].params).numpy()
    drafts = gather(rows, proposals)
    spans = enumerate(_spans(proposals))
    return [_walk(rows, drafts, start, b, each) for (b, (start, _)), each in zip(spans, proposals, strict=True)]


def _spans(proposals: Sequence[Proposed]) -> Iterator[tuple[int, int]]:
    """Yield the first row of each proposal, and the end of its rows."""
    return pairwise(accumulate((len(each.tokens) + 1 for each in proposals), initial=0))


def block_step(P: float, p: float, q: float) -> float:
    """Return P_i = min(1, P_{i-1} · p(x_i)/q̂(x_i)); 0 if the token could not have been drafted."""
    return min(1.0, P * p / q) if q > 0 else 0.0


def block_reach(P: float, p: np.ndarray, q: np.ndarray) -> float:
    """Return h_i = Z/(Z + 1 - P) with Z = Σ max(P · p - q̂, 0), where p and q̂ `[K]` are given on the support of q̂ only.

    Since p sums to 1 over the vocabulary, Z = P - Σ min(P · p, q̂).
    """
    Z = P - float(np.minimum(P * p, q).sum(dtype=np.float64))
    return Z / (Z + (1 - P)) if Z > 0 else 0.0


def _walk(rows: np.ndarray, drafts: Drafts, start: int, number: int, proposal: Proposed) -> VerifyResult:
    """Verify one proposal above temperature 0. Its rows begin at `start`, and it is number `number`."""
    if proposal.rule is Rule.COUPLED:
        return _walk_coupled(rows, start, proposal)
    walk = _walk_block if proposal.rule is Rule.BLOCK else _walk_tokenwise
    accepted, P = walk(rows, drafts, start, start - number, proposal)
    if accepted < 0 or math.isnan(rows[start + accepted, 0]):
        return BAD_LOGITS
    return _resampled(rows[start + accepted], drafts, start - number, accepted, P, proposal)


def _walk_tokenwise(rows: np.ndarray, drafts: Drafts, start: int, draft: int, proposal: Proposed) -> tuple[int, float]:
    """Return the number accepted up to the first rejection [L Alg. 1], or -1 for a bad row; and 1."""
    accepted = 0
    while accepted < len(proposal.tokens):
        p, q = drafts.p[draft + accepted], drafts.q[draft + accepted]
        if math.isnan(rows[start + accepted, 0]):  # a bad row is NaN throughout
            return -1, 1.0
        if not accepts(proposal.accept_uniform(accepted), proposal.lenience, q, p):
            break
        accepted += 1
    return accepted, 1.0


def _walk_block(rows: np.ndarray, drafts: Drafts, start: int, draft: int, proposal: Proposed) -> tuple[int, float]:
    """Return τ, the last success, or -1 for a bad row; and P_τ."""
    gamma = len(proposal.tokens)
    P = P_tau = 1.0
    tau = 0
    for i in range(1, gamma + 1):
        if math.isnan(rows[start + i - 1, 0]):
            return -1, 1.0
        P = block_step(P, drafts.p[draft + i - 1], drafts.q[draft + i - 1])
        if P == 0:
            break
        h = P
        if i < gamma:
            if math.isnan(rows[start + i, 0]):
                return -1, 1.0
            _, q, p = drafts.support(draft + i)
            h = block_reach(P, p, q)
        if proposal.accept_uniform(i - 1) < h:
            tau, P_tau = i, P
    return tau, P_tau


def _walk_coupled(rows: np.ndarray, start: int, proposal: Proposed) -> VerifyResult:
    """Accept while argmax(log p + g) is the drafted token. The first that differs is the next token."""
    gamma, V = len(proposal.tokens), rows.shape[1]
    for i in range(gamma + 1):
        p = rows[start + i]
        if math.isnan(p[0]):
            return BAD_LOGITS
        noise = noise_rows([(proposal.seed, proposal.base_length + i)], V)
        (best,) = gumbel_max(torch.from_numpy(p[None, :]), noise)
        if i == gamma or best != proposal.tokens[i]:
            break
    return VerifyResult(Status.OK, i, best)


def _resampled(
    row: np.ndarray, drafts: Drafts, draft: int, accepted: int, P: float, proposal: Proposed
) -> VerifyResult:
    """Draw the next token from the stopping `row` `[V]`: from p after the last draft, else from max(0, P · p - q̂)."""
    gamma = len(proposal.tokens)
    beta = tuple(drafts.beta[draft : draft + min(accepted + 1, gamma)])
    u = proposal.resample_uniform(accepted)
    if accepted == gamma:
        return VerifyResult(Status.OK, accepted, inverse_cdf(row, u), beta)
    ids, q, _ = drafts.support(draft + accepted)
    rest = residual(row if P == 1 else P * row, ids, q)
    if rest.sum() > _ROUNDING * P:
        return VerifyResult(Status.OK, accepted, inverse_cdf(rest, u), beta)
    return VerifyResult(Status.ZERO_RESIDUAL, accepted, inverse_cdf(row, u), beta)


def _verify_sigmoid(z: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """Verify by σ of scaled logits, above temperature 0 [W 3.2.2]. Lossy."""
    bad = bad_rows(z).tolist()
    spans = zip(_spans(proposals), proposals, strict=True)
    return [_walk_sigmoid(z[start:end], bad[start:end], each) for (start, end), each in spans]


def _walk_sigmoid(z: Tensor, bad: Sequence[bool], proposal: Proposed) -> VerifyResult:
    """Accept up to the first rejection, and sample from norm(max(0, p̂ - q̂)) there.

    If all are accepted, the next token is drawn from the softmax of the last row. The code released with [W] takes the
    raw logits there, which seems to be a slip.
    """
    # z: [γ+1, V]
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


def _verify_greedy(z: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """Verify at temperature 0: accept the argmax, or with lenience tokens close to it [L A.5]."""
    # z: [n, V]
    rows = z.to(torch.float32).numpy()
    best = rows.argmax(axis=1)
    top = rows[np.arange(len(rows)), best].astype(np.float64).tolist()  # NaN if there is one
    best_ids = best.tolist()
    spans = zip(_spans(proposals), proposals, strict=True)
    return [_walk_greedily(rows[start:end], best_ids[start:end], top[start:end], each) for (start, end), each in spans]


def _walk_greedily(rows: np.ndarray, best: list[int], top: list[float], proposal: Proposed) -> VerifyResult:
    # rows: [γ+1, V]
    beta: list[float] = []
    accepted = 0
    for i, token in enumerate(proposal.tokens):
        if not math.isfinite(top[i]):
            return BAD_LOGITS
        acceptable = _acceptable(rows[i], best[i], top[i], proposal.lenience)
        if proposal.rule not in (Rule.COUPLED, Rule.SIGMOID):  # these rules have no q̂
            beta.append(float(sum(_draft_probability(proposal.q[i], token, int(choice)) for choice in acceptable)))
        if token not in acceptable:
            break
        accepted += 1
    if not math.isfinite(top[accepted]):
        return BAD_LOGITS
    return VerifyResult(Status.OK, accepted, best[accepted], tuple(beta))


def _draft_probability(q: DraftDistribution, token: int, choice: int) -> float:
    """Return q̂(choice); a point mass is on `token`."""
    match q:
        case SparseDistribution():
            return q.probability(choice)
        case DenseDistribution():
            return float(q.probabilities[choice])
        case _:
            return float(choice == token)


def _acceptable(row: np.ndarray, best: int, top: float, lenience: float) -> Sequence[int]:
    """Return the acceptable ids at temperature 0: the argmax, and with l < 1 all with p(x) ≥ l · max p [L A.5]."""
    if lenience == 1:
        return (best,)
    # p(x) / max p is exp(z(x) - max z), without a normaliser. The first cut is generous, the second exact.
    near = np.flatnonzero(row >= top + math.log(lenience) - 1.0)
    chosen: list[int] = near[np.exp(row[near].astype(np.float64) - top) >= lenience].tolist()
    return chosen


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafted tokens of several proposals, flat `[N]`, and the support of each one's q̂.

    The draft at row r of proposal b is number r - b: each proposal before it has one row more than it has drafts.
    """

    p: list[float]  # p(x)
    q: list[float]  # q̂(x)
    beta: list[float]  # Σ min(p/l, q̂)
    ids: np.ndarray  # [S], all supports one after the other, without those of dense distributions
    weights: np.ndarray  # [S], q̂ at them
    masses: np.ndarray  # [S], p at them
    ends: list[int]  # [N + 1], where each support begins, and the end
    dense: dict[int, tuple[np.ndarray, np.ndarray]]  # q̂ and p of each draft with a dense distribution, [V] each

    def support(self, draft: int) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
        """Return the ids of a draft's support (all ids if dense), with q̂ and p at them."""
        if draft in self.dense:
            return slice(None), *self.dense[draft]
        at = slice(self.ends[draft], self.ends[draft + 1])
        return self.ids[at], self.weights[at], self.masses[at]


def gather(rows: np.ndarray, proposals: Sequence[Proposed]) -> Drafts:
    """Return the drafts of the proposals; `rows` `[n, V]` holds p of their rows, in order.

    Under `coupled`, which has no q̂, point masses take its place.
    """
    V = rows.shape[1]
    tokens: list[int] = []
    at: list[int] = []
    supports: list[tuple[np.ndarray, np.ndarray, int]] = []
    leniences: list[float] = []
    dense: dict[int, np.ndarray] = {}
    row = 0
    for proposal in proposals:
        distributions = (None,) * len(proposal.tokens) if proposal.rule is Rule.COUPLED else proposal.q
        for token, distribution in zip(proposal.tokens, distributions, strict=True):
            token = token if 0 <= token < V else -1
            tokens.append(token)
            at.append(row)
            row += 1
            leniences.append(proposal.lenience)
            if isinstance(distribution, DenseDistribution):
                dense[len(supports)] = distribution.probabilities.cpu().float().numpy()
            supports.append(_support(distribution, token))
        row += 1
    N = len(tokens)
    if N == 0:
        return Drafts([], [], [], _NO_IDS, _NO_IDS, _NO_IDS, [0], {})

    sizes = [len(ids) for ids, _, _ in supports]
    draft = np.arange(N).repeat(sizes)
    flat = np.concatenate([ids for ids, _, _ in supports], dtype=np.int64)
    totals = np.array([total for _, _, total in supports], dtype=np.float64)
    q = np.concatenate([weights for _, weights, _ in supports]) / totals.repeat(sizes)
    foreign = flat.view(np.uint64) >= V  # negative ids too
    if foreign.any():
        draft, flat, q = draft[~foreign], flat[~foreign], q[~foreign]
    where, drafted = np.array(at), np.array(tokens)
    p = rows[where[draft], flat].astype(np.float64)
    scaled = p if min(leniences) == 1 else p / np.array(leniences)[draft]
    hit = flat == drafted[draft]
    drafts = Drafts(
        p=rows[where, drafted].tolist(),
        q=np.bincount(draft[hit], q[hit], minlength=N).tolist(),
        beta=np.bincount(draft, np.minimum(scaled, q), minlength=N).tolist(),
        ids=flat,
        weights=q,
        masses=p,
        ends=draft.searchsorted(np.arange(N + 1)).tolist(),
        dense={},
    )
    for number, q_dense in dense.items():
        _put_dense(drafts, number, q_dense, rows[at[number]], tokens[number], leniences[number])
    return drafts


def _put_dense(drafts: Drafts, draft: int, q: np.ndarray, p: np.ndarray, token: int, lenience: float) -> None:
    # q, p: [V], float32
    drafts.q[draft] = float(q[token]) if token >= 0 else 0.0
    scaled = p if lenience == 1 else p / lenience
    drafts.beta[draft] = float(np.minimum(scaled, q).sum(dtype=np.float64))
    drafts.dense[draft] = q, p


def _support(q: DraftDistribution, token: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return ids and weights `[K]` of a draft distribution, and their total; empty for a dense one.

    None is a point mass on `token`.
    """
    match q:
        case SparseDistribution():
            return q.ids, q.weights, q.total
        case DenseDistribution():
            return _NO_IDS, _NO_WEIGHTS, 1
        case DraftLogits():
            raise TypeError("draft logits are not a distribution")  # `verify` refuses them outside the rule sigmoid
        case None:
            return np.array((token,), dtype=np.int64), _UNIT_WEIGHT, 1


_UNIT_WEIGHT = np.ones(1, dtype=np.uint16)
_NO_WEIGHTS = np.empty(0, dtype=np.uint16)
_NO_IDS = np.empty(0, dtype=np.int64)
