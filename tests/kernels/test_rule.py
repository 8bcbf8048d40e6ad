"""The rule `tokenwise`, greed and bad rows, edge by edge, for every implementation alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels import verify_torch
from kernels.adjustments import Adjuster, LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule, Status, Uniforms
from tests.kernels import reference
from tests.kernels.cases import law_of, logits_of, proposed_of
from tests.kernels.mutants import accepts_equality
from tests.kernels.paths import HOST, PATHS, verify

MODULES = {"reference": reference, "torch": verify_torch}
GREEDY = SamplingParams(temperature=0)
JUST_BELOW_1 = 1 - 2**-53


# ----------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("path", PATHS)
def test_a_token_of_probability_zero_is_rejected_at_u_zero(path: str) -> None:
    assert _rejects_impossible_token(path)


@pytest.mark.parametrize("path", HOST)
def test_a_test_with_equality_would_be_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES[path], "accepts", accepts_equality)
    assert not _rejects_impossible_token(path)


def _rejects_impossible_token(path: str) -> bool:
    z = logits_of([[0.0, 0.5, 0.5, 0.0], [0.25] * 4])
    proposed = proposed_of(tokens=(3,), q=(law_of({1: 1, 3: 2}),), accept=(0.0,), resample=0.9)
    (result,) = verify(z, [proposed], path)
    return (result.accepted, result.next_token) == (0, 2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [-1, 4, 2**40, -(2**62)])
@pytest.mark.parametrize("law", [None, {1: 3, 2: 1}])
def test_a_token_outside_the_vocabulary_is_rejected(path: str, token: int, law: dict[int, int] | None) -> None:
    z = logits_of([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    proposed = proposed_of(tokens=(token,), q=(law_of(law) if law else None,), accept=(0.0,), resample=0.999)
    (result,) = verify(z, [proposed], path)
    assert (result.accepted, result.next_token) == (0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_a_token_outside_its_own_support_is_rejected(path: str) -> None:
    z = logits_of([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    (result,) = verify(z, [proposed_of(tokens=(0,), q=(law_of({1: 1, 2: 1}),), accept=(0.0,))], path)
    assert result.accepted == 0


@pytest.mark.parametrize("path", PATHS)
def test_support_outside_the_vocabulary_is_not_read(path: str) -> None:
    z = logits_of([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    proposed = proposed_of(tokens=(2,), q=(law_of({-7: 1, 0: 1, 2: 1, 900: 1}),), accept=(0.999,), resample=0.0)
    (result,) = verify(z, [proposed], path)
    assert (result.accepted, result.next_token) == (1, 0)
    assert result.beta == pytest.approx((0.1 + 0.25,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 1e-6])
def test_equal_laws_accept(path: str, u: float) -> None:
    law = law_of({0: 1, 1: 2, 2: 4, 3: 1})
    z = logits_of([[0.125, 0.25, 0.5, 0.125], [0.25] * 4])
    (result,) = verify(z, [proposed_of(tokens=(2,), q=(law,), accept=(u,))], path)
    assert result.accepted == 1
    assert result.beta == pytest.approx((1.0,))


@pytest.mark.parametrize("path", PATHS)
def test_equal_laws_leave_no_residual_and_the_target_is_drawn_from(path: str) -> None:
    # The token is not in the vocabulary, so it is rejected though p = q̂.
    law = law_of({0: 1, 1: 2, 2: 4, 3: 1})
    z = torch.tensor([[0.125, 0.25, 0.5, 0.125], [0.25] * 4], dtype=torch.float64).log()
    (result,) = verify(z, [proposed_of(tokens=(-1,), q=(law,), accept=(0.5,), resample=0.9)], path)
    assert (result.status, result.next_token) == (Status.ZERO_RESIDUAL, 3)


@pytest.mark.parametrize("path", PATHS)
def test_one_hot_laws_that_agree_accept_and_that_differ_do_not(path: str) -> None:
    z = logits_of([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    for law in (None, law_of({1: 65535})):
        (agree,) = verify(z, [proposed_of(tokens=(1,), q=(law,), accept=(JUST_BELOW_1,))], path)
        assert (agree.accepted, agree.next_token, agree.beta) == (1, 1, (1.0,))
    for law in (None, law_of({2: 1})):
        (differ,) = verify(z, [proposed_of(tokens=(2,), q=(law,), accept=(0.0,))], path)
        assert (differ.accepted, differ.next_token, differ.beta) == (0, 1, (0.0,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resample", [0.0, 0.3, JUST_BELOW_1])
def test_disjoint_supports_reject_and_draw_from_the_target(path: str, resample: float) -> None:
    z = logits_of([[0.0, 0.0, 0.5, 0.5], [0.25] * 4])
    proposed = proposed_of(tokens=(0,), q=(law_of({0: 1, 1: 1}),), accept=(0.0,), resample=resample)
    (result,) = verify(z, [proposed], path)
    assert (result.accepted, result.next_token, result.beta) == (0, 2 if resample < 0.5 else 3, (0.0,))
    assert result.status is Status.OK


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("resample", [0.0, JUST_BELOW_1])
def test_the_ends_of_the_uniform_never_draw_an_impossible_token(path: str, resample: float) -> None:
    p = [0.0, 0.0, 0.2, 0.0, 0.8, 0.0, 0.0]
    (result,) = verify(logits_of([p]), [proposed_of(tokens=(), q=(), resample=resample)], path)
    assert result.next_token == (2 if resample == 0 else 4)


@pytest.mark.parametrize("path", PATHS)
def test_a_uniform_on_an_edge_takes_the_later_token(path: str) -> None:
    z = torch.zeros(3, 4)
    proposals = [proposed_of(tokens=(), q=(), resample=u) for u in (0.25, 0.5, 0.75)]
    assert [each.next_token for each in verify(z, proposals, path)] == [1, 2, 3]


@pytest.mark.parametrize("path", PATHS)
def test_the_residual_is_drawn_from_after_a_rejection(path: str) -> None:
    # p - q̂ is positive at tokens 2 and 3 alone, by 0.1 and 0.3.
    z = logits_of([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    law = law_of({0: 4, 1: 3, 2: 2, 3: 1})
    drawn = [
        verify(z, [proposed_of(tokens=(0,), q=(law,), accept=(0.3,), resample=u)], path)[0].next_token
        for u in (0.0, 0.249, 0.251, JUST_BELOW_1)
    ]
    assert drawn == [2, 2, 3, 3]


@pytest.mark.parametrize("path", PATHS)
def test_beta_speaks_of_the_rows_up_to_the_stopping_one(path: str) -> None:
    z = logits_of([[0.5, 0.5]] * 4)
    half, skewed = law_of({0: 1, 1: 1}), law_of({0: 3, 1: 1})
    proposed = proposed_of(tokens=(0, 0, 0), q=(half, skewed, half), accept=(0.5, 0.9, 0.0))
    (stopped,) = verify(z, [proposed], path)
    assert stopped.accepted == 1
    assert stopped.beta == pytest.approx((1.0, 0.75))
    (passed,) = verify(z, [replace(proposed, uniforms=Uniforms((0.5, 0.1, 0.0), 0.5))], path)
    assert passed.accepted == 3
    assert passed.beta == pytest.approx((1.0, 0.75, 1.0))


# ------------------------------------------------------------------------------------------------ lenience, greed


@pytest.mark.parametrize("path", PATHS)
def test_lenience_loosens_the_test_and_beta_alone(path: str) -> None:
    z = logits_of([[0.1, 0.9], [0.5, 0.5]])
    proposed = proposed_of(tokens=(0,), q=(law_of({0: 1, 1: 1}),), accept=(0.39,), resample=0.5)
    (strict,), (lenient,) = verify(z, [proposed], path), verify(z, [replace(proposed, lenience=0.5)], path)
    assert (strict.accepted, strict.next_token, lenient.accepted) == (0, 1, 1)
    assert strict.beta == pytest.approx((0.6,))
    assert lenient.beta == pytest.approx((0.7,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_greed_accepts_the_argmax_alone_whatever_the_draft_believed(path: str, rule: Rule) -> None:
    z = logits_of([[0.2, 0.5, 0.3]] * 3)
    for q in (None, law_of({1: 1, 2: 9})):
        proposed = proposed_of(tokens=(1, 2), q=(q, q), accept=(JUST_BELOW_1, 0.0), law=GREEDY, rule=rule)
        (result,) = verify(z, [proposed], path)
        assert (result.accepted, result.next_token) == (1, 1)
        assert result.beta == pytest.approx((1.0, 0.0) if q is None else (0.1, 0.1))


@pytest.mark.parametrize("path", PATHS)
def test_ties_at_the_maximum_go_to_the_lowest_id(path: str) -> None:
    z = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).expand(3, 4)
    (result,) = verify(z, [proposed_of(tokens=(1, 2), q=(None, None), law=GREEDY)], path)
    assert (result.accepted, result.next_token) == (1, 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("lenience", "accepted"), [(1.0, 0), (0.61, 0), (0.59, 1), (0.2, 2)])
def test_lenient_greed_accepts_what_is_nearly_the_best(path: str, lenience: float, accepted: int) -> None:
    """[L A.5] p(x) ≥ l · max p: here p(x)/max p is 0.6, then 0.4, then 0."""
    z = logits_of([[0.3, 0.5, 0.2], [0.3, 0.5, 0.2], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    proposed = proposed_of(tokens=(0, 2, 0), q=(None, None, None), law=GREEDY, lenience=lenience)
    (result,) = verify(z, [proposed], path)
    assert (result.accepted, result.next_token) == (accepted, 1)


@pytest.mark.parametrize("path", PATHS)
def test_lenient_greed_sums_beta_over_what_would_stand(path: str) -> None:
    z = logits_of([[0.3, 0.5, 0.2], [1.0, 0.0, 0.0]])
    proposed = proposed_of(tokens=(0,), q=(law_of({0: 2, 1: 1, 2: 7}),), law=GREEDY, lenience=0.5)
    (result,) = verify(z, [proposed], path)
    assert result.beta == pytest.approx((0.3,))


# ------------------------------------------------------------------------------------------------------- bad rows

BAD_ROWS = {
    "one NaN": [0.0, math.nan, 1.0, 2.0],
    "all NaN": [math.nan] * 4,
    "all -inf": [-math.inf] * 4,
    "one +inf": [0.0, 1.0, math.inf, 2.0],
}


FILTERED = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize(
    ("law", "at"),
    [(SamplingParams(), 0), (SamplingParams(), 1), (SamplingParams(), 2), (GREEDY, 0), (GREEDY, 2), (FILTERED, 1)],
)
def test_a_bad_row_spoils_its_own_sequence_alone(path: str, kind: str, law: SamplingParams, at: int) -> None:
    z = logits_of([[0.1, 0.7, 0.1, 0.1]] * 9)
    z[3 + at] = torch.tensor(BAD_ROWS[kind])
    proposed = proposed_of(tokens=(1, 1), q=(None, None), accept=(0.0, 0.0), law=law, top_logprobs=2)
    results = verify(z, [proposed] * 3, path)
    assert [each.status for each in results] == [Status.OK, Status.BAD_LOGITS, Status.OK]
    assert (results[1].accepted, results[1].next_token, results[1].logprobs) == (0, -1, ())
    assert results[0] == results[2]
    assert results[0].accepted == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("law", [SamplingParams(), GREEDY])
def test_a_bad_row_that_is_not_needed_spoils_nothing(path: str, law: SamplingParams) -> None:
    z = logits_of([[0.1, 0.9], [0.1, 0.9], [0.1, 0.9]])
    z[2] = math.nan
    (result,) = verify(z, [proposed_of(tokens=(1, 0), q=(None, None), accept=(0.0, 0.99), law=law)], path)
    assert (result.status, result.accepted) == (Status.OK, 1)


@pytest.mark.parametrize("path", PATHS)
def test_bans_that_leave_no_token_are_reported(path: str) -> None:
    adjuster = Adjuster(LogitRules(banned_tokens=(0, 1, 2)), [], 3)
    proposed = replace(proposed_of(tokens=(), q=()), adjustments=(adjuster.row(),))
    (result,) = verify(logits_of([[0.2, 0.3, 0.5]]), [proposed], path)
    assert result.status is Status.BAD_LOGITS


@pytest.mark.parametrize("path", PATHS)
def test_extreme_logits_are_laws(path: str) -> None:
    z = torch.tensor([[65504.0, -65504.0, 65504.0], [-3.4e38, 3.4e38, -math.inf], [0.0, 0.0, 0.0]])
    for law in (SamplingParams(), SamplingParams(temperature=1e-40), SamplingParams(temperature=0.5)):
        proposed = [replace(proposed_of(tokens=(), q=(), resample=0.75), law=law)] * 3
        assert [each.next_token for each in verify(z, proposed, path)] == [2, 1, 2]


@pytest.mark.parametrize("path", PATHS)
def test_no_proposals_make_no_rulings(path: str) -> None:
    assert verify(torch.empty(0, 7), [], path) == []
