"""One verifier at one address: its channel, its breaker, what it runs, and how busy it is."""

import time
from collections.abc import Callable
from typing import Any

import grpc

from draft_service.breaker import Breaker, State
from draft_service.losses import Loss
from draft_service.verify_sequence import VerifySequence, translate
from outrider.rpc.channel import RenewedChannel
from outrider.rpc.errors import RequestError, unavailable
from outrider.rpc.tls import ChannelTLS
from outrider.service import tracing
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

GET_MODEL_TIMEOUT = 2.0
# What a verifier said of others' sequences counts for so many seconds: without any of ours there nobody says more.
LOAD_SECONDS = 10.0
# How long one that has no room is left alone where it does not say.
BUSY_SECONDS = 1.0


class Replica:
    """A verifier to choose.

    Attributes:
        address: `HOST:PORT`, which no name is hidden behind where `name` says what was resolved.
        model: what it runs, once that is known to be the target of the pair; None before.
        mismatch: how it differs from the target, where it does; empty otherwise.
        trouble: what a sequence was lost there by last.
        busy_until: `time.monotonic()` up to which it has no room, as the first that it refused was told.
        num_open: sequences of ours there.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int,
        silence: float,
        name: str = "",
        tls: ChannelTLS | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`silence` is how long it may owe an answer, in seconds; `name` is the `HOST:PORT` that was resolved to
        `address`; `tls` is how to speak to it, None plaintext. `on_change` is called when the breaker opens or closes,
        or the model is known or another one.
        """
        self.address = address
        self.breaker = Breaker()
        self.model: model_pb2.ModelInfo | None = None
        self.mismatch = ""
        self.trouble = ""
        self.busy_until = 0.0
        self.num_open = 0
        self._silence = silence
        self._on_change = on_change
        # Whoever stands in front of the verifier, and its certificate, knows it by the name that was asked for.
        self._channel: RenewedChannel[Any] = RenewedChannel(  # the asynchronous stub has the same methods
            address, VerifierServiceStub, max_message_bytes=max_message_bytes, tls=tls, name=name
        )
        self._others = 0  # sequences there that are not ours, as it said last
        self._told = 0.0  # when

    @property
    def status(self) -> str:
        """In one word: "unknown", "mismatched", or the state of its breaker."""
        if self.mismatch:
            return "mismatched"
        return "unknown" if self.model is None else self.breaker.state.value

    @property
    def has_target(self) -> bool:
        """Whether it runs the target of the pair, as far as is known."""
        return self.model is not None and not self.mismatch

    def is_usable(self) -> bool:
        """Whether a sequence may begin there now; it may be refused still."""
        return self.has_target and self.breaker.admits()

    def load(self) -> int:
        """Sequences there: ours as they are, others as it said last."""
        others = self._others if time.monotonic() - self._told < LOAD_SECONDS else 0
        return self.num_open + others

    async def ask(self) -> model_pb2.ModelInfo:
        """What it runs.

        Raises:
            RequestError: it does not answer, or not yet.
        """
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            answer = await self._channel.begin(lambda stub: stub.GetModel(request, timeout=GET_MODEL_TIMEOUT))
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        if answer is None:  # gRPC could not parse it
            raise unavailable("NO_VERIFIER", f"what came from the verifier at {self.address} is no answer")
        model: model_pb2.ModelInfo = answer.model
        return model

    def probed(self, model: model_pb2.ModelInfo | None, mismatch: str = "") -> None:
        """It was asked what it runs: this, which differs from the target as said; None: it did not answer."""
        before = self.status
        if self.breaker.state is State.OPEN:
            self.breaker.probed(well=model is not None)
        elif model is None:
            self.breaker.failed(self.breaker.epoch)
        if model is not None:
            self.model, self.mismatch, self.busy_until = model, mismatch, 0.0
        if self.status != before:
            self._on_change()

    def open(
        self,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        timeout: float | None,
        seat: "ReplicaSeat | None" = None,
    ) -> VerifySequence:
        """Begins a sequence. `timeout` is what is left of the client's deadline, in seconds; `seat` its seat here, for
        who wants to tell the replica more than the sequence hears.
        """
        metadata = tracing.outgoing()
        call = self._channel.begin(lambda stub: stub.Verify(timeout=timeout, wait_for_ready=False, metadata=metadata))
        return VerifySequence(
            call,
            opening,
            sequence_id=sequence_id,
            fingerprint="" if self.model is None else self.model.weights_fingerprint,
            address=self.address,
            silence=self._silence,
            seat=ReplicaSeat(self) if seat is None else seat,
        )

    async def close(self) -> None:
        """Ends all that is under way there."""
        await self._channel.close()


class ReplicaSeat:
    """A sequence's place at a replica: what it hears there the replica learns."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._epoch = replica.breaker.begin()
        replica.num_open += 1

    def judged(self, load: speculation_pb2.VerifierLoad) -> None:
        replica = self.replica
        replica._others = max(0, load.running + load.waiting - replica.num_open)
        replica._told = time.monotonic()
        if replica.breaker.succeeded(self._epoch):
            replica._on_change()

    def drains(self) -> None:
        self.replica.trouble = "it is draining"
        self._fail()

    def ended(self) -> None:
        self.replica.num_open -= 1

    def lost(self, loss: Loss, error: RequestError) -> None:
        """The sequence was lost, and why."""
        replica = self.replica
        replica.trouble = error.message
        match loss:
            case Loss.REFUSED:
                wait = BUSY_SECONDS if error.retry_after is None else error.retry_after
                # Each that is refused is told a later time than the one before; who comes anew need not wait longest.
                if replica.busy_until < (now := time.monotonic()):
                    replica.busy_until = now + wait
            case Loss.MISMATCHED:
                replica.mismatch = error.message
                replica._on_change()
            case Loss.DRAINING:
                self.drains()
            case Loss.DIED | Loss.SILENT:
                self._fail()
            case Loss.STEP_FAILED:  # it has served the others
                pass

    def _fail(self) -> None:
        if self.replica.breaker.failed(self._epoch):
            self.replica._on_change()
