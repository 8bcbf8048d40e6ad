"""Verification: types, input checks, and `verify`, which picks the implementation by device.

An implementation is a module with `verify(logits, proposals)`; `_MODULES` lists them. To its results `verify` adds
log-probabilities and p of drafted tokens (`kernels.logprobs`), which few requests need.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels.adjustments import RowAdjustment
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.sparse import SparseDistribution

DraftDistribution = SparseDistribution | DraftLogits | None
"""The distribution of a drafted token; None is a point mass on it. `DraftLogits` is for the rule `sigmoid` only."""


class Rule(enum.Enum):
    """The acceptance rule."""

    TOKENWISE = "tokenwise"  # [L Alg. 1]
    BLOCK = "block"  # Sun et al., "Block verification accelerates speculative decoding", 2024
    COUPLED = "coupled"  # draft and target share their noise
    SIGMOID = "sigmoid"  # [W 3.2.2], lossy


class Status(enum.Enum):
    """The status of a result."""

    OK = "ok"
    ZERO_RESIDUAL = "zero_residual"  # p = q̂ up to rounding at the rejected token: the next one was drawn from p
    BAD_LOGITS = "bad_logits"  # a needed row has NaN, +inf, or only -inf: no tokens


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Uniforms in [0, 1) from the caller in place of Philox: one per acceptance test `[γ]`, one for the next token."""

    accept: tuple[float, ...]
    resample: float


@dataclass(frozen=True, slots=True)
class Proposed:
    """One sequence's proposal.

    Attributes:
        tokens: the γ ≥ 0 drafted tokens.
        q: the distribution each was sampled from, `[γ]`. Empty under `coupled`; `DraftLogits` under `sigmoid`.
        params: how the target's logits become p.
        seed: key of the random numbers, 0 to 2^64 - 1.
        base_length: committed tokens (prompt included) when the round began; part of every counter, and the absolute
            position of the first drafted token.
        rule: the acceptance rule.
        lenience: l of [L A.5], in (0, 1]; 1 is exact.
        adjustments: changes to the target's logits, one per row `[γ+1]`, or empty.
        top_logprobs: -1 for no log-probabilities, 0 for those of the emitted tokens, N for the N best as well.
        reports_probabilities: whether the result has p of the drafted tokens.
        uniforms: overrides the uniforms of (seed, base_length). `coupled` uses none.
        sigmoid: the scales; required by the rule `sigmoid`, refused by the others.
    """

    tokens: tuple[int, ...]
    q: tuple[DraftDistribution, ...]
    params: SamplingParams
    seed: int
    base_length: int
    rule: Rule = Rule.TOKENWISE
    lenience: float = 1.0
    adjustments: tuple[RowAdjustment | None, ...] = ()
    top_logprobs: int = -1
    reports_probabilities: bool = False
    uniforms: Uniforms | None = None
    sigmoid: SigmoidScales | None = None

    @property
    def gamma(self) -> int:
        """The number of drafted tokens."""
        return len(self.tokens)

    def accept_uniform(self, index: int) -> float:
        """Return the uniform of the acceptance test at `index`."""
        if self.uniforms is not None:
            return self.uniforms.accept[index]
        return uniform(self.seed, self.base_length, index, Domain.ACCEPT)

    def resample_uniform(self, accepted: int) -> float:
        """Return the uniform of the next token, at index `accepted` of the round."""
        if self.uniforms is not None:
            return self.uniforms.resample
        return uniform(self.seed, self.base_length, accepted, Domain.RESAMPLE)


def adjustments_of(proposals: Sequence[Proposed]) -> list[RowAdjustment | None]:
    """Return the adjustments of all rows, in order; empty if no proposal has any."""
    if not any(proposal.adjustments for proposal in proposals):
        return []
    return [row for each in proposals for row in (each.adjustments or (None,) * (len(each.tokens) + 1))]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one emitted token, under the target.

    Attributes:
        token: the emitted token.
        raw: its log softmax of the untouched logits.
        adjusted: its log p, after adjustments, temperature and filters; -inf if p is 0.
        top_ids: the ids of highest `raw`, best first, lower ids first among equals.
        top_raw: their `raw`.
        top_adjusted: their `adjusted`.
    """

    token: int
    raw: float
    adjusted: float
    top_ids: tuple[int, ...] = ()
    top_raw: tuple[float, ...] = ()
    top_adjusted: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of one proposal.

    Attributes:
        status: see `Status`.
        accepted: the number of accepted drafted tokens.
        next_token: the token after them, sampled by the verifier; -1 under BAD_LOGITS.
        beta: β = Σ min(p/l, q̂) [L 3.5, A.5] of each row up to the stopping one, `[min(accepted + 1, γ)]`: the chance of
            acceptance under `tokenwise`. Empty under `coupled` and `sigmoid`, which have no q̂.
        logprobs: one entry per emitted token, `[accepted + 1]`, if requested.
        probabilities: p of each drafted token after those before it, `[γ]`, if requested.
    """

    status: Status
    accepted: int
    next_token: int
    beta: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    probabilities: tuple[float, ...] = ()


BAD_LOGITS = VerifyResult(status=Status.BAD_LOGITS, accepted=0, next_token=-1)
"""The result of a sequence with a bad row of logits (`sampling.bad_rows`)."""


_Verify = Callable[[Tensor, Sequence[Proposed]], list[VerifyResult]]

_MODULES = {
    "torch": "kernels.verify_torch",
    "c": "kernels.verify_c",  # on processors with AVX2
    "triton": "kernels.verify_triton",  # imported on use: triton is optional
}


def implementation_for(device: torch.device) -> str:
    """Return the name of the implementation that `verify` picks for logits on `device`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return "triton"
    from kernels import verify_c  # which imports this module

    return "c" if device.type == "cpu" and verify_c.is_available() else "torch"


def verify(logits: Tensor, proposals: Sequence[Proposed], implementation: str | None = None) -> list[VerifyResult]:
    """Verify proposals against the target's logits.

    Args:
        logits: `[R, V]` with R = Σ(γ_b + 1), the rows of each proposal in order, one proposal after the other.
        proposals: any mixture of sampling parameters, rules and γ.
        implementation: "torch", "c" or "triton"; by default the fastest on the logits' device.

    Returns:
        One result per proposal. A bad row makes the result of its own proposal BAD_LOGITS; the others are not affected.

    Raises:
        ValueError: shapes do not fit together, or a field is out of range.
    """
    name = implementation or implementation_for(logits.device)
    if name not in _MODULES:
        raise ValueError(f"implementation is {name!r}; it must be one of {', '.join(_MODULES)}")
    verify_all = _load(name)
    for number, proposal in enumerate(proposals):
        _check_counts(number, proposal)
    R = sum(len(proposal.tokens) + 1 for proposal in proposals)
    if logits.ndim != 2 or logits.shape[0] != R or (R and logits.shape[1] == 0):
        raise ValueError(f"logits have the shape {list(logits.shape)}; for these proposals it must be [{R}, V]")
    for number, proposal in enumerate(proposals):
        _check_distributions(number, proposal, logits.shape[1])
    results = verify_all(logits, proposals) if proposals else []
    first = 0
    for b, proposal in enumerate(proposals):
        end = first + len(proposal.tokens) + 1
        if proposal.top_logprobs >= 0 or proposal.reports_probabilities:
            from kernels.logprobs import with_reports  # which imports this module

            results[b] = with_reports(results[b], proposal, logits[first:end])
        first = end
    return results


@cache
def _load(name: str) -> _Verify:
    found: _Verify = import_module(_MODULES[name]).verify
    return found


def _check_counts(number: int, proposal: Proposed) -> None:
    """Check that counts agree and fields are in range.

    Raises:
        ValueError: names the field and the numbers.
    """
    gamma = len(proposal.tokens)
    if proposal.rule is Rule.COUPLED:
        if proposal.q:
            raise ValueError(
                f"q of proposal {number} has length {len(proposal.q)}; it must be 0 under the rule coupled"
            )
    elif len(proposal.q) != gamma:
        raise ValueError(f"q of proposal {number} has length {len(proposal.q)}; it must be that of tokens, {gamma}")
    if proposal.adjustments and len(proposal.adjustments) != gamma + 1:
        raise ValueError(
            f"adjustments of proposal {number} has length {len(proposal.adjustments)}; it must be 0 or {gamma + 1}"
        )
    if not 0 < proposal.lenience <= 1:
        raise ValueError(f"lenience of proposal {number} is {proposal.lenience}; it must be above 0 and at most 1")
    if proposal.lenience < 1 and proposal.rule in (Rule.BLOCK, Rule.COUPLED):
        raise ValueError(
            f"lenience of proposal {number} is {proposal.lenience}; it must be 1 under the rule {proposal.rule.value}"
        )
    if proposal.top_logprobs < -1:
        raise ValueError(f"top_logprobs of proposal {number} is {proposal.top_logprobs}; it must be at least -1")
    if proposal.uniforms is not None and len(proposal.uniforms.accept) < gamma:
        raise ValueError(
            f"uniforms of proposal {number} has length {len(proposal.uniforms.accept)}; it must be {gamma}"
        )


def _check_distributions(number: int, proposal: Proposed, V: int) -> None:
    """Check type and length of draft distributions, and that scales are given for `sigmoid` only.

    Args:
        proposal: checked by `_check_counts` before.

    Raises:
        ValueError: names the field and the given value.
    """
    is_sigmoid = proposal.rule is Rule.SIGMOID
    if is_sigmoid and proposal.sigmoid is None:
        raise ValueError(f"sigmoid of proposal {number} is None; the rule sigmoid needs scales")
    if not is_sigmoid and proposal.sigmoid is not None:
        raise ValueError(f"sigmoid of proposal {number} is set; it must be None under the rule {proposal.rule.value}")
    for i, q in enumerate(proposal.q):
        # At temperature 0 no rule needs q, and draft logits are not defined.
        if is_sigmoid and not (isinstance(q, DraftLogits) or (q is None and proposal.params.is_greedy)):
            form = "a point mass" if q is None else "a sparse distribution"
            raise ValueError(f"q[{i}] of proposal {number} is {form}; the rule sigmoid needs draft logits")
        if not is_sigmoid and isinstance(q, DraftLogits):
            raise ValueError(
                f"q[{i}] of proposal {number} is draft logits; the rule {proposal.rule.value} needs a distribution"
            )
        if isinstance(q, DraftLogits) and q.values.shape != (V,):
            raise ValueError(f"q[{i}] of proposal {number} has the shape {list(q.values.shape)}; it must be [{V}]")
