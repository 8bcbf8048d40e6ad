"""Who runs, who waits, and what goes into a pass.

A pass takes rounds that are ready, then pieces of prompts, within a budget of tokens; whoever was served goes to the
back. A sequence begins when there are blocks for all of it. Where blocks run out, those who came last give theirs back
and are run again when there is room: the oldest always goes on, so every sequence ends.

It belongs to the engine's thread.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.runtime.kv_cache import KVPool, PrefixCache, grow_with_preemption
from outrider.runtime.model_runner import Chunk
from outrider.service.best_effort import Component
from verifier_service.request import Round
from verifier_service.sequence import TargetSequence

PREFIX_CACHE = Component("prefix_cache")

MAX_BACKLOG = 64  # unread replies at which a sequence pauses
IDLE_SECONDS = 1.0  # without a round: whoever owes one for so long gives way to all others
# How long an isolated sequence may hold its turn without a round.
TURN_SECONDS = 5.0
# Of a pass, while prompts wait: rounds never take all of it.
PROMPT_SHARE = 0.25


_Ready = tuple[TargetSequence, Round | None]


@dataclass(frozen=True, slots=True)
class TargetWork:
    """One sequence's share of a pass; `round` is None where it is prompt alone."""

    sequence: TargetSequence
    round: Round | None
    chunk: Chunk


@dataclass(slots=True)
class Plan:
    """A pass in the making, and what became of others for its sake."""

    work: list[TargetWork] = field(default_factory=list)
    begun: list[tuple[TargetSequence, int]] = field(default_factory=list)  # with the tokens that were known
    preempted: list[TargetSequence] = field(default_factory=list)


class Scheduler:
    """The sequences of one engine.

    Args:
        pool: whose blocks they hold.
        prefixes: where their beginnings may be known.
        pass_tokens: tokens of a pass at most, save that one round always fits.
        max_sequences: how many hold a place at once.
    """

    def __init__(self, pool: KVPool, prefixes: PrefixCache, *, pass_tokens: int, max_sequences: int) -> None:
        self.running: list[TargetSequence] = []  # those longest unserved first
        self.waiting: deque[TargetSequence] = deque()
        self._pool = pool
        self._prefixes = prefixes
        self._pass_tokens = pass_tokens
        self._max_sequences = max_sequences
        self.is_short = False  # of blocks, at the last plan: then the oldest go first
        self._isolated: TargetSequence | None = None  # whose turn it is
        self._turn_began = 0.0
        self._was_isolated = False  # the last step held an isolated sequence
        self._came = 0

    # -------------------------------------------------------------------------------------------------- come and go

    def add(self, sequence: TargetSequence) -> bool:
        """Gives a sequence a place, or lets it wait; says which. Who was in progress elsewhere waits before all who
        begin.
        """
        self._came += 1
        sequence.came = self._came
        if len(self.running) < self._max_sequences:
            self._place(sequence)
            return True
        resumed = sum(each.opening.resumed for each in self.waiting)  # they are in front
        self.waiting.insert(resumed if sequence.opening.resumed else len(self.waiting), sequence)
        return False

    def remove(self, sequence: TargetSequence) -> None:
        """Takes a sequence out, with all it held; the next in the queue has its place."""
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
            self._place(self.waiting.popleft())

    def settle(self, sequence: TargetSequence) -> None:
        """Invariant 5, after a verdict: the cache keeps the committed tokens but the last; rejected ones leave it."""
        if sequence.slot is None:
            return
        self._pool.rollback(sequence.slot, len(sequence.tokens) - 1)
        if sequence.finished or not sequence.prefix_kept:  # early: what begins alike may come while this one goes on
            self._keep(sequence)
            sequence.prefix_kept = True
        if sequence.finished:  # now: its client may take long to read the rest
            self._pool.rollback(sequence.slot, 0)

    def _place(self, sequence: TargetSequence) -> None:
        opening = sequence.opening
        sequence.slot = self._pool.allocate(len(opening.prompt) + opening.max_new_tokens)
        self.running.append(sequence)

    def _keep(self, sequence: TargetSequence) -> None:
        slot = sequence.slot
        assert slot is not None
        PREFIX_CACHE.run(lambda: self._prefixes.keep(slot, sequence.tokens, sequence.opening.cache_salt), None)

    def _adopt(self, sequence: TargetSequence, slot: int) -> int:
        """Lets an empty slot hold the known prefix of a sequence; returns its length."""
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
        """Gives the turn to the isolated sequence that came first, if it is free; returns that sequence.

        A turn lasts until the first verdict. Its sequence sends a round only once the turn has begun, and nothing of it
        is run before: so where the process ends meanwhile, no other isolated sequence can have ended it.
        """
        if (holder := self.isolated) is not None and holder.is_isolated and not holder.finished:
            return None
        waiting = [each for each in self.running if each.is_isolated and not each.finished]
        self._isolated = min(waiting, key=lambda each: each.came, default=None)
        self._turn_began = time.perf_counter()
        return self._isolated

    def overdue(self) -> TargetSequence | None:
        """The sequence that has the turn and has sent no round for too long."""
        holder = self.isolated
        is_waited_for = holder is not None and holder.is_isolated and not holder.finished and not holder.rounds
        return holder if is_waited_for and time.perf_counter() - self._turn_began > TURN_SECONDS else None

    # ------------------------------------------------------------------------------------------------------- a pass

    def plan(self, rounds: Sequence[tuple[TargetSequence, Round | None]]) -> Plan:
        """Fills a pass from sequences and the rounds to judge now, in the order given.

        Rounds on prefixes that are there come first, and leave a share to prompts. A prompt too long for what is left
        is cut. While blocks are short, age goes before both, so that the oldest gets what it needs. An isolated
        sequence has every other step to itself.
        """
        ready = self._isolate([item for item in rounds if _may_run(*item)])
        prompts = [item for item in ready if self._behind(item[0]) > 1]
        order = [item for item in ready if self._behind(item[0]) == 1 and item[1] is not None] + prompts
        if self.is_short:
            order.sort(key=lambda item: item[0].came)
            self.is_short = False
        plan = Plan()
        budget = self._pass_tokens
        kept_back = int(PROMPT_SHARE * budget) if prompts else 0
        for sequence, round_ in order:
            is_prompt = self._behind(sequence) > 1
            room = budget if is_prompt else budget - kept_back
            if room < 1 and plan.work:
                continue
            if not self._has_blocks(sequence, round_, plan):
                self.is_short = True
                continue
            work = self._cut(sequence, round_, room, must=not plan.work)
            if work is not None:
                budget -= len(work.chunk.tokens)
                plan.work.append(work)
        if plan.work:
            served = {id(item.sequence) for item in plan.work}
            self.running.sort(key=lambda sequence: id(sequence) in served)
        return plan

    def _isolate(self, ready: list[_Ready]) -> list[_Ready]:
        """The isolated sequence whose turn it is, once it has a round; or all that are not isolated."""
        isolated = [item for item in ready if item[0] is self._isolated and item[1] is not None]
        others = [item for item in ready if not item[0].is_isolated]
        self._was_isolated = bool(isolated) and not (others and self._was_isolated)
        return isolated if self._was_isolated else others

    def _cut(self, sequence: TargetSequence, round_: Round | None, room: int, *, must: bool) -> TargetWork | None:
        """The round where it fits, or is alone and `must`; else a piece of what is to be run before it."""
        assert sequence.slot is not None
        start = self._pool.length(sequence.slot)
        behind = len(sequence.tokens) - start  # at least 1: the last token is always still to run (invariant 5)
        if round_ is not None:
            tokens = [*sequence.tokens[start:], *sequence.drafted(round_)]
            if len(tokens) <= room or (behind == 1 and must):
                return TargetWork(sequence, round_, Chunk(sequence.slot, tokens, start, behind - 1))
        piece = min(behind - 1, room)
        if piece < 1:
            return None
        return TargetWork(sequence, None, Chunk(sequence.slot, sequence.tokens[start : start + piece], start, piece))

    def _behind(self, sequence: TargetSequence) -> int:
        """Tokens that are not in the cache."""
        assert sequence.slot is not None
        return len(sequence.tokens) - self._pool.length(sequence.slot)

    # ------------------------------------------------------------------------------------------------------- blocks

    def _has_blocks(self, sequence: TargetSequence, round_: Round | None, plan: Plan) -> bool:
        """Takes the blocks for all of a sequence's tokens and its round, from others where it may."""
        slot = sequence.slot
        assert slot is not None
        begins = self._pool.is_empty(slot)
        known = self._adopt(sequence, slot) if begins else 0
        length = len(sequence.tokens) + (0 if round_ is None else len(sequence.drafted(round_)))
        # Whoever begins leaves each of the others a block to grow into, or would soon have to give way again.
        spare = self._pool.holders if begins else 0
        given = grow_with_preemption(self._pool, slot, length, self._victims(sequence, plan), spare=spare)
        if given is None:
            if begins:
                self._pool.rollback(slot, 0)
            return False
        if given:
            plan.preempted += [each for each in self.running if each.slot in given]
        if begins:
            plan.begun.append((sequence, known))
        return True

    def _victims(self, sequence: TargetSequence, plan: Plan) -> Iterator[int]:
        """Who gives way to a sequence: those that have long owed a round, then those that came after it, last first."""
        now = time.perf_counter()
        served = {id(item.sequence) for item in plan.work}
        others = [each for each in self.running if each is not sequence and id(each) not in served]
        idle = [each for each in others if each.idle_since(now) > IDLE_SECONDS]
        later = [each for each in others if each not in idle and each.came > sequence.came]
        for each in (*idle, *sorted(later, key=lambda each: -each.came)):
            if each.slot is not None and self._holds(each):
                yield each.slot

    def _holds(self, sequence: TargetSequence) -> bool:
        return sequence.slot is not None and not self._pool.is_empty(sequence.slot)


def _may_run(sequence: TargetSequence, round_: Round | None) -> bool:
    """Whether there is something to run now: a round, or a prompt that no round was judged on yet."""
    return (
        sequence.slot is not None
        and not sequence.finished
        and sequence.backlog < MAX_BACKLOG
        and (round_ is not None or not sequence.judged_at)
    )
