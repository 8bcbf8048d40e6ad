"""The formulas give the paper's tables, and the rates of simulated rounds."""

import math
import random

import pytest

from outrider.theory import (
    best_gamma,
    expected_tokens,
    fixed_rate,
    improvement,
    operations,
    oracle_rate,
    tokens_per_second,
)

TABLE_1 = [  # α, γ, operations, speed, with c = ĉ = 0 [L Table 1]
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
TABLE_4 = [  # γ, α, c, expected improvement [L Table 4]
    (7, 0.75, 0.02, 3.2),
    (7, 0.8, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]


@pytest.mark.parametrize(("alpha", "gamma", "work", "speed"), TABLE_1)
def test_table_1_is_reproduced(alpha: float, gamma: int, work: float, speed: float) -> None:
    assert operations(alpha, gamma, c_hat=0) == pytest.approx(work, abs=0.0051)
    assert improvement(alpha, gamma, c=0) == pytest.approx(speed, abs=0.0051)


@pytest.mark.parametrize(("gamma", "alpha", "c", "expected"), TABLE_4)
def test_table_4_is_reproduced(gamma: int, alpha: float, c: float, expected: float) -> None:
    # The paper rounds α to two places and c to two: its one decimal follows within that error.
    low = improvement(alpha - 0.005, gamma, c + 0.005)
    high = improvement(alpha + 0.005, gamma, max(c - 0.005, 0))
    assert low - 0.05 <= expected <= high + 0.05


def test_expected_tokens_at_the_ends() -> None:
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(0.7, 0) == 1
    assert expected_tokens(1, 5) == 6


@pytest.mark.parametrize("distance", [1e-5, 2e-6, 5e-7, 1e-9, 1e-15])
def test_expected_tokens_keeps_its_digits_near_one(distance: float) -> None:
    alpha = 1 - distance
    assert expected_tokens(alpha, 8) == pytest.approx(math.fsum(alpha**i for i in range(9)), rel=1e-9)


def test_tokens_per_second_is_the_improvement_over_one_target_step() -> None:
    step = 0.02
    rate = tokens_per_second(0.8, 5, draft_step=0.1 * step, verify_pass=1.3 * step, round_trip=0.25 * step)
    assert rate * step == pytest.approx(improvement(0.8, 5, c=0.1, round_trip=0.25, verify_cost=1.3))
    assert improvement(0.8, 5, c=0.05, round_trip=1.25) == pytest.approx(improvement(0.8, 5, c=0.05) / 2)


@pytest.mark.parametrize("alpha", [0.05, 0.4, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("c", [0.01, 0.05, 0.1, 0.4, 2.0])
def test_no_other_gamma_beats_the_best(alpha: float, c: float) -> None:
    """[L Cor. 3.9]: for α > c some γ improves, by (1 + α)/(1 + c) at least."""
    best = improvement(alpha, best_gamma(alpha, c), c)
    assert all(improvement(alpha, gamma, c) <= best for gamma in range(60))
    if alpha > c:
        assert best >= (1 + alpha) / (1 + c) - 1e-12
    else:
        assert best_gamma(alpha, c) == 0


def test_the_best_gamma_follows_the_cost_of_a_pass_and_the_round_trip() -> None:
    assert best_gamma(0.9, 0.01, verify_cost=lambda tokens: 1 + 0.2 * (tokens - 1)) < best_gamma(0.9, 0.01)
    assert best_gamma(0.9, 0.01, round_trip=3) > best_gamma(0.9, 0.01)
    assert best_gamma(1.0, 0.01, max_gamma=7) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.1, "gamma": 2, "c": 0.1}, "alpha is 1.1"),
        ({"alpha": math.nan, "gamma": 2, "c": 0.1}, "alpha is nan"),
        ({"alpha": 0.5, "gamma": -1, "c": 0.1}, "gamma is -1"),
        ({"alpha": 0.5, "gamma": 2, "c": -0.1}, "c is -0.1"),
        ({"alpha": 0.5, "gamma": 2, "c": 0.1, "round_trip": math.inf}, "round_trip is inf"),
        ({"alpha": 0.5, "gamma": 2, "c": 0.1, "verify_cost": 0.0}, "verify_cost is 0.0"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        improvement(**arguments)  # type: ignore[arg-type]


def _rounds(alpha: float, count: int) -> list[int]:
    """Accepted drafts of each round, with no limit on γ."""
    source = random.Random(7)
    return [int(math.log(1 - source.random()) / math.log(alpha)) for _ in range(count)]


def test_recorded_rounds_give_the_rates_of_the_formulas() -> None:
    """An oracle writes 1/(1 - α) tokens a round [L 3.5]; 40,000 rounds."""
    accepted = _rounds(0.8, 40_000)
    assert oracle_rate(accepted, lambda gamma: 1.0) == pytest.approx(1 / (1 - 0.8), rel=0.02)
    for gamma in (1, 3, 8):
        found = fixed_rate(accepted, gamma, lambda drafts: 0.1 * drafts + 1.5)
        assert found == pytest.approx(tokens_per_second(0.8, gamma, 0.1, 1.0, 0.5), rel=0.02)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("draft_step", [0.02, 0.1, 0.5])
def test_no_fixed_gamma_beats_the_oracle(alpha: float, draft_step: float) -> None:
    """The oracle gains up to 60 % where the draft is expensive [L 3.5]."""
    accepted = _rounds(alpha, 20_000)

    def seconds(gamma: int) -> float:
        return 1 + draft_step * gamma

    best = max(fixed_rate(accepted, gamma, seconds) for gamma in range(30))
    assert best < oracle_rate(accepted, seconds) < 1.7 * best


def test_no_rounds_and_rounds_without_duration_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no rounds are given"):
        oracle_rate([], lambda gamma: 1.0)
    with pytest.raises(ValueError, match=r"seconds\(2\) is 0"):
        fixed_rate([1, 2], 2, lambda gamma: 0.0)
    with pytest.raises(ValueError, match=r"gamma is -1"):
        fixed_rate([1], -1, lambda gamma: 1.0)
