"""Speculative verification in float64, row by row, as the papers write it [L Alg. 1].

Slow, for comparison. With the other implementations it shares `adjustments`, the words of the noise and
log-probabilities, and no other arithmetic.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import apply
from kernels.logprobs import token_logprobs
from kernels.rng import gumbel
from kernels.sampling import SamplingParams
from kernels.sigmoid import EXCLUDED, DraftLogits, SigmoidScales
from kernels.sparse import SparseDistribution
from kernels.verify import BAD_LOGITS, Proposed, Rule, Status, VerifyResult

_ROUNDING = 1e-12
"""A residual of less mass than this, of the mass it is taken from, is rounding: p = q̂."""


def verify(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """See `kernels.verify.verify`. `logits` `[R, V]`, rows in order."""
    results = []
    start = 0
    for proposal in proposals:
        raw = logits[start : start + proposal.gamma + 1].cpu()
        results.append(_verify_one(raw, proposal))
        start += proposal.gamma + 1
    return results


def standardise(z: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution of one row of logits `[V]`: temperature, top-k, top-p, min-p, in that order [L 2.2]."""
    return _standardised(z.tobytes(), z.dtype.str, params)


@lru_cache(64)  # `enumeration` needs the rows of a pair thousands of times
def _standardised(row: bytes, dtype: str, params: SamplingParams) -> np.ndarray:
    z: np.ndarray = np.frombuffer(row, dtype)
    if params.temperature == 0:
        p = _point_mass(int(z.argmax()), len(z))
    else:
        p = _softmax(np.where(filtered(z, params), z, -math.inf), params.temperature)
    p.flags.writeable = False
    return p


def filtered(z: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return which tokens top-k, top-p and min-p leave of one row, bool `[V]`; the temperature is above 0."""
    keep = np.full(len(z), True)
    if 0 < params.top_k < len(z):
        keep &= z >= np.sort(z)[-params.top_k]
    p = _softmax(np.where(keep, z, -math.inf), params.temperature)
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        enough = np.flatnonzero(p[order].cumsum() >= params.top_p)
        last = order[enough[0]] if len(enough) else order[-1]
        keep &= z >= z[last]
    if params.min_p > 0:
        keep &= p >= params.min_p * p.max()
    return keep


def accepts(u: float, lenience: float, q: float, p: float) -> bool:
    """Say whether a drafted token stands: u · l · q < p, strictly, so that p = 0 never does [L 2.3, A.5]."""
    return q > 0 and u * lenience * q < p


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return max(0, p - q) `[V]`, not normalised [L 2.3].

    Lenience does not enter here. With it, x is accepted with probability min(q, p/l), which only overshoots p where
    q > p, and there the residual is 0. Elsewhere the residual adds at most p - q, since lenience only makes rejections
    rarer. So no token exceeds p/l, l = 1 is exact, and no other residual brings the distribution nearer to p.
    """
    rest: np.ndarray = np.maximum(0.0, p - q)
    return rest


def block_step(P: float, p: float, q: float) -> float:
    """Return P_i = min(1, P_{i-1} · p(x_i)/q(x_i)); 0 where the token could not have been drafted."""
    return min(1.0, P * p / q) if q > 0 else 0.0


def block_reach(P: float, p: np.ndarray, q: np.ndarray) -> float:
    """Return h_i = Z/(Z + 1 - P) with Z = Σ max(P · p - q, 0), p and q `[V]` being those of the next token.

    It is 0 where both Z and 1 - P are: p is q there, and a later token is accepted.
    """
    Z = float(residual(P * p, q).sum())
    return Z / (Z + (1 - P)) if Z > 0 else 0.0


def squashed(z: np.ndarray, scales: SigmoidScales) -> np.ndarray:
    """Return 1 / (1 + exp(-(z - α) / (β - α))) of each logit [W 3.2.2, Eq. 5], which stands in for softmax there."""
    with np.errstate(over="ignore"):  # far below α it is 0
        return np.asarray(1 / (1 + np.exp(-(z - scales.alpha) / (scales.beta - scales.alpha))))


class _BadRow(Exception):
    """A row that is needed has a NaN, a +inf, or nothing but -inf."""


class _Rows:
    """p and q of one sequence, row by row; `z` holds the adjusted logits, `[γ+1, V]`. Each is computed once."""

    def __init__(self, z: np.ndarray, proposal: Proposed) -> None:
        self.z, self.proposal, self.vocab_size = z, proposal, z.shape[1]
        self._p: dict[int, np.ndarray] = {}
        self._q: dict[int, np.ndarray] = {}

    def p(self, i: int) -> np.ndarray:
        if i not in self._p:
            self._refuse_bad(i)
            self._p[i] = standardise(self.z[i], self.proposal.params)
        return self._p[i]

    def q(self, i: int) -> np.ndarray:
        if i not in self._q:
            self._q[i] = self._draft_distribution(i)
        return self._q[i]

    def _draft_distribution(self, i: int) -> np.ndarray:
        q = self.proposal.q[i]
        if q is None:
            return _point_mass(self.proposal.tokens[i], self.vocab_size)
        assert isinstance(q, SparseDistribution)  # `verify` lets logits through to the rule sigmoid alone
        dense = np.zeros(self.vocab_size)
        for x, weight in zip(q.ids.tolist(), q.weights.tolist(), strict=True):
            if 0 <= x < self.vocab_size:
                dense[x] = weight / q.total
        return dense

    def at_draft(self, i: int) -> tuple[float, float]:
        """Return p(x) and q(x) of the drafted token x at `i`; 0 outside the vocabulary."""
        x = self.proposal.tokens[i]
        return (float(self.p(i)[x]), float(self.q(i)[x])) if 0 <= x < self.vocab_size else (0.0, 0.0)

    def scores(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return p̂ and q̂ of the rule `sigmoid`, `[V]` each; 0 where the filters of either exclude a token."""
        self._refuse_bad(i)
        z, params, draft, scales = self.z[i], self.proposal.params, self.proposal.q[i], self.proposal.sigmoid
        assert isinstance(draft, DraftLogits)
        assert scales is not None
        v = draft.values.cpu().to(torch.float64).numpy()
        p = np.where(filtered(z, params), squashed(z / params.temperature, scales), 0.0)
        return p, np.where(v == EXCLUDED, 0.0, squashed(v, scales))

    def beta(self, rows: int) -> tuple[float, ...]:
        """Return Σ min(p/l, q) of the first `rows` drafted tokens."""
        return tuple(float(np.minimum(self.p(i) / self.proposal.lenience, self.q(i)).sum()) for i in range(rows))

    def _refuse_bad(self, i: int) -> None:
        if not math.isfinite(self.z[i].max()):
            raise _BadRow


def _verify_one(raw: Tensor, proposal: Proposed) -> VerifyResult:
    # raw: [γ+1, V]
    rows = _Rows(apply(raw, proposal.adjustments).to(torch.float64).numpy(), proposal)
    try:
        result = _greedily(rows) if proposal.params.is_greedy else _RULES[proposal.rule](rows)
    except _BadRow:
        return BAD_LOGITS
    if proposal.top_logprobs < 0:
        return result
    emitted = (*proposal.tokens[: result.accepted], result.next_token)
    log_p = torch.from_numpy(np.stack([rows.p(i) for i in range(len(emitted))])).log()
    return replace(result, logprobs=token_logprobs(raw[: len(emitted)], log_p, emitted, proposal.top_logprobs))


def _tokenwise(rows: _Rows) -> VerifyResult:
    """Accept until the first failure [L Alg. 1]."""
    proposal = rows.proposal
    accepted = 0
    while accepted < proposal.gamma:
        p, q = rows.at_draft(accepted)
        if not accepts(proposal.accept_uniform(accepted), proposal.lenience, q, p):
            break
        accepted += 1
    return _resampled(rows, accepted, 1.0)


def _block(rows: _Rows) -> VerifyResult:
    """Accept up to the last success; P is the weight that the block so far may keep (Sun et al. 2024, Alg. 2)."""
    proposal = rows.proposal
    P = P_tau = 1.0
    tau = 0
    for i in range(1, proposal.gamma + 1):
        p, q = rows.at_draft(i - 1)
        P = block_step(P, p, q)
        if P == 0:
            break
        h = P if i == proposal.gamma else block_reach(P, rows.p(i), rows.q(i))
        if proposal.accept_uniform(i - 1) < h:
            tau, P_tau = i, P
    return _resampled(rows, tau, P_tau)


def _coupled(rows: _Rows) -> VerifyResult:
    """Accept while the target, with the noise that the draft had too, takes the same token."""
    proposal = rows.proposal
    for i in range(proposal.gamma + 1):
        y = coupled_choice(rows.p(i), proposal.seed, proposal.base_length + i)
        if i == proposal.gamma or y != proposal.tokens[i]:
            break
    return VerifyResult(Status.OK, i, y)


def coupled_choice(p: np.ndarray, seed: int, position: int) -> int:
    """Return argmax(log p + g), p `[V]`, with the Gumbel noise of an absolute position."""
    with np.errstate(divide="ignore"):
        return int((np.log(p) + gumbel(seed, [position], len(p), torch.float64)[0].numpy()).argmax())


def _sigmoid(rows: _Rows) -> VerifyResult:
    """Judge by p̂ and q̂, which do not add up to 1, until the first failure [W 3.2.2]. Lossy.

    After the last drafted token the next one is drawn from p. The code released with [W] has the raw logits
    there instead of p, which seems to be a slip.
    """
    proposal = rows.proposal
    for i in range(proposal.gamma):
        x = proposal.tokens[i]
        p_hat, q_hat = rows.scores(i)
        inside = 0 <= x < rows.vocab_size
        if inside and accepts(proposal.accept_uniform(i), proposal.lenience, q_hat[x], p_hat[x]):
            continue
        rest, u = residual(p_hat, q_hat), proposal.resample_uniform(i)
        if rest.any():
            return VerifyResult(Status.OK, i, _inverse_cdf(rest, u))
        return VerifyResult(Status.ZERO_RESIDUAL, i, _inverse_cdf(rows.p(i), u))
    last = proposal.gamma
    return VerifyResult(Status.OK, last, _inverse_cdf(rows.p(last), proposal.resample_uniform(last)))


def _greedily(rows: _Rows) -> VerifyResult:
    """Accept the most probable tokens, or nearly those, as lenience allows [L A.5]; the same under every rule."""
    proposal = rows.proposal
    beta: list[float] = []
    for accepted in range(proposal.gamma + 1):
        best = int(rows.p(accepted).argmax())
        if accepted == proposal.gamma:
            break
        x = proposal.tokens[accepted]
        stands = _greedy_choices(rows.z[accepted], proposal.lenience)
        if proposal.rule not in (Rule.COUPLED, Rule.SIGMOID):
            beta.append(float(rows.q(accepted)[stands].sum()))
        if not (0 <= x < rows.vocab_size and stands[x]):
            break
    return VerifyResult(Status.OK, accepted, best, tuple(beta))


def _resampled(rows: _Rows, accepted: int, P: float) -> VerifyResult:
    """Draw the next token: from p after the last drafted one, from norm(max(0, P · p - q)) before."""
    proposal = rows.proposal
    p, u = rows.p(accepted), proposal.resample_uniform(accepted)
    beta = rows.beta(min(accepted + 1, proposal.gamma))
    if accepted == proposal.gamma:
        return VerifyResult(Status.OK, accepted, _inverse_cdf(p, u), beta)
    rest = residual(P * p, rows.q(accepted))
    if rest.sum() > _ROUNDING * P:
        return VerifyResult(Status.OK, accepted, _inverse_cdf(rest, u), beta)
    return VerifyResult(Status.ZERO_RESIDUAL, accepted, _inverse_cdf(p, u), beta)


_RULES: dict[Rule, Callable[[_Rows], VerifyResult]] = {
    Rule.TOKENWISE: _tokenwise,
    Rule.BLOCK: _block,
    Rule.COUPLED: _coupled,
    Rule.SIGMOID: _sigmoid,
}


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
