"""One `Verify` stream: rounds go out, verdicts come in, and a refusal of the verifier becomes an error."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import structlog

from outrider.rpc.errors import (
    UNSPECIFIED,
    RequestError,
    failed_precondition,
    from_rpc_error,
    internal,
    unavailable,
)
from outrider.rpc.timeouts import Ending, InactivityTimer
from outrider.service.wire import PrefixHash, pad
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2

_log = structlog.get_logger()

# How long an end that should come at once is waited for.
CLOSING_SECONDS = 1.0

# Without a reason these speak of the way to the verifier: what it refuses itself has one.
_GONE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
)
_NOT_ADMITTED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_OF_A_ROUND = ("proposal", "decode", "sequence_id")
SILENT = "silent_seconds"
"""What the metadata of an error names where the verifier was silent for too long."""


class Seat(Protocol):
    """Whose sequence it is at the verifier's address: told what the verifier says of itself."""

    def judged(self, load: speculation_pb2.VerifierLoad) -> None:
        """A verdict came, and told how busy the verifier is."""

    def drains(self) -> None:
        """The verifier is going away."""

    def ended(self) -> None:
        """The sequence is over. Called once."""


class VerifySequence:
    """A sequence at the verifier. Whoever holds it sends a round, reads its verdicts, and sends the next.

    Attributes:
        load: how busy the verifier was at the last verdict, and what its passes cost; None before the first.
        length: tokens of the sequence: prompt, and everything committed.
        draining: the verifier has said that it is going away.
    """

    def __init__(
        self,
        call: Any,
        opening: verifier_service_pb2.OpenSequence,
        *,
        sequence_id: str,
        fingerprint: str,
        address: str,
        silence: float,
        seat: Seat,
    ) -> None:
        """`call` is a fresh call of `Verify`, `fingerprint` that of the target's weights as the pair was matched,
        and `silence` how long the verifier may owe an answer, in seconds.
        """
        self.load: speculation_pb2.VerifierLoad | None = None
        self.draining = False
        self.length = len(opening.prompt_token_ids) + len(opening.committed_token_ids)
        self._call = call
        self._opening: verifier_service_pb2.OpenSequence | None = opening
        self._opened: verifier_service_pb2.Opened | None = None
        self._sequence_id = sequence_id
        self._fingerprint = fingerprint
        self._address = address
        self._ending = Ending(call)
        self._timer = InactivityTimer(silence)
        self._hash = PrefixHash(opening.prompt_token_ids)
        self._hash.extend(opening.committed_token_ids)
        self._padded_to = opening.request_bytes
        self._round = 0
        self._seen = 0  # the last round whose verdict was read
        self._outstanding = 0  # verdicts that the verifier owes
        self._ended = False  # by a verdict with a finish reason
        self._seat = seat
        self._over = False

    @property
    def is_open(self) -> bool:
        """Whether the verifier has taken the sequence."""
        return self._opened is not None

    @property
    def is_awaited(self) -> bool:
        """Whether the verifier runs something of the sequence: its prompt, or a round."""
        return self.is_open and (not self._seen or self._outstanding > 0)

    async def begin(self) -> verifier_service_pb2.Opened:
        """Sends the opening, and returns what the verifier says to it.

        Raises:
            RequestError: the verifier refuses it, is not there, runs another model than it did, or judges by another
                rule than the one that proposals will be made for.
        """
        assert self._opening is not None
        rule = self._opening.sampling.rule
        await self._write(verifier_service_pb2.VerifyRequest(sequence_id=self._sequence_id, open=self._opening))
        self._opening = None  # a prompt may be long, and it is not needed again
        while self._opened is None:
            self._note(await self._read())
        if self._opened.weights_fingerprint != self._fingerprint:  # another model has taken its place since
            raise failed_precondition(
                "PAIR_MISMATCH",
                f"the verifier at {self._address} runs weights {self._opened.weights_fingerprint[:16]}; the pair was "
                f"matched with {self._fingerprint[:16]}: restart the draft service",
            )
        if rule and self._opened.rule != rule:
            asked, taken = (sampling_pb2.AcceptanceRule.Name(each) for each in (rule, self._opened.rule))
            raise internal("INTERNAL", f"the verifier at {self._address} judges by {taken}; {asked} was asked for")
        return self._opened

    async def propose(
        self, token_ids: Sequence[int], distributions: Sequence[speculation_pb2.TokenDistribution]
    ) -> None:
        """Sends a proposal; one verdict answers it.

        Raises:
            RequestError: the stream has ended.
        """
        self._round += 1
        proposal = speculation_pb2.Proposal(
            round=self._round,
            base_length=self.length,
            prefix_hash=self._hash.digest(),
            token_ids=token_ids,
            distributions=distributions,
            seen_round=self._seen,
        )
        await self._write(verifier_service_pb2.VerifyRequest(sequence_id=self._sequence_id, proposal=proposal))
        self._outstanding = 1

    async def decode(self, tokens: int) -> None:
        """Asks for `tokens` of the target's own; one verdict comes for each.

        Raises:
            RequestError: the stream has ended.
        """
        self._round += 1
        decode = verifier_service_pb2.Decode(
            round=self._round,
            base_length=self.length,
            prefix_hash=self._hash.digest(),
            num_tokens=tokens,
            seen_round=self._seen,
        )
        await self._write(verifier_service_pb2.VerifyRequest(sequence_id=self._sequence_id, decode=decode))
        self._outstanding = tokens

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict. Its tokens count as committed from here on.

        Raises:
            RequestError: the verifier refused the round, or is gone.
        """
        while (response := await self._read()).WhichOneof("kind") != "verdict":
            self._note(response)
        verdict = response.verdict
        if verdict.status != speculation_pb2.VERDICT_STATUS_JUDGED or verdict.base_length != self.length:
            raise internal(
                "INTERNAL",
                f"verdict {verdict.round} has base {verdict.base_length}; the sequence has {self.length} tokens",
            )
        self.length += len(verdict.token_ids)
        self._hash.extend(verdict.token_ids)
        self._outstanding -= 1
        self._seen = verdict.round
        self.load = verdict.load
        self._seat.judged(verdict.load)
        self._ended = bool(verdict.finish_reason)
        return verdict

    async def close(self) -> None:
        """Ends the stream. Where nothing is owed it ends well, and the verifier sees that it does."""
        try:
            if self._ended or (self._seen and not self._outstanding):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self._call.done_writing()
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            pass  # it is over all the same
        finally:
            self.cancel()  # also where the client leaves just now

    def cancel(self) -> None:
        """Ends the stream here and now, whatever it owes. Without effect on one that has ended."""
        self._timer.close()
        self._call.cancel()
        if not self._over:
            self._over = True
            self._seat.ended()

    def _note(self, response: verifier_service_pb2.VerifyResponse) -> None:
        match response.WhichOneof("kind"):
            case "opened":
                self._opened = response.opened
            case "notice" if response.notice.kind == verifier_service_pb2.NOTICE_KIND_DRAINING:
                self.draining = True
                self._seat.drains()

    # --------------------------------------------------------------------------------------------- the call, guarded

    async def _read(self) -> verifier_service_pb2.VerifyResponse:
        try:
            response = await self._timer.wait_for(self._call.read())
        except TimeoutError:
            raise self._silent() from None
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise await self._explain(error) from None
        if response is grpc.aio.EOF:
            raise await self._explain(asyncio.InvalidStateError())
        if response is None:  # gRPC could not parse it
            raise unavailable("NO_VERIFIER", f"what came from the verifier at {self._address} is no answer")
        message: verifier_service_pb2.VerifyResponse = response
        return message

    async def _write(self, message: verifier_service_pb2.VerifyRequest) -> None:
        if self._padded_to and not message.HasField("open"):
            pad(message, self._padded_to)
        try:
            await self._timer.wait_for(self._call.write(message))
        except TimeoutError:
            raise self._silent() from None
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise await self._explain(error) from None

    def _silent(self) -> RequestError:
        seconds = f"{self._timer.seconds:g}"
        error = unavailable("NO_VERIFIER", f"the verifier at {self._address} was silent for {seconds} s")
        error.metadata[SILENT] = seconds
        return error

    async def _explain(self, error: BaseException) -> BaseException:
        """What is to be raised for an error of the call's."""
        if isinstance(error, asyncio.CancelledError):
            return error
        status = await self._ending.status()
        if status.code() is grpc.StatusCode.OK:
            return internal("INTERNAL", "the verifier ended the stream before the sequence")
        return translate(status, self._address)


def translate(error: grpc.RpcError, address: str) -> RequestError:
    """A failed call as what the client is told: refusals of the verifier's as they are, and its absence as such.

    The draft service makes the rounds, so a refusal of one is no fault of the client's.
    """
    told = from_rpc_error(error)
    if told.reason == UNSPECIFIED and told.code in _GONE:
        return unavailable("NO_VERIFIER", f"no verifier answers at {address}: {told.message}")
    if told.code in _NOT_ADMITTED:
        _log.warning("a verifier does not admit this service", verifier=address, reason=told.message)
        return unavailable("NO_VERIFIER", f"the verifier at {address} does not admit this draft service")
    of_a_round = told.reason in ("WRONG_BASE", "OUT_OF_ORDER") or told.metadata.get("field", "").startswith(_OF_A_ROUND)
    if told.code is grpc.StatusCode.INVALID_ARGUMENT and of_a_round:
        _log.error("the verifier refused a round", verifier=address, reason=told.reason, text=told.message)
        return internal("INTERNAL", "internal error; the server's log has the rest")
    return told
