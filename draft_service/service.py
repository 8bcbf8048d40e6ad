"""The gRPC face of the draft service."""

from typing import Any

from draft_service.concurrency import ConcurrencyLimit
from draft_service.drafter_choice import KIND_TO_WIRE
from draft_service.generate_call import GenerateCall
from draft_service.pair import Pair
from draft_service.propose_call import ProposeCall
from draft_service.request_metrics import RequestMetrics
from draft_service.settings import DraftSettings
from outrider.rpc.errors import guarded, unavailable
from outrider.service.metrics import Metrics
from outrider.service.tracing import Tracing
from protos.outrider.v1 import draft_service_pb2, draft_service_pb2_grpc

SERVICE_NAME = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftService(draft_service_pb2_grpc.DraftServiceServicer):
    """Answers once `attach` has given it a pair; until then every call is UNAVAILABLE."""

    def __init__(self, settings: DraftSettings, metrics: Metrics, tracing: Tracing) -> None:
        self._settings = settings
        self._metrics = RequestMetrics(metrics)
        self._tracing = tracing
        self.limit = ConcurrencyLimit(
            settings.max_sequences,
            max_waiting=settings.max_waiting,
            contended_idle_timeout=settings.contended_idle_timeout,
            on_start=self._metrics.queued,
        )
        self._pair: Pair | None = None

    def attach(self, pair: Pair) -> None:
        """The models are there."""
        self._pair = pair

    @guarded
    async def Generate(  # type: ignore[override]  # stubs know generators alone; this one writes to its context
        self, request: draft_service_pb2.GenerateRequest, context: Any
    ) -> None:
        with self._tracing.call("Generate", context.invocation_metadata()) as trace:
            call = GenerateCall(self._ready(), self.limit, self._settings, context, metrics=self._metrics, trace=trace)
            await call.run(request)

    @guarded
    async def Propose(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        with self._tracing.call("Propose", context.invocation_metadata()):
            await ProposeCall(self._ready(), self.limit, self._settings, context).run()

    @guarded
    async def GetModel(
        self, request: draft_service_pb2.DraftServiceGetModelRequest, context: Any
    ) -> draft_service_pb2.DraftServiceGetModelResponse:
        pair = self._ready()
        return draft_service_pb2.DraftServiceGetModelResponse(
            model=pair.draft,
            target=pair.target,
            drafters=sorted(KIND_TO_WIRE[kind] for kind in pair.drafters),
            default_drafter=KIND_TO_WIRE[pair.default],
        )

    def _ready(self) -> Pair:
        if self._pair is None:
            raise unavailable(
                "NO_VERIFIER",
                f"the draft is being loaded, or the verifier at {', '.join(self._settings.verifier)} has not answered "
                "yet",
            )
        return self._pair
