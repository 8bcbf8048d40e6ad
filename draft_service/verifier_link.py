"""The way to the verifier: finding it, matching the pair, and one stream for each sequence.

It knows nothing of drafts or of clients: rounds go out, verdicts come in.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from outrider.model_info import check_pair
from outrider.rpc.channel import open_channel
from outrider.rpc.errors import UNSPECIFIED, RequestError, from_rpc_error, internal, unavailable
from outrider.wire import PrefixHash
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_log = structlog.get_logger()

Answer = TypeVar("Answer")

GET_MODEL_TIMEOUT = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
SECONDS_PER_LINE = 5.0  # of the log, while waiting


class VerifierLink:
    """A channel to one verifier. Later there may be several to choose from; who opens a sequence need not know."""

    def __init__(self, address: str, *, max_message_bytes: int, timeout: float) -> None:
        """`timeout` is how long the verifier may stay silent while it owes an answer, in seconds."""
        self.address = address
        self._timeout = timeout
        self._channel = open_channel(address, max_message_bytes=max_message_bytes)
        self._stub: Any = VerifierServiceStub(self._channel)  # the asynchronous kind has the same methods

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
                return target

    def open(
        self,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        timeout: float | None,
    ) -> "VerifySequence":
        """Begins a sequence. `timeout` is what is left of the client's deadline, in seconds."""
        call = self._stub.Verify(timeout=timeout, wait_for_ready=False)
        return VerifySequence(call, opening, sequence_id=sequence_id, address=self.address, silence=self._timeout)

    async def close(self) -> None:
        """Closes the channel and what still runs over it."""
        await self._channel.close()

    async def _get_model(self) -> model_pb2.ModelInfo:
        request = verifier_service_pb2.VerifierServiceGetModelRequest()
        try:
            answer = await self._stub.GetModel(request, timeout=GET_MODEL_TIMEOUT)
        except grpc.RpcError as error:
            raise _translate(error, self.address) from None
        model: model_pb2.ModelInfo = answer.model
        return model


class VerifySequence:
    """One `Verify` stream. Whoever holds it sends a round, reads its verdicts, and sends the next.

    Attributes:
        opened: the verifier's first answer, once `wait_opened` has returned it.
        gamma_cap: the longest proposal the verifier wants now; None where it has not said.
        length: tokens of the sequence: prompt, and everything committed.
    """

    def __init__(
        self,
        call: Any,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        address: str,
        silence: float,
    ) -> None:
        self.gamma_cap: int | None = None
        self.length = len(opening.prompt_token_ids) + len(opening.committed_token_ids)
        self._call = call
        self._opening: verifier_service_pb2.OpenSequence | None = opening
        self._opened: verifier_service_pb2.Opened | None = None
        self._sequence_id = sequence_id
        self._address = address
        self._silence = silence
        self._hash = PrefixHash(opening.prompt_token_ids)
        self._hash.extend(opening.committed_token_ids)
        self._round = 0
        self._seen = 0  # the last round whose verdict was read
        self._outstanding = 0  # verdicts that the verifier owes
        self._ended = False  # by a verdict with a finish reason

    async def begin(self) -> verifier_service_pb2.Opened:
        """Sends the opening, and returns what the verifier says to it.

        Raises:
            RequestError: the verifier refuses it, or is not there.
        """
        assert self._opening is not None
        await self._write(verifier_service_pb2.VerifyRequest(sequence_id=self._sequence_id, open=self._opening))
        self._opening = None  # a prompt may be long, and it is not needed again
        while self._opened is None:
            self._note(await self._read())
        return self._opened

    async def propose(
        self, token_ids: Sequence[int], distributions: Sequence[speculation_pb2.TokenDistribution]
    ) -> None:
        """Sends a proposal; one verdict answers it.

        Raises:
            RequestError: the stream has ended.
        """
        self._round += 1
        self._outstanding = 1
        await self._write(
            verifier_service_pb2.VerifyRequest(
                sequence_id=self._sequence_id,
                proposal=speculation_pb2.Proposal(
                    round=self._round,
                    base_length=self.length,
                    prefix_hash=self._hash.digest(),
                    token_ids=token_ids,
                    distributions=distributions,
                    seen_round=self._seen,
                ),
            )
        )

    async def decode(self, tokens: int) -> None:
        """Asks for `tokens` of the target's own; one verdict comes for each.

        Raises:
            RequestError: the stream has ended.
        """
        self._round += 1
        self._outstanding = tokens
        await self._write(
            verifier_service_pb2.VerifyRequest(
                sequence_id=self._sequence_id,
                decode=verifier_service_pb2.Decode(
                    round=self._round,
                    base_length=self.length,
                    prefix_hash=self._hash.digest(),
                    num_tokens=tokens,
                    seen_round=self._seen,
                ),
            )
        )

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict. Its tokens count as committed from here on.

        Raises:
            RequestError: the verifier refused the round, or is gone.
        """
        while True:
            response = await self._read()
            if response.WhichOneof("kind") == "verdict":
                break
            self._note(response)
        verdict: speculation_pb2.Verdict = response.verdict
        if verdict.status != speculation_pb2.VERDICT_STATUS_JUDGED or verdict.base_length != self.length:
            raise internal(
                "INTERNAL",
                f"verdict {verdict.round} has base {verdict.base_length}; the sequence has {self.length} tokens",
            )
        self.length += len(verdict.token_ids)
        self._hash.extend(verdict.token_ids)
        self._outstanding -= 1
        self._seen = verdict.round
        self._ended = bool(verdict.finish_reason)
        return verdict

    async def close(self) -> None:
        """Ends the stream. Where nothing is owed it ends well, and the verifier sees that it does."""
        if self._ended or (self._seen and not self._outstanding):
            try:
                async with asyncio.timeout(1.0):
                    await self._call.done_writing()
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
                return
            except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                pass
        self.cancel()

    def cancel(self) -> None:
        """Ends the stream here and now, whatever it owes."""
        self._call.cancel()

    def _note(self, response: verifier_service_pb2.VerifyResponse) -> None:
        match response.WhichOneof("kind"):
            case "opened":
                self._opened = response.opened
            case "notice" if response.notice.kind == verifier_service_pb2.NOTICE_KIND_GAMMA_CAP:
                self.gamma_cap = response.notice.gamma_cap

    async def _read(self) -> verifier_service_pb2.VerifyResponse:
        response = await self._answer(self._call.read)
        if response is grpc.aio.EOF:
            await self._raise_status()
        message: verifier_service_pb2.VerifyResponse = response
        return message

    async def _write(self, message: verifier_service_pb2.VerifyRequest) -> None:
        await self._answer(lambda: self._call.write(message))

    async def _answer(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """What a call's method gives, with its errors as ours."""
        try:
            async with asyncio.timeout(self._silence):
                return await ask()
        except grpc.RpcError as error:
            raise _translate(error, self._address) from None
        except asyncio.InvalidStateError:  # the call has ended: its status says why
            return await self._raise_status()
        except TimeoutError:
            raise unavailable(
                "NO_VERIFIER", f"the verifier at {self._address} was silent for {self._silence:g} s"
            ) from None

    async def _raise_status(self) -> Any:
        """Raises what the ended call ended with."""
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            raise internal("INTERNAL", "the verifier ended the stream before the sequence")
        error = grpc.aio.AioRpcError(
            code, await self._call.initial_metadata(), await self._call.trailing_metadata(), details=details
        )
        raise _translate(error, self._address)


def _translate(error: grpc.RpcError, address: str) -> RequestError:
    """A failed call as what the client is told: refusals of the verifier's as they are, and its absence as such.

    The draft service makes rounds, so a refusal of one is no fault of the client's.
    """
    told = from_rpc_error(error)
    if told.reason == UNSPECIFIED and told.code is grpc.StatusCode.UNAVAILABLE:
        return unavailable("NO_VERIFIER", f"no verifier answers at {address}: {told.message}")
    field = told.metadata.get("field", "")
    of_a_round = told.reason in ("WRONG_BASE", "OUT_OF_ORDER") or field.startswith(
        ("proposal", "decode", "sequence_id")
    )
    if told.code is grpc.StatusCode.INVALID_ARGUMENT and of_a_round:
        _log.error("the verifier refused a round", verifier=address, reason=told.reason, text=told.message)
        return internal("INTERNAL", "internal error; the server's log has the rest")
    return told
