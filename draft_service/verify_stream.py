"""The client side of one `Verify` stream."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc

from draft_service.replicas import Replica, is_refusal, translate, unreadable
from draft_service.sequence import Round, Sequence
from outrider.rpc.errors import Ending, RequestError, counted, failed_precondition, internal, unavailable
from outrider.rpc.timeouts import InactivityTimer
from outrider.service.model_info import check_limits
from outrider.service.wire import encode_proposal, pad
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2 import VerifyRequest, VerifyResponse

# Seconds to wait for the verifier to end a finished stream.
CLOSING_SECONDS = 1.0

SILENT = "silent_seconds"  # metadata of the error after --verifier-timeout


class VerifyStream:
    """A sequence at one verifier. Use: open, then for each round send, read its verdicts and commit them.

    Attributes:
        replica: the verifier, which counts the stream until its end.
        epoch: of the replica's circuit breaker when the stream began.
        draining: the verifier has sent the notice DRAINING.
    """

    def __init__(self, replica: Replica, sequence: Sequence, *, target: model_pb2.ModelInfo, timeout: float) -> None:
        """Begins the call. `target` is the model that the pair was matched with, or an empty one; `timeout` is the time
        left of the client's deadline, in seconds.
        """
        self._call = replica.verify(timeout=timeout)  # first: if it fails, the replica counts nothing
        self.replica = replica
        self.epoch = replica.breaker.begin()
        replica.num_open += 1
        self.draining = False
        self._sequence = sequence
        self._address = replica.address
        self._target = target
        self._ending = Ending(self._call)
        self._timer = InactivityTimer(replica.timeout)
        self._opened: verifier_service_pb2.Opened | None = None
        self._is_isolated = False
        self._may_run = False  # an isolated sequence is opened when its turn comes
        self._sent: Round | None = None
        self._seen = 0  # number of the last round with a verdict
        self._ended = False  # by a verdict with a finish reason
        self._is_over = False

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def has_round(self) -> bool:
        """Whether the current round was sent on this stream."""
        return self._sent is self._sequence.round

    @property
    def is_running(self) -> bool:
        """Whether the verifier may be running the prompt or a round of the sequence."""
        return self._may_run and (not self._seen or self._is_owed)

    @property
    def _is_owed(self) -> bool:
        return self.has_round and self._sequence.round.owed > 0

    async def open(self, *, reopened: bool = False, isolated: bool = False) -> verifier_service_pb2.Opened:
        """Opens the sequence (see `Sequence.opening`), and returns the answer.

        Raises:
            RequestError: the verifier refuses the sequence, is unreachable, runs another model than before or with
                lower limits, or uses another acceptance rule than the requested one.
        """
        message, round_ = VerifyRequest(), self._sequence.round
        opening = message.open
        opening.CopyFrom(self._sequence.opening(reopened=reopened, isolated=isolated))
        if opening.HasField("join_ms"):  # a verifier that only waits for more tokens is not silent
            opening.join_ms = int(min(opening.join_ms, 500 * self._timer.seconds))
        # A request of fixed size must not show whether the first round is a Decode. The round of an isolated sequence
        # leaves after `Opened`: else the verifier could end in it before this side knows that it ran.
        may_send = not isolated and not self._sequence.request.round_sizes.request
        if round_.draft is None and round_.owed and may_send:
            self._describe(opening.decode)
        await self._write(message)
        self._is_isolated, self._may_run = isolated, not isolated
        while self._opened is None:
            self._note(await self._read())
        rule = opening.sampling.rule
        fingerprint = self._target.weights_fingerprint
        if self._opened.weights_fingerprint != fingerprint:  # another model since the pair was matched
            raise failed_precondition(
                "PAIR_MISMATCH",
                f"the verifier at {self._address} has the weights fingerprint {self._opened.weights_fingerprint[:16]}, "
                f"and had {fingerprint[:16]} when the draft service started: restart the draft service",
            )
        if lower := check_limits(self._opened.limits, self._target.limits):  # it was restarted with other settings
            text = f"the verifier at {self._address} has changed: {lower}; restart the draft service"
            raise failed_precondition("PAIR_MISMATCH", text)
        if self._opened.rule != rule:
            needed, taken = (sampling_pb2.AcceptanceRule.Name(each) for each in (rule, self._opened.rule))
            raise internal(
                "INTERNAL",
                f"the verifier at {self._address} uses the rule {taken}, and the request {needed}; run the same "
                "release of both services",
            )
        if self._opened.round and self._opened.round == round_.number:
            self._sent = round_
        return self._opened

    async def send(self) -> None:
        """Sends the sequence's round, or the rest of it.

        Raises:
            RequestError: the stream has ended.
        """
        # After a write that fails while messages are unread, `grpc.aio` never has the status of the call.
        if not self._is_isolated:  # the prompt of an isolated sequence runs once there is a round
            await self._read_prompt_logprobs()
        round_, message = self._sequence.round, VerifyRequest()
        self._describe(message.decode if round_.draft is None else message.proposal)
        await self._write(message)
        self._sent = round_

    def _describe(self, content: verifier_service_pb2.Decode | speculation_pb2.Proposal) -> None:
        sequence, round_ = self._sequence, self._sequence.round
        content.round = round_.number
        content.base_length = len(sequence.tokens)
        content.prefix_hash = sequence.prefix_hash
        content.seen_round = self._seen
        if isinstance(content, verifier_service_pb2.Decode):
            content.num_tokens = round_.owed
        elif round_.draft is not None:
            encode_proposal(content, round_.draft.token_ids, round_.draft.distributions)

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict.

        Raises:
            RequestError: the verifier refused the round, or failed.
        """
        await self._read_prompt_logprobs()
        while (response := await self._read()).WhichOneof("kind") != "verdict":
            self._note(response)
        verdict, length = response.verdict, len(self._sequence.tokens)
        if verdict.status != speculation_pb2.VERDICT_STATUS_JUDGED or verdict.base_length != length:
            raise internal(
                "INTERNAL",
                f"the verdict on round {verdict.round} of the verifier at {self._address} has base_length "
                f"{verdict.base_length}, and the sequence has {counted(length, 'token')}; run the same release of both "
                "services",
            )
        round_ = self._sequence.round
        if not verdict.token_ids or (round_.draft is None and len(verdict.token_ids) > round_.owed):
            raise internal(
                "INTERNAL",
                f"the verdict on round {verdict.round} of the verifier at {self._address} has "
                f"{counted(len(verdict.token_ids), 'token')}; at least 1, and at most {round_.owed} for a Decode",
            )
        self._seen = verdict.round
        self._ended = bool(verdict.finish_reason)
        return verdict

    async def close(self) -> None:
        """Ends the stream, in order if no verdict is owed."""
        try:
            if self._ended or (self._seen and not self._is_owed):
                async with asyncio.timeout(CLOSING_SECONDS):
                    if not self._ended:
                        await self._call.done_writing()
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream has ended anyway
        finally:
            self.cancel()  # even if the client cancels meanwhile

    def cancel(self) -> None:
        """Ends the stream at once. May be called twice."""
        self._timer.close()
        self._call.cancel()
        if not self._is_over:
            self._is_over = True
            self.replica.num_open -= 1

    async def _read_prompt_logprobs(self) -> None:
        """Reads those that are owed: all come before the first verdict."""
        while self._sequence.needs_prompt_logprobs:
            response = await self._read()
            if response.HasField("verdict"):
                raise self._incomplete(f"a verdict came before those of position {self._sequence.scored}")
            if not response.HasField("prompt_logprobs"):
                self._note(response)
                continue
            try:
                await self._sequence.take_prompt_logprobs(response.prompt_logprobs)
            except ValueError as error:
                raise self._incomplete(str(error)) from None

    def _incomplete(self, why: str) -> RequestError:
        return internal(
            "INTERNAL",
            f"the verifier at {self._address} skipped log-probabilities of the prompt: {why}; run the same release of "
            "both services",
        )

    def _note(self, response: VerifyResponse) -> None:
        if response.WhichOneof("kind") == "opened":
            self._opened, self._may_run = response.opened, True
        elif response.notice.kind == verifier_service_pb2.NOTICE_KIND_DRAINING:
            self.draining = True

    # ------------------------------------------------------------------------------------------------------- the call

    async def _read(self) -> VerifyResponse:
        response = await self._wait_for(self._call.read())
        if response is grpc.aio.EOF:
            raise await self._failure()
        if response is None:
            raise unreadable(self._address)
        message: VerifyResponse = response
        return message

    async def _write(self, message: VerifyRequest) -> None:
        message.sequence_id = self._sequence.id
        size = self._sequence.request.round_sizes.request
        if size and not message.HasField("open"):
            pad(message, size)
        await self._wait_for(self._call.write(message))

    async def _wait_for(self, step: Awaitable[Any]) -> Any:
        try:
            return await self._timer.wait_for(step)
        except TimeoutError:
            seconds = f"{self._timer.seconds:g}"
            error = unavailable(
                "NO_VERIFIER", f"the verifier at {self._address} sent nothing for {seconds} s (--verifier-timeout)"
            )
            error.metadata[SILENT] = seconds
            raise error from None
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise await self._failure() from None

    async def _failure(self) -> RequestError:
        """How the call ended."""
        status = await self._ending.status()
        if status.code() is grpc.StatusCode.OK:
            return internal(
                "INTERNAL", f"the verifier at {self._address} ended the stream before the sequence; see its log"
            )
        if not self.is_open and is_refusal(status):
            self._may_run = False  # it still loads, for example
        return translate(status, self._address)
