"""The scheduler: which sequences run, which wait, and the batch of each step. Belongs to the engine's thread.

A step takes rounds that are ready, then pieces of prompts, up to a budget of tokens, and runs one encoder at most.
The sequence that has waited longest comes first. A prompt begins when there are free blocks for all of it. When blocks
run out, the newest sequences are preempted and run again later. The oldest always continues, so every sequence ends.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from outrider.runtime.encoder_decoder import encoder_length
from outrider.runtime.kv_cache import KVPool, grow_with_preemption
from outrider.runtime.model_runner import Chunk
from outrider.runtime.prefix_cache import PrefixCache
from outrider.service.best_effort import Component
from verifier_service.request import Round
from verifier_service.sequence import TargetSequence

PREFIX_CACHE = Component("prefix_cache")

IDLE_SECONDS = 1.0  # a sequence that has waited for its client for so long can be preempted by any other
# Seconds that an isolated sequence may hold its turn without a round.
TURN_SECONDS = 5.0
# Share of a step that rounds leave to prompts, while prompts wait.
PROMPT_SHARE = 0.25


_Ready = tuple[TargetSequence, Round | None]


@dataclass(frozen=True, slots=True)
class TargetWork:
    """One sequence's share of a step.

    Attributes:
        round: None for a piece of a prompt.
    """

    sequence: TargetSequence
    round: Round | None
    chunk: Chunk
    encodes: bool = False

    @property
    def scored_tokens(self) -> list[int]:
        """Of a piece of a prompt, the tokens whose log-probabilities are wanted: one after each row with logits."""
        if self.round is not None:
            return []
        first = self.chunk.start + self.chunk.logits_from + 1
        return self.sequence.tokens[first : self.chunk.start + len(self.chunk.tokens) + 1]


@dataclass(slots=True)
class Plan:
    """A planned step, and the sequences looked up in the prefix cache and preempted for it."""

    work: list[TargetWork] = field(default_factory=list)
    looked_up: list[tuple[TargetSequence, int]] = field(default_factory=list)  # with the tokens in the prefix cache
    preempted: list[TargetSequence] = field(default_factory=list)


class Scheduler:
    """The sequences of one engine."""

    def __init__(self, pool: KVPool, prefixes: PrefixCache, *, max_batch_tokens: int, max_sequences: int) -> None:
        """`max_batch_tokens` is the most tokens in a step; one round always fits."""
        self.running: list[TargetSequence] = []  # the longest unserved first
        self.waiting: deque[TargetSequence] = deque()
        self._pool = pool
        self._prefixes = prefixes
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self.is_short = False  # of blocks, in the last plan; then the oldest go first
        self._isolated: TargetSequence | None = None  # the one whose turn it is
        self._turn_began = 0.0
        self._was_isolated = False  # whether the last step was that of an isolated sequence
        self._prompts_waited = False  # whether prompts had no share of the last step
        self._arrivals = 0
        self._overtook = 0  # resumed sequences that started while new ones waited, since the last new one

    # -------------------------------------------------------------------------------------------------- come and go

    def add(self, sequence: TargetSequence) -> bool:
        """Starts a sequence, or queues it. Returns whether it started. Resumed sequences go before new ones in the
        queue; but after `max_sequences` of them a new one starts, since any client can say that it resumes.
        """
        self._arrivals += 1
        sequence.arrival = self._arrivals
        if len(self.running) < self._max_sequences:
            self._start(sequence)
            return True
        resumed = sum(each.opening.resumed for each in self.waiting)  # they are first in the queue
        self.waiting.insert(resumed if sequence.opening.resumed else len(self.waiting), sequence)
        return False

    def remove(self, sequence: TargetSequence) -> None:
        """Removes a sequence and frees its slot. The next one in the queue starts."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.slot is None:
            return
        if not sequence.failed:
            self._keep(sequence)
        self._pool.free(sequence.slot)
        sequence.slot = None
        self.running.remove(sequence)
        if self.waiting:
            self._start(self._next())

    def _next(self) -> TargetSequence:
        """Takes the next sequence from the queue."""
        new = next((each for each in self.waiting if not each.opening.resumed), None)
        chosen = self.waiting[0] if new is None or self._overtook < self._max_sequences else new
        self._overtook = self._overtook + 1 if new is not None and chosen.opening.resumed else 0
        self.waiting.remove(chosen)
        return chosen

    def settle(self, sequence: TargetSequence) -> None:
        """After a verdict, rolls the KV cache back to the committed tokens without the last one (invariant 5)."""
        if sequence.slot is None:
            return
        self._pool.rollback(sequence.slot, len(sequence.tokens) - 1)
        if sequence.finished or not sequence.prefix_kept:  # early, for those with the same prefix that come meanwhile
            self._keep(sequence)
            sequence.prefix_kept = True
        if sequence.finished:  # now: its client may take long to read the last replies
            self._pool.rollback(sequence.slot, 0)

    def _start(self, sequence: TargetSequence) -> None:
        opening = sequence.opening
        sequence.slot = self._pool.allocate(len(opening.prompt) + opening.max_new_tokens)
        self.running.append(sequence)

    def _keep(self, sequence: TargetSequence) -> None:
        slot = sequence.slot
        assert slot is not None
        PREFIX_CACHE.run(lambda: self._prefixes.keep(slot, sequence.tokens, sequence.opening.cache_salt), None)

    def _adopt(self, sequence: TargetSequence, slot: int) -> int:
        """Fills an empty slot with the sequence's cached prefix. Returns its length."""
        salt = sequence.opening.cache_salt
        known = PREFIX_CACHE.run(lambda: self._prefixes.adopt(slot, sequence.tokens, salt), None)
        if known is None:
            self._pool.rollback(slot, 0)
        return known or 0

    # -------------------------------------------------------------------------------------------- isolated sequences

    @property
    def isolated(self) -> TargetSequence | None:
        """The isolated sequence whose turn it is."""
        return self._isolated if self._isolated in self.running else None

    def next_isolated(self) -> TargetSequence | None:
        """Gives the turn to the first isolated sequence, if no other one has it. Returns that sequence.

        A turn lasts until the first verdict. The sequence sends a round only after the turn began, and nothing of it
        runs before. So if the process dies meanwhile, no other isolated sequence is the cause.
        """
        if (holder := self.isolated) is not None and holder.is_isolated and not holder.finished:
            return None
        waiting = [each for each in self.running if each.is_isolated and not each.finished]
        self._isolated = min(waiting, key=lambda each: each.arrival, default=None)
        self._turn_began = time.perf_counter()
        return self._isolated

    def overdue(self) -> TargetSequence | None:
        """The sequence that has had the turn for too long without a round."""
        holder = self.isolated
        is_waited_for = holder is not None and holder.is_isolated and not holder.finished and not holder.rounds
        return holder if is_waited_for and time.perf_counter() - self._turn_began > TURN_SECONDS else None

    # ------------------------------------------------------------------------------------------------------- a step

    def plan(self, rounds: Sequence[tuple[TargetSequence, Round | None]]) -> Plan:
        """Plans a step from sequences and their next rounds, in this order.

        Rounds of sequences whose other tokens are all in the KV cache come first, and leave a share of the step to
        prompts; if a long round took that too, prompts come first in the next step. Prompts are cut to fit. While
        blocks are short, the oldest sequences come first instead. An isolated sequence gets every other step for
        itself, unless it waits for blocks. In the planned step, rounds are before pieces of prompts.
        """
        ready = [item for item in rounds if _may_run(*item)]
        isolated = [item for item in ready if item[0] is self._isolated and item[1] is not None]
        others = [item for item in ready if not item[0].is_isolated]
        if isolated and not (others and self._was_isolated):
            plan = self._fill(isolated)
            self._was_isolated = bool(plan.work) or not others
            if self._was_isolated:
                return plan
        self._was_isolated = False
        return self._fill(others)

    def _fill(self, ready: list[_Ready]) -> Plan:
        """Plans a step of these, as `plan` says."""
        order, prompts = self._in_order(ready)
        self.is_short = False
        plan = Plan()
        has_encoder = False
        budget = self._max_batch_tokens
        reserved = int(PROMPT_SHARE * budget) if prompts else 0
        for sequence, round_ in order:
            left = budget if not prompts or self._is_prompt(sequence) else budget - reserved
            assert sequence.slot is not None
            encodes = sequence.opening.encoder_input is not None and self._pool.lacks_encoder(sequence.slot)
            if (left < 1 and plan.work) or (encodes and has_encoder):
                continue
            if self.is_short and self._pool.is_empty(sequence.slot):
                continue  # an older one waits for blocks
            if not self._take_blocks(sequence, round_, plan):
                self.is_short = True
                continue
            work = self._cut(sequence, round_, left, must=not plan.work)
            if work is not None:
                if encodes:
                    work, has_encoder = replace(work, encodes=True), True
                budget -= len(work.chunk.tokens)
                plan.work.append(work)
        if plan.work:
            plan.work.sort(key=lambda item: item.round is None)
            served = {item.sequence for item in plan.work}
            self._prompts_waited = bool(prompts) and all(sequence not in served for sequence, _ in prompts)
            self.running.sort(key=lambda sequence: sequence in served)
        return plan

    def _in_order(self, ready: list[_Ready]) -> tuple[list[_Ready], list[_Ready]]:
        """All that have tokens to run, in the order of `plan`; and those with a prompt to run."""
        order, prompts = list[_Ready](), list[_Ready]()
        for item in ready:
            if self._is_prompt(item[0]):
                prompts.append(item)
            elif item[1] is not None:
                order.append(item)
            else:  # its prompt has run without a round
                item[0].prefilled_at = time.perf_counter()
        order = prompts + order if self._prompts_waited else order + prompts
        if self.is_short:
            order.sort(key=lambda item: item[0].arrival)
        return order, prompts

    def _cut(self, sequence: TargetSequence, round_: Round | None, left: int, *, must: bool) -> TargetWork | None:
        """The round, if it fits or `must` run alone; else a piece of the tokens before it."""
        assert sequence.slot is not None
        start = self._pool.length(sequence.slot)
        if sequence.owes_prompt_logprobs:
            return self._cut_scored(sequence, start, left)
        behind = len(sequence.tokens) - start  # at least 1: the last token has not run (invariant 5)
        if round_ is not None:
            tokens = [*sequence.tokens[start:], *sequence.drafted(round_)]
            if len(tokens) <= left or (behind == 1 and must):
                return TargetWork(sequence, round_, Chunk(sequence.slot, tokens, start, behind - 1))
        piece = min(behind - 1, left)
        if piece < 1:
            return None
        return TargetWork(sequence, None, Chunk(sequence.slot, sequence.tokens[start : start + piece], start, piece))

    def _cut_scored(self, sequence: TargetSequence, start: int, left: int) -> TargetWork | None:
        """A piece of a prompt whose tokens are scored, each by the row before it.

        It ends before the last token of the prompt, and has no round. After a preemption it has logits only for tokens
        that were not scored before.
        """
        assert sequence.slot is not None
        tokens = sequence.opening.prompt[start:-1][:left]
        if not tokens:
            return None
        logits_from = min(max(0, sequence.scored - 1 - start), len(tokens))
        return TargetWork(sequence, None, Chunk(sequence.slot, tokens, start, logits_from))

    def _is_prompt(self, sequence: TargetSequence) -> bool:
        """Whether tokens before its last one are not in the KV cache."""
        assert sequence.slot is not None
        return len(sequence.tokens) - self._pool.length(sequence.slot) > 1

    # ------------------------------------------------------------------------------------------------------- blocks

    def _take_blocks(self, sequence: TargetSequence, round_: Round | None, plan: Plan) -> bool:
        """Takes blocks for all tokens of a sequence and its round; may preempt others. Returns whether it has them."""
        slot = sequence.slot
        assert slot is not None
        length = len(sequence.tokens) + (0 if round_ is None else len(sequence.drafted(round_)))
        if not self._pool.blocks_needed(slot, length):  # as in most steps
            return True
        begins = self._pool.is_empty(slot)
        # Tokens of a prompt are scored by the rows before them, so those rows must run.
        looks_up = begins and self._prefixes.enabled and not sequence.owes_prompt_logprobs
        # A new sequence leaves each other one a block to grow, or it would soon be preempted itself.
        spare = self._pool.holders if begins else 0
        known = self._adopt(sequence, slot) if looks_up else 0
        given = grow_with_preemption(
            self._pool, slot, length, self._victims(sequence, plan),
            spare=spare, encoder_length=encoder_length(sequence.opening.encoder_input),
        )  # fmt: skip
        if given is None:
            if begins:
                self._pool.rollback(slot, 0)
            return False
        if given:
            plan.preempted += [each for each in self.running if each.slot in given]
        if looks_up:
            plan.looked_up.append((sequence, known))
        return True

    def decode_counts(self, work: Sequence[TargetWork], most: int) -> list[int] | None:
        """How many tokens of each sequence a planned step may write, `most` at most, in the free blocks.

        None if it is 1, if an active sequence has no `Decode` in the step, if one needs more than the decode loop does,
        or if the step writes the first token of a sequence, which is sent at once.
        """
        for item in work:
            if item.round is None or not item.round.decode or item.encodes or not item.sequence.judged_at:
                return None
            if not item.sequence.may_be_decoded:
                return None
        now = time.perf_counter()
        if len(work) < sum(each.is_active(now) for each in self.running):
            return None
        while most > 1:
            counts, needed = list[int](), 0
            for item in work:
                assert item.round is not None
                counts.append(item.sequence.decode_count(item.round, most))
                end = item.chunk.start + len(item.chunk.tokens) + counts[-1] - 1
                needed += self._pool.blocks_needed(item.chunk.slot, end)
            if needed <= self._pool.blocks.num_free:
                return counts if max(counts) > 1 else None
            most = max(counts) // 2
        return None

    def _victims(self, sequence: TargetSequence, plan: Plan) -> Iterator[int]:
        """Sequences that may be preempted: those whose client is long silent, then newer ones, the newest first."""
        now = time.perf_counter()
        served = {item.sequence for item in plan.work}
        others = [each for each in self.running if each is not sequence and each not in served]
        idle = [each for each in others if each.idle_seconds(now) > IDLE_SECONDS]
        later = [each for each in others if each not in idle and each.arrival > sequence.arrival]
        for each in (*idle, *sorted(later, key=lambda each: -each.arrival)):
            if each.slot is not None and not self._pool.is_empty(each.slot):
                yield each.slot


def _may_run(sequence: TargetSequence, round_: Round | None) -> bool:
    """Whether the sequence has work: a round, or a prompt that runs before one."""
    return (
        sequence.slot is not None
        and not sequence.finished
        and not sequence.is_paused
        and (round_ is not None or sequence.prefills)
    )
