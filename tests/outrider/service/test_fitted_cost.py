"""The fitted cost of a step finds the true line, never becomes negative, and follows changes."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.service.fitted_cost import CREDIBLE_DEVIATIONS, FORGETTING, CostLine, FittedCost


def trials(line: CostLine) -> list[tuple[int, float]]:
    return [(tokens, line.seconds(tokens)) for tokens in (1, 17, 68)]


def noisy(line: CostLine, tokens: int, rng: random.Random) -> float:
    return line.seconds(tokens) * (1 + rng.uniform(-0.05, 0.05))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fixed=st.floats(1e-4, 0.1), per_token=st.floats(1e-6, 1e-2), seed=st.integers(0, 999))
def test_the_line_is_found_under_noise(fixed: float, per_token: float, seed: int) -> None:
    """From trials off by half: within 5 % at every width that was measured, with noise of 5 %."""
    line, rng = CostLine(fixed, per_token), random.Random(seed)
    cost = FittedCost(trials(CostLine(fixed / 2, per_token / 2)))
    for _ in range(600):
        tokens = rng.randint(1, 64)
        cost.add(tokens, noisy(line, tokens, rng))
    for tokens in (1, 8, 32, 64):
        # Relative to the largest width: an error of the slope shows there.
        assert cost.line.seconds(tokens) == pytest.approx(line.seconds(tokens), abs=0.05 * line.seconds(64))


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_change_of_the_machine_is_followed(factor: float) -> None:
    old, rng = CostLine(4e-3, 1e-4), random.Random(1)
    new = CostLine(factor * old.fixed, factor * old.per_token)
    cost = FittedCost(trials(old))
    for line, times in ((old, 200), (new, 200)):
        for _ in range(times):
            tokens = rng.choice((6, 12, 48))
            cost.add(tokens, noisy(line, tokens, rng))
        for tokens in (6, 12, 48):
            assert cost.line.seconds(tokens) == pytest.approx(line.seconds(tokens), rel=0.07)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(outlier=st.floats(0.05, 3600.0), seed=st.integers(0, 999))
def test_an_outlier_moves_the_line_by_a_few_deviations_at_most(outlier: float, seed: int) -> None:
    line, rng = CostLine(4e-3, 1e-4), random.Random(seed)
    cost = FittedCost(trials(line))
    for _ in range(100):
        tokens = rng.choice((6, 12))
        cost.add(tokens, noisy(line, tokens, rng))
    before = cost.line.seconds(9)
    cost.add(9, outlier)
    bound = FORGETTING * CREDIBLE_DEVIATIONS * 0.05 * line.seconds(9)  # the mean deviation is below the largest
    assert cost.line.seconds(9) - before <= bound


numbers = st.one_of(st.floats(), st.sampled_from([0.0, 5e-324, 1e308]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    first=st.floats(1e-6, 10.0),
    passes=st.lists(st.tuples(st.integers(0, 1 << 31), numbers, st.integers(1, 50)), max_size=20),
)
def test_the_line_stays_finite_and_not_negative(first: float, passes: list[tuple[int, float, int]]) -> None:
    cost = FittedCost([(1, first)])
    for tokens, seconds, burst in passes:
        for _ in range(burst):
            cost.add(tokens, seconds)
        assert 0.0 <= cost.line.fixed < math.inf
        assert 0.0 <= cost.line.per_token < math.inf
