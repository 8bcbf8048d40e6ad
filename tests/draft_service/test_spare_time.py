"""What a draft may begin while verdicts are under way, and when it stops trying."""

import random

import pytest

from draft_service.drafters.spare_time import SpareTime
from draft_service.drafters.trial import FIRST_PAUSE, LONGEST_PAUSE, TRIAL_ROUNDS, Trial


def rounds(spare: SpareTime, who: str, waits: list[float]) -> float:
    now = 0.0
    for wait in waits:
        spare.left(who, now)
        now += wait
        spare.asked(who, now)
    return now


def test_nothing_is_begun_before_a_wait_and_a_token_are_known() -> None:
    spare = SpareTime()
    spare.left("a", 0.0)
    assert spare.steps(0.001, 1) == 0
    spare.asked("a", 0.010)
    spare.left("a", 0.010)
    assert spare.steps(0.011, 1) == 0
    spare.spent(1, 4, 0.002)
    assert spare.steps(0.011, 1) > 0


def test_what_is_begun_is_done_before_the_next_asks() -> None:
    spare = SpareTime()
    spare.spent(1, 5, 0.0025)
    now = rounds(spare, "a", [0.010] * 60)
    spare.left("a", now)
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)
    assert spare.steps(now + 0.006, 1) == pytest.approx(8, abs=1)
    assert spare.steps(now + 0.0099, 1) == 0
    assert spare.steps(now + 0.02, 1) == 0  # overdue: it may ask at any moment


def test_the_first_of_several_to_ask_is_what_counts_and_who_is_gone_does_not() -> None:
    spare = SpareTime()
    spare.spent(1, 1, 0.0005)
    now = rounds(spare, "a", [0.010] * 60)
    spare.left("early", now - 0.008)
    spare.left("late", now)
    assert spare.steps(now, 1) == pytest.approx(4, abs=1)
    spare.gone("early")
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)


def test_steps_that_many_take_together_are_fewer() -> None:
    spare = SpareTime()
    for _ in range(200):
        for width in (1, 2, 4):
            spare.spent(width, 5, 5 * (0.0004 + 0.0001 * width))
    now = rounds(spare, "a", [0.010] * 60)
    spare.left("a", now)
    assert spare.step_seconds(1) == pytest.approx(0.0005, rel=0.05)
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)
    assert spare.steps(now, 6) == pytest.approx(10, abs=1)


def test_waits_that_vary_leave_a_margin_and_a_pause_teaches_nothing() -> None:
    steady, varying = SpareTime(), SpareTime()
    for spare, waits in ((steady, [0.010] * 80), (varying, [0.004, 0.016] * 40)):
        spare.spent(1, 1, 0.0005)
        now = rounds(spare, "a", [*waits, 5.0])
        spare.left("a", now)
        assert 8 <= spare.steps(now, 1) <= 20
    assert varying.steps(now, 1) < steady.steps(now, 1)


# ---------------------------------------------------------------------------------------------------------- the trial


def share_on(gain: float, *, count: int = 6000, noise: float = 0.3, seed: int = 1) -> float:
    """Of the last half of these rounds, how many were done with it; a round is shorter by `gain` with it."""
    trial, coin, on_count = Trial(), random.Random(seed), 0
    for round_ in range(count):
        on = trial.choose()
        drift = 1.0 + 0.5 * round_ / count  # the machine grows slower
        trial.add(drift * (1.0 - gain * on) * coin.lognormvariate(0, noise), on=on)
        on_count += on and round_ >= count // 2
    return on_count / (count // 2)


@pytest.mark.parametrize("seed", range(4))
def test_what_pays_is_done_and_what_does_not_is_left(seed: int) -> None:
    assert share_on(0.1, seed=seed) > 0.9
    assert share_on(-0.1, seed=seed) < 0.1


def test_a_first_trial_comes_soon_and_the_ways_take_turns_in_it() -> None:
    trial, ways = Trial(), list[bool]()
    for _ in range(FIRST_PAUSE + TRIAL_ROUNDS):
        ways.append(trial.choose())
        trial.add(1.0, on=ways[-1])
    assert all(ways[:FIRST_PAUSE])
    assert 0.25 < sum(ways[FIRST_PAUSE:]) / TRIAL_ROUNDS < 0.75


def test_while_nothing_changes_trials_become_rare() -> None:
    trial, coin = Trial(), random.Random(3)
    off = 0
    for round_ in range(20 * LONGEST_PAUSE):
        on = trial.choose()
        off += (not on) and round_ > 10 * LONGEST_PAUSE
        trial.add((0.9 if on else 1.0) * coin.lognormvariate(0, 0.1), on=on)
    assert 0 < off / (10 * LONGEST_PAUSE) < 0.03


def test_single_rounds_that_take_for_ever_decide_nothing() -> None:
    trial, coin = Trial(), random.Random(4)
    on_count = 0
    for round_ in range(4000):
        on = trial.choose()
        seconds = 100.0 if on and coin.random() < 0.01 else (0.85 if on else 1.0) * coin.lognormvariate(0, 0.1)
        trial.add(seconds, on=on)
        on_count += on and round_ >= 2000
    assert on_count > 1800
