"""What every proposal must hold to before it is judged: counts that go together, fields in range, forms of q̂.

Knows nothing of how proposals are judged, and of which rules an implementation has.
"""

from __future__ import annotations

from kernels.dense import DenseLaw, DraftLogits
from kernels.ruling import DraftLaw, Proposed, Rule
from kernels.sparse import SparseLaw


def refuse_misfit(number: int, proposal: Proposed) -> None:
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


def refuse_forms(number: int, proposal: Proposed, V: int) -> None:
    """Refuse draft laws of the wrong form or length, and scales that are missing or not asked for.

    Args:
        number: of the proposal, for the message.
        proposal: one that `refuse_misfit` lets pass.
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
