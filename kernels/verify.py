"""The one door to verification: checks the shapes, picks an implementation, and rules on a batch of proposals.

An implementation is a module with `verify(logits, proposals)` and the `RULES` that it judges by; `_MODULES` names them.
Knows nothing of sequences beyond their proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from kernels import verify_reference, verify_torch
from kernels.dense import DenseLaw, DraftLogits, SigmoidScales
from kernels.ruling import DraftLaw, Proposed, Rule, Ruling, Status, TokenLogprobs, Uniforms, UnsupportedRule
from kernels.sparse import SparseLaw

__all__ = [
    "SUPPORTED_RULES",
    "DenseLaw",
    "DraftLaw",
    "DraftLogits",
    "Proposed",
    "Rule",
    "Ruling",
    "SigmoidScales",
    "Status",
    "TokenLogprobs",
    "Uniforms",
    "UnsupportedRule",
    "implementation_for",
    "implementations",
    "verify",
]


class _Implementation(Protocol):
    RULES: frozenset[Rule]

    def verify(self, logits: Tensor, proposals: Sequence[Proposed]) -> list[Ruling]: ...


_MODULES = {
    "reference": "kernels.verify_reference",
    "torch": "kernels.verify_torch",
    "triton": "kernels.verify_triton",  # imported where it is asked for alone: triton need not be installed
}

SUPPORTED_RULES: frozenset[Rule] = verify_reference.RULES & verify_torch.RULES
"""The rules that every implementation judges by."""


def implementation_for(device: torch.device) -> str:
    """Return the name of the implementation that `verify` picks for logits on `device`."""
    return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"


def implementations() -> tuple[str, ...]:
    """Return the names that `verify` takes."""
    return tuple(_MODULES)


def verify(logits: Tensor, proposals: Sequence[Proposed], implementation: str | None = None) -> list[Ruling]:
    """Rule on each proposal, given the target's logits after each of its prefixes.

    Args:
        logits: `[R, V]` with R = Σ(γ_b + 1), the rows of each proposal in order, one proposal after the other.
        proposals: any mixture of laws, rules and lengths.
        implementation: "torch", "triton" or "reference" (float64, slow); by default the fastest on the logits' device.

    Returns:
        One ruling a proposal. Rows that are no law spoil the ruling of the sequence that needed them, and no other.

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
    """Refuse draft laws of the wrong form or length, and scales that are missing or not asked for."""
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


def _dense_shape(law: DraftLaw) -> tuple[int, ...] | None:
    match law:
        case DenseLaw():
            return tuple(law.probabilities.shape)
        case DraftLogits():
            return tuple(law.values.shape)
        case _:
            return None


def _form(law: DraftLaw) -> str:
    names = {SparseLaw: "a sparse law", DenseLaw: "a dense law", DraftLogits: "draft logits"}
    return names.get(type(law), "a point mass")
