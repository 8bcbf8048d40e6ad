"""One call of `Propose`: drafts for one sequence; the client has them judged itself."""

import asyncio
import time
from dataclasses import replace
from typing import Any, cast

import grpc
import structlog

from draft_service.concurrency import Claim, ConcurrencyLimit
from draft_service.drafters.base import Draft, DrafterKind, DraftError, Drafting, DraftSequence
from draft_service.drafters.guard import FIRST_BACKOFF_S
from draft_service.metrics import REQUEST_LOG
from draft_service.pair import Pair
from draft_service.prompt import check_prompt_length
from draft_service.request import DRAFTER_TO_WIRE
from draft_service.settings import DraftSettings
from draft_service.validation import (
    check_draft_temperature,
    check_drafter,
    check_gamma,
    check_message_size,
    check_target_sampling,
    check_tokens_per_pass,
)
from outrider.rpc.errors import (
    RequestError,
    internal,
    invalid_field,
    out_of_order,
    outcome,
    overloaded,
    write,
    wrong_base,
)
from outrider.rpc.timeouts import first_message, kind_of_next
from outrider.service.encoder_input import check_opening_input
from outrider.service.model_info import check_name, check_required_features
from outrider.service.sampling import RULE_TO_WIRE, check_token_ids
from outrider.service.wire import PrefixHash, encode_proposal
from protos.outrider.v1 import draft_service_pb2, model_pb2, speculation_pb2

_log = structlog.get_logger()

Context = grpc.aio.ServicerContext[draft_service_pb2.ProposeRequest, draft_service_pb2.ProposeResponse]


class ProposeCall:
    """One call, from its first message to its end."""

    def __init__(self, pair: Pair, limit: ConcurrencyLimit, settings: DraftSettings, context: Context) -> None:
        self._pair = pair
        self._limit = limit
        self._limits = pair.draft.limits
        self._settings = settings
        self._context = context
        self._started = time.perf_counter()
        self._proposals = self._tokens = 0
        self._sequence_id = ""

    async def run(self) -> None:
        """Serves the call, frees everything it held, and writes one line to the log."""
        with outcome(self._record):
            await self._serve()

    @REQUEST_LOG.quiet
    def _record(self, status: str) -> None:
        _log.info(
            "propose",
            sequence_id=self._sequence_id,
            status=status,
            proposals=self._proposals,
            draft_tokens=self._tokens,
            seconds=round(time.perf_counter() - self._started, 4),
        )

    async def _serve(self) -> None:
        message = await first_message(self._next, "OpenDraft", self._settings.idle_timeout)
        check_name("sequence_id", message.sequence_id, required=True)
        self._sequence_id = message.sequence_id
        sequence, drafter = check_open(message.open, self._pair, self._settings)
        with self._limit.claim(1, resumed=bool(sequence.committed)) as claim:
            await self._wait_for_turn(claim)
            if (inputs := self._pair.encoder_inputs) is not None:
                tensor = await inputs.checked_tensor(message.open.encoder_input, prefix="encoder_input.")
                sequence = replace(sequence, encoder_input=tensor)
            drafting = self._pair.drafters[drafter].open(sequence)
            try:
                await self._draft(sequence, drafter, drafting, claim)
            finally:
                drafting.close()

    async def _wait_for_turn(self, claim: Claim) -> None:
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):  # the client's own deadline cancels the call
                async for ahead in claim.turn():
                    await self._write(queue_position=ahead)
        except TimeoutError:
            raise overloaded(
                f"the stream waited in the queue for {seconds:g} s (--request-timeout); try again later",
                retry_after=self._limit.retry_after(),
                seconds=seconds,
            ) from None

    async def _draft(self, sequence: DraftSequence, drafter: DrafterKind, drafting: Drafting, claim: Claim) -> None:
        """Answers each `Advance` until the client ends the stream or is idle for too long."""
        progress = _Progress(sequence)
        opened = draft_service_pb2.DraftOpened(
            limits=self._limits, rule=RULE_TO_WIRE[sequence.rule], drafter=DRAFTER_TO_WIRE[drafter]
        )
        await self._write(opened=opened)
        with (
            claim.inactivity_timer(self._settings.idle_timeout) as reading,
            claim.inactivity_timer(self._settings.slow_client_timeout) as writing,
        ):
            while True:
                try:
                    message = await reading.wait_for(self._next())
                except TimeoutError:
                    raise claim.idle("the client sent no message", "--idle-timeout", reading) from None
                if message is None:
                    return
                kind_of_next(message, self._sequence_id, "OpenDraft", "open or advance")
                advance = message.advance
                progress.check(advance, self._limits, self._pair.target.vocab_size)
                if sequence.needs_logits:
                    check_message_size("advance.gamma", advance.gamma, self._pair.draft, self._pair.target)
                draft = await _propose(drafting, advance)
                self._proposals += 1
                self._tokens += len(draft.token_ids)
                try:
                    await writing.wait_for(self._write(proposal=progress.proposal(draft)))
                except TimeoutError:
                    raise claim.idle("the client read no proposals", "--slow-client-timeout", writing) from None
                if draft.error is not None:
                    raise _failed(draft.error)

    async def _next(self) -> draft_service_pb2.ProposeRequest | None:
        message = cast("Any", await self._context.read())
        return None if message is grpc.aio.EOF else cast("draft_service_pb2.ProposeRequest", message)

    async def _write(self, **kind: Any) -> None:
        await write(self._context, draft_service_pb2.ProposeResponse(sequence_id=self._sequence_id, **kind))


async def _propose(drafting: Drafting, advance: draft_service_pb2.Advance) -> Draft:
    drafting.advance(advance.committed_token_ids)
    try:
        return await drafting.propose(advance.gamma)
    except DraftError as error:
        raise _failed(error) from None


def _failed(error: DraftError) -> RequestError:
    text = f"drafting failed: {error}"
    if error.reason == "OVERLOADED":  # late
        return overloaded(f"{text}; open the sequence again later", retry_after=FIRST_BACKOFF_S)
    return internal(error.reason, text)


class _Progress:
    """The committed length, its hash, and the round of a sequence."""

    def __init__(self, sequence: DraftSequence) -> None:
        self._length = len(sequence.prompt) + len(sequence.committed)
        self._hash = PrefixHash([*sequence.prompt, *sequence.committed])
        self._seen = 0  # the round of the last verdict
        self._round = 0

    def check(self, advance: draft_service_pb2.Advance, limits: model_pb2.Limits, vocab_size: int) -> None:
        """Checks an `Advance` against the sequence, and adds its committed tokens."""
        if advance.round <= self._round:
            raise out_of_order(f"advance.round is {advance.round}; it must be above {self._round}, the last round")
        if advance.base_length != self._length:
            raise wrong_base(
                f"advance.base_length is {advance.base_length}; it must be the number of tokens of prompt and "
                f"committed output before this message, {self._length}",
                field="advance.base_length",
                given=advance.base_length,
                expected=self._length,
            )
        committed = check_token_ids(
            "advance.committed_token_ids", advance.committed_token_ids, vocab_size, limits.max_sequence_tokens
        )
        if self._round and not committed:
            raise invalid_field(
                "advance.committed_token_ids",
                f"advance.committed_token_ids is empty in round {advance.round}; it must have the tokens that the last "
                "verdict committed, at least 1",
                given=0,
            )
        check_gamma("advance.gamma", advance.gamma, limits)
        if self._length + len(committed) > limits.max_sequence_tokens:
            raise invalid_field(
                "advance.committed_token_ids",
                f"advance.committed_token_ids makes the sequence {self._length + len(committed)} tokens long; at most "
                f"{limits.max_sequence_tokens} (--max-sequence-tokens): end it",
                given=self._length + len(committed),
                maximum=limits.max_sequence_tokens,
            )
        self._seen, self._round = self._round, advance.round
        self._length += len(committed)
        self._hash.extend(committed)

    def proposal(self, draft: Draft) -> speculation_pb2.Proposal:
        message = speculation_pb2.Proposal(
            round=self._round, base_length=self._length, prefix_hash=self._hash.digest(), seen_round=self._seen
        )
        encode_proposal(message, draft.token_ids, draft.distributions)
        return message


def check_open(
    message: draft_service_pb2.OpenDraft, pair: Pair, settings: DraftSettings
) -> tuple[DraftSequence, DrafterKind]:
    """Checks an opening; `settings` hold the defaults. Returns the sequence and its drafter.

    Raises:
        RequestError: INVALID_ARGUMENT naming the field, or FAILED_PRECONDITION.
    """
    check_required_features(message.required_features, pair.draft.features)
    check_opening_input(message, pair.target if pair.encoder_inputs is None else pair.draft)
    vocab_size, most = pair.target.vocab_size, pair.draft.limits.max_sequence_tokens
    sampling = check_target_sampling(message.sampling, pair.target)
    drafter = check_drafter("drafter", message.drafter, sampling, offered=pair.drafters.keys(), default=pair.default)
    if sampling.seed is None:
        raise invalid_field("sampling.seed", "sampling.seed is not set; give the seed of OpenSequence")
    prompt = check_token_ids("prompt_token_ids", message.prompt_token_ids, vocab_size, most)
    if not prompt:
        raise invalid_field("prompt_token_ids", "prompt_token_ids is empty; at least 1 token is needed", given=0)
    check_prompt_length("prompt_token_ids", len(prompt), settings.max_prompt_tokens)
    committed = check_token_ids("committed_token_ids", message.committed_token_ids, vocab_size, most)
    if len(prompt) + len(committed) > most:
        raise invalid_field(
            "prompt_token_ids",
            f"prompt_token_ids and committed_token_ids have {len(prompt) + len(committed)} tokens; at most {most} "
            "(--max-sequence-tokens): shorten the prompt",
            given=len(prompt) + len(committed),
            maximum=most,
        )
    sequence = DraftSequence(
        prompt=prompt,
        committed=committed,
        params=sampling.params,
        logit_rules=replace(sampling.logit_rules, generation=pair.generation_rules),
        seed=sampling.seed,
        rule=sampling.rule,
        draft_temperature=check_draft_temperature(
            "draft_temperature", message, sampling, default=settings.draft_temperature
        ),
        uses_outcome_cache=settings.outcome_cache,
        tokens_per_pass=check_tokens_per_pass("tokens_per_pass", message, drafter, default=settings.tokens_per_pass),
    )
    return sequence, drafter
