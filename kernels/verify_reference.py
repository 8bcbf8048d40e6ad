"""Speculative verification in float64, row by row, as the paper writes it: the oracle [L Alg. 1].

Made to be read and compared with, not to be fast. It shares no arithmetic with the other implementations, save that of
`adjustments`: adjusted logits are what a rule is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import apply
from kernels.distribution import SamplingLaw
from kernels.logprobs import token_logprobs
from kernels.ruling import BAD_LOGITS, Proposed, Ruling, Status, TokenLogprobs
from kernels.sparse import SparseLaw

_ROUNDING = 1e-12
"""A residual of less mass than this is rounding: p = q̂."""


def verify(logits: Tensor, proposals: Sequence[Proposed]) -> list[Ruling]:
    """Rule on each proposal; `logits` `[R, V]`, rows in order. See `kernels.verify.verify`."""
    rulings = []
    start = 0
    for proposal in proposals:
        raw = logits[start : start + proposal.gamma + 1].cpu()
        rulings.append(_judge(raw, proposal))
        start += proposal.gamma + 1
    return rulings


def standardise(z: np.ndarray, law: SamplingLaw) -> np.ndarray:
    """Return the law of one row of logits `[V]`: temperature, top-k, top-p, min-p, in that order [L 2.2]."""
    if law.temperature == 0:
        return _point_mass(int(z.argmax()), len(z))
    keep = np.full(len(z), True)
    if 0 < law.top_k < len(z):
        keep &= z >= np.sort(z)[-law.top_k]
    p = _softmax(np.where(keep, z, -math.inf), law.temperature)
    if law.top_p < 1:
        order = np.argsort(-p, kind="stable")
        enough = np.flatnonzero(p[order].cumsum() >= law.top_p)
        last = order[enough[0]] if len(enough) else order[-1]
        keep &= z >= z[last]
    if law.min_p > 0:
        keep &= p >= law.min_p * p.max()
    return _softmax(np.where(keep, z, -math.inf), law.temperature)


def accepts(u: float, lenience: float, q: float, p: float) -> bool:
    """Say whether a drafted token stands: u · l · q < p, strictly, so that p = 0 never does [L 2.3, A.5]."""
    return q > 0 and u * lenience * q < p


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return max(0, p - q), what acceptance leaves of p, `[V]`, not normalised [L 2.3].

    Lenience does not enter here. With it, x is accepted with probability min(q, p/l), which only overshoots p where
    q > p, and there the residual is 0. Elsewhere the residual adds at most p - q, since lenience only makes rejections
    rarer. So no token exceeds p/l, l = 1 is exact, and no other residual brings the law nearer to p.
    """
    rest: np.ndarray = np.maximum(0.0, p - q)
    return rest


def _judge(raw: Tensor, proposal: Proposed) -> Ruling:
    # raw: [γ+1, V]
    adjusted = apply(raw, proposal.adjustments).to(torch.float64).numpy()
    V = adjusted.shape[1]
    beta: list[float] = []
    accepted = 0
    for i, x in enumerate(proposal.tokens):
        if _is_bad(adjusted[i]):
            return BAD_LOGITS
        p, q = standardise(adjusted[i], proposal.law), _draft_law(proposal.q[i], x, V)
        if proposal.law.temperature == 0:
            lenient = _greedy_choices(adjusted[i], proposal.lenience)
            beta.append(float(q[lenient].sum()))
            stands = 0 <= x < V and bool(lenient[x])
        else:
            beta.append(float(np.minimum(p / proposal.lenience, q).sum()))
            stands = 0 <= x < V and accepts(proposal.accept_uniform(i), proposal.lenience, q[x], p[x])
        if not stands:
            break
        accepted += 1
    if _is_bad(adjusted[accepted]):
        return BAD_LOGITS

    next_law = p = standardise(adjusted[accepted], proposal.law)
    status = Status.OK
    if accepted < proposal.gamma and proposal.law.temperature > 0:
        rest = residual(p, _draft_law(proposal.q[accepted], proposal.tokens[accepted], V))
        if rest.sum() > _ROUNDING:
            next_law = rest
        else:
            status = Status.ZERO_RESIDUAL
    next_token = _inverse_cdf(next_law, proposal.resample_uniform(accepted))
    emitted = (*proposal.tokens[:accepted], next_token)
    logprobs: tuple[TokenLogprobs, ...] = ()
    if proposal.top_logprobs >= 0:
        laws = np.stack([standardise(row, proposal.law) for row in adjusted[: accepted + 1]])
        logprobs = token_logprobs(raw[: accepted + 1], torch.from_numpy(laws), emitted, proposal.top_logprobs)
    return Ruling(status, accepted, next_token, tuple(beta), logprobs)


def _draft_law(law: SparseLaw | None, token: int, V: int) -> np.ndarray:
    if law is None:
        return _point_mass(token, V)
    q = np.zeros(V)
    for x, weight in zip(law.ids.tolist(), law.weights.tolist(), strict=True):
        if 0 <= x < V:
            q[x] = weight / law.total
    return q


def _greedy_choices(z: np.ndarray, lenience: float) -> np.ndarray:
    """Return which tokens stand at temperature 0, bool `[V]`: the argmax, and p(x) ≥ l · max p where l < 1 [L A.5]."""
    if lenience == 1:
        return _point_mass(int(z.argmax()), len(z)) > 0
    choices: np.ndarray = np.exp(z - z.max()) >= lenience
    return choices


def _softmax(z: np.ndarray, temperature: float) -> np.ndarray:
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf, as it should
        e = np.exp((z - z.max()) / temperature)
    return np.asarray(e / e.sum())


def _point_mass(token: int, V: int) -> np.ndarray:
    p = np.zeros(V)
    if 0 <= token < V:
        p[token] = 1.0
    return p


def _inverse_cdf(weights: np.ndarray, u: float) -> int:
    cdf = weights.cumsum()
    return int(np.searchsorted(cdf, u * cdf[-1], side="right"))


def _is_bad(z: np.ndarray) -> bool:
    return not math.isfinite(z.max())
