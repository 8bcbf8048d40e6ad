"""The gRPC face of the verifier."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.rpc.errors import guarded, unavailable
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2, verifier_service_pb2, verifier_service_pb2_grpc
from verifier_service.admission import Admission
from verifier_service.engine import VerifierEngine
from verifier_service.metrics import SequenceMetrics
from verifier_service.settings import VerifierSettings
from verifier_service.stream import Outbox, VerifyStream

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
            raise unavailable("NO_VERIFIER", "the model is being loaded")
        return self._engine, self._outbox
