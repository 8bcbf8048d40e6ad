"""The gRPC servicer of the verifier, and its concurrency limit."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from outrider.rpc.errors import counted, guarded, outcome, overloaded, unavailable
from outrider.rpc.timeouts import Pace
from outrider.service.encoder_input import EncoderInputs
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2, verifier_service_pb2, verifier_service_pb2_grpc
from verifier_service.engine import VerifierEngine
from verifier_service.metrics import SequenceMetrics
from verifier_service.settings import VerifierSettings
from verifier_service.stream import Outbox, VerifyStream


class ConcurrencyLimit:
    """At most `maximum` sequences at once, and a bounded queue for more."""

    def __init__(self, maximum: int, max_waiting: int) -> None:
        self._maximum = maximum
        self._max_waiting = max_waiting
        self._pace = Pace()
        self._inside = 0  # running or queued
        self._leaving = 0  # running, and being ended for queued ones

    def retry_after(self) -> float:
        """Estimated seconds until half of the queue runs."""
        return self._pace.wait(max(1, (self._inside - self._maximum) // 2), max(self._inside, 1))

    @contextmanager
    def preempt(self) -> Iterator[bool]:
        """Yields whether an idle sequence must end for a queued one. Keep the context open until it has ended."""
        is_preempted = self._inside - self._maximum > self._leaving
        self._leaving += is_preempted
        try:
            yield is_preempted
        finally:
            self._leaving -= is_preempted

    @contextmanager
    def enter(self, *, resumed: bool = False) -> Iterator[None]:
        """Holds a sequence, running or queued, while the context is open.

        Args:
            resumed: the sequence was in progress at another verifier. The queue takes `maximum` more of those.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with `retry_after`: the queue is full.
        """
        waiting = self._inside - self._maximum
        maximum = self._max_waiting + (self._maximum if resumed else 0)
        if waiting >= maximum:
            seconds = self.retry_after()
            raise overloaded(
                f"the queue is full: {counted(waiting, 'sequence')} in it, and at most {maximum}; try again in about "
                f"{seconds:.2g} s, or raise --max-waiting",
                retry_after=seconds,
                waiting=waiting,
                maximum=maximum,
            )
        self._inside += 1
        arrived = time.monotonic()
        try:
            yield
        finally:
            self._inside -= 1
            self._pace.end(time.monotonic() - arrived)


SERVICE_NAME = verifier_service_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name


class VerifierService(verifier_service_pb2_grpc.VerifierServiceServicer):
    """The servicer. Every call is UNAVAILABLE until `attach`."""

    def __init__(self, settings: VerifierSettings, metrics: SequenceMetrics, tracing: Tracing) -> None:
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing
        self._limit = ConcurrencyLimit(settings.max_sequences, settings.max_waiting)
        self._engine: VerifierEngine | None = None
        self._outbox: Outbox | None = None
        self._model = model_pb2.ModelInfo()
        self._encoder_inputs: EncoderInputs | None = None

    def attach(
        self, engine: VerifierEngine, model: model_pb2.ModelInfo, encoder_inputs: EncoderInputs | None = None
    ) -> None:
        """Starts to serve this model. `encoder_inputs` are those of its encoder."""
        self._engine, self._model, self._encoder_inputs = engine, model, encoder_inputs
        self._outbox = Outbox(asyncio.get_running_loop())
        engine.flush = self._outbox.flush

    # The stubs expect a generator. A coroutine that writes can time each write.
    @guarded
    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verifier_service_pb2.VerifyRequest], context: Any
    ) -> None:
        with self._tracing.call("Verify", context.invocation_metadata()) as trace, outcome(self._metrics.ended):
            engine, outbox = self._ready()
            await VerifyStream(
                engine,
                self._model,
                self._settings,
                self._limit,
                context,
                outbox=outbox,
                trace=trace,
                encoder_inputs=self._encoder_inputs,
            ).run()

    @guarded
    async def GetModel(
        self, request: verifier_service_pb2.VerifierServiceGetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_service_pb2.VerifierServiceGetModelResponse:
        self._ready()
        return verifier_service_pb2.VerifierServiceGetModelResponse(model=self._model)

    def _ready(self) -> tuple[VerifierEngine, Outbox]:
        if self._engine is None or self._outbox is None:
            raise unavailable("NO_VERIFIER", "the model is loading; try again later")
        return self._engine, self._outbox
