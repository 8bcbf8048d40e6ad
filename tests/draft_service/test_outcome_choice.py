"""What the outcome cache chooses by: chances of verdicts, spare time, and a trial of whether branches pay.

Whatever befalls them they never raise: clocks stand still or jump, scores and times are no numbers.
"""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.outcome_cache import (
    END,
    EVERY,
    FIRST_EVERY,
    MOST_STEPS,
    TEMPERATURES,
    TRIAL_PAIRS,
    Forecast,
    SpareTime,
    Trial,
)
from draft_service.drafters.sequence import Place

SURE = Place([7, 1, 2], [9.0, 1.0, 0.0])
RISKY = Place([8, 3, 4], [5.0, 4.9, 1.0])

cheaply = settings(max_examples=60, derandomize=True, deadline=None)
numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1e-3, -1e-3, 5e-324, 1e308, math.nan, math.inf]))
finite = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([0.0, 1e-3, 5e-324]))
counts = st.integers(0, 17)
bursts = st.integers(1, 10)


# ------------------------------------------------------------------------------------------------------------- forecast


@pytest.mark.parametrize("by_scores", [True, False])
def test_chances_of_all_outcomes_sum_to_one(by_scores: bool) -> None:
    forecast = Forecast(by_scores=by_scores)
    *rejected, end = forecast.guesses([SURE, RISKY, SURE], [7, 8, 7])
    assert (end.accepted, end.token) == (3, END)
    behind = forecast.followers(RISKY, 3, end.chance)
    assert sum(guess.chance for guess in behind) == pytest.approx(end.chance)
    assert sum(guess.chance for guess in (*rejected, end)) == pytest.approx(1.0)
    assert min(guess.chance for guess in (*rejected, *behind)) > 0


def test_the_place_where_two_tokens_are_near_is_where_it_is_expected_to_end() -> None:
    best = max(
        guess for guess in Forecast(by_scores=True).guesses([SURE, RISKY, SURE], [7, 8, 7]) if guess.token != END
    )
    assert (best.accepted, best.token) == (1, 3)


def test_no_outcome_puts_the_rejected_token_in_its_own_place_nor_one_without_chance() -> None:
    place = Place([8, 3, 4], [5.0, 4.9, -math.inf])
    forecast = Forecast(by_scores=True)
    assert [guess.token for guess in forecast.guesses([place], [8])] == [3, END]
    assert {guess.token for guess in forecast.followers(place, 1, 0.5)} == {8, 3}


def test_where_tokens_are_drawn_each_place_has_the_mean_acceptance_rate() -> None:
    forecast = Forecast(by_scores=False)
    for _ in range(300):
        forecast.learn([SURE] * 4, [7] * 4, 1, 5)
    assert forecast.acceptance_rate == pytest.approx(0.5, abs=0.02)
    *rejected, end = forecast.guesses([SURE, RISKY], [7, 8])
    assert end.chance == pytest.approx(0.25, abs=0.02)
    assert sum(guess.chance for guess in rejected if guess.accepted == 0) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("noise", [0.15, 0.45, 1.5])
def test_the_temperature_is_learned_from_verdicts(noise: float) -> None:
    """A target whose scores are the draft's with Gumbel noise of a scale chooses by softmax(scores / scale)."""
    forecast, random_ = Forecast(by_scores=True), np.random.default_rng(2)
    stood = expected = 0.0
    for round_ in range(600):
        scores = np.sort(random_.normal(size=(4, 5)) * 1.5, axis=1)[:, ::-1]
        places = [Place([0, 1, 2, 3, 4], row.tolist()) for row in scores]
        chosen = (scores + noise * random_.gumbel(size=scores.shape)).argmax(axis=1)
        accepted = next((i for i, token in enumerate(chosen) if token), 4)
        if round_ >= 200:
            expected += forecast.guesses(places[:1], [0])[-1].chance
            stood += accepted > 0
        forecast.learn(places, [0] * 4, accepted, int(chosen[accepted]) if accepted < 4 else 1)
    assert abs(np.log(forecast.temperature / noise)) <= np.log(1.6)
    assert forecast.temperature in TEMPERATURES
    assert stood == pytest.approx(expected, rel=0.12)


def test_a_verdict_without_a_next_token_or_a_proposal_teaches_what_it_says_and_no_more() -> None:
    forecast = Forecast(by_scores=True)
    for _ in range(5):
        forecast.learn([SURE, RISKY], [7, 8], 1, None)  # cut behind its first token
    before = forecast.acceptance_rate
    for _ in range(10_000):
        forecast.learn([], [], 0, 3)
    assert forecast.acceptance_rate == before


places = st.lists(st.tuples(st.integers(0, 9), numbers), min_size=1, max_size=5).map(
    lambda pairs: Place([token for token, _ in pairs], [score for _, score in pairs])
)
verdicts = st.tuples(
    st.lists(st.tuples(places, st.integers(0, 9)), max_size=4), counts, st.none() | st.integers(0, 9), bursts
)


@cheaply
@given(by_scores=st.booleans(), told=st.lists(verdicts, max_size=12))
def test_chances_of_outcomes_are_chances(
    by_scores: bool, told: list[tuple[list[tuple[Place, int]], int, int | None, int]]
) -> None:
    forecast = Forecast(by_scores=by_scores)
    for pairs, accepted, token, burst in told:
        at, drafted = [place for place, _ in pairs], [token for _, token in pairs]
        guesses = forecast.guesses(at, drafted)
        if at:
            guesses += forecast.followers(at[-1], len(at), guesses[-1].chance)
        assert all(0.0 <= guess.chance <= 1.0 + 1e-9 for guess in guesses)
        for _ in range(burst):
            forecast.learn(at, drafted, min(accepted, len(drafted)), token)
        assert 0.0 <= forecast.acceptance_rate <= 1.0


# ----------------------------------------------------------------------------------------------------------- spare time


def after_rounds(spare: SpareTime, waits: list[float], *, step: float | None = 0.0005) -> float:
    """The time after so many rounds of one sequence."""
    if step is not None:
        spare.spent(1, 5, 5 * step)
    now = 0.0
    for wait in waits:
        spare.left["a"] = now
        now += wait
        spare.asked("a", now)
    return now


def test_nothing_is_begun_before_a_wait_and_a_step_are_known() -> None:
    for waits, step in (([], 0.0005), ([0.01], None)):
        spare = SpareTime()
        now = after_rounds(spare, waits, step=step)
        spare.left["a"] = now
        assert spare.steps(now, 1) == 0
    spare.spent(1, 1, 0.0005)
    assert spare.steps(now, 1) > 0


def test_what_is_begun_is_done_before_the_first_of_them_asks() -> None:
    spare = SpareTime()
    now = after_rounds(spare, [0.010] * 60)
    spare.left["late"] = now
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)
    assert spare.steps(now + 0.006, 1) == pytest.approx(8, abs=1)
    assert spare.steps(now + 0.0099, 1) == 0
    assert spare.steps(now + 0.02, 1) == 0  # overdue: it may ask at any moment
    spare.left["early"] = now - 0.008
    assert spare.steps(now, 1) == pytest.approx(4, abs=1)
    spare.left.pop("early", None)
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)


def test_steps_that_many_take_together_are_fewer() -> None:
    spare = SpareTime()
    now = after_rounds(spare, [0.010] * 60)
    spare.left["a"] = now
    assert spare.steps(now, 4) == pytest.approx(5, abs=1), "as if one by one, until it is measured"
    for _ in range(200):
        for width in (1, 2, 4):
            spare.spent(width, 5, 5 * (0.0004 + 0.0001 * width))
    assert spare.step_seconds(1) == pytest.approx(0.0005, rel=0.05)
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)
    assert spare.steps(now, 4) == pytest.approx(12, abs=1)
    spare.spent(1, 1, 60.0)
    assert spare.step_seconds(1) < 0.001, "the machine stood still"


def test_waits_that_vary_leave_a_margin_and_a_pause_teaches_nothing() -> None:
    steady, varying = SpareTime(), SpareTime()
    for spare, waits in ((steady, [0.010] * 80), (varying, [0.004, 0.016] * 40)):
        now = after_rounds(spare, [*waits, 5.0])
        spare.left["a"] = now
        assert 8 <= spare.steps(now, 1) <= 20
    assert varying.steps(now, 1) < steady.steps(now, 1)


events = st.tuples(
    st.sampled_from(["left", "asked", "gone", "spent", "steps"]), st.integers(0, 3), finite, numbers, counts
)


@cheaply
@given(told=st.lists(events))
def test_spare_time_is_some_steps(told: list[tuple[str, int, float, float, int]]) -> None:
    spare = SpareTime()
    for event, who, now, seconds, width in told:
        match event:
            case "left":
                spare.left[who] = now
            case "asked":
                spare.asked(who, now)
            case "gone":
                spare.left.pop(who, None)
            case "spent":
                spare.spent(width, who, seconds)
            case _:
                assert spare.steps(now, width) in range(MOST_STEPS + 1)


# ---------------------------------------------------------------------------------------------------------------- trial


def share_on(gain: float, *, noise: float = 0.3, seed: int = 1, pauses: float = 0.0, rounds: int = 6000) -> float:
    """Of the last half of these rounds, how many were done with branches; a round is shorter by `gain` with them."""
    trial, coin, on_count = Trial(), random.Random(seed), 0
    for round_ in range(rounds):
        on = trial.choose()
        drift = 1.0 + 0.5 * round_ / rounds  # the machine grows slower
        pause = 100.0 if on and coin.random() < pauses else 1.0
        trial.add(pause * drift * (1.0 - gain * on) * coin.lognormvariate(0, noise), on=on)
        on_count += on and round_ >= rounds // 2
    return on_count / (rounds // 2)


@pytest.mark.parametrize("seed", range(4))
def test_what_pays_is_done_and_what_does_not_is_left(seed: int) -> None:
    assert share_on(0.1, seed=seed) > 0.9
    assert share_on(-0.1, seed=seed) < 0.1


def test_single_rounds_that_take_for_ever_decide_nothing() -> None:
    assert share_on(0.15, noise=0.1, pauses=0.01) > 0.9


def test_the_other_way_is_tried_often_at_first_and_seldom_once_it_is_known() -> None:
    trial, ways = Trial(), list[bool]()
    for _ in range(4000):
        ways.append(trial.choose())
        trial.add(0.9 if ways[-1] else 1.0, on=ways[-1])
    first = 2 * FIRST_EVERY * TRIAL_PAIRS
    assert TRIAL_PAIRS / 2 < ways[:first].count(False) < 3 * TRIAL_PAIRS
    assert 0 < ways[first:].count(False) / len(ways[first:]) < 1.5 / EVERY


@cheaply
@given(told=st.lists(st.tuples(numbers, st.booleans(), st.integers(1, 2 * TRIAL_PAIRS)), max_size=12))
def test_a_trial_takes_any_times(told: list[tuple[float, bool, int]]) -> None:
    trial = Trial()
    for seconds, on, burst in told:
        for _ in range(burst):
            trial.add(seconds, on=on)
            assert trial.choose() in (True, False)


def test_a_trial_under_a_clock_that_stands_still_changes_nothing() -> None:
    trial = Trial()
    for i in range(1000):
        trial.add(0.0, on=bool(i % 2))
    assert trial.best
