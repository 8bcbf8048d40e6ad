"""Break-evens between one token a pass and several: plain arithmetic."""

from typing import Any

import pytest

from benchmarks.parallel import CHOSEN, NO_CACHE, ONE, measured_costs, needed_alpha
from outrider.theory import improvement


@pytest.mark.parametrize("c", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("growth", [0.0, 0.1])
def test_at_the_break_even_one_pass_is_as_fast_as_one_token_a_pass(c: float, growth: float) -> None:
    alpha, round_trip, most = 0.9, 0.4, 16

    def cost(tokens: int) -> float:
        return 1 + growth * (tokens - 1)

    needed = needed_alpha(alpha, c, growth=growth, round_trip=round_trip)
    assert 0 < needed < alpha
    single = max(improvement(alpha, gamma, c, round_trip, cost) for gamma in range(1, most + 1))
    for later, is_faster in ((needed + 0.01, True), (needed - 0.01, False)):
        whole = max(
            improvement([alpha, *[later] * (most - 1)], gamma, c, round_trip, cost, parallel=True)
            for gamma in range(1, most + 1)
        )
        assert (whole > single) is is_faster


def test_masks_need_less_where_drafting_is_slower_or_the_network_nearer() -> None:
    by_cost = [needed_alpha(0.9, c, growth=0.1, round_trip=0.4) for c in (0.02, 0.1, 0.5, 1.0)]
    assert by_cost == sorted(by_cost, reverse=True)
    assert needed_alpha(0.9, 0.2, growth=0.1, round_trip=5.0) > needed_alpha(0.9, 0.2, growth=0.1, round_trip=0.1)


def test_costs_are_those_of_the_rounds() -> None:
    """A pass of the target takes 2000 µs and 100 µs more a token, a pass of the draft 300 µs, all else 900 µs."""

    def arm(gamma: int, passes: int) -> dict[str, Any]:
        draft = 400.0 + 300 * passes
        times = {"target_pass_us": 2000.0 + 100 * gamma, "round_trip_us": 500.0, "round_us": {"draft": draft}}
        return {"gamma": gamma, **times}

    arms = {"s = 1, γ = 3": arm(3, 3), NO_CACHE: arm(4, 4), "s = γ = 4": arm(4, 1), "s = γ = 6": arm(6, 1)}
    odd = dict.fromkeys((ONE, CHOSEN), arm(5, 100))  # choose γ: their means are no point of a line
    costs = measured_costs(arms | odd)
    assert costs == pytest.approx({"t_p_us": 2000, "c": 0.15, "growth": 0.05, "round_trip": 0.45})
    noisy = {name: each | {"target_pass_us": 3000.0 - 50 * each["gamma"]} for name, each in arms.items()}
    assert measured_costs(noisy)["growth"] == 0
