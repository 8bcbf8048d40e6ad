"""What only watches a text may fail, and the text goes on: metrics, statistics, signs of life, failover's counters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draft_service.drafters.base import Draft
from draft_service.drafters.guard import Cost
from draft_service.metrics import FAILOVER_METRICS, REQUEST_METRICS, FailoverMetrics, SampleWatch
from draft_service.output import Emitter, OutputText, Responses
from draft_service.sequence import STATISTICS, SpeculationCounts, Timings
from draft_service.service import HEARTBEAT, HEARTBEAT_SECONDS, Heartbeat
from outrider.service.best_effort import Component
from outrider.service.tracing import UNTRACED
from protos.outrider.v1 import sampling_pb2, speculation_pb2
from tests.fake_clock import fake_clock


class Broken:
    """Whatever is called of it raises."""

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any, **named: Any) -> None:
            raise RuntimeError(f"{name} broke")

        return fail


def errors_of(component: Component, before: list[int]) -> int:
    before.append(component.errors)
    return before[-1] - before[-2]


def test_metrics_that_fail_are_counted_and_change_nothing() -> None:
    before = [REQUEST_METRICS.errors]
    watch = SampleWatch(Broken(), UNTRACED, 0)  # type: ignore[arg-type]
    watch.begins()
    watch.first_token(0.1)
    watch.next_tokens(0.1, 0)
    watch.judged(speculation_pb2.Verdict(), asked=1, drafted=1, draft=None, waited=0.1)
    watch.ends()
    assert errors_of(REQUEST_METRICS, before) >= 4
    failovers = FailoverMetrics.__new__(FailoverMetrics)
    failovers._switches = failovers._seconds = Broken()  # type: ignore[assignment]
    before = [FAILOVER_METRICS.errors]
    failovers.switched("died")
    failovers.paused(1.0)
    assert errors_of(FAILOVER_METRICS, before) == 2
    cost = Cost()
    cost.add(Draft([1], [None], None))  # type: ignore[arg-type]
    assert cost.proposals == 1


def test_a_text_ends_whole_where_its_statistics_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [STATISTICS.errors]
    monkeypatch.setattr(SpeculationCounts, "to_message", Broken().to_message)
    monkeypatch.setattr(Timings, "to_message", Broken().to_message)
    responses, text = Responses(), OutputText(Words(), stop=(), min_tokens=0)
    emitter = Emitter(responses, text, index=0, prompt_tokens=1)
    timings = Timings(0.0, Broken())  # its watch is broken, too
    emitter.take(speculation_pb2.Verdict(accepted=1, token_ids=[4, 5]), [4])
    reason = emitter.finish(sampling_pb2.FINISH_REASON_LENGTH, SpeculationCounts(), timings)
    assert reason == sampling_pb2.FINISH_REASON_LENGTH
    sent = []
    while (response := responses.take_now()) is not None:
        sent.append(response)
    assert [token for each in sent for token in each.chunk.token_ids] == [4, 5]
    assert sent[-1].finished.usage.completion_tokens == 2
    assert errors_of(STATISTICS, before) == 3


class Words:
    """A detokenizer of words of one letter."""

    pending = False

    def push(self, token: int) -> str:
        return chr(97 + token)

    def flush(self) -> str:
        return ""


@fake_clock
async def test_signs_of_life_go_on_after_one_that_failed() -> None:
    before = [HEARTBEAT.errors]
    responses = Responses()
    honest, calls = responses.send, list[Any]()

    def fails_first(response: Any) -> None:
        calls.append(response)
        if len(calls) == 1:
            raise RuntimeError("injected")
        honest(response)

    responses.send = fails_first  # type: ignore[method-assign]
    with Heartbeat(responses):
        await asyncio.sleep(2.5 * HEARTBEAT_SECONDS)
    assert len(calls) == 2
    assert errors_of(HEARTBEAT, before) == 1
