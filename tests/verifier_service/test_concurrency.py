"""The verifier's concurrency limit on a fake clock: `retry_after` of its refusals, preemption of idle streams. And when
a client counts as silent.
"""

import asyncio
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from outrider.rpc.errors import RequestError
from outrider.rpc.timeouts import FIRST_GUESS
from protos.outrider.v1 import model_pb2
from tests.verifier_service.engines import make
from verifier_service.concurrency import ConcurrencyLimit
from verifier_service.settings import VerifierSettings
from verifier_service.stream import Outbox, Target, VerifyStream

MAXIMUM, WAITING = 2, 1


def entered(limit: ConcurrencyLimit, *, resumed: bool = False) -> ExitStack:
    """A sequence, running or queued; `close` ends it."""
    stack = ExitStack()
    stack.enter_context(limit.enter(resumed=resumed))
    return stack


def test_retry_after_depends_on_the_pace_and_not_on_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("verifier_service.concurrency.time", SimpleNamespace(monotonic=lambda: now))
    limit = ConcurrencyLimit(MAXIMUM, WAITING)
    sequences = [entered(limit) for _ in range(MAXIMUM + WAITING)]

    def retry_after() -> float | None:
        with pytest.raises(RequestError) as caught:
            entered(limit)
        return caught.value.retry_after

    assert {retry_after() for _ in range(200)} == {FIRST_GUESS}
    for pace in (3.0, 0.5):
        for _ in range(60):
            now += pace
            sequences.pop(0).close()
            sequences.append(entered(limit))
        (seconds,) = {retry_after() for _ in range(200)}
        assert seconds == pytest.approx(pace, rel=0.02)


def test_no_more_sequences_are_preempted_than_are_queued() -> None:
    limit = ConcurrencyLimit(MAXIMUM, WAITING)
    with limit.preempt() as is_preempted:
        assert not is_preempted, "none is queued"
    sequences = [entered(limit, resumed=number == 3) for number in range(4)]
    assert len(sequences) - MAXIMUM == 2, "queued"
    with ExitStack() as ending:
        assert [ending.enter_context(limit.preempt()) for _ in range(4)] == [True, True, False, False]
    with limit.preempt() as is_preempted:
        assert is_preempted, "earlier ones have ended"


@pytest.mark.parametrize("judged_ago", [0.0, 5.0])
def test_a_client_is_silent_from_its_last_verdict_on_though_that_is_not_written_yet(judged_ago: float) -> None:
    """Replies of a step leave together, after all are committed; its message came before the step."""
    settings = VerifierSettings.from_command_line(["--model", "m", "--idle-timeout", "2"], program="verifier_service")

    async def ends() -> bool:
        target = Target(Mock(), model_pb2.ModelInfo(), Outbox(asyncio.get_running_loop()), None)
        stream = VerifyStream(target, settings, ConcurrencyLimit(MAXIMUM, WAITING), Mock(), Mock())
        sequence = make([])
        sequence.slot, sequence.judged_at = 0, time.perf_counter() - judged_ago
        stream._heard -= 10.0
        watching = asyncio.create_task(stream._watch(sequence))
        await asyncio.sleep(1.0)
        watching.cancel()
        return not stream._replies.empty()

    assert asyncio.run(ends()) == (judged_ago > settings.idle_timeout)
