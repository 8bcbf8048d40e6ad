"""Conditions that services are put under, in the process that is about to become one: slow, broken, or about to end.

They are called by name, as faults are (`tests.exactness.mutants.faults.FAULTS`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any


def unhurried() -> None:
    """Each of the verifier's passes takes 10 ms more, so that a text is in progress for a while."""
    _slow_passes(0.01)


def crowded() -> None:
    """Each of the verifier's passes takes 50 ms more, so that many texts share it."""
    _slow_passes(0.05)


def _slow_passes(seconds: float) -> None:
    from verifier_service.engine import VerifierEngine

    honest = VerifierEngine.forward

    def forward(self: VerifierEngine, work: Any) -> Any:
        time.sleep(seconds)
        return honest(self, work)

    VerifierEngine.forward = forward  # type: ignore[method-assign]


def slow_steps() -> None:
    """Each of the verifier's steps takes as many seconds as a file says."""
    from tests import slow_steps

    slow_steps.install()


def impatient_keepalive() -> None:
    """A server that pings its peers does so after 6 s, and waits 6 s for the answer."""
    import grpc.aio

    honest = grpc.aio.server
    sooner = {"grpc.keepalive_time_ms": 6_000, "grpc.keepalive_timeout_ms": 6_000}

    def server(*, options: Sequence[tuple[str, int]], **other: Any) -> grpc.aio.Server:
        return honest(options=[(name, sooner.get(name, value)) for name, value in options], **other)

    setattr(grpc.aio, "server", server)  # noqa: B010  # its type names each argument


def briskly_interpreted() -> None:
    """Triton's interpreter as `tests.kernels` has it, which takes less than half of the time."""
    from tests.kernels.interpreter import patch_once_a_launch

    patch_once_a_launch()


def broken_components() -> None:
    """One `Component` after another fails, as a file says."""
    from tests.load import broken

    broken.install()


def dies_after_every_round() -> None:
    """The draft service ends each call with the first round that it has told of, as one that has died."""
    _die(most=1 << 30)


def dies_thrice() -> None:
    """The same, for the first three calls of each request."""
    _die(most=3)


def _die(most: int) -> None:
    from draft_service import generation
    from outrider.rpc.errors import unavailable

    sample = generation.Sample
    honest = sample._emit
    deaths = Counter[str]()

    async def emit(self: Any) -> None:
        await honest(self)
        sequence, request = self.sequence, self.sequence.request
        has_more = len(sequence.tokens) > len(request.prompt) + len(request.committed)
        if has_more and not sequence.finish_reason and deaths[request.request_id] < most:
            deaths[request.request_id] += 1
            raise unavailable("DRAINING", "gone")

    sample._emit = emit  # type: ignore[method-assign]


POISON = 1999
"""The token that breaks what `poisoned_step` and `deadly_step` break."""


def poisoned_step() -> None:
    """A step of the target's fails where a token is in it."""
    _poison(_fail)


def deadly_step() -> None:
    """It ends the process."""
    _poison(lambda: os._exit(9))


def _poison(end: Callable[[], Any]) -> None:
    from outrider.runtime.model_runner import Chunk, ModelRunner

    forward = ModelRunner.forward

    def poisoned(self: ModelRunner, chunks: Sequence[Chunk], **named: Any) -> Any:
        if any(POISON in chunk.tokens for chunk in chunks):
            end()
        return forward(self, chunks, **named)

    ModelRunner.forward = poisoned  # type: ignore[method-assign]


def scheduler_breaks() -> None:
    """The verifier's scheduler raises from its second sequence on; the first is that of the warm-up."""
    from verifier_service.scheduler import Scheduler

    plan = Scheduler.plan
    seen = set[Any]()

    def broken(self: Scheduler, rounds: Any) -> Any:
        seen.update(self.running)
        if len(seen) > 1:
            _fail()
        return plan(self, rounds)

    Scheduler.plan = broken  # type: ignore[method-assign]


def _fail() -> None:
    raise RuntimeError("injected")
