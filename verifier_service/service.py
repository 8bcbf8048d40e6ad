"""The gRPC face of the verifier, and who may come in."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from outrider.rpc.errors import guarded, overloaded, unavailable
from outrider.rpc.timeouts import Pace
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2, verifier_service_pb2, verifier_service_pb2_grpc
from verifier_service.engine import VerifierEngine
from verifier_service.metrics import SequenceMetrics
from verifier_service.settings import VerifierSettings
from verifier_service.stream import Outbox, VerifyStream


class Admission:
    """Places in progress, and a bounded queue for them."""

    def __init__(self, places: int, max_waiting: int, clock: Callable[[], float] | None = None) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._clock = clock or time.monotonic
        self._pace = Pace()
        self._inside = 0  # in progress or waiting
        self._leaving = 0  # in progress, and about to end for those that wait

    def retry_after(self) -> float:
        """Seconds until half of the queue has moved on."""
        return self._pace.wait(max(1, (self._inside - self._places) // 2), max(self._inside, 1))

    @contextmanager
    def give_way(self) -> Iterator[bool]:
        """Whether a sequence that holds a place idly is to end, since another one waits that has none of those ending.

        Open it until it has ended.
        """
        gives_way = self._inside - self._places > self._leaving
        self._leaving += gives_way
        try:
            yield gives_way
        finally:
            self._leaving -= gives_way

    @contextmanager
    def enter(self, *, resumed: bool = False) -> Iterator[None]:
        """Holds a place, or one in the queue, for as long as it is open.

        Args:
            resumed: the sequence was in progress elsewhere; there may be as many more of those in the queue as there
                are places.

        Raises:
            RequestError: RESOURCE_EXHAUSTED with the time to wait, where all are taken and the queue is full.
        """
        waiting = self._inside - self._places
        maximum = self._max_waiting + (self._places if resumed else 0)
        if waiting >= maximum:
            seconds = self.retry_after()
            raise overloaded(
                f"the queue is full: {waiting} sequences wait, at most {maximum}; try again in about {seconds:.2g} s",
                retry_after=seconds,
                waiting=waiting,
                maximum=maximum,
            )
        self._inside += 1
        came = self._clock()
        try:
            yield
        finally:
            self._inside -= 1
            self._pace.end(self._clock() - came)


SERVICE_NAME = verifier_service_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name


class VerifierService(verifier_service_pb2_grpc.VerifierServiceServicer):
    """Answers once `attach` has given it a model; until then every call is UNAVAILABLE."""

    def __init__(self, settings: VerifierSettings, metrics: SequenceMetrics, tracing: Tracing) -> None:
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing
        self._admission = Admission(settings.max_sequences, settings.max_waiting)
        self._engine: VerifierEngine | None = None
        self._outbox: Outbox | None = None
        self._model = model_pb2.ModelInfo()

    def attach(self, engine: VerifierEngine, model: model_pb2.ModelInfo) -> None:
        """The model is there."""
        self._engine, self._model = engine, model
        self._outbox = Outbox(asyncio.get_running_loop())
        engine.flush = self._outbox.flush

    # The stubs' types know of generators only; a coroutine that writes can tell how long a write takes.
    @guarded
    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verifier_service_pb2.VerifyRequest], context: Any
    ) -> None:
        with self._tracing.call("Verify", context.invocation_metadata()) as trace, self._metrics.sequence():
            engine, outbox = self._ready()
            await VerifyStream(
                engine, self._model, self._settings, self._admission, context, outbox=outbox, trace=trace
            ).run()

    @guarded
    async def GetModel(
        self,
        request: verifier_service_pb2.VerifierServiceGetModelRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> verifier_service_pb2.VerifierServiceGetModelResponse:
        self._ready()
        return verifier_service_pb2.VerifierServiceGetModelResponse(model=self._model)

    def _ready(self) -> tuple[VerifierEngine, Outbox]:
        if self._engine is None or self._outbox is None:
            raise unavailable("NO_VERIFIER", "the model is loading; try again later")
        return self._engine, self._outbox
