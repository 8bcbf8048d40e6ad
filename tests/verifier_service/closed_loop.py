"""A verifier and its drafts as a simulation: so many sequences that draft, wait for a pass, and draft again.

Passes, lingering and the order of things are the engine's, times and acceptances are drawn; nothing runs, so that a
machine's speed is no part of it.
"""

import heapq
import random
from dataclasses import dataclass, field
from itertools import count

from outrider.service.cost_model import FittedCost
from verifier_service.gamma_cap import GammaCap
from verifier_service.linger import Turnaround, seconds_to_linger

MAX_LINGER = 0.02
DECODED_ALONE = (32, 128)  # tokens of a first and of a longest Decode
SPREAD = 0.3  # of a turnaround: its deviation over its mean


@dataclass(frozen=True, slots=True)
class World:
    """What everything takes, in seconds, and how good the drafts are."""

    fixed: float
    per_token: float
    turnaround: float
    draft_step: float
    alpha: float
    network: float = 0.001  # the turnaround of a Decode


@dataclass(slots=True, eq=False)
class Sequence:
    """One of them."""

    cap: int | None = None
    gamma: int = 0
    decode: int = 0  # tokens left of the Decode under way
    alone: int = DECODED_ALONE[0]
    length: int = 0
    arrived: float = 0.0
    judged: float = 0.0
    answers: Turnaround = field(default_factory=Turnaround)


class ClosedLoop:
    """The loop; `caps` decides, where it is given.

    Attributes:
        told: the caps in force, one after the other.
        world: may be changed between runs.
    """

    def __init__(self, world: World, sequences: int, *, gamma: int, caps: GammaCap | None = None, seed: int = 1):
        self.world = world
        self.sequences: list[Sequence] = []
        self.told: list[int | None] = [None]
        self._gamma = gamma
        self._caps = caps
        self._chance = random.Random(seed)
        self._cost = FittedCost([(n, world.fixed + n * world.per_token) for n in (1, gamma + 1)])
        self._now = 0.0
        self._pass_ended = 0.0
        self._order = count()
        self._coming: list[tuple[float, int, Sequence]] = []
        self._ready: dict[Sequence, float] = {}
        self.resize(sequences)

    def resize(self, sequences: int) -> None:
        """So many sequences from now on; the oldest leave."""
        while len(self.sequences) > sequences:
            gone = self.sequences.pop(0)
            self._ready.pop(gone, None)
            self._coming = [entry for entry in self._coming if entry[2] is not gone]
            heapq.heapify(self._coming)
        while len(self.sequences) < sequences:
            self.sequences.append(Sequence(cap=None if self._caps is None else self._caps.cap))
            self._answer(self.sequences[-1])

    def run(self, passes: int) -> float:
        """So many passes; returns tokens a second of all sequences together."""
        began, tokens = self._now, 0
        for _ in range(passes):
            tokens += self._pass()
        return tokens / (self._now - began)

    def _answer(self, sequence: Sequence) -> None:
        """The next round of a sequence is on its way."""
        sequence.gamma = self._gamma if sequence.cap is None else min(self._gamma, sequence.cap)
        if sequence.gamma:
            sequence.alone = DECODED_ALONE[0]
            mean = self.world.turnaround + sequence.gamma * self.world.draft_step
            seconds = self._chance.gammavariate(SPREAD**-2, mean * SPREAD**2)
        else:
            sequence.decode, seconds = sequence.alone, self.world.network
            sequence.alone = min(2 * sequence.alone, DECODED_ALONE[1])
        sequence.arrived = self._now + seconds
        heapq.heappush(self._coming, (sequence.arrived, next(self._order), sequence))

    def _arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            at, _, sequence = heapq.heappop(self._coming)
            self._ready[sequence] = at
            if sequence.judged:
                sequence.answers.add(at - sequence.judged)

    def _wait(self) -> None:
        """For a first round, and then as the engine lingers."""
        if not self._ready:
            self._now = max(self._now, self._coming[0][0])
        self._arrivals()
        bound = min(MAX_LINGER, self._cost.line.fixed)
        while True:
            owing = [each for each in self.sequences if each not in self._ready]
            due = [each.judged + latest for each in owing if (latest := each.answers.latest()) is not None]
            since = max(self._pass_ended, min(self._ready.values()))
            seconds = seconds_to_linger(self._now, since, due, bound)
            if seconds <= 0:
                return
            until = self._now + seconds
            self._now = min(until, self._coming[0][0]) if self._coming else until
            self._arrivals()

    def _pass(self) -> int:
        self._wait()
        width = sum(sequence.gamma + 1 for sequence in self._ready)
        seconds = (self.world.fixed + self.world.per_token * width) * self._chance.uniform(0.98, 1.02)
        self._cost.add(width, seconds)
        self._now += seconds
        self._pass_ended = self._now
        tokens = sum(self._judge(sequence) for sequence in list(self._ready))
        if self._caps is not None:
            self._caps.look({sequence: sequence.length for sequence in self.sequences}, self._cost.line)
            if self._caps.cap != self.told[-1]:
                self.told.append(self._caps.cap)
            for sequence in self.sequences:
                sequence.cap = self._caps.of(sequence)
        return tokens

    def _judge(self, sequence: Sequence) -> int:
        accepted = 0
        while accepted < sequence.gamma and self._chance.random() < self.world.alpha:
            accepted += 1
        if self._caps is not None and sequence.judged:
            self._caps.add(
                sequence,
                drafted=sequence.gamma,
                judged=min(accepted + 1, sequence.gamma),
                accepted=accepted,
                turnaround=sequence.arrived - sequence.judged,
                whole=self._now - sequence.judged,
            )
        sequence.judged = self._now
        sequence.length += accepted + 1
        sequence.decode -= 1
        if sequence.decode <= 0:
            sequence.decode = 0
            del self._ready[sequence]
            self._answer(sequence)
        return accepted + 1
