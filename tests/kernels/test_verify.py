"""Verification: the fast path against the oracle, token for token; draws, log-probabilities, and the door."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels import verify as verification
from kernels import verify_torch
from kernels.adjustments import Adjuster, LogitRules, RowAdjustment
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.verify import (
    SUPPORTED_RULES,
    DenseDistribution,
    DraftLogits,
    Rule,
    SigmoidScales,
    Uniforms,
    UnsupportedRule,
    implementation_for,
)
from tests.kernels import reference
from tests.kernels.cases import differing, law_of, logits_of, proposed_of, random_batch
from tests.kernels.paths import HOST, PATHS, verify

GREEDY = SamplingParams(temperature=0)
SCALES = SigmoidScales(-10, 10)
LOGITS = DraftLogits(torch.zeros(2).half())


# ------------------------------------------------------------------------------------------- the path and the oracle


@pytest.mark.parametrize(("V", "size"), [(1, 20), (2, 60), (257, 60), (5003, 40), (50257, 12)])
def test_the_fast_path_rules_as_the_oracle_does(V: int, size: int) -> None:
    logits, proposals = random_batch(seed=V, V=V, size=size)
    assert differing(verify_torch.verify, reference.verify, logits, proposals) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_fast_path_takes_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits, proposals = random_batch(seed=9, V=300, size=30, dtype=dtype)
    assert differing(verify_torch.verify, reference.verify, logits, proposals) <= 1


def test_a_stratified_sweep_counts_every_outcome_to_within_one() -> None:
    """1,024 evenly spaced uniforms: each token's count is its probability times 1,024, give or take one."""
    N = 1024
    z = torch.randn(1, 33, generator=torch.Generator().manual_seed(2)) * 2
    grid = [(k + 0.5) / N for k in range(N)]
    proposals = [proposed_of(tokens=(), q=(), resample=u) for u in grid]
    counts = np.bincount([each.next_token for each in verify(z.expand(N, 33), proposals)], minlength=33)
    assert np.abs(counts - N * torch.softmax(z[0].double(), -1).numpy()).max() < 1.0


def test_rows_stand_alone() -> None:
    """Neither splitting the batch, nor its order, nor rows of other sequences change a result."""
    logits, proposals = random_batch(seed=4, V=97, size=24)
    together = verify(logits, proposals)
    starts = np.cumsum([0, *(each.gamma + 1 for each in proposals)])
    rows = [logits[a:b] for a, b in pairwise(starts)]
    assert [verify(own, [each])[0] for own, each in zip(rows, proposals, strict=True)] == together
    assert verify(torch.cat(rows[::-1]), proposals[::-1]) == together[::-1]


def test_rows_may_be_strided() -> None:
    logits, proposals = random_batch(seed=5, V=64, size=12)
    padded = torch.full((len(logits), 80), math.nan)
    padded[:, :64] = logits
    assert verify(padded[:, :64], proposals) == verify(logits, proposals)


# ---------------------------------------------------------------------------------------------- draws, adjustments


@pytest.mark.parametrize("path", HOST)
def test_the_draws_are_those_of_the_round(path: str) -> None:
    """Acceptance at i draws (base_length, i, ACCEPT); the next token draws (base_length, accepted, RESAMPLE)."""
    z = logits_of([[0.25] * 4] * 3)
    law = law_of({0: 1, 1: 1})
    outcomes = set()
    for base_length in range(60):
        accept = tuple(uniform(11, base_length, i, Domain.ACCEPT) for i in range(2))
        accepted = 0
        while accepted < 2 and accept[accepted] * 0.5 < 0.25:
            accepted += 1
        given = Uniforms(accept, uniform(11, base_length, accepted, Domain.RESAMPLE))
        proposed = replace(proposed_of(tokens=(0, 1), q=(law, law)), seed=11, base_length=base_length, uniforms=None)
        (result,) = verify(z, [proposed], path)
        assert result == verify(z, [replace(proposed, uniforms=given)], path)[0]
        assert result.accepted == accepted
        outcomes.add((result.accepted, result.next_token))
    assert len(outcomes) > 5


def test_no_draw_is_made_past_the_stopping_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, Domain]] = []

    def recording(seed: int, base_length: int, index: int, domain: Domain) -> float:
        made.append((index, domain))
        return 0.9

    monkeypatch.setattr(verification, "uniform", recording)
    proposed = replace(proposed_of(tokens=(0, 1, 0), q=(None,) * 3), uniforms=None)
    verify(logits_of([[0.95, 0.05]] * 4), [proposed])
    assert made == [(0, Domain.ACCEPT), (1, Domain.ACCEPT), (1, Domain.RESAMPLE)]


@pytest.mark.parametrize("path", PATHS)
def test_each_row_has_its_own_adjustment(path: str) -> None:
    def ban(token: int) -> RowAdjustment:
        return RowAdjustment(np.array([token]), np.ones(1, np.float32), np.array([-math.inf], np.float32))

    z = logits_of([[0.4, 0.3, 0.3]] * 3)
    proposed = proposed_of(tokens=(1, 0), q=(None, None), law=GREEDY)
    adjusted = replace(proposed, adjustments=(ban(0), None, ban(0)))
    (result,) = verify(z, [adjusted], path)
    assert (result.accepted, result.next_token) == (2, 1)
    assert torch.equal(z, logits_of([[0.4, 0.3, 0.3]] * 3))


# ------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_are_raw_and_adjusted(path: str) -> None:
    z = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 2
    law = SamplingParams(temperature=0.5, top_k=5)
    adjuster = Adjuster(LogitRules(banned_tokens=(int(z[1].argmax()),)), [], 50)
    tokens = (int(z[0].argmax()), int(z[1].topk(2).indices[1]))
    proposed = replace(
        proposed_of(tokens=tokens, q=(None, None), accept=(0.0, 0.0), law=law, top_logprobs=7),
        adjustments=(None, adjuster.row(), None),
    )
    (result,) = verify(z, [proposed], path)
    assert result.accepted == 2
    raw = torch.log_softmax(z.double(), -1)
    for i, (token, at) in enumerate(zip((*tokens, result.next_token), result.logprobs, strict=True)):
        assert at.token == token
        assert at.raw == pytest.approx(raw[i, token].item(), abs=1e-5)
        assert at.top_ids == tuple(raw[i].topk(7).indices.tolist())
        assert at.top_raw == pytest.approx(raw[i].topk(7).values.tolist(), abs=1e-5)
        assert sum(math.exp(each) for each in at.top_adjusted) == pytest.approx(1, abs=1e-5)
    assert result.logprobs[1].top_adjusted[0] == -math.inf


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_of_greed_are_those_of_a_point_mass(path: str) -> None:
    z = logits_of([[0.3, 0.5, 0.2], [0.2, 0.2, 0.6]])
    proposed = proposed_of(tokens=(0,), q=(None,), law=GREEDY, lenience=0.5, top_logprobs=0)
    (result,) = verify(z, [proposed], path)
    assert [(at.token, at.adjusted) for at in result.logprobs] == [(0, -math.inf), (2, 0.0)]
    assert [at.raw for at in result.logprobs] == pytest.approx([math.log(0.3), math.log(0.6)], abs=1e-6)
    assert result.logprobs[0].top_ids == ()


def test_the_best_of_equals_come_in_order_of_id() -> None:
    z = torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0]])
    (result,) = verify(z, [proposed_of(tokens=(), q=(), top_logprobs=2)])
    assert result.logprobs[0].top_ids == (0, 2)
    (all_of_it,) = verify(z, [proposed_of(tokens=(), q=(), top_logprobs=20)])
    assert all_of_it.logprobs[0].top_ids == (0, 2, 3, 1, 4)


# ------------------------------------------------------------------------------------------------------- the door


def test_the_door_picks_by_device() -> None:
    assert implementation_for(torch.device("cpu")) == "torch"
    assert implementation_for(torch.device("cuda:1")) == ("triton" if find_spec("triton") else "torch")
    assert implementation_for(torch.device("mps")) == "torch"
    assert set(Rule) == SUPPORTED_RULES


@pytest.mark.parametrize("rule", list(Rule))
def test_a_rule_that_is_not_served_is_refused(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_torch, "RULES", SUPPORTED_RULES - {rule})
    with pytest.raises(UnsupportedRule, match=rule.value):
        verify(torch.zeros(1, 3), [replace(proposed_of(tokens=(), q=()), rule=rule)])


@pytest.mark.parametrize(
    ("change", "rows", "named"),
    [
        ({}, 3, r"\(3, 2\).*\[2, V\]"),
        ({"q": ()}, 2, "1 tokens and 0 draft laws"),
        ({"adjustments": (None,)}, 2, "1 adjustments for 2 rows"),
        ({"lenience": 0.0}, 2, "lenience of proposal 0 is 0.0"),
        ({"lenience": math.nan}, 2, "lenience of proposal 0 is nan"),
        ({"lenience": 1.5}, 2, "lenience of proposal 0 is 1.5"),
        ({"lenience": 0.9, "rule": Rule.BLOCK}, 2, "lenience of proposal 0 is 0.9; it must be 1 under block"),
        ({"lenience": 0.9, "rule": Rule.COUPLED, "q": ()}, 2, "it must be 1 under coupled"),
        ({"rule": Rule.COUPLED}, 2, "1 draft laws; the rule coupled takes none"),
        ({"rule": Rule.BLOCK, "q": ()}, 2, "1 tokens and 0 draft laws"),
        ({"top_logprobs": -2}, 2, "top_logprobs of proposal 0 is -2"),
        ({"uniforms": Uniforms((), 0.5)}, 2, "0 uniforms for 1 tokens"),
        (
            {"q": (DenseDistribution(torch.ones(3) / 3),)},
            2,
            r"q\[0\] of proposal 0 has shape \(3,\); the vocabulary has 2",
        ),
        ({"q": (LOGITS,)}, 2, r"q\[0\] of proposal 0 is draft logits, which the rule tokenwise does not take"),
        ({"q": (LOGITS,), "rule": Rule.BLOCK}, 2, "which the rule block does not take"),
        ({"sigmoid": SCALES}, 2, "proposal 0 has sigmoid scales; the rule tokenwise takes none"),
        ({"q": (LOGITS,), "rule": Rule.SIGMOID}, 2, "sigmoid of proposal 0 is None; the rule sigmoid needs scales"),
        ({"rule": Rule.SIGMOID, "sigmoid": SCALES}, 2, r"q\[0\] of proposal 0 is a point mass"),
        (
            {"rule": Rule.SIGMOID, "sigmoid": SCALES, "q": (law_of({0: 1}),)},
            2,
            "is a sparse law; .* draft logits alone",
        ),
        ({"rule": Rule.SIGMOID, "sigmoid": SCALES, "q": (DenseDistribution(torch.ones(2) / 2),)}, 2, "is a dense law"),
        ({"rule": Rule.SIGMOID, "sigmoid": SCALES, "q": (DraftLogits(torch.zeros(3)),)}, 2, r"has shape \(3,\)"),
        ({"rule": Rule.SIGMOID, "sigmoid": SCALES, "q": ()}, 2, "1 tokens and 0 draft laws"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], rows: int, named: str) -> None:
    proposed = replace(proposed_of(tokens=(0,), q=(None,)), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        verify(torch.zeros(rows, 2), [proposed])


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match=r"'magic'.*torch, triton"):
        verify(torch.zeros(0, 2), [], "magic")
