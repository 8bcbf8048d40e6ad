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
from draft_service.failover import FailoverBudget
from draft_service.replicas import Breaker
from draft_service.sequence import SpeculationCounts, Timings
from protos.outrider.v1 import speculation_pb2

cheaply = settings(max_examples=60, derandomize=True, deadline=None)

numbers = st.one_of(st.floats(), st.sampled_from([0.0, 1e-3, -1e-3, 5e-324, 1e308, math.nan, math.inf]))
counts = st.integers(0, 17)
bursts = st.integers(1, 10)
finite = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([0.0, 1e-3, 5e-324]))


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
    breaker, epochs = Breaker(clock=lambda: now), [0]
    for event, now in events:  # noqa: B007  # the clock reads it
        steps: dict[str, Callable[[], Any]] = {
            "begin": lambda: epochs.append(breaker.begin()),
            "succeeded": lambda: breaker.succeeded(epochs[-1]),
            "failed": lambda: breaker.failed(epochs[-1]),
            "well": lambda: breaker.probed(well=True),
            "ill": lambda: breaker.probed(well=False),
        }
        steps[event]()
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
