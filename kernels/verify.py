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
from kernels.checks import refuse_forms, refuse_misfit
from kernels.dense import DenseLaw, DraftLogits, SigmoidScales
from kernels.ruling import DraftLaw, Proposed, Rule, Ruling, Status, TokenLogprobs, Uniforms, UnsupportedRule

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
        refuse_misfit(number, proposal)
        if proposal.rule not in chosen.RULES:
            offered = ", ".join(sorted(rule.value for rule in chosen.RULES))
            raise UnsupportedRule(f"{name} does not judge by {proposal.rule.value}; it judges by {offered}")
    R = sum(len(proposal.tokens) + 1 for proposal in proposals)
    if logits.ndim != 2 or logits.shape[0] != R or (R and logits.shape[1] == 0):
        raise ValueError(f"logits have shape {tuple(logits.shape)}; the proposals need [{R}, V]")
    for number, proposal in enumerate(proposals):
        refuse_forms(number, proposal, logits.shape[1])
    return chosen.verify(logits, proposals) if proposals else []


@cache
def _load(name: str) -> _Implementation:
    return cast(_Implementation, import_module(_MODULES[name]))
