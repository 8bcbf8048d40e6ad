"""The gRPC servicer of the verifier."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.rpc.errors import guarded, outcome, unavailable
from outrider.service.encoder_input import EncoderInputs
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2, verifier_service_pb2, verifier_service_pb2_grpc
from verifier_service.concurrency import ConcurrencyLimit
from verifier_service.engine import VerifierEngine
from verifier_service.metrics import SequenceMetrics
from verifier_service.settings import VerifierSettings
from verifier_service.stream import Outbox, Target, VerifyStream

SERVICE_NAME = verifier_service_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name


class VerifierService(verifier_service_pb2_grpc.VerifierServiceServicer):
    """The servicer. Every call is UNAVAILABLE until `attach`."""

    def __init__(self, settings: VerifierSettings, metrics: SequenceMetrics, tracing: Tracing) -> None:
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing
        self._limit = ConcurrencyLimit(settings.max_sequences, settings.max_waiting)
        self._attached: Target | None = None

    def attach(
        self, engine: VerifierEngine, model: model_pb2.ModelInfo, encoder_inputs: EncoderInputs | None = None
    ) -> None:
        """Starts to serve this model. `encoder_inputs` are those of its encoder."""
        outbox = Outbox(asyncio.get_running_loop())
        self._attached = Target(engine, model, outbox, encoder_inputs)
        engine.flush = outbox.flush

    # The stubs expect a generator. A coroutine that writes can time each write.
    @guarded
    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verifier_service_pb2.VerifyRequest], context: Any
    ) -> None:
        with self._tracing.call("Verify", context.invocation_metadata()) as trace, outcome(self._metrics.ended):
            await VerifyStream(self._target, self._settings, self._limit, context, trace).run()

    @guarded
    async def GetModel(
        self, request: verifier_service_pb2.VerifierServiceGetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_service_pb2.VerifierServiceGetModelResponse:
        return verifier_service_pb2.VerifierServiceGetModelResponse(model=self._target.model)

    @property
    def _target(self) -> Target:
        if self._attached is None:
            raise unavailable("NO_VERIFIER", "the model is loading; try again later")
        return self._attached
