"""Handmade and random proposals, and the comparison of two implementations on them.

Two precisions may disagree where a uniform lies within rounding of an edge: then, and only then, the neighbour is
allowed, and counted.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules, RowAdjustment
from kernels.sampling import SamplingParams, probabilities
from kernels.sigmoid import EXCLUDED, SigmoidScales, draft_logits
from kernels.sparse import SparseConfig, SparseDistribution, truncate
from kernels.verify import DraftDistribution, Proposed, Rule, Uniforms, VerifyResult

Verify = Callable[[Tensor, Sequence[Proposed]], list[VerifyResult]]

LAST = 1 - 2**-53
"""The largest uniform."""
GREEDY = SamplingParams(temperature=0)
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.8),
    GREEDY,
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.8, min_p=0.02),
    SamplingParams(top_k=1),
)
_RULES = LogitRules(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, banned_tokens=(0,))
_SCALES = tuple(
    SigmoidScales(alpha, beta)
    for alpha, beta in ((-10, 10), (-1e3, 1e3), (-1e4, 1e4), (-1e5, 1e5), (-0.5, 0.5), (1.0, 2.5))
)
_NEAR = 1e-5  # relative, in the uniforms: the precision of a float32 softmax


def gaussian(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def logits_of(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return float32 logits of these probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log().float()


def sparse(weights: dict[int, int]) -> SparseDistribution:
    ids, values = np.array(list(weights), dtype=np.int64), np.array(list(weights.values()), np.uint16)
    return SparseDistribution(ids, values, sum(weights.values()))


def propose(
    tokens: tuple[int, ...] = (),
    q: tuple[DraftDistribution, ...] | None = None,
    accept: tuple[float, ...] | None = None,
    resample: float = 0.5,
    **fields: Any,
) -> Proposed:
    """Return a proposal of point masses (or of `q`) with the given uniforms, which are 0.5 by default."""
    fields.setdefault("params", SamplingParams())
    fields.setdefault("uniforms", Uniforms((0.5,) * len(tokens) if accept is None else accept, resample))
    return Proposed(tokens, (None,) * len(tokens) if q is None else q, **{"seed": 0, "base_length": 0} | fields)


def coupled(tokens: tuple[int, ...], seed: int, base_length: int, params: SamplingParams | None = None) -> Proposed:
    return Proposed(tokens, (), params or SamplingParams(), seed, base_length, rule=Rule.COUPLED)


# ------------------------------------------------------------------------------------------------------------ by chance


def random_batch(seed: int, V: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Proposed]]:
    """Return logits and proposals with γ of 0 to 8; forms of q, rules, params, lenience and adjustments mixed."""
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
    params = source.choice(PARAMS)
    if rule is Rule.SIGMOID:
        drafts = _draft_logits(source, noisy, params)
    else:
        drafts = _draft_distributions(source, torch.softmax(noisy, -1))
    tokens = [token for token, _ in drafts]
    if rule is Rule.COUPLED:  # most agree with the target, so that the walk goes on
        best = z[:gamma].float().argmax(-1).tolist()
        tokens = [best[i] if source.random() < 0.7 else token for i, token in enumerate(tokens)]
    adjuster = Adjuster(_RULES, [source.randrange(V) for _ in range(5)], V) if V > 1 and source.random() < 0.3 else None
    return Proposed(
        tokens=tuple(tokens),
        q=() if rule is Rule.COUPLED else tuple(q for _, q in drafts),
        params=params,
        seed=source.getrandbits(64),
        base_length=source.randrange(1000),
        rule=rule,
        lenience=source.choice((1.0, 1.0, 0.5)) if rule in (Rule.TOKENWISE, Rule.SIGMOID) else 1.0,
        adjustments=_adjustments(adjuster, tokens) if adjuster else (),
        top_logprobs=source.choice((-1, -1, 0, 3)),
        sigmoid=source.choice(_SCALES) if rule is Rule.SIGMOID else None,
    )


def sparsify(p: Tensor, config: SparseConfig) -> list[SparseDistribution]:
    """Return q̂ of each row of `p` `[B, V]`."""
    return [truncate(row, config) for row in p.numpy()]


def _draft_distributions(source: random.Random, q: Tensor) -> list[tuple[int, DraftDistribution]]:
    """Return for each row of `q` `[γ, V]` a token and its draft distribution: a point mass, or sparse."""
    config = SparseConfig(keep_mass=1.0, max_support=source.choice((1, 2, 16, 256)))
    drafts: list[tuple[int, DraftDistribution]] = []
    for row, truncated in zip(q, sparsify(q, config), strict=True):
        if source.random() < 0.1:
            drafts.append((int(row.argmax()), None))
        else:
            drafts.append((truncated.token_at(source.random()), truncated))
    return drafts


def _draft_logits(source: random.Random, z: Tensor, params: SamplingParams) -> list[tuple[int, DraftDistribution]]:
    """Return for each row of the draft's logits `z` `[γ, V]` a token, and its `DraftLogits`."""
    if params.is_greedy:
        return [(int(row.argmax()), None) for row in z]
    tokens = [_draw(row, source.random()) for row in probabilities(z, params)]
    sent = draft_logits(z, params)
    if sent and source.random() < 0.2:  # a draft that could not have drawn its token
        sent[0].values[tokens[0]] = EXCLUDED
    return list(zip(tokens, sent, strict=True))


def _draw(p: Tensor, u: float) -> int:
    cdf = p.double().cumsum(0)
    return int(torch.searchsorted(cdf, u * cdf[-1], right=True))


def _adjustments(adjuster: Adjuster, tokens: list[int]) -> tuple[RowAdjustment | None, ...]:
    rows = [adjuster.row()]
    for token in tokens:
        adjuster.push(token)
        rows.append(adjuster.row())
    return tuple(rows)


# ----------------------------------------------------------------------------------------------------------- comparison


def n_differing(tested: Verify, reference: Verify, logits: Tensor, proposals: Sequence[Proposed]) -> int:
    """Assert equality but within rounding of an edge; return how many results lie there and differ."""
    near = start = 0
    for result, expected, proposal in zip(
        tested(logits, proposals), reference(logits, proposals), proposals, strict=True
    ):
        rows = logits[start : start + proposal.gamma + 1]
        start += len(rows)
        outcome, wanted = ((each.status, each.accepted, each.next_token) for each in (result, expected))
        if outcome != wanted:
            near += 1
            assert _is_neighbour(result, reference, rows, proposal), (result, expected, proposal)
            continue
        assert result.beta == pytest.approx(expected.beta, abs=1e-5)
        _assert_same_logprobs(result, expected)
    return near


def _assert_same_logprobs(result: VerifyResult, expected: VerifyResult) -> None:
    assert len(result.logprobs) == len(expected.logprobs)
    for mine, theirs in zip(result.logprobs, expected.logprobs, strict=True):
        assert (mine.token, mine.top_ids) == (theirs.token, theirs.top_ids)
        assert (mine.raw, mine.adjusted, *mine.top_raw, *mine.top_adjusted) == pytest.approx(
            (theirs.raw, theirs.adjusted, *theirs.top_raw, *theirs.top_adjusted), abs=1e-4
        )


def _is_neighbour(result: VerifyResult, reference: Verify, rows: Tensor, proposal: Proposed) -> bool:
    """Return whether the reference gives the result for uniforms a little lower or higher, or for such noise."""
    if proposal.rule is Rule.COUPLED:
        return _is_near_tie(result, reference, rows, proposal)
    around = []
    for factor in (1 - _NEAR, 1 + _NEAR):
        accept = tuple(min(proposal.accept_uniform(i) * factor, LAST) for i in range(proposal.gamma))
        for step in (-_NEAR, _NEAR):
            resample = min(max(proposal.resample_uniform(result.accepted) + step, 0.0), LAST)
            around += reference(rows, [replace(proposal, uniforms=Uniforms(accept, resample))])
    alike = [each.next_token for each in around if each.accepted == result.accepted]
    return bool(alike) and min(alike) <= result.next_token <= max(alike)


def _is_near_tie(result: VerifyResult, reference: Verify, rows: Tensor, proposal: Proposed) -> bool:
    """Return whether the reference, had that logit been higher, takes the same token where the two first differ."""
    (expected,) = reference(rows, [proposal])
    i = min(result.accepted, expected.accepted)
    is_accepted = result.accepted > i
    preferred = proposal.tokens[i] if is_accepted else result.next_token
    raised = rows.to(torch.float64, copy=True)
    raised[i, preferred] += _NEAR * max(1.0, proposal.params.temperature)
    (moved,) = reference(raised, [proposal])
    return moved.accepted > i if is_accepted else (moved.accepted, moved.next_token) == (i, preferred)
