"""Verification: the fast path against the oracle, token for token, and every edge of the rule, for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import ruling as ruling_module
from kernels import verify_reference, verify_torch
from kernels.adjustments import Adjuster, LogitRules, RowAdjustment
from kernels.distribution import SamplingLaw
from kernels.philox import Domain, uniform
from kernels.sparse import SparseLaw
from kernels.verify import (
    SUPPORTED_RULES,
    Proposed,
    Rule,
    Status,
    Uniforms,
    UnsupportedRule,
    implementation_for,
    verify,
)
from tests.kernels.cases import differing, random_batch
from tests.kernels.mutants import accepts_equality

PATHS = ("torch", "reference")
MODULES = {"reference": verify_reference, "torch": verify_torch}
GREEDY = SamplingLaw(temperature=0)
JUST_BELOW_1 = 1 - 2**-53


# ------------------------------------------------------------------------------------------- the path and the oracle


@pytest.mark.parametrize(("V", "size"), [(1, 20), (2, 60), (257, 60), (5003, 40), (50257, 12)])
def test_the_fast_path_rules_as_the_oracle_does(V: int, size: int) -> None:
    logits, proposals = random_batch(seed=V, V=V, size=size)
    assert differing(verify_torch.verify, verify_reference.verify, logits, proposals) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_fast_path_takes_logits_of_any_dtype(dtype: torch.dtype) -> None:
    logits, proposals = random_batch(seed=9, V=300, size=30, dtype=dtype)
    assert differing(verify_torch.verify, verify_reference.verify, logits, proposals) <= 1


def test_a_stratified_sweep_counts_every_outcome_to_within_one() -> None:
    """1,024 evenly spaced uniforms: each token's count is its probability times 1,024, give or take one."""
    N = 1024
    z = torch.randn(1, 33, generator=torch.Generator().manual_seed(2)) * 2
    grid = [(k + 0.5) / N for k in range(N)]
    proposals = [_proposed(tokens=(), q=(), resample=u) for u in grid]
    counts = np.bincount([each.next_token for each in verify(z.expand(N, 33), proposals)], minlength=33)
    assert np.abs(counts - N * torch.softmax(z[0].double(), -1).numpy()).max() < 1.0


def test_rows_stand_alone() -> None:
    """Neither splitting the batch, nor its order, nor rows of other sequences change a ruling."""
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


# ----------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("path", PATHS)
def test_a_token_of_probability_zero_is_rejected_at_u_zero(path: str) -> None:
    assert _rejects_impossible_token(path)


@pytest.mark.parametrize("path", PATHS)
def test_a_test_with_equality_would_be_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES[path], "accepts", accepts_equality)
    assert not _rejects_impossible_token(path)


def _rejects_impossible_token(path: str) -> bool:
    z = _logits([[0.0, 0.5, 0.5, 0.0], [0.25] * 4])
    proposed = _proposed(tokens=(3,), q=(_law({1: 1, 3: 2}),), accept=(0.0,), resample=0.9)
    (ruling,) = verify(z, [proposed], path)
    return (ruling.accepted, ruling.next_token) == (0, 2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [-1, 4, 2**40, -(2**62)])
@pytest.mark.parametrize("law", [None, {1: 3, 2: 1}])
def test_a_token_outside_the_vocabulary_is_rejected(path: str, token: int, law: dict[int, int] | None) -> None:
    z = _logits([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    proposed = _proposed(tokens=(token,), q=(_law(law) if law else None,), accept=(0.0,), resample=0.999)
    (ruling,) = verify(z, [proposed], path)
    assert (ruling.accepted, ruling.next_token) == (0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_a_token_outside_its_own_support_is_rejected(path: str) -> None:
    z = _logits([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    (ruling,) = verify(z, [_proposed(tokens=(0,), q=(_law({1: 1, 2: 1}),), accept=(0.0,))], path)
    assert ruling.accepted == 0


@pytest.mark.parametrize("path", PATHS)
def test_support_outside_the_vocabulary_is_not_read(path: str) -> None:
    z = _logits([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    proposed = _proposed(tokens=(2,), q=(_law({-7: 1, 0: 1, 2: 1, 900: 1}),), accept=(0.999,), resample=0.0)
    (ruling,) = verify(z, [proposed], path)
    assert (ruling.accepted, ruling.next_token) == (1, 0)
    assert ruling.beta == pytest.approx((0.1 + 0.25,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 1e-6])
def test_equal_laws_accept(path: str, u: float) -> None:
    law = _law({0: 1, 1: 2, 2: 4, 3: 1})
    z = _logits([[0.125, 0.25, 0.5, 0.125], [0.25] * 4])
    (ruling,) = verify(z, [_proposed(tokens=(2,), q=(law,), accept=(u,))], path)
    assert ruling.accepted == 1
    assert ruling.beta == pytest.approx((1.0,))


@pytest.mark.parametrize("path", PATHS)
def test_equal_laws_leave_no_residual_and_the_target_is_drawn_from(path: str) -> None:
    # The token is not in the vocabulary, so it is rejected though p = q̂.
    law = _law({0: 1, 1: 2, 2: 4, 3: 1})
    z = torch.tensor([[0.125, 0.25, 0.5, 0.125], [0.25] * 4], dtype=torch.float64).log()
    (ruling,) = verify(z, [_proposed(tokens=(-1,), q=(law,), accept=(0.5,), resample=0.9)], path)
    assert (ruling.status, ruling.next_token) == (Status.ZERO_RESIDUAL, 3)


@pytest.mark.parametrize("path", PATHS)
def test_one_hot_laws_that_agree_accept_and_that_differ_do_not(path: str) -> None:
    z = _logits([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    for law in (None, _law({1: 65535})):
        (agree,) = verify(z, [_proposed(tokens=(1,), q=(law,), accept=(JUST_BELOW_1,))], path)
        assert (agree.accepted, agree.next_token, agree.beta) == (1, 1, (1.0,))
    for law in (None, _law({2: 1})):
        (differ,) = verify(z, [_proposed(tokens=(2,), q=(law,), accept=(0.0,))], path)
        assert (differ.accepted, differ.next_token, differ.beta) == (0, 1, (0.0,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resample", [0.0, 0.3, JUST_BELOW_1])
def test_disjoint_supports_reject_and_draw_from_the_target(path: str, resample: float) -> None:
    z = _logits([[0.0, 0.0, 0.5, 0.5], [0.25] * 4])
    proposed = _proposed(tokens=(0,), q=(_law({0: 1, 1: 1}),), accept=(0.0,), resample=resample)
    (ruling,) = verify(z, [proposed], path)
    assert (ruling.accepted, ruling.next_token, ruling.beta) == (0, 2 if resample < 0.5 else 3, (0.0,))
    assert ruling.status is Status.OK


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resample", [0.0, JUST_BELOW_1])
def test_the_ends_of_the_uniform_never_draw_an_impossible_token(path: str, resample: float) -> None:
    p = [0.0, 0.0, 0.2, 0.0, 0.8, 0.0, 0.0]
    (ruling,) = verify(_logits([p]), [_proposed(tokens=(), q=(), resample=resample)], path)
    assert ruling.next_token == (2 if resample == 0 else 4)


@pytest.mark.parametrize("path", PATHS)
def test_the_residual_is_drawn_from_after_a_rejection(path: str) -> None:
    # p - q̂ is positive at tokens 2 and 3 alone, by 0.1 and 0.3.
    z = _logits([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    law = _law({0: 4, 1: 3, 2: 2, 3: 1})
    drawn = [
        verify(z, [_proposed(tokens=(0,), q=(law,), accept=(0.3,), resample=u)], path)[0].next_token
        for u in (0.0, 0.249, 0.251, JUST_BELOW_1)
    ]
    assert drawn == [2, 2, 3, 3]


@pytest.mark.parametrize("path", PATHS)
def test_beta_speaks_of_the_rows_up_to_the_stopping_one(path: str) -> None:
    z = _logits([[0.5, 0.5]] * 4)
    half, skewed = _law({0: 1, 1: 1}), _law({0: 3, 1: 1})
    proposed = _proposed(tokens=(0, 0, 0), q=(half, skewed, half), accept=(0.5, 0.9, 0.0))
    (stopped,) = verify(z, [proposed], path)
    assert stopped.accepted == 1
    assert stopped.beta == pytest.approx((1.0, 0.75))
    (passed,) = verify(z, [replace(proposed, uniforms=Uniforms((0.5, 0.1, 0.0), 0.5))], path)
    assert passed.accepted == 3
    assert passed.beta == pytest.approx((1.0, 0.75, 1.0))


# ------------------------------------------------------------------------------------------------ lenience, greed


@pytest.mark.parametrize("path", PATHS)
def test_lenience_loosens_the_test_and_beta_alone(path: str) -> None:
    z = _logits([[0.1, 0.9], [0.5, 0.5]])
    proposed = _proposed(tokens=(0,), q=(_law({0: 1, 1: 1}),), accept=(0.39,), resample=0.5)
    (strict,), (lenient,) = verify(z, [proposed], path), verify(z, [replace(proposed, lenience=0.5)], path)
    assert (strict.accepted, strict.next_token, lenient.accepted) == (0, 1, 1)
    assert strict.beta == pytest.approx((0.6,))
    assert lenient.beta == pytest.approx((0.7,))


@pytest.mark.parametrize("path", PATHS)
def test_greed_accepts_the_argmax_alone_whatever_the_draft_believed(path: str) -> None:
    z = _logits([[0.2, 0.5, 0.3]] * 3)
    for q in (None, _law({1: 1, 2: 9})):
        (ruling,) = verify(z, [_proposed(tokens=(1, 2), q=(q, q), accept=(JUST_BELOW_1, 0.0), law=GREEDY)], path)
        assert (ruling.accepted, ruling.next_token) == (1, 1)
        assert ruling.beta == pytest.approx((1.0, 0.0) if q is None else (0.1, 0.1))


@pytest.mark.parametrize("path", PATHS)
def test_ties_at_the_maximum_go_to_the_lowest_id(path: str) -> None:
    z = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).expand(3, 4)
    (ruling,) = verify(z, [_proposed(tokens=(1, 2), q=(None, None), law=GREEDY)], path)
    assert (ruling.accepted, ruling.next_token) == (1, 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("lenience", "accepted"), [(1.0, 0), (0.61, 0), (0.59, 1), (0.2, 2)])
def test_lenient_greed_accepts_what_is_nearly_the_best(path: str, lenience: float, accepted: int) -> None:
    """[L A.5] p(x) ≥ l · max p: here p(x)/max p is 0.6, then 0.4, then 0."""
    z = _logits([[0.3, 0.5, 0.2], [0.3, 0.5, 0.2], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    proposed = _proposed(tokens=(0, 2, 0), q=(None, None, None), law=GREEDY, lenience=lenience)
    (ruling,) = verify(z, [proposed], path)
    assert (ruling.accepted, ruling.next_token) == (accepted, 1)


@pytest.mark.parametrize("path", PATHS)
def test_lenient_greed_sums_beta_over_what_would_stand(path: str) -> None:
    z = _logits([[0.3, 0.5, 0.2], [1.0, 0.0, 0.0]])
    proposed = _proposed(tokens=(0,), q=(_law({0: 2, 1: 1, 2: 7}),), law=GREEDY, lenience=0.5)
    (ruling,) = verify(z, [proposed], path)
    assert ruling.beta == pytest.approx((0.3,))


# ------------------------------------------------------------------------------------------------------- bad rows

BAD_ROWS = {
    "one NaN": [0.0, math.nan, 1.0, 2.0],
    "all NaN": [math.nan] * 4,
    "all -inf": [-math.inf] * 4,
    "one +inf": [0.0, 1.0, math.inf, 2.0],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("law", [SamplingLaw(), GREEDY, SamplingLaw(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_row_spoils_its_own_sequence_alone(path: str, kind: str, law: SamplingLaw, at: int) -> None:
    z = _logits([[0.1, 0.7, 0.1, 0.1]] * 9)
    z[3 + at] = torch.tensor(BAD_ROWS[kind])
    proposed = _proposed(tokens=(1, 1), q=(None, None), accept=(0.0, 0.0), law=law, top_logprobs=2)
    rulings = verify(z, [proposed] * 3, path)
    assert [each.status for each in rulings] == [Status.OK, Status.BAD_LOGITS, Status.OK]
    assert (rulings[1].accepted, rulings[1].next_token, rulings[1].logprobs) == (0, -1, ())
    assert rulings[0] == rulings[2]
    assert rulings[0].accepted == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("law", [SamplingLaw(), GREEDY])
def test_a_bad_row_that_is_not_needed_spoils_nothing(path: str, law: SamplingLaw) -> None:
    z = _logits([[0.1, 0.9], [0.1, 0.9], [0.1, 0.9]])
    z[2] = math.nan
    (ruling,) = verify(z, [_proposed(tokens=(1, 0), q=(None, None), accept=(0.0, 0.99), law=law)], path)
    assert (ruling.status, ruling.accepted) == (Status.OK, 1)


@pytest.mark.parametrize("path", PATHS)
def test_bans_that_leave_no_token_are_reported(path: str) -> None:
    adjuster = Adjuster(LogitRules(banned_tokens=(0, 1, 2)), [], 3)
    proposed = replace(_proposed(tokens=(), q=()), adjustments=(adjuster.row(),))
    (ruling,) = verify(_logits([[0.2, 0.3, 0.5]]), [proposed], path)
    assert ruling.status is Status.BAD_LOGITS


@pytest.mark.parametrize("path", PATHS)
def test_extreme_logits_are_laws(path: str) -> None:
    z = torch.tensor([[65504.0, -65504.0, 65504.0], [-3.4e38, 3.4e38, -math.inf], [0.0, 0.0, 0.0]])
    for law in (SamplingLaw(), SamplingLaw(temperature=1e-40), SamplingLaw(temperature=0.5)):
        proposed = [replace(_proposed(tokens=(), q=(), resample=0.75), law=law)] * 3
        assert [each.next_token for each in verify(z, proposed, path)] == [2, 1, 2]


@pytest.mark.parametrize("path", PATHS)
def test_no_proposals_make_no_rulings(path: str) -> None:
    assert verify(torch.empty(0, 7), [], path) == []


# ---------------------------------------------------------------------------------------------- draws, adjustments


@pytest.mark.parametrize("path", PATHS)
def test_the_draws_are_those_of_the_round(path: str) -> None:
    """Acceptance at i draws (base_length, i, ACCEPT); the next token draws (base_length, accepted, RESAMPLE)."""
    z = _logits([[0.25] * 4] * 3)
    law = _law({0: 1, 1: 1})
    outcomes = set()
    for base_length in range(60):
        accept = tuple(uniform(11, base_length, i, Domain.ACCEPT) for i in range(2))
        accepted = 0
        while accepted < 2 and accept[accepted] * 0.5 < 0.25:
            accepted += 1
        given = Uniforms(accept, uniform(11, base_length, accepted, Domain.RESAMPLE))
        proposed = replace(_proposed(tokens=(0, 1), q=(law, law)), seed=11, base_length=base_length, uniforms=None)
        (ruling,) = verify(z, [proposed], path)
        assert ruling == verify(z, [replace(proposed, uniforms=given)], path)[0]
        assert ruling.accepted == accepted
        outcomes.add((ruling.accepted, ruling.next_token))
    assert len(outcomes) > 5


def test_no_draw_is_made_past_the_stopping_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, Domain]] = []

    def recording(seed: int, base_length: int, index: int, domain: Domain) -> float:
        made.append((index, domain))
        return 0.9

    monkeypatch.setattr(ruling_module, "uniform", recording)
    proposed = replace(_proposed(tokens=(0, 1, 0), q=(None,) * 3), uniforms=None)
    verify(_logits([[0.95, 0.05]] * 4), [proposed])
    assert made == [(0, Domain.ACCEPT), (1, Domain.ACCEPT), (1, Domain.RESAMPLE)]


@pytest.mark.parametrize("path", PATHS)
def test_each_row_has_its_own_adjustment(path: str) -> None:
    def ban(token: int) -> RowAdjustment:
        return RowAdjustment(np.array([token]), np.ones(1, np.float32), np.array([-math.inf], np.float32))

    z = _logits([[0.4, 0.3, 0.3]] * 3)
    proposed = _proposed(tokens=(1, 0), q=(None, None), law=GREEDY)
    adjusted = replace(proposed, adjustments=(ban(0), None, ban(0)))
    (ruling,) = verify(z, [adjusted], path)
    assert (ruling.accepted, ruling.next_token) == (2, 1)
    assert torch.equal(z, _logits([[0.4, 0.3, 0.3]] * 3))


# ------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_are_raw_and_adjusted(path: str) -> None:
    z = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 2
    law = SamplingLaw(temperature=0.5, top_k=5)
    adjuster = Adjuster(LogitRules(banned_tokens=(int(z[1].argmax()),)), [], 50)
    tokens = (int(z[0].argmax()), int(z[1].topk(2).indices[1]))
    proposed = replace(
        _proposed(tokens=tokens, q=(None, None), accept=(0.0, 0.0), law=law, top_logprobs=7),
        adjustments=(None, adjuster.row(), None),
    )
    (ruling,) = verify(z, [proposed], path)
    assert ruling.accepted == 2
    raw = torch.log_softmax(z.double(), -1)
    for i, (token, at) in enumerate(zip((*tokens, ruling.next_token), ruling.logprobs, strict=True)):
        assert at.token == token
        assert at.raw == pytest.approx(raw[i, token].item(), abs=1e-5)
        assert at.top_ids == tuple(raw[i].topk(7).indices.tolist())
        assert at.top_raw == pytest.approx(raw[i].topk(7).values.tolist(), abs=1e-5)
        assert sum(math.exp(each) for each in at.top_adjusted) == pytest.approx(1, abs=1e-5)
    assert ruling.logprobs[1].top_adjusted[0] == -math.inf


@pytest.mark.parametrize("path", PATHS)
def test_logprobs_of_greed_are_those_of_a_point_mass(path: str) -> None:
    z = _logits([[0.3, 0.5, 0.2], [0.2, 0.2, 0.6]])
    proposed = _proposed(tokens=(0,), q=(None,), law=GREEDY, lenience=0.5, top_logprobs=0)
    (ruling,) = verify(z, [proposed], path)
    assert [(at.token, at.adjusted) for at in ruling.logprobs] == [(0, -math.inf), (2, 0.0)]
    assert [at.raw for at in ruling.logprobs] == pytest.approx([math.log(0.3), math.log(0.6)], abs=1e-6)
    assert ruling.logprobs[0].top_ids == ()


def test_the_best_of_equals_come_in_order_of_id() -> None:
    z = torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0]])
    (ruling,) = verify(z, [_proposed(tokens=(), q=(), top_logprobs=2)])
    assert ruling.logprobs[0].top_ids == (0, 2)
    (all_of_it,) = verify(z, [_proposed(tokens=(), q=(), top_logprobs=20)])
    assert all_of_it.logprobs[0].top_ids == (0, 2, 3, 1, 4)


# ------------------------------------------------------------------------------------------------------- the door


def test_the_door_picks_by_device() -> None:
    assert implementation_for(torch.device("cpu")) == "torch"
    assert {Rule.TOKENWISE} <= SUPPORTED_RULES


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in SUPPORTED_RULES])
def test_a_rule_that_is_not_served_is_refused(rule: Rule) -> None:
    with pytest.raises(UnsupportedRule, match=rule.value):
        verify(torch.zeros(1, 3), [replace(_proposed(tokens=(), q=()), rule=rule)])


@pytest.mark.parametrize(
    ("change", "rows", "named"),
    [
        ({}, 3, r"\(3, 2\).*\[2, V\]"),
        ({"q": ()}, 2, "1 tokens and 0 draft laws"),
        ({"adjustments": (None,)}, 2, "1 adjustments for 2 rows"),
        ({"lenience": 0.0}, 2, "lenience of proposal 0 is 0.0"),
        ({"lenience": math.nan}, 2, "lenience of proposal 0 is nan"),
        ({"lenience": 1.5}, 2, "lenience of proposal 0 is 1.5"),
        ({"top_logprobs": -2}, 2, "top_logprobs of proposal 0 is -2"),
        ({"uniforms": Uniforms((), 0.5)}, 2, "0 uniforms for 1 tokens"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], rows: int, named: str) -> None:
    proposed = replace(_proposed(tokens=(0,), q=(None,)), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        verify(torch.zeros(rows, 2), [proposed])


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match=r"'magic'.*reference, torch"):
        verify(torch.zeros(0, 2), [], "magic")


# -------------------------------------------------------------------------------------------------------- helpers


def _logits(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().float()


def _law(weights: dict[int, int]) -> SparseLaw:
    return SparseLaw(
        np.array(list(weights), dtype=np.int64), np.array(list(weights.values()), np.uint16), sum(weights.values())
    )


def _proposed(
    tokens: tuple[int, ...],
    q: tuple[SparseLaw | None, ...],
    accept: tuple[float, ...] | None = None,
    resample: float = 0.5,
    law: SamplingLaw | None = None,
    lenience: float = 1.0,
    top_logprobs: int = -1,
) -> Proposed:
    return Proposed(
        tokens=tokens,
        q=q,
        law=law or SamplingLaw(),
        seed=0,
        base_length=0,
        lenience=lenience,
        top_logprobs=top_logprobs,
        uniforms=Uniforms((0.5,) * len(tokens) if accept is None else accept, resample),
    )
