"""The papers' formulas, with the network, the outcome cache and parallel drafts added.

Pure arithmetic on plain numbers. Times are in target steps, c and R included: one step writes a token without drafts.
With all times in seconds `improvement` is tokens per second. Functions of one α assume independent acceptances of equal
probability [L 3.1], roughly true of real texts; a sequence of α by position needs no such assumption.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from operator import mul
from typing import TypeAlias

MAX_GAMMA = 64
"""Default of `best_gamma`: the largest γ considered."""

Alpha: TypeAlias = float | Sequence[float]
"""α of all positions, or of each position given that all positions before it are accepted; 0 beyond the last."""

Cost: TypeAlias = float | Callable[[int], float]
"""v, time of a forward pass of the target: of γ+1 tokens, or a function of the tokens; 1 in the paper.

A constant ignores that the pass grows with γ, and gives a γ that is too large.
"""

# ------------------------------------------------------------------------------------------------------- one round


def expected_tokens(alpha: Alpha, gamma: int) -> float:
    """Return the expected tokens of one round, (1 - α^(γ+1)) / (1 - α) [L Eq. 1].

    With α by position it is 1 + α₁ + α₁α₂ + … + α₁⋯α_γ.

    Raises:
        ValueError: α is outside [0, 1], or γ is negative.
    """
    _refuse_alpha(alpha)
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; it must be at least 0")
    if not isinstance(alpha, int | float):
        return 1 + math.fsum(accumulate(islice(alpha, gamma), mul))
    if 1 - alpha < 1e-6:  # the quotient loses precision, the sum does not
        return math.fsum(alpha**i for i in range(gamma + 1))
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def round_time(
    gamma: int,
    c: float,
    round_trip: float = 0.0,
    verify_cost: Cost = 1.0,
    *,
    hit_rate: float = 0.0,
    parallel: bool = False,
) -> float:
    """Return the expected time of one round, (1 - h)·γc + v + R [L Thm 3.8: γc + 1].

    Args:
        gamma: drafted tokens.
        c: time of one draft step [L Def. 3.7].
        round_trip: R, network time of a round; 0 in the paper.
        verify_cost: v, see `Cost`.
        hit_rate: h, share of rounds whose proposal the outcome cache has; they take no draft steps.
        parallel: one draft step drafts all γ tokens [L 3.6: non-autoregressive models]: c in place of γc.

    Raises:
        ValueError: γ is negative, h is outside [0, 1], or a time is negative, infinite or NaN (v also 0).
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; it must be at least 0")
    if not 0 <= hit_rate <= 1:
        raise ValueError(f"hit_rate is {hit_rate}; it must lie in [0, 1]")
    verify = verify_cost(gamma + 1) if callable(verify_cost) else verify_cost
    _refuse_times(c=c, round_trip=round_trip)
    _refuse_times(verify_cost=verify, above_zero=True)
    steps = min(gamma, 1) if parallel else gamma
    return (1 - hit_rate) * steps * c + verify + round_trip


def improvement(
    alpha: Alpha,
    gamma: int,
    c: float,
    round_trip: float = 0.0,
    verify_cost: Cost = 1.0,
    *,
    hit_rate: float = 0.0,
    parallel: bool = False,
) -> float:
    """Return the expected speed-up over the target alone, `expected_tokens` / `round_time` [L Thm 3.8].

    Raises:
        ValueError: as these two.
    """
    tokens = expected_tokens(alpha, gamma)
    return tokens / round_time(gamma, c, round_trip, verify_cost, hit_rate=hit_rate, parallel=parallel)


def operations(alpha: Alpha, gamma: int, c_hat: float, *, parallel: bool = False) -> float:
    """Return the expected growth of the operations per token [L Thm 3.11], (1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)).

    `c_hat` is the draft's operations per token over the target's [L Def. 3.10]; with `parallel` those of its one step.

    Raises:
        ValueError: α, γ or ĉ is out of range.
    """
    _refuse_times(c_hat=c_hat)
    steps = min(gamma, 1) if parallel else gamma
    return (steps * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


# ------------------------------------------------------------------------------------------------ choosing and bounds


def best_gamma(
    alpha: Alpha,
    c: float,
    round_trip: float = 0.0,
    verify_cost: Cost = 1.0,
    max_gamma: int = MAX_GAMMA,
    *,
    hit_rate: float = 0.0,
    parallel: bool = False,
) -> int:
    """Return the γ in 1..max_gamma of largest `improvement`, the smallest among equals; 0 if none improves [L 3.5].

    Raises:
        ValueError: as `improvement`, or `max_gamma` is negative.
    """

    def speed_up(gamma: int) -> float:
        return improvement(alpha, gamma, c, round_trip, verify_cost, hit_rate=hit_rate, parallel=parallel)

    best = max(_gammas(max_gamma), key=speed_up, default=0)
    return best if best and speed_up(best) > 1 else 0


def oracle(alpha: float, c: float, round_trip: float = 0.0) -> float:
    """Return the speed-up of the best γ of each round in hindsight, the limit of every policy [L 3.5].

    It drafts the accepted tokens and no others: 1/(1 - α) tokens a round, and α/(1 - α) draft steps. Infinite if it
    takes no time. Where the target's pass grows with each token, add that to c.

    Raises:
        ValueError: as `improvement`.
    """
    _refuse_alpha(alpha)
    time = alpha * c + (1 - alpha) * round_time(0, c, round_trip)  # of one token
    return 1 / time if time else math.inf


def break_even_alpha(
    c: float,
    round_trip: float = 0.0,
    verify_cost: Cost = 1.0,
    max_gamma: int = MAX_GAMMA,
    *,
    hit_rate: float = 0.0,
    parallel: bool = False,
) -> float | None:
    """Return the α at which the best γ is as fast as the target alone; None if even α = 1 is slower.

    Without network and with v = 1 it is c [L Cor. 3.9].

    Raises:
        ValueError: as `best_gamma`.
    """

    def gain(alpha: float) -> float:
        most = break_even_round_trip(alpha, c, verify_cost, max_gamma, hit_rate=hit_rate, parallel=parallel)
        return most - round_trip

    _refuse_times(round_trip=round_trip)
    low, high = 0.0, 1.0
    if gain(high) < 0:
        return None
    for _ in range(52):  # `gain` grows with α; halve until the digits of a float end
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= 0 else (middle, high)
    return high


def break_even_round_trip(
    alpha: Alpha,
    c: float,
    verify_cost: Cost = 1.0,
    max_gamma: int = MAX_GAMMA,
    *,
    hit_rate: float = 0.0,
    parallel: bool = False,
) -> float:
    """Return the R at which the best γ is as fast as the target alone; below 0 if no γ improves without a network.

    Raises:
        ValueError: as `best_gamma`, or `max_gamma` is 0.
    """
    if max_gamma == 0:
        raise ValueError("max_gamma is 0; it must be at least 1")
    return max(
        expected_tokens(alpha, gamma) - round_time(gamma, c, 0.0, verify_cost, hit_rate=hit_rate, parallel=parallel)
        for gamma in _gammas(max_gamma)
    )


def _gammas(max_gamma: int) -> range:
    if max_gamma < 0:
        raise ValueError(f"max_gamma is {max_gamma}; it must be at least 0")
    return range(1, max_gamma + 1)


# ----------------------------------------------------------------------------------------------------------- refusals


def _refuse_alpha(alpha: Alpha) -> None:
    for each in (alpha,) if isinstance(alpha, int | float) else alpha:
        if not 0 <= each <= 1:
            raise ValueError(f"alpha is {each}; it must lie in [0, 1]")


def _refuse_times(above_zero: bool = False, **times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0) or (above_zero and value == 0):
            raise ValueError(f"{name} is {value}; it must be finite and {'above' if above_zero else 'at least'} 0")
