"""The gRPC servicer of the draft service, and one call of Generate."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import structlog

from draft_service.concurrency import Claim, ConcurrencyLimit
from draft_service.drafters.base import RUN_A_MODEL
from draft_service.generation import Sample
from draft_service.metrics import REQUEST_LOG, REQUEST_METRICS, RequestMetrics, SampleWatch
from draft_service.output import Emitter, OutputText
from draft_service.pair import Pair
from draft_service.privacy import framed
from draft_service.propose_call import ProposeCall
from draft_service.request import DRAFTER_TO_WIRE, POLICY_TO_WIRE, CheckedRequest
from draft_service.responses import Responses
from draft_service.settings import DraftSettings
from draft_service.tokenizer_calls import TokenizerThread, describe, detokenize, tokenize
from draft_service.validation import check_generate
from outrider.rpc.auth import count_sequences
from outrider.rpc.errors import UNSPECIFIED, RequestError, guarded, outcome, overloaded, unavailable, write
from outrider.runtime.tokenizer import IncrementalDetokenizer
from outrider.service.best_effort import Component
from outrider.service.metrics import Metrics
from outrider.service.sampling import RULE_TO_WIRE
from outrider.service.tracing import CallTrace, Tracing
from protos.outrider.v1 import draft_service_pb2, draft_service_pb2_grpc, sampling_pb2, verifier_service_pb2

_log = structlog.get_logger()

Context = grpc.aio.ServicerContext[draft_service_pb2.GenerateRequest, draft_service_pb2.GenerateResponse]

# Larger requests are checked and tokenised on two threads. This many characters take about a millisecond; some
# megabytes take seconds, and a hundred megabytes of memory.
SHORT_REQUEST_BYTES = 4096
TOKENISING = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
# gRPC may end the call to a verifier this many seconds before `--request-timeout`, by its own clock.
LATE_SECONDS = 1.0
DRAFT_INPUT = Component("draft_input")


class GenerateCall:
    """One call, from its request to its end."""

    def __init__(
        self,
        pair: Pair,
        limit: ConcurrencyLimit,
        settings: DraftSettings,
        context: Context,
        *,
        metrics: RequestMetrics,
        trace: CallTrace,
    ) -> None:
        self._pair = pair
        self._limit = limit
        self._settings = settings
        self._context = context
        self._metrics = metrics
        self._trace = trace
        self._arrived = time.perf_counter()
        self._responses = Responses()
        self._samples: list[Sample] = []
        self._started = False

    async def run(self, message: draft_service_pb2.GenerateRequest) -> None:
        """Serves the call, frees everything it held, and writes one line to the log.

        A call above a limit of its client is refused before, and counts nowhere.
        """
        if message.n <= self._settings.max_samples:  # else `_check` refuses it
            count_sequences("n", max(1, message.n))
        request: CheckedRequest | None = None
        with outcome(lambda status: self._record(message, request, status)):
            samples = message.n if message.HasField("n") else 1
            if samples > self._limit.maximum:
                await self._check(message)  # refuses it
            with self._limit.claim(samples, resumed=bool(message.committed_token_ids)) as claim:
                request = await self._check(message)  # here, so that few long prompts wait to be tokenised
                producer = asyncio.create_task(self._produce(request, claim))
                try:
                    await self._deliver(request, claim)
                finally:
                    producer.cancel()
                    await asyncio.gather(producer, return_exceptions=True)

    async def _deliver(self, request: CheckedRequest, claim: Claim) -> None:
        """Writes responses until the last one, or until the client leaves one unread for too long."""
        emission, held = request.emission, request.message.held_tokens
        responses = aiter(self._responses) if emission is None else framed(self._responses, emission, held=held)
        with claim.inactivity_timer(self._settings.slow_client_timeout) as timer:
            async for response in responses:
                try:
                    await timer.wait_for(write(self._context, response))
                except TimeoutError:
                    raise claim.idle("the client read no responses", "--slow-client-timeout", timer) from None

    async def _check(self, message: draft_service_pb2.GenerateRequest) -> CheckedRequest:
        check = partial(check_generate, message, self._pair, self._settings)
        if message.ByteSize() <= SHORT_REQUEST_BYTES:
            return check()
        return await asyncio.get_running_loop().run_in_executor(TOKENISING, check)

    async def _produce(self, request: CheckedRequest, claim: Claim) -> None:
        """Runs all samples. The first error ends them all."""
        try:
            await self._wait_for_turn(request, claim)
            self._responses.are_joined = request.joined_responses  # not before: queue positions come at once
            request = self._pair.gamma_controller.with_tokens_per_pass(await self._with_draft_input(request))
            async with asyncio.TaskGroup() as group:
                for index in range(request.samples):
                    group.create_task(self._run_sample(request, index))
        except BaseExceptionGroup as errors:
            self._responses.end(errors.exceptions[0])
        except Exception as error:  # otherwise the client would wait until its deadline
            self._responses.end(error)
        else:
            self._responses.end()

    async def _wait_for_turn(self, request: CheckedRequest, claim: Claim) -> None:
        """Waits until the samples may run, or until `time_limit` has passed: then they end at once."""
        seconds, limit = self._time_left(), request.time_limit
        if limit is not None:
            limit -= time.perf_counter() - self._arrived
        try:
            async with asyncio.timeout(seconds if limit is None else min(limit, seconds)):
                async for ahead in claim.turn():
                    self._responses.send(draft_service_pb2.GenerateResponse(queue_position=ahead))
        except TimeoutError:
            if limit is None or limit > seconds:
                raise overloaded(
                    f"the request waited in the queue for {seconds:.3g} s, until its deadline; try again later",
                    retry_after=self._limit.retry_after(),
                    seconds=f"{seconds:.3g}",
                ) from None

    async def _with_draft_input(self, request: CheckedRequest) -> CheckedRequest:
        """Computes the input of the draft's encoder, if its model runs. If that fails, the target writes alone."""
        inputs, message = self._pair.encoder_inputs, request.encoder_input
        if inputs is None or message is None or request.speculation.drafter not in RUN_A_MODEL:
            return request
        try:
            tensor = await inputs.checked_tensor(message)
        except Exception as error:
            DRAFT_INPUT.note(error)
            return replace(request, speculation=request.speculation.without_drafts())
        return replace(request, draft_sequence=replace(request.draft_sequence, encoder_input=tensor))

    async def _run_sample(self, request: CheckedRequest, index: int) -> None:
        if index and request.top_prompt_logprobs is not None:
            await self._samples[0].sequence.is_scored.wait()  # they come before the first chunk
        emitter = self._emitter(request, index)
        watch = SampleWatch(self._metrics, self._trace, index)
        gamma = self._pair.gamma_controller.of(request, self._pair.verifiers.replicas.least_load)
        sample = Sample(request, index, emitter, gamma, watch, arrived=self._arrived)
        self._samples.append(sample)
        try:
            await sample.run(
                self._pair.verifiers,
                self._pair.drafters[request.speculation.drafter],
                timeout=self._time_left(),
                on_open=partial(self._on_open, request),
            )
        except RequestError as error:
            is_late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED and error.reason == UNSPECIFIED
            if not is_late or self._context.time_remaining() is not None or self._time_left() > LATE_SECONDS:
                raise
            seconds = f"{self._settings.request_timeout:g}"
            text = f"the request took longer than {seconds} s (--request-timeout); give a deadline, or ask for less"
            raise RequestError(error.code, UNSPECIFIED, text, {"seconds": seconds}) from None
        finally:
            sample.sequence.is_scored.set()

    def _emitter(self, request: CheckedRequest, index: int) -> Emitter:
        hides_special = not request.message.keep_special_tokens
        delivered = len(request.committed) - request.message.held_tokens
        text = OutputText(
            IncrementalDetokenizer(
                self._pair.tokenizer, [*request.prompt, *request.committed[:delivered]], skip_special=hides_special
            ),
            stop=request.stop,
            min_tokens=request.message.min_new_tokens,
            written=delivered,
        )
        show = partial(self._pair.tokenizer.decode_token, skip_special=hides_special) if request.report_rounds else None
        return Emitter(
            self._responses,
            text,
            index=index,
            prompt_tokens=request.prompt_tokens,
            committed=request.committed,
            show_token=show,
            one_by_one=request.emission is not None,
        )

    def _on_open(self, request: CheckedRequest, opened: verifier_service_pb2.Opened | None) -> None:
        if self._started:
            return
        self._started = True
        target = self._pair.target
        started = draft_service_pb2.GenerateStarted(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            seed=request.draft_sequence.seed,
            weights_fingerprint=opened.weights_fingerprint if opened else target.weights_fingerprint,
            rule=opened.rule if opened else RULE_TO_WIRE[request.sampling.rule],
            max_new_tokens=request.max_new_tokens,
            lossy=request.sampling.is_lossy,
            drafter=DRAFTER_TO_WIRE[request.speculation.drafter],
            tokens_per_pass=request.draft_sequence.tokens_per_pass,
            policy=POLICY_TO_WIRE[request.speculation.policy],
        )
        self._responses.send(draft_service_pb2.GenerateResponse(started=started))

    def _time_left(self) -> float:
        """Seconds until the client's deadline; without one, until `--request-timeout` has passed."""
        left: Any = self._context.time_remaining()
        return self._arrived + self._settings.request_timeout - time.perf_counter() if left is None else float(left)

    @REQUEST_LOG.quiet
    def _record(self, message: draft_service_pb2.GenerateRequest, request: CheckedRequest | None, status: str) -> None:
        sequences = [sample.sequence for sample in self._samples]
        counts = [sequence.counts.to_message() for sequence in sequences]
        timings = [sequence.timings for sequence in sequences]
        reasons = [sampling_pb2.FinishReason.Name(sequence.finish_reason) for sequence in sequences]
        first = [each.first_token for each in timings if each.first_token is not None]
        seconds = time.perf_counter() - self._arrived
        prompt = request.prompt_tokens if request else 0
        tokens = sum(sample.emitter.completion_tokens for sample in self._samples)
        request_id = request.request_id if request else message.request_id
        REQUEST_METRICS.run(lambda: self._metrics.ended(status, seconds, prompt=prompt, generated=tokens), None)
        self._trace.describe(
            {
                "outrider.request_id": request_id,
                "outrider.status": status,
                "outrider.prompt_tokens": prompt,
                "outrider.tokens": tokens,
            }
        )
        _log.info(
            "generate",
            request_id=request_id,
            status=status,
            samples=len(self._samples),
            finish_reasons=[reason.removeprefix("FINISH_REASON_") for reason in reasons],
            prompt_tokens=prompt,
            committed_tokens=len(message.committed_token_ids),
            drafter=request.speculation.drafter.value if request else "",
            speculation=request.speculation.policy.value if request else "",
            tokens=tokens,
            rounds=sum(each.num_rounds for each in counts),
            drafts=sum(each.num_drafts for each in counts),
            draft_tokens=sum(each.num_draft_tokens for each in counts),
            accepted_tokens=sum(each.num_accepted_tokens for each in counts),
            draft_failures=sum(each.num_draft_failures for each in counts),
            outcome_cache_hits=sum(each.num_outcome_cache_hits for each in counts),
            draft_recoveries=sum(each.num_draft_recoveries for each in counts),
            failovers=sum(each.num_failovers for each in counts),
            alpha=[round(each.alpha, 4) for each in counts],
            mean_gamma=[round(each.mean_gamma, 2) for each in counts],
            seconds=round(seconds, 4),
            first_token_seconds=round(min(first), 4) if first else None,
            draft_seconds=round(sum(each.draft for each in timings), 4),
            verdict_seconds=round(sum(each.verdict for each in timings), 4),
            failover_seconds=round(sum(each.failover for each in timings), 4),
        )


SERVICE_NAME = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftService(draft_service_pb2_grpc.DraftServiceServicer):
    """The servicer. Every call is UNAVAILABLE until `attach`."""

    def __init__(self, settings: DraftSettings, metrics: Metrics, tracing: Tracing) -> None:
        self._settings = settings
        self.metrics = RequestMetrics(metrics)
        self._tracing = tracing
        self.limit = ConcurrencyLimit(
            settings.max_sequences,
            max_waiting=settings.max_waiting,
            contended_idle_timeout=settings.contended_idle_timeout,
            on_start=self.metrics.queued.observe,
        )
        self._tokenizer_thread = TokenizerThread()
        self._pair: Pair | None = None

    def attach(self, pair: Pair) -> None:
        self._pair = pair

    @guarded
    async def Generate(  # type: ignore[override]  # the stubs expect a generator; this one writes to its context
        self, request: draft_service_pb2.GenerateRequest, context: Any
    ) -> None:
        await self.generate(request, context)

    async def generate(self, request: draft_service_pb2.GenerateRequest, context: Any) -> None:
        """Serves a call of `Generate`, of this contract or of another one in front of it.

        Args:
            context: has `write`, `time_remaining` and `invocation_metadata` as a gRPC context.

        Raises:
            RequestError: the status of a call that fails.
        """
        with self._tracing.call("Generate", context.invocation_metadata()) as trace:
            call = GenerateCall(self.ready(), self.limit, self._settings, context, metrics=self.metrics, trace=trace)
            await call.run(request)

    @guarded
    async def Propose(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        with self._tracing.call("Propose", context.invocation_metadata()):
            await ProposeCall(self.ready(), self.limit, self._settings, context).run()

    @guarded
    async def GetModel(
        self, request: draft_service_pb2.DraftServiceGetModelRequest, context: Any
    ) -> draft_service_pb2.DraftServiceGetModelResponse:
        pair = self.ready()
        return draft_service_pb2.DraftServiceGetModelResponse(
            model=pair.draft,
            target=pair.target,
            drafters=sorted(DRAFTER_TO_WIRE[kind] for kind in pair.drafters),
            default_drafter=DRAFTER_TO_WIRE[pair.default],
        )

    @guarded
    async def Tokenize(
        self, request: draft_service_pb2.TokenizeRequest, context: Any
    ) -> draft_service_pb2.TokenizeResponse:
        work = partial(tokenize, request, self.ready(), self._settings.max_prompt_tokens)
        return await self._tokenizer_thread.run(work)

    @guarded
    async def Detokenize(
        self, request: draft_service_pb2.DetokenizeRequest, context: Any
    ) -> draft_service_pb2.DetokenizeResponse:
        return await self._tokenizer_thread.run(partial(detokenize, request, self.ready()))

    @guarded
    async def GetTokenizer(
        self, request: draft_service_pb2.GetTokenizerRequest, context: Any
    ) -> draft_service_pb2.GetTokenizerResponse:
        return describe(self.ready().tokenizer)

    def ready(self) -> Pair:
        """The pair that it serves.

        Raises:
            RequestError: UNAVAILABLE: none is attached yet.
        """
        if self._pair is None:
            raise unavailable(
                "NO_VERIFIER",
                f"the draft is loading, or no verifier has answered yet at {', '.join(self._settings.verifier)}; "
                "try again later",
            )
        return self._pair
