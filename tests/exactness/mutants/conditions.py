"""Conditions of services that are slow, broken or about to end, made in the process that is about to become one.

They are called by name, as faults are (`tests.exactness.mutants.faults.FAULTS`).
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


def unhurried() -> None:
    """Each step of the verifier takes 10 ms more, so that a text is in progress for a while."""
    _slow_steps(0.01)


def crowded() -> None:
    """Each step of the verifier takes 20 ms more, so that many texts share it."""
    _slow_steps(0.02)


def sluggish() -> None:
    """Each step of the verifier takes 40 ms more, so that a short text is in progress for seconds."""
    _slow_steps(0.04)


def _slow_steps(seconds: float) -> None:
    from verifier_service.engine import VerifierEngine

    original = VerifierEngine.forward

    def forward(self: VerifierEngine, work: Any) -> Any:
        time.sleep(seconds)
        return original(self, work)

    VerifierEngine.forward = forward  # type: ignore[method-assign]


def layers_by_torch() -> None:
    """As where the C code cannot run: torch runs the layers, and tokens are drawn and verified in Python."""
    from kernels import cpu_decoder

    setattr(cpu_decoder, "can_run", lambda *_, **__: False)  # noqa: B010  # its type names each argument
    verification_by_torch()


def verification_by_torch() -> None:
    """Tokens are verified in Python, also where the C code could."""
    from kernels import verify_c

    verify_c.is_available = lambda: False


def slow_steps() -> None:
    """Each step of the verifier takes the seconds that a file holds."""
    from tests import slow_steps

    slow_steps.install()


def impatient_keepalive() -> None:
    """A server that pings its peers does so after 6 s, and waits 6 s for the answer."""
    import grpc.aio

    original = grpc.aio.server
    sooner = {"grpc.keepalive_time_ms": 6_000, "grpc.keepalive_timeout_ms": 6_000}

    def server(*, options: Sequence[tuple[str, int]], **other: Any) -> grpc.aio.Server:
        return original(options=[(name, sooner.get(name, value)) for name, value in options], **other)

    setattr(grpc.aio, "server", server)  # noqa: B010  # its type names each argument


def briskly_interpreted() -> None:
    """Triton's interpreter as all tests have it."""
    from tests.triton_interpreter import patch_language_once

    patch_language_once()


def loads_for_ever() -> None:
    """The verifier loads until its process ends. Code 3 stands for Python's own end, which aborts amid C++ code."""
    import torch

    from outrider.service.lifecycle import run as original
    from verifier_service import __main__ as service
    from verifier_service.app import VerifierApp

    def build(self: VerifierApp) -> Any:
        print("loading", flush=True)
        while True:
            torch.ones(64, 64) @ torch.ones(64, 64)

    def run(program: str, settings: Any, make: Any) -> int:
        with suppress(SystemExit):
            original(program, settings, make)
        return 3

    VerifierApp._build = build  # type: ignore[method-assign]
    setattr(service, "run", run)  # noqa: B010  # it exports none


def tries_with_two_threads() -> None:
    """The verifier ends after it tried its verification, and prints torch's threads and those that it left."""
    import torch

    from verifier_service import app

    original = app.choose_verify_path

    def choose_verify_path(settings: Any) -> Any:
        torch.set_num_threads(2)
        torch.ones(64, 64)
        before = set(os.listdir("/proc/self/task"))
        original(settings)
        until = time.monotonic() + 2  # a pool ends just after its thread
        while (left := set(os.listdir("/proc/self/task")) - before) and time.monotonic() < until:
            time.sleep(0.01)
        print(torch.get_num_threads(), len(left), flush=True)
        raise SystemExit(0)

    app.choose_verify_path = choose_verify_path


def broken_components() -> None:
    """One `Component` after another fails, in the order of a file."""
    from tests.load import broken

    broken.install()


def dies_after_every_round() -> None:
    """The draft service ends each call after the first round that it streamed, as if it had died."""
    _die(most=1 << 30)


def dies_thrice() -> None:
    """The same, for the first three calls of each request."""
    _die(most=3)


def _die(most: int) -> None:
    from draft_service import generation
    from outrider.rpc.errors import unavailable

    sample = generation.Sample
    original = sample._emit
    deaths = Counter[str]()

    async def emit(self: Any) -> None:
        await original(self)
        sequence, request = self.sequence, self.sequence.request
        has_more = len(sequence.tokens) > len(request.prompt) + len(request.committed)
        if has_more and not sequence.finish_reason and deaths[request.request_id] < most:
            deaths[request.request_id] += 1
            raise unavailable("DRAINING", "gone")

    sample._emit = emit  # type: ignore[method-assign]


POISON = 1999
"""The token that triggers `poisoned_step`, `poisoned_logits` and `deadly_step`."""


def poisoned_step() -> None:
    """A step of the target fails if it holds the token."""
    _poison(_fail)


def poisoned_logits() -> None:
    """The logits of a step of the target are NaN if it holds the token."""
    from outrider.runtime.model_runner import Chunk
    from outrider.runtime.torch_runner import TorchRunner

    original = TorchRunner.forward

    def forward(self: TorchRunner, chunks: Sequence[Chunk], **named: Any) -> Any:
        logits = original(self, chunks, **named)
        return logits.fill_(math.nan) if any(POISON in chunk.tokens for chunk in chunks) else logits

    TorchRunner.forward = forward  # type: ignore[method-assign]


def deadly_step() -> None:
    """It ends the process."""
    _poison(lambda: os._exit(9))


def _poison(end: Callable[[], Any]) -> None:
    from outrider.runtime.model_runner import Chunk
    from outrider.runtime.torch_runner import TorchRunner

    original = TorchRunner.forward

    def forward(self: TorchRunner, chunks: Sequence[Chunk], **named: Any) -> Any:
        if any(POISON in chunk.tokens for chunk in chunks):
            end()
        return original(self, chunks, **named)

    TorchRunner.forward = forward  # type: ignore[method-assign]


def scheduler_breaks() -> None:
    """The verifier's scheduler raises from its second sequence on; the first is that of the warm-up."""
    from verifier_service.scheduler import Scheduler

    original = Scheduler.plan
    seen = set[Any]()

    def plan(self: Scheduler, rounds: Any) -> Any:
        seen.update(self.running, self.waiting)
        if len(seen) > 1:
            _fail()
        return original(self, rounds)

    Scheduler.plan = plan  # type: ignore[method-assign]


def _fail() -> None:
    raise RuntimeError("injected")
