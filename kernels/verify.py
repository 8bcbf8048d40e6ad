"""Verification: a batch of proposals against the target's logits, by the fastest implementation on their device.

What goes in and comes out, the checks that every proposal passes, and `verify`. An implementation is a module with
`verify(logits, proposals)` and the `RULES` that it judges by; `_MODULES` names them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels.adjustments import RowAdjustment
from kernels.dense import DenseDistribution, DraftLogits, SigmoidScales
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution

__all__ = [
    "SUPPORTED_RULES",
    "DenseDistribution",
    "DraftDistribution",
    "DraftLogits",
    "Proposed",
    "Rule",
    "SigmoidScales",
    "Status",
    "TokenLogprobs",
    "Uniforms",
    "UnsupportedRule",
    "VerifyResult",
    "implementation_for",
    "implementations",
    "verify",
]

DraftDistribution = SparseDistribution | DenseDistribution | DraftLogits | None
"""What a drafted token was sampled from; None is a point mass on it. `DraftLogits` go with the rule `sigmoid` alone."""


class Rule(enum.Enum):
    """How a proposal is judged."""

    TOKENWISE = "tokenwise"  # [L Alg. 1]
    BLOCK = "block"  # Sun et al., "Block verification accelerates speculative decoding", 2024
    COUPLED = "coupled"  # draft and target share their noise
    SIGMOID = "sigmoid"  # [W 3.2.2], lossy


class Status(enum.Enum):
    """How a result came about."""

    OK = "ok"
    ZERO_RESIDUAL = "zero_residual"  # p = q̂ up to rounding at the rejected token: the next one was drawn from p
    BAD_LOGITS = "bad_logits"  # a row it needed has a NaN, a +inf, or nothing but -inf: there are no tokens


class UnsupportedRule(ValueError):
    """The chosen implementation does not judge by the rule that a proposal names."""


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Draws given by the caller in place of Philox: one for each acceptance test `[γ]`, and one for the next token."""

    accept: tuple[float, ...]
    resample: float


@dataclass(frozen=True, slots=True)
class Proposed:
    """One sequence's proposal.

    Attributes:
        tokens: the γ ≥ 0 drafted tokens.
        q: the law each was sampled from, `[γ]`. Empty under `coupled`; `DraftLogits` under `sigmoid`.
        law: how the target's logits become p.
        seed: key of the draws.
        base_length: committed tokens (prompt included) when the round began; part of every draw's counter, and the
            absolute position of the first drafted token.
        rule: how the proposal is judged.
        lenience: l of [L A.5], in (0, 1]; 1 is exact.
        adjustments: what changes in the target's rows, `[γ+1]`, or nothing.
        top_logprobs: -1 for no log-probabilities, 0 for those of the emitted tokens, N for the N best as well.
        uniforms: the draws to use; by default those of (seed, base_length). `coupled` draws none.
        sigmoid: the scales of the rule `sigmoid`, which needs them.
    """

    tokens: tuple[int, ...]
    q: tuple[DraftDistribution, ...]
    law: SamplingParams
    seed: int
    base_length: int
    rule: Rule = Rule.TOKENWISE
    lenience: float = 1.0
    adjustments: tuple[RowAdjustment | None, ...] = ()
    top_logprobs: int = -1
    uniforms: Uniforms | None = None
    sigmoid: SigmoidScales | None = None

    @property
    def gamma(self) -> int:
        """How many tokens were drafted."""
        return len(self.tokens)

    def accept_uniform(self, index: int) -> float:
        """Return the draw that tests the drafted token at `index`."""
        if self.uniforms is not None:
            return self.uniforms.accept[index]
        return uniform(self.seed, self.base_length, index, Domain.ACCEPT)

    def resample_uniform(self, accepted: int) -> float:
        """Return the draw of the next token, which stands at index `accepted` of the round."""
        if self.uniforms is not None:
            return self.uniforms.resample
        return uniform(self.seed, self.base_length, accepted, Domain.RESAMPLE)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one emitted token, under the target.

    Attributes:
        token: the emitted token.
        raw: its log softmax of the untouched logits.
        adjusted: its log p, after adjustments, temperature and filters; -inf where p is 0.
        top_ids: the ids of highest `raw`, best first, lower ids first among equals.
        top_raw: theirs.
        top_adjusted: theirs.
    """

    token: int
    raw: float
    adjusted: float
    top_ids: tuple[int, ...] = ()
    top_raw: tuple[float, ...] = ()
    top_adjusted: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What became of one proposal.

    Attributes:
        status: see `Status`.
        accepted: how many drafted tokens stand.
        next_token: the token after them, drawn by the verifier; -1 under BAD_LOGITS.
        beta: Σ min(p/l, q̂) [L 3.5, A.5] of each drafted token, which is its chance of being accepted under
            `tokenwise`, for the rows up to the one that stopped the round: `[min(accepted + 1, γ)]`. Empty under
            `coupled` and `sigmoid`, where no q̂ is known.
        logprobs: one entry for each emitted token, `[accepted + 1]`, where asked for.
    """

    status: Status
    accepted: int
    next_token: int
    beta: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


BAD_LOGITS = VerifyResult(status=Status.BAD_LOGITS, accepted=0, next_token=-1)
"""The result of a sequence whose logits are no law."""


class _Implementation(Protocol):
    RULES: frozenset[Rule]

    def verify(self, logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]: ...


_MODULES = {
    "torch": "kernels.verify_torch",
    "triton": "kernels.verify_triton",  # imported where it is asked for alone: triton need not be installed
}

SUPPORTED_RULES: frozenset[Rule] = frozenset(Rule)
"""The rules that every implementation judges by."""


def implementation_for(device: torch.device) -> str:
    """Return the name of the implementation that `verify` picks for logits on `device`."""
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def implementations() -> tuple[str, ...]:
    """Return the names that `verify` takes."""
    return tuple(_MODULES)


def verify(logits: Tensor, proposals: Sequence[Proposed], implementation: str | None = None) -> list[VerifyResult]:
    """Rule on each proposal, given the target's logits after each of its prefixes.

    Args:
        logits: `[R, V]` with R = Σ(γ_b + 1), the rows of each proposal in order, one proposal after the other.
        proposals: any mixture of laws, rules and lengths.
        implementation: "torch" or "triton"; by default the fastest on the logits' device.

    Returns:
        One result a proposal. Rows that are no law spoil the result of the sequence that needed them, and no other.

    Raises:
        ValueError: shapes do not fit together, or a field is out of range.
        UnsupportedRule: the implementation does not judge by a rule that a proposal names.
    """
    name = implementation or implementation_for(logits.device)
    if name not in _MODULES:
        raise ValueError(f"implementation is {name!r}; there are {', '.join(_MODULES)}")
    chosen = _load(name)
    for number, proposal in enumerate(proposals):
        _refuse_misfit(number, proposal)
        if proposal.rule not in chosen.RULES:
            offered = ", ".join(sorted(rule.value for rule in chosen.RULES))
            raise UnsupportedRule(f"{name} does not judge by {proposal.rule.value}; it judges by {offered}")
    R = sum(len(proposal.tokens) + 1 for proposal in proposals)
    if logits.ndim != 2 or logits.shape[0] != R or (R and logits.shape[1] == 0):
        raise ValueError(f"logits have shape {tuple(logits.shape)}; the proposals need [{R}, V]")
    for number, proposal in enumerate(proposals):
        _refuse_forms(number, proposal, logits.shape[1])
    return chosen.verify(logits, proposals) if proposals else []


@cache
def _load(name: str) -> _Implementation:
    return cast(_Implementation, import_module(_MODULES[name]))


def _refuse_misfit(number: int, proposal: Proposed) -> None:
    """Refuse numbers of things that do not go together, and fields out of range.

    Args:
        number: of the proposal, for the message.
        proposal: as it was given.

    Raises:
        ValueError: names the field and the numbers.
    """
    gamma = len(proposal.tokens)
    if proposal.rule is Rule.COUPLED:
        if proposal.q:
            raise ValueError(f"proposal {number} has {len(proposal.q)} draft laws; the rule coupled takes none")
    elif len(proposal.q) != gamma:
        raise ValueError(f"proposal {number} has {gamma} tokens and {len(proposal.q)} draft laws")
    if proposal.adjustments and len(proposal.adjustments) != gamma + 1:
        raise ValueError(f"proposal {number} has {len(proposal.adjustments)} adjustments for {gamma + 1} rows")
    if not 0 < proposal.lenience <= 1:
        raise ValueError(f"lenience of proposal {number} is {proposal.lenience}; it must be above 0 and at most 1")
    if proposal.lenience < 1 and proposal.rule in (Rule.BLOCK, Rule.COUPLED):
        raise ValueError(
            f"lenience of proposal {number} is {proposal.lenience}; it must be 1 under {proposal.rule.value}"
        )
    if proposal.top_logprobs < -1:
        raise ValueError(f"top_logprobs of proposal {number} is {proposal.top_logprobs}; it must be at least -1")
    if proposal.uniforms is not None and len(proposal.uniforms.accept) < gamma:
        raise ValueError(f"proposal {number} has {len(proposal.uniforms.accept)} uniforms for {gamma} tokens")


def _refuse_forms(number: int, proposal: Proposed, V: int) -> None:
    """Refuse draft laws of the wrong form or length, and scales that are missing or not asked for.

    Args:
        number: of the proposal, for the message.
        proposal: one that `_refuse_misfit` lets pass.
        V: tokens in the target's vocabulary.

    Raises:
        ValueError: names the field, and what was given.
    """
    is_sigmoid = proposal.rule is Rule.SIGMOID
    if is_sigmoid and proposal.sigmoid is None:
        raise ValueError(f"sigmoid of proposal {number} is None; the rule sigmoid needs scales")
    if not is_sigmoid and proposal.sigmoid is not None:
        raise ValueError(f"proposal {number} has sigmoid scales; the rule {proposal.rule.value} takes none")
    for i, law in enumerate(proposal.q):
        # At temperature 0 no rule asks what the draft believed, and a draft has no scale for its logits.
        if is_sigmoid and not (isinstance(law, DraftLogits) or (law is None and proposal.law.is_greedy)):
            raise ValueError(f"q[{i}] of proposal {number} is {_form(law)}; the rule sigmoid takes draft logits alone")
        if not is_sigmoid and isinstance(law, DraftLogits):
            raise ValueError(
                f"q[{i}] of proposal {number} is draft logits, which the rule {proposal.rule.value} does not take"
            )
        shape = _dense_shape(law)
        if shape is not None and shape != (V,):
            raise ValueError(f"q[{i}] of proposal {number} has shape {shape}; the vocabulary has {V} tokens")


def _dense_shape(law: DraftDistribution) -> tuple[int, ...] | None:
    match law:
        case DenseDistribution():
            return tuple(law.probabilities.shape)
        case DraftLogits():
            return tuple(law.values.shape)
        case _:
            return None


def _form(law: DraftDistribution) -> str:
    names = {SparseDistribution: "a sparse law", DenseDistribution: "a dense law", DraftLogits: "draft logits"}
    return names.get(type(law), "a point mass")
