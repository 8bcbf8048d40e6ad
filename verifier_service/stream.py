"""The server side of one `Verify` stream: reads rounds, writes replies, and ends idle streams."""

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import grpc
import structlog

from outrider.rpc.errors import RequestError, counted, idle, internal, outcome, overloaded, write, yielded
from outrider.rpc.timeouts import NOTICE_SECONDS, InactivityTimer, first_message, kind_of_next
from outrider.service.best_effort import Component
from outrider.service.encoder_input import EncoderInputs
from outrider.service.model_info import check_name
from outrider.service.sampling import RULE_TO_WIRE
from outrider.service.tracing import CallTrace
from outrider.service.wire import pad
from protos.outrider.v1 import model_pb2, speculation_pb2, verifier_service_pb2
from verifier_service.concurrency import ConcurrencyLimit
from verifier_service.engine import Close, HalfClose, Open, Read, Remind, Submit, VerifierEngine
from verifier_service.request import check_decode, check_open, check_proposal
from verifier_service.scheduler import PREFIX_CACHE
from verifier_service.sequence import MAX_BACKLOG, Reply, TargetSequence, encoded
from verifier_service.settings import VerifierSettings

_log = structlog.get_logger()

Context = grpc.aio.ServicerContext[verifier_service_pb2.VerifyRequest, verifier_service_pb2.VerifyResponse]
STREAM_LOG = Component("stream_log")


class Outbox:
    """Carries the replies of a step from the engine's thread to the streams, in one call of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._replies: list[tuple[asyncio.Queue[Reply], Reply]] = []

    def put(self, queue: asyncio.Queue[Reply], reply: Reply) -> None:
        """Adds a reply; `flush` sends it."""
        self._replies.append((queue, reply))

    def flush(self) -> None:
        """Sends all replies added since the last call."""
        if self._replies:
            replies, self._replies = self._replies, []
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(_put_all, replies)


def _put_all(replies: list[tuple[asyncio.Queue[Reply], Reply]]) -> None:
    for queue, reply in replies:
        queue.put_nowait(reply)


class Target(NamedTuple):
    """The loaded target, as streams use it. `encoder_inputs` are None if it has no encoder."""

    engine: VerifierEngine
    model: model_pb2.ModelInfo
    outbox: Outbox
    encoder_inputs: EncoderInputs | None


class VerifyStream:
    """One call of `Verify`, from its first message to its end."""

    def __init__(
        self, target: Target, settings: VerifierSettings, limit: ConcurrencyLimit, context: Context, trace: CallTrace
    ) -> None:
        self._engine, self._model, self._outbox, self._encoder_inputs = target
        self._settings = settings
        self._limit = limit
        self._context = context
        self._trace = trace
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()
        self._heard = time.perf_counter()
        self._served = self._heard  # when the last reply was written that is not STALE
        self._posted = 0  # rounds handed to the engine
        self._tally = _Tally()

    async def run(self) -> None:
        """Serves the call."""
        message = await first_message(self._next, "OpenSequence", self._settings.idle_timeout)
        check_name("sequence_id", message.sequence_id, required=True)
        generation = self._engine.model_runner.loaded.generation_rules
        opening, name = check_open(message.open, self._model, generation), message.sequence_id
        with self._limit.enter(resumed=opening.resumed):
            if self._encoder_inputs is not None:
                tensor = await self._encoder_inputs.checked_tensor(message.open.encoder_input, prefix="encoder_input.")
                opening = replace(opening, encoder_input=tensor)
            del message  # speech is large
            deliver = partial(self._outbox.put, self._replies)
            await self._serve(TargetSequence(name, opening, self._model.vocab_size, deliver))

    async def _serve(self, sequence: TargetSequence) -> None:
        prefixes, salt = self._engine.prefixes, sequence.opening.cache_salt
        cached = 0
        if not sequence.owes_prompt_logprobs:  # a prompt to score is not looked up
            cached = PREFIX_CACHE.run(lambda: prefixes.find(sequence.tokens, salt), 0)
        opened = verifier_service_pb2.VerifyResponse(
            sequence_id=sequence.sequence_id,
            opened=verifier_service_pb2.Opened(
                cached_tokens=cached,
                limits=self._model.limits,
                rules=self._model.rules,
                rule=RULE_TO_WIRE[sequence.opening.sampling.rule],
                weights_fingerprint=self._model.weights_fingerprint,
                round=0 if (first := sequence.opening.first_round) is None else first.number,
            ),
        )
        if sequence.is_isolated:
            sequence.opened = opened  # the engine sends it when the sequence's turn comes
        else:
            self._replies.put_nowait(opened)
        self._posted = int(sequence.opening.first_round is not None)
        self._engine.post(Open(sequence))
        helpers = [asyncio.create_task(self._read(sequence)), asyncio.create_task(self._watch(sequence))]
        with outcome(partial(self._record_end, sequence)):
            try:
                await self._write(sequence)
            finally:
                for helper in helpers:
                    helper.cancel()
                self._engine.post(Close(sequence))

    def _record_end(self, sequence: TargetSequence, status: str) -> None:
        STREAM_LOG.run(lambda: self._tally.log(sequence, status), None)
        self._trace.describe(
            {
                "outrider.request_id": sequence.opening.request_id,
                "outrider.sequence_id": sequence.sequence_id,
                "outrider.status": status,
                "outrider.tokens": self._tally.tokens,
            }
        )

    # ------------------------------------------------------------------------------------------------------- reading

    async def _read(self, sequence: TargetSequence) -> None:
        """Checks each message and hands it to the engine. An invalid message ends the stream."""
        rule, is_greedy = sequence.opening.sampling.rule, sequence.opening.sampling.params.is_greedy
        outstanding_limit = self._model.limits.max_outstanding
        try:
            while (message := await self._next()) is not None:
                kind = kind_of_next(message, sequence.sequence_id, "OpenSequence", "open, proposal or decode")
                outstanding = self._outstanding(sequence)
                if outstanding >= outstanding_limit:
                    raise overloaded(
                        f"the stream has {counted(outstanding, 'round')} without a verdict; at most "
                        f"{outstanding_limit}: wait for one",
                        maximum=outstanding_limit,
                    )
                if kind == "decode":
                    round_ = check_decode(message.decode)
                else:
                    round_ = check_proposal(message.proposal, self._model, rule=rule, is_greedy=is_greedy)
                self._engine.post(Submit(sequence, round_))
                self._posted += 1
            self._engine.post(HalfClose(sequence))
        except RequestError as error:
            self._replies.put_nowait(error)
        except Exception as error:  # otherwise the stream would wait until the idle timeout
            _log.error("reading from a Verify stream failed", request_id=sequence.opening.request_id, exc_info=error)
            self._replies.put_nowait(internal("INTERNAL", "internal error; the service's log has the cause"))

    def _outstanding(self, sequence: TargetSequence) -> int:
        """Rounds without a verdict: those of the sequence, and those that the engine has not received yet."""
        return len(sequence.rounds) + self._posted - sequence.received  # `rounds` first: so none is counted twice

    async def _next(self) -> verifier_service_pb2.VerifyRequest | None:
        message = cast("Any", await self._context.read())
        self._heard = time.perf_counter()
        return None if message is grpc.aio.EOF else cast("verifier_service_pb2.VerifyRequest", message)

    # ------------------------------------------------------------------------------------------------------- writing

    async def _write(self, sequence: TargetSequence) -> None:
        limit = self._settings.slow_client_timeout
        with InactivityTimer(limit) as timer:
            while (reply := encoded(await self._replies.get())) is not None:
                if isinstance(reply, RequestError):
                    raise reply
                if sequence.opening.response_bytes:
                    pad(reply, sequence.opening.response_bytes)
                try:
                    await timer.wait_for(write(self._context, reply))
                except TimeoutError:
                    text = f"the client read no responses for {limit:g} s (--slow-client-timeout)"
                    raise idle(text, seconds=limit) from None
                self._heard = time.perf_counter()
                kind = reply.WhichOneof("kind")
                if kind != "verdict" or reply.verdict.status == speculation_pb2.VERDICT_STATUS_JUDGED:
                    self._served = self._heard
                if kind in ("verdict", "prompt_logprobs"):
                    sequence.num_written += 1
                    # It may have been paused, also by a reply that the engine has delivered just now.
                    if sequence.backlog == MAX_BACKLOG - 1:
                        self._engine.post(Read(sequence))
                if kind == "verdict":
                    STREAM_LOG.run(lambda: self._tally.add(reply.verdict), None)
                    if self._trace.is_recorded:
                        self._record(reply.verdict)

    def _record(self, verdict: speculation_pb2.Verdict) -> None:
        """Adds a span for the round, from its arrival to now."""
        if verdict.status != speculation_pb2.VERDICT_STATUS_JUDGED:
            return
        now, timings = time.perf_counter(), verdict.timings
        self._trace.span(
            "verdict",
            now - (timings.queue_us + timings.forward_us + timings.verify_us) / 1e6,
            now,
            {
                "outrider.round": verdict.round,
                "outrider.base_length": verdict.base_length,
                "outrider.judged": verdict.judged,
                "outrider.accepted": verdict.accepted,
                "outrider.committed": len(verdict.token_ids),
                "outrider.queue_seconds": timings.queue_us / 1e6,
                "outrider.forward_seconds": timings.forward_us / 1e6,
                "outrider.verify_seconds": timings.verify_us / 1e6,
                "outrider.step_tokens": timings.pass_tokens,
                "outrider.step_sequences": timings.pass_sequences,
            },
        )

    async def _watch(self, sequence: TargetSequence) -> None:
        """Repeats QUEUED while the sequence waits, and ends the stream of an idle client."""
        limit, contended_limit = self._settings.idle_timeout, self._settings.contended_idle_timeout
        interval = min(NOTICE_SECONDS, limit / 4)
        pause = longest_pause = min(interval, contended_limit)
        while True:
            await asyncio.sleep(pause)
            runs_prompt = sequence.owes_prompt_logprobs and not sequence.is_isolated  # without a round
            waits = sequence.slot is None or self._outstanding(sequence) or sequence.awaits_turn or runs_prompt
            # After `waits`: a verdict may be committed meanwhile, and is written later.
            silent = time.perf_counter() - max(self._heard, sequence.judged_at)
            pause = longest_pause if silent >= longest_pause else longest_pause - silent
            if waits:
                if silent >= interval:
                    # The engine sends the notice: if it hangs, the client notices.
                    self._engine.post(Remind(sequence))
            elif silent > limit:
                text = f"the client sent no message for {limit:g} s (--idle-timeout)"
                self._replies.put_nowait(idle(text, seconds=limit))
            # Also a client that sends only proposals that are STALE.
            elif (idle_seconds := time.perf_counter() - max(self._served, sequence.judged_at)) > contended_limit:
                await self._preempt(f"{idle_seconds:.3g}")

    async def _preempt(self, seconds: str) -> None:
        """Ends an idle stream for a queued sequence. It can continue later, or at another verifier now."""
        with self._limit.preempt() as is_preempted:
            if is_preempted:
                text = (
                    f"the client sent no message for {seconds} s while others wait in the queue "
                    "(--contended-idle-timeout)"
                )
                error = yielded(text, retry_after=self._limit.retry_after(), seconds=seconds)
                self._replies.put_nowait(error)
                await asyncio.Event().wait()  # until the stream has ended, which cancels this


class _Tally:
    """Totals of a sequence for its line in the log."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.verdicts = self.stale = self.tokens = self.judged = self.accepted = 0
        self.queue_us = self.forward_us = self.verify_us = 0

    def add(self, verdict: speculation_pb2.Verdict) -> None:
        if verdict.status == speculation_pb2.VERDICT_STATUS_STALE:
            self.stale += 1
            return
        self.verdicts += 1
        self.tokens += len(verdict.token_ids)
        self.judged += verdict.judged
        self.accepted += verdict.accepted
        self.queue_us += verdict.timings.queue_us
        self.forward_us += verdict.timings.forward_us
        self.verify_us += verdict.timings.verify_us

    def log(self, sequence: TargetSequence, status: str) -> None:
        _log.info(
            "sequence",
            request_id=sequence.opening.request_id,
            sequence_id=sequence.sequence_id,
            status=status,
            prompt_tokens=len(sequence.opening.prompt),
            committed_tokens=len(sequence.opening.committed),
            tokens=self.tokens,
            verdicts=self.verdicts,
            stale=self.stale,
            judged=self.judged,
            accepted=self.accepted,
            seconds=round(time.monotonic() - self.started, 4),
            queue_seconds=self.queue_us / 1e6,
            forward_seconds=self.forward_us / 1e6,
            verify_seconds=self.verify_us / 1e6,
        )
