"""Whatever befalls them, controllers that only make a text faster never raise, and no γ is outside its range.

Sequences come and go, rounds are empty or come in bursts, clocks stand still or jump, and times are no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.base import Foresight
from draft_service.drafters.guard import Health
from draft_service.drafters.outcomes import Forecast, Place
from draft_service.drafters.spare_time import MOST_STEPS, SpareTime
from draft_service.drafters.trial import FIRST_PAUSE as FIRST_TRIAL
from draft_service.drafters.trial import TRIAL_ROUNDS, Trial
from draft_service.failover import FailoverBudget
from draft_service.replicas import Breaker
from draft_service.statistics import SpeculationCounts, Timings
from protos.outrider.v1 import speculation_pb2

cheaply = settings(max_examples=60, derandomize=True, deadline=None)

numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1e-3, -1e-3, 5e-324, 1e308, math.nan, math.inf]))
counts = st.integers(0, 17)
bursts = st.integers(1, 10)
finite = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([0.0, 1e-3, 5e-324]))


@cheaply
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["left", "asked", "gone", "spent", "steps"]), st.integers(0, 3), finite, numbers, counts
        )
    )
)
def test_spare_time_is_some_steps(events: list[tuple[str, int, float, float, int]]) -> None:
    spare = SpareTime()
    for event, who, now, seconds, width in events:
        match event:
            case "left":
                spare.left(who, now)
            case "asked":
                spare.asked(who, now)
            case "gone":
                spare.gone(who)
            case "spent":
                spare.spent(width, who, seconds)
            case _:
                assert spare.steps(now, width) in range(MOST_STEPS + 1)


@cheaply
@given(events=st.lists(st.tuples(numbers, st.booleans(), st.integers(1, 2 * TRIAL_ROUNDS)), max_size=12))
def test_a_trial_comes_to_an_end(events: list[tuple[float, bool, int]]) -> None:
    trial = Trial()
    for seconds, on, burst in events:
        for _ in range(burst):
            trial.add(seconds, on=on)
            assert trial.choose() in (True, False)


def test_a_trial_under_a_clock_that_stands_still_changes_nothing() -> None:
    trial = Trial()
    for i in range(3 * (FIRST_TRIAL + 2 * TRIAL_ROUNDS)):
        trial.add(0.0, on=bool(i % 2))
    assert trial.best


places = st.lists(st.tuples(st.integers(0, 9), numbers), min_size=1, max_size=5).map(
    lambda pairs: Place([token for token, _ in pairs], [score for _, score in pairs])
)


@cheaply
@given(
    by_scores=st.booleans(),
    verdicts=st.lists(
        st.tuples(
            st.lists(st.tuples(places, st.integers(0, 9)), max_size=4), counts, st.none() | st.integers(0, 9), bursts
        ),
        max_size=12,
    ),
)
def test_chances_of_outcomes_are_chances(
    by_scores: bool, verdicts: list[tuple[list[tuple[Place, int]], int, int | None, int]]
) -> None:
    forecast = Forecast(by_scores=by_scores)
    for pairs, accepted, token, burst in verdicts:
        at, drafted = [place for place, _ in pairs], [token for _, token in pairs]
        guesses, all_stand = forecast.guesses(at, drafted)
        if at:
            guesses += forecast.after_all(at[-1], len(at), all_stand)
        assert all(0.0 <= chance <= 1.0 + 1e-9 for chance in (all_stand, *(guess.chance for guess in guesses)))
        for _ in range(burst):
            forecast.learn(at, drafted, min(accepted, len(drafted)), token)
        assert 0.0 <= forecast.acceptance_rate <= 1.0


def test_proposals_of_nothing_teach_a_forecast_nothing() -> None:
    forecast = Forecast(by_scores=False)
    before = forecast.acceptance_rate
    for _ in range(100_000):
        forecast.learn([], [], 0, 3)
    assert forecast.acceptance_rate == before


@cheaply
@given(
    burst=st.integers(1, 64),
    events=st.lists(st.tuples(st.sampled_from(["earn", "give_back", "take_now", "tokens"]), finite)),
)
def test_the_budget_of_failovers_stays_in_its_bounds(burst: int, events: list[tuple[str, float]]) -> None:
    now = 0.0
    budget = FailoverBudget(burst, clock=lambda: now)
    for event, now in events:  # noqa: B007  # the clock reads it
        tokens = getattr(budget, event)
        if callable(tokens):
            tokens()
        assert 0.0 <= budget.tokens <= burst


@cheaply
@given(events=st.lists(st.tuples(st.sampled_from(["begin", "succeeded", "failed", "well", "ill"]), finite)))
def test_breakers_take_whatever_comes(events: list[tuple[str, float]]) -> None:
    now = 0.0
    breaker, health, epochs = Breaker(clock=lambda: now), Health(lambda: now), [0]
    for event, now in events:  # noqa: B007  # the clock reads it
        steps: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "begin": (lambda: epochs.append(breaker.begin()), health.needs_probe),
            "succeeded": (lambda: breaker.succeeded(epochs[-1]), health.proposed),
            "failed": (lambda: breaker.failed(epochs[-1]), health.failed),
            "well": (lambda: breaker.probed(well=True), lambda: health.probed(well=True)),
            "ill": (lambda: breaker.probed(well=False), lambda: health.probed(well=False)),
        }
        for step in steps[event]:
            step()
        assert breaker.pause >= 0.0
        assert breaker.admits() in (True, False)


@cheaply
@given(
    verdicts=st.lists(st.tuples(counts, counts, counts, st.lists(st.floats(0, 1), max_size=4), st.none() | counts)),
    foresights=st.lists(st.builds(Foresight, counts, counts, st.booleans(), finite)),
    waited=finite,
)
def test_statistics_can_always_be_told(
    verdicts: list[tuple[int, int, int, list[float], int | None]], foresights: list[Foresight], waited: float
) -> None:
    told, timings = SpeculationCounts(), Timings(0.0)
    assert told.to_message().mean_gamma == timings.to_message().draft_us == 0
    for drafted, judged, accepted, beta, asked in verdicts:
        verdict = speculation_pb2.Verdict(judged=judged, accepted=accepted, beta=beta)
        told.add(drafted, verdict, asked=asked)
        timings.add(waited, verdict)
    timings.tokens_out(0)
    for foresight in foresights:
        told.add_foresight(foresight)
    assert told.to_message().num_rounds == len(verdicts)
    assert timings.to_message().verdict_us >= 0
