"""The rule `block`, edge by edge, for every implementation alike. Its law: `test_enumeration`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.verify import Proposed, Rule, Status, Uniforms
from tests.kernels.cases import law_of, logits_of, proposed_of
from tests.kernels.paths import HOST, PATHS, verify

LAST = 1 - 2**-53
EVEN = law_of({0: 1, 1: 1, 2: 1, 3: 1})
HALF = law_of({0: 1, 1: 1})


def _block(tokens: tuple[int, ...], q: tuple, accept: tuple[float, ...], resample: float = 0.5) -> Proposed:  # type: ignore[type-arg]
    return proposed_of(tokens=tokens, q=q, accept=accept, resample=resample, rule=Rule.BLOCK)


@pytest.mark.parametrize("path", HOST)
def test_one_draft_is_judged_as_tokenwise_judges_it(path: str) -> None:
    z = logits_of([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    for token in range(4):
        for u in (0.0, 0.39, 0.41, 0.79, 0.81, LAST):
            for resample in (0.0, 0.3, 0.7, LAST):
                block = _block((token,), (EVEN,), (u,), resample)
                assert verify(z, [block], path) == verify(z, [replace(block, rule=Rule.TOKENWISE)], path)


@pytest.mark.parametrize("path", PATHS)
def test_a_later_success_takes_back_an_earlier_failure(path: str) -> None:
    """p(0)/q̂(0) is 1.6 and then 0.4: by itself the second token stands with 0.4, whatever became of the first."""
    z = logits_of([[0.8, 0.2, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0], [0.25] * 4])
    (failed,) = verify(z, [_block((0, 0), (HALF, HALF), (LAST, 0.41))], path)
    (stands,) = verify(z, [_block((0, 0), (HALF, HALF), (LAST, 0.39))], path)
    assert failed.accepted == 1  # h_1 is 1, as P_1 is: what p lacks of q̂ at 0 it has beyond it at 1
    assert stands.accepted == 2


@pytest.mark.parametrize("path", PATHS)
def test_the_edge_of_a_shorter_block_is_where_it_should_be(path: str) -> None:
    """P_1 = 0.4; Z = Σ max(0.4 p_2 - q̂_2, 0) = 0.32, all of it at token 2; h_1 = 0.32 / 0.92."""
    z = logits_of([[0.2, 0.8, 0.0, 0.0], [0.1, 0.1, 0.8, 0.0], [0.25] * 4])
    h = 0.32 / 0.92
    for u, accepted in ((h - 1e-4, 1), (h + 1e-4, 0)):
        (result,) = verify(z, [_block((0, 1), (HALF, HALF), (u, LAST), resample=0.6)], path)
        assert (result.accepted, result.next_token) == (accepted, 2 if accepted else 1)


@pytest.mark.parametrize("path", PATHS)
def test_equal_laws_accept_all_and_leave_no_remainder_to_divide_by(path: str) -> None:
    """Z + 1 - P is 0 at every place but the last, which accepts."""
    law = law_of({0: 1, 1: 2, 2: 4, 3: 1})
    z = logits_of([[0.125, 0.25, 0.5, 0.125]] * 4)
    for u in (0.0, 0.5, 1 - 1e-6):
        (result,) = verify(z, [_block((2, 0, 3), (law,) * 3, (u,) * 3)], path)
        assert (result.accepted, result.status) == (3, Status.OK)
        assert result.beta == pytest.approx((1.0, 1.0, 1.0))


@pytest.mark.parametrize("path", PATHS)
def test_a_token_of_probability_zero_ends_the_block(path: str) -> None:
    z = logits_of([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.25] * 4])
    drafts = (HALF, law_of({2: 1, 3: 1}))
    (second,) = verify(z, [_block((0, 2), drafts, (0.0, 0.0), 0.7)], path)
    assert (second.accepted, second.next_token) == (1, 3)
    (first,) = verify(z, [_block((2, 3), (law_of({0: 1, 2: 1}), drafts[1]), (0.0, 0.0), 0.7)], path)
    assert (first.accepted, first.next_token) == (0, 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_a_token_outside_the_vocabulary_ends_the_block(path: str, token: int) -> None:
    z = logits_of([[0.1, 0.2, 0.3, 0.4]] * 3)
    (result,) = verify(z, [_block((token, 3), (EVEN, EVEN), (0.0, 0.0), LAST)], path)
    assert (result.accepted, result.next_token) == (0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_equal_laws_leave_no_residual_and_the_target_is_drawn_from(path: str) -> None:
    z = torch.tensor([[0.125, 0.25, 0.5, 0.125]] * 2, dtype=torch.float64).log()
    (result,) = verify(z, [_block((-1,), (law_of({0: 1, 1: 2, 2: 4, 3: 1}),), (0.5,), 0.9)], path)
    assert (result.status, result.next_token) == (Status.ZERO_RESIDUAL, 3)


@pytest.mark.parametrize("path", PATHS)
def test_a_block_of_small_weight_still_leaves_its_residual(path: str) -> None:
    """P_1 = 2e-7, and what it leaves of the second law is all of token 3."""
    z = logits_of([[1e-7, 1 - 1e-7, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.25] * 4])
    (result,) = verify(z, [_block((0, 1), (HALF, HALF), (0.0, LAST))], path)
    assert (result.status, result.accepted, result.next_token) == (Status.OK, 1, 3)


@pytest.mark.parametrize("path", PATHS)
def test_a_point_mass_is_a_law_like_any(path: str) -> None:
    z = logits_of([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    # P_1 = 0.5, Z = 0.5 (1 - 0.25), h_1 = 0.375/0.875; P_2 = 0.125.
    for u, accepted in (((0.0, 0.124), 2), ((0.428, 0.126), 1), ((0.429, 0.126), 0)):
        (result,) = verify(z, [_block((0, 0), (None, None), u)], path)
        assert result.accepted == accepted


@pytest.mark.parametrize("path", PATHS)
def test_after_a_success_what_the_block_may_keep_is_drawn_from(path: str) -> None:
    z = logits_of([[0.25, 0.75, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1], [0.25] * 4])
    # P_1 = 0.5, and P_1 · p exceeds q̂ at token 1 alone, by 0.05: h_1 = 0.05/0.55. All of p exceeds it at 2 too.
    laws = (HALF, law_of({0: 13, 1: 2, 2: 3, 3: 2}))
    for resample in (0.0, 0.9, LAST):
        (result,) = verify(z, [_block((0, 0), laws, (0.09, LAST), resample)], path)
        assert (result.accepted, result.next_token) == (1, 1)


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_row_counts_while_the_block_can_still_grow(path: str) -> None:
    z = logits_of([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.3, 0.3, 0.4]])
    z[1, 0] = math.nan
    bad = _block((0, 0), (HALF, HALF), (LAST, LAST))
    over = _block((2, 0), (law_of({0: 1, 2: 1}), HALF), (LAST, LAST))
    assert [each.status for each in verify(torch.cat((z, z)), [bad, over], path)] == [Status.BAD_LOGITS, Status.OK]
    z = logits_of([[0.5, 0.5], [0.5, 0.5]])
    z[1] = -math.inf
    needed, spared = _block((0,), (law_of({0: 1}),), (0.4,)), _block((0,), (law_of({0: 1}),), (0.6,))
    assert [each.status for each in verify(torch.cat((z, z)), [needed, spared], path)] == [Status.BAD_LOGITS, Status.OK]


@pytest.mark.parametrize("path", PATHS)
def test_beta_speaks_of_the_rows_up_to_the_stopping_one(path: str) -> None:
    z = logits_of([[0.5, 0.5]] * 4)
    skewed = law_of({0: 3, 1: 1})
    proposed = _block((0, 0, 0), (HALF, skewed, HALF), (0.5, LAST, LAST))
    (stopped,) = verify(z, [proposed], path)
    assert stopped.accepted == len(stopped.beta) - 1 < 3
    (passed,) = verify(z, [replace(proposed, uniforms=Uniforms((0.5, 0.1, 0.0), 0.5))], path)
    assert passed.beta == pytest.approx((1.0, 0.75, 1.0))
