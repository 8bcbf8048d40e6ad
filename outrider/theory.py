"""The paper's formulas, with the network added: expected tokens, speed-up, operations, and the best γ.

Pure arithmetic on plain numbers. Functions of α assume independent acceptances of equal probability [L 3.1], roughly
true of real texts; others take recorded rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MAX_GAMMA = 64
"""Default of `best_gamma`: the largest γ considered."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the expected tokens of one round, (1 - α^(γ+1)) / (1 - α) [L Eq. 1].

    Raises:
        ValueError: α is outside [0, 1], or γ is negative.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must lie in [0, 1]")
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; it must be at least 0")
    if 1 - alpha < 1e-6:  # the quotient loses precision, the sum does not
        return math.fsum(alpha**i for i in range(gamma + 1))
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def fixed_rate(accepted: Sequence[int], gamma: int, seconds: Callable[[int], float]) -> float:
    """Return the tokens per second that γ would have given in recorded rounds, Σ (min(a, γ) + 1) / (n · seconds(γ)).

    Args:
        accepted: a of each round: its accepted tokens, drafted with at least this γ.
        gamma: drafted tokens a round.
        seconds: time of a round with that many drafted tokens.

    Raises:
        ValueError: there is no round, γ is negative, or a round takes no time.
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; it must be at least 0")
    return _rate([min(each, gamma) for each in accepted], [gamma] * len(accepted), seconds)


def oracle_rate(accepted: Sequence[int], seconds: Callable[[int], float]) -> float:
    """Return the tokens per second of the best γ in hindsight [L 3.5], Σ (a + 1) / Σ seconds(a).

    It drafts in each round only the tokens that were accepted: an upper bound for every policy. With one α it has
    1/(1 - α) tokens a round. If all drafted tokens of a round were accepted it is underestimated, because more might
    have been. For the arguments see `fixed_rate`.

    Raises:
        ValueError: there is no round, or one takes no time.
    """
    return _rate(accepted, accepted, seconds)


def _rate(accepted: Sequence[int], drafted: Sequence[int], seconds: Callable[[int], float]) -> float:
    if not accepted:
        raise ValueError("no rounds are given; at least 1 is needed")
    times = {gamma: seconds(gamma) for gamma in set(drafted)}
    for gamma, time in times.items():
        _refuse_times(above_zero=True, **{f"seconds({gamma})": time})
    return sum(each + 1 for each in accepted) / math.fsum(times[gamma] for gamma in drafted)


def improvement(alpha: float, gamma: int, c: float, round_trip: float = 0.0, verify_cost: float = 1.0) -> float:
    """Return the expected speed-up over the target alone [L Thm 3.8], (1 - α^(γ+1)) / ((1 - α)(γc + v + R)).

    Args:
        alpha: chance that a drafted token is accepted.
        gamma: drafted tokens a round.
        c: time of one draft step, in target steps.
        round_trip: R, network time of a round, in target steps; 0 in the paper.
        verify_cost: v, time of the target's forward pass over γ+1 tokens, in target steps of one; 1 in the paper.

    Raises:
        ValueError: α or γ is out of range, or a time is negative, infinite or NaN (`verify_cost` also 0).
    """
    _refuse_times(c=c, round_trip=round_trip)
    _refuse_times(verify_cost=verify_cost, above_zero=True)
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost + round_trip)


def tokens_per_second(
    alpha: float, gamma: int, draft_step: float, verify_pass: float, round_trip: float = 0.0
) -> float:
    """Return the expected rate of one sequence, E(γ, α) / (γ·t_q + t_p(γ+1) + R).

    Args:
        alpha: chance that a drafted token is accepted.
        gamma: drafted tokens a round.
        draft_step: t_q, seconds of one draft step.
        verify_pass: t_p(γ+1), seconds of the target's pass over γ+1 tokens.
        round_trip: R, seconds a round spends on the network.

    Raises:
        ValueError: α or γ is out of range, or a time is negative, infinite or NaN (`verify_pass` also 0).
    """
    _refuse_times(draft_step=draft_step, round_trip=round_trip)
    _refuse_times(verify_pass=verify_pass, above_zero=True)
    return expected_tokens(alpha, gamma) / (gamma * draft_step + verify_pass + round_trip)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Return the expected growth of the operations per token [L Thm 3.11], (1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)).

    `c_hat` is the draft's operations per token over the target's.

    Raises:
        ValueError: α, γ or ĉ is out of range.
    """
    _refuse_times(c_hat=c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(
    alpha: float,
    c: float,
    round_trip: float = 0.0,
    verify_cost: float | Callable[[int], float] = 1.0,
    max_gamma: int = MAX_GAMMA,
) -> int:
    """Return the γ in 0..max_gamma of largest `improvement`, the smallest among equals [L 3.5].

    `verify_cost` may be a function of the tokens in the target's forward pass, γ+1. A constant ignores that the pass
    grows with γ, and gives a γ that is too large.

    Raises:
        ValueError: as `improvement` does, or `max_gamma` is negative.
    """
    if max_gamma < 0:
        raise ValueError(f"max_gamma is {max_gamma}; it must be at least 0")

    def speed_up(gamma: int) -> float:
        cost = verify_cost(gamma + 1) if callable(verify_cost) else verify_cost
        return improvement(alpha, gamma, c, round_trip, cost)

    return max(range(max_gamma + 1), key=speed_up)


def _refuse_times(above_zero: bool = False, **times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0) or (above_zero and value == 0):
            raise ValueError(f"{name} is {value}; it must be finite and {'above' if above_zero else 'at least'} 0")
