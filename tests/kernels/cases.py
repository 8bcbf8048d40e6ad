"""Proposals by hand and by chance, and the comparison of two implementations on them.

Two precisions may disagree where a uniform lies within rounding of an edge: then, and only then, the neighbour is
allowed, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules
from kernels.dense import EXCLUDED, DenseDistribution, SigmoidScales
from kernels.sampling import SamplingParams, probabilities
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import DraftDistribution, Proposed, Rule, Uniforms, VerifyResult

Verify = Callable[[Tensor, Sequence[Proposed]], list[VerifyResult]]

LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.8),
    SamplingParams(temperature=0),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.8, min_p=0.02),
    SamplingParams(top_k=1),
)
_RULES = LogitRules(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, banned_tokens=(0,))
_SCALES = (
    SigmoidScales(-10, 10),
    SigmoidScales(-1e3, 1e3),
    SigmoidScales(-1e4, 1e4),
    SigmoidScales(-1e5, 1e5),
    SigmoidScales(-0.5, 0.5),
    SigmoidScales(1.0, 2.5),
)
_NEAR = 1e-5  # relative, in the uniforms: what a float32 softmax leaves open


def random_batch(seed: int, V: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Proposed]]:
    """Return logits and `size` proposals, with γ of 0 to 8, forms of q, rules, laws, lenience and adjustments mixed."""
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows, proposals = [], []
    for _ in range(size):
        gamma = source.choice((0, 1, 2, 3, 5, 8))
        z = (torch.randn(gamma + 1, V, generator=generator) * source.choice((0.5, 2.0, 4.0))).to(dtype)
        rows.append(z)
        proposals.append(_random_proposal(source, generator, z))
    return torch.cat(rows), proposals


def _random_proposal(source: random.Random, generator: torch.Generator, z: Tensor) -> Proposed:
    # z: [γ+1, V]
    gamma, V = len(z) - 1, z.shape[1]
    noisy = z[:gamma].float() + torch.randn(gamma, V, generator=generator) * 0.7
    rule = source.choice((Rule.TOKENWISE, Rule.TOKENWISE, Rule.BLOCK, Rule.COUPLED, Rule.SIGMOID))
    law = source.choice(LAWS)
    drafts: list[tuple[int, DraftDistribution]]
    if rule is Rule.SIGMOID:
        drafts = _drafted_logits(source, noisy, law)
    else:
        drafts = _drafted_laws(source, torch.softmax(noisy, -1))
    tokens = [token for token, _ in drafts]
    if rule is Rule.COUPLED:
        # Most agree with the target, so that the walk goes on.
        tokens = [
            int(row.float().argmax()) if source.random() < 0.7 else token
            for row, token in zip(z[:gamma], tokens, strict=True)
        ]
    adjuster = Adjuster(_RULES, [source.randrange(V) for _ in range(5)], V) if V > 1 and source.random() < 0.3 else None
    return Proposed(
        tokens=tuple(tokens),
        q=() if rule is Rule.COUPLED else tuple(said for _, said in drafts),
        law=law,
        seed=source.getrandbits(64),
        base_length=source.randrange(1000),
        rule=rule,
        lenience=source.choice((1.0, 1.0, 0.5)) if rule in (Rule.TOKENWISE, Rule.SIGMOID) else 1.0,
        adjustments=_adjustments(adjuster, tokens) if adjuster else (),
        top_logprobs=source.choice((-1, -1, 0, 3)),
        sigmoid=source.choice(_SCALES) if rule is Rule.SIGMOID else None,
    )


def _drafted_laws(source: random.Random, q: Tensor) -> list[tuple[int, DraftDistribution]]:
    """Return a token of each row of `q` `[γ, V]`, and what it was drawn from: a point mass, a sparse or a dense law."""
    config = SparseConfig(keep_mass=1.0, max_support=source.choice((1, 2, 16, 256)))
    drafts: list[tuple[int, DraftDistribution]] = []
    for row, law in zip(q, sparsify(q, config), strict=True):
        form = source.choice(("sparse",) * 6 + ("dense",) * 3 + ("point",))
        if form == "point":
            drafts.append((int(row.argmax()), None))
        elif form == "dense":
            drafts.append((_drawn(row, source.random()), DenseDistribution(row)))
        else:
            drafts.append((law.token_at(source.random()), law))
    return drafts


def _drafted_logits(source: random.Random, z: Tensor, law: SamplingParams) -> list[tuple[int, DraftDistribution]]:
    """Return a token of each row of the draft's logits `z` `[γ, V]`, and what the rule `sigmoid` is told of it."""
    if law.is_greedy:
        return [(int(row.argmax()), None) for row in z]
    tokens = [_drawn(row, source.random()) for row in probabilities(z, law)]
    said = draft_logits(z, law)
    if said and source.random() < 0.2:  # and a draft that could not have drawn its token
        said[0].values[tokens[0]] = EXCLUDED
    return list(zip(tokens, said, strict=True))


def _drawn(p: Tensor, u: float) -> int:
    cdf = p.double().cumsum(0)
    return int(torch.searchsorted(cdf, u * cdf[-1], right=True))


def _adjustments(adjuster: Adjuster, tokens: list[int]) -> tuple:  # type: ignore[type-arg]
    rows = [adjuster.row()]
    for token in tokens:
        adjuster.push(token)
        rows.append(adjuster.row())
    return tuple(rows)


def differing(tested: Verify, oracle: Verify, logits: Tensor, proposals: Sequence[Proposed]) -> int:
    """Assert that both rule alike, within rounding of an edge; return how many results lay there and differ."""
    near = 0
    for b, (result, expected) in enumerate(zip(tested(logits, proposals), oracle(logits, proposals), strict=True)):
        if (result.status, result.accepted, result.next_token) != (
            expected.status,
            expected.accepted,
            expected.next_token,
        ):
            near += 1
            assert _is_neighbour(result, oracle, _rows_of(b, logits, proposals), proposals[b]), (b, result, expected)
            continue
        assert result.beta == pytest.approx(expected.beta, abs=1e-5)
        _assert_same_logprobs(result, expected)
    return near


def _assert_same_logprobs(result: VerifyResult, expected: VerifyResult) -> None:
    assert len(result.logprobs) == len(expected.logprobs)
    for mine, theirs in zip(result.logprobs, expected.logprobs, strict=True):
        assert (mine.token, mine.top_ids) == (theirs.token, theirs.top_ids)
        assert (mine.raw, mine.adjusted) == pytest.approx((theirs.raw, theirs.adjusted), abs=1e-4)
        assert mine.top_raw == pytest.approx(theirs.top_raw, abs=1e-4)
        assert mine.top_adjusted == pytest.approx(theirs.top_adjusted, abs=1e-4)


def _is_neighbour(result: VerifyResult, oracle: Verify, rows: Tensor, proposal: Proposed) -> bool:
    """Say whether the result is the oracle's for uniforms a little lower or higher, or for noise that is."""
    if proposal.rule is Rule.COUPLED:
        return _is_near_tie(result, oracle, rows, proposal)
    around = []
    for factor in (1 - _NEAR, 1 + _NEAR):
        accept = tuple(min(proposal.accept_uniform(i) * factor, 1 - 2**-53) for i in range(proposal.gamma))
        for step in (-_NEAR, _NEAR):
            drawn = min(max(proposal.resample_uniform(result.accepted) + step, 0.0), 1 - 2**-53)
            (moved,) = oracle(rows, [replace(proposal, uniforms=Uniforms(accept, drawn))])
            around.append(moved)
    alike = [each.next_token for each in around if each.accepted == result.accepted]
    return bool(alike) and min(alike) <= result.next_token <= max(alike)


def _is_near_tie(result: VerifyResult, oracle: Verify, rows: Tensor, proposal: Proposed) -> bool:
    """Say whether the oracle would have taken the same token where the two first differ, had its logit been higher."""
    (expected,) = oracle(rows, [proposal])
    place = min(result.accepted, expected.accepted)
    preferred = proposal.tokens[place] if result.accepted > place else result.next_token
    raised = rows.to(torch.float64, copy=True)
    raised[place, preferred] += _NEAR * max(1.0, proposal.law.temperature)
    (moved,) = oracle(raised, [proposal])
    return (
        moved.accepted > place if result.accepted > place else (moved.accepted, moved.next_token) == (place, preferred)
    )


def _rows_of(b: int, logits: Tensor, proposals: Sequence[Proposed]) -> Tensor:
    start = sum(each.gamma + 1 for each in proposals[:b])
    return logits[start : start + proposals[b].gamma + 1]


def logits_of(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return float32 logits of these probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log().float()


def law_of(weights: dict[int, int]) -> SparseDistribution:
    """Return the law of these weights by token."""
    return SparseDistribution(
        np.array(list(weights), dtype=np.int64), np.array(list(weights.values()), np.uint16), sum(weights.values())
    )


def proposed_of(
    tokens: tuple[int, ...],
    q: tuple[DraftDistribution, ...],
    accept: tuple[float, ...] | None = None,
    resample: float = 0.5,
    law: SamplingParams | None = None,
    lenience: float = 1.0,
    top_logprobs: int = -1,
    rule: Rule = Rule.TOKENWISE,
    sigmoid: SigmoidScales | None = None,
) -> Proposed:
    """Return a proposal whose uniforms are given: 0.5 unless told otherwise."""
    return Proposed(
        tokens=tokens,
        q=q,
        law=law or SamplingParams(),
        seed=0,
        base_length=0,
        rule=rule,
        lenience=lenience,
        top_logprobs=top_logprobs,
        uniforms=Uniforms((0.5,) * len(tokens) if accept is None else accept, resample),
        sigmoid=sigmoid,
    )
