"""The way to the verifier: waiting until it is there, matching the pair, and opening sequences.

It knows nothing of drafts or of clients.
"""

import asyncio
import time
from typing import Any

import grpc
import structlog

from draft_service.verify_sequence import VerifySequence, translate
from outrider.model_info import check_pair
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import RequestError
from protos.outrider.v1 import model_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_log = structlog.get_logger()

GET_MODEL_TIMEOUT = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
SECONDS_PER_LINE = 5.0  # of the log, while waiting


class VerifierLink:
    """A channel to one verifier. Later there may be several to choose from; who opens a sequence need not know."""

    def __init__(self, address: str, *, max_message_bytes: int, silence: float) -> None:
        """`silence` is how long the verifier may owe an answer, in seconds."""
        self.address = address
        self._silence = silence
        self._channel = open_channel(address, max_message_bytes=max_message_bytes)
        self._stub: Any = VerifierServiceStub(self._channel)  # the asynchronous kind has the same methods
        self._fingerprint = ""  # of the target that was matched
        self._open = 0  # sequences that would be told where a cap changes
        self._gamma_cap: int | None = None  # what they were told last

    async def match(self, draft: model_pb2.ModelInfo) -> model_pb2.ModelInfo:
        """Waits until the verifier is there, and checks that its model and `draft` form a pair.

        Raises:
            RequestError: FAILED_PRECONDITION: they do not.
        """
        pause, started = FIRST_PAUSE, time.monotonic()
        next_line = started
        while True:
            try:
                target = await self._get_model()
            except RequestError as error:
                if (now := time.monotonic()) >= next_line:
                    next_line = now + SECONDS_PER_LINE
                    _log.info(
                        "waiting for the verifier",
                        verifier=self.address,
                        seconds=round(now - started, 1),
                        answer=f"{error.code.name}: {error.message}",
                    )
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE)
            else:
                check_pair(draft, target)
                self._fingerprint = target.weights_fingerprint
                return target

    def open(
        self,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        timeout: float | None,
    ) -> VerifySequence:
        """Begins a sequence. `timeout` is what is left of the client's deadline, in seconds."""
        call = self._stub.Verify(timeout=timeout, wait_for_ready=False)
        self._open += 1
        return VerifySequence(
            call,
            opening,
            sequence_id=sequence_id,
            fingerprint=self._fingerprint,
            address=self.address,
            silence=self._silence,
            expected_cap=self._gamma_cap,
            on_cap=self._note_cap,
            on_end=self._note_end,
        )

    def _note_cap(self, gamma: int) -> None:
        self._gamma_cap = gamma

    def _note_end(self) -> None:
        self._open -= 1
        if not self._open:  # nobody is left to hear of a change
            self._gamma_cap = None

    async def _get_model(self) -> model_pb2.ModelInfo:
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            answer = await self._stub.GetModel(request, timeout=GET_MODEL_TIMEOUT)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        model: model_pb2.ModelInfo = answer.model
        return model
