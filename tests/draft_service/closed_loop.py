"""A verifier and its sequences in simulated time: each sequence drafts, waits for a step, and drafts again.

Policies, cost model and lingering are the services' own. Times and acceptances are drawn at random.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from draft_service.cost_model import CostModel, JudgedRound
from draft_service.speculation import Adaptive, Policy
from draft_service.statistics import AcceptanceStatistics
from outrider.service.fitted_cost import CostLine, FittedCost
from verifier_service.sequence import Turnaround, seconds_to_linger

CEILING = 16
MAX_LINGER = 0.02
SPREAD = 0.2  # of drafting and round trip together: deviation over mean
NOISE = 0.05  # of a step


@dataclass(slots=True)
class Draft:
    """One sequence's draft. Times are in seconds.

    Attributes:
        alpha: the chance of each drafted token to be accepted.
        step: one pass of the draft.
        hidden: share of its proposals that were drafted before the verdict came.
        later: α of the other tokens of one pass, by position.
    """

    alpha: float
    step: float = 0.001
    round_trip: float = 0.001
    hidden: float = 0.0
    later: Sequence[float] = ()

    def alpha_at(self, position: int) -> float:
        """`position` is that in the proposal, from 0."""
        in_pass = position % self.tokens_per_pass
        return self.later[in_pass - 1] if in_pass else self.alpha

    @property
    def tokens_per_pass(self) -> int:
        return 1 + len(self.later)

    def expected_tokens(self, gamma: int) -> float:
        """Mean tokens of a round: the accepted ones and the next one."""
        tokens = reached = 1.0
        for position in range(gamma):
            reached *= self.alpha_at(position)
            tokens += reached
        return tokens


def adaptive(sequences: int = 1, *, is_shared: bool = True, tokens_per_pass: int = 1) -> list[Adaptive]:
    """A policy for each sequence: all of one draft service, or each of its own."""
    shared = (AcceptanceStatistics(), CostModel(tokens_per_pass))
    policies = []
    for _ in range(sequences):
        statistics, costs = shared if is_shared else (AcceptanceStatistics(), CostModel(tokens_per_pass))
        policies.append(Adaptive(5, ceiling=CEILING, statistics=statistics, costs=costs))
    return policies


class DecodeOnly(Policy):
    """The target alone."""

    pause = 64

    def next(self, most: int) -> int:
        return 0

    def observe(self, round_: JudgedRound) -> None: ...


@dataclass(slots=True, eq=False)
class Stream:
    """A sequence in the loop."""

    draft: Draft
    policy: Policy
    gamma: int = 0
    decode: int = 0  # tokens left of the current Decode
    judged: float = 0.0
    overhead: float | None = None
    drafting: float = 0.0
    must_read: bool = False  # tokens of a Decode, before it drafts
    unlearned: JudgedRound | None = None
    gammas: list[int] = field(default_factory=list)
    turnaround: Turnaround = field(default_factory=Turnaround)

    def learn(self) -> None:
        """As `SequenceGamma.learn`."""
        round_, self.unlearned = self.unlearned, None
        if round_ is not None:
            self.policy.observe(round_)


class ClosedLoop:
    """The loop. `cost` is that of a step; a step takes the share `contention` longer while all sequences draft."""

    def __init__(
        self, drafts: Sequence[Draft], policies: Sequence[Policy], cost: CostLine, *, contention: float = 0.0
    ) -> None:
        self.streams = [Stream(draft, policy) for draft, policy in zip(drafts, policies, strict=True)]
        self._step_cost = cost
        self._contention = contention
        self._random = random.Random(1)
        self._cost = FittedCost([(n, cost.seconds(n)) for n in (1, 17)])
        self._now = 0.0
        self._step_ended = 0.0
        self._order = count()
        self._coming: list[tuple[float, int, Stream]] = []
        self._ready: dict[Stream, float] = {}
        for stream in self.streams:
            self._begin_round(stream)

    def keep(self, streams: int) -> None:
        """End all other sequences."""
        gone, self.streams = self.streams[streams:], self.streams[:streams]
        self._ready = {stream: at for stream, at in self._ready.items() if stream not in gone}
        self._coming = [entry for entry in self._coming if entry[2] not in gone]
        heapq.heapify(self._coming)

    def run(self, seconds: float) -> float:
        """Run for so long. Return tokens a second of all sequences together.

        Each round counts with its expected tokens: γ is chosen before any draw of the round, so the mean is the same,
        and the rate has a fraction of the noise.
        """
        until, began, tokens = self._now + seconds, self._now, 0.0
        while self._now < until:
            tokens += self._step()
        return tokens / (self._now - began)

    def _begin_round(self, stream: Stream) -> None:
        draft, was_drafting = stream.draft, stream.gamma > 0
        if not stream.policy.is_prepared:
            stream.learn()
        stream.gamma = stream.policy.next(16)
        stream.gammas.append(stream.gamma)
        stream.learn()
        if stream.gamma:
            stream.policy.prepare()
        hidden = self._random.random() < draft.hidden
        mean = draft.round_trip + (0.0 if hidden else -(-stream.gamma // draft.tokens_per_pass) * draft.step)
        seconds = self._random.gammavariate(SPREAD**-2, mean * SPREAD**2)
        stream.must_read = stream.gamma > 0 and not was_drafting and stream.judged > 0
        stream.decode = 0 if stream.gamma else max(1, stream.policy.pause)
        stream.drafting = seconds * (1 - draft.round_trip / mean)
        stream.overhead = seconds if was_drafting and stream.gamma else None
        heapq.heappush(self._coming, (self._now + seconds, next(self._order), stream))

    def _receive(self) -> Iterator[Stream]:
        while self._coming and self._coming[0][0] <= self._now:
            at, _, stream = heapq.heappop(self._coming)
            self._ready[stream] = at
            if stream.judged:
                stream.turnaround.add(at - stream.judged)
            yield stream

    def _wait(self) -> None:
        """Wait for a first round, then linger as the engine does."""
        if not self._ready:
            self._now = max(self._now, self._coming[0][0])
        for _ in self._receive():
            pass
        bound = min(MAX_LINGER, self._cost.line.fixed)
        since = max(self._step_ended, min(self._ready.values()))
        owing = (entry[2] for entry in self._coming)
        due = {
            each: each.judged + latest for each in owing if (latest := each.turnaround.longest_expected()) is not None
        }
        while (seconds := seconds_to_linger(self._now, since, due.values(), bound)) > 0:
            self._now = min(self._now + seconds, self._coming[0][0])
            for arrived in self._receive():
                due.pop(arrived, None)

    def _step(self) -> float:
        self._wait()
        began = self._now
        width = sum(stream.gamma + 1 for stream in self._ready)
        drafting = sum(stream.gamma > 0 for stream in self.streams) / len(self.streams)
        seconds = self._step_cost.seconds(width) * (1 + self._contention * drafting)
        seconds *= self._random.uniform(1 - NOISE, 1 + NOISE)
        self._cost.add(width, seconds)
        self._now = self._step_ended = began + seconds
        sequences = len(self._ready)
        return sum(self._judge(stream, width, sequences) for stream in list(self._ready))

    def _judge(self, stream: Stream, tokens: int, sequences: int) -> float:
        accepted = 0
        while accepted < stream.gamma and self._random.random() < stream.draft.alpha_at(accepted):
            accepted += 1
        stream.learn()
        stream.unlearned = JudgedRound(
            gamma=stream.gamma,
            drafted=stream.gamma,
            judged=min(accepted + 1, stream.gamma),
            accepted=accepted,
            seconds=None if stream.must_read else self._now - stream.judged,
            overhead=stream.overhead,
            drafting=stream.drafting,
            at_verifier=self._now - self._ready[stream],
            step=self._cost.line,
            active=len(self.streams),
            tokens=tokens,
            sequences=sequences,
        )
        stream.judged = self._ready[stream] = self._now
        expected = stream.draft.expected_tokens(stream.gamma)
        stream.decode -= 1
        if stream.decode <= 0:
            del self._ready[stream]
            self._begin_round(stream)
        return expected
