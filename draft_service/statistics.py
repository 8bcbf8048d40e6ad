"""What one sample reports of itself at its end: how speculation went, and where the time went."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from draft_service.drafters.base import Foresight
from outrider.service.best_effort import Component
from protos.outrider.v1 import draft_service_pb2, speculation_pb2

STATISTICS = Component("speculation_statistics")


@dataclass(slots=True)
class Failovers:
    """What losing verifiers has cost a sample.

    Attributes:
        count: how often it was opened again.
        moves: in how many of them the verifier was draining, and nothing was lost.
        tokens: prompt and output that was handed to the next verifier, over all of them.
        seconds: without a verifier, or while it was being opened at the next.
    """

    count: int = 0
    moves: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of drafted and accepted tokens, under the names that the field uses."""

    num_drafts: int = 0
    num_rounds: int = 0
    drafter: draft_service_pb2.Drafter = draft_service_pb2.DRAFTER_UNSPECIFIED
    num_draft_failures: int = 0
    num_outcome_cache_queries: int = 0
    num_outcome_cache_hits: int = 0
    num_predrafted_tokens: int = 0
    num_wasted_tokens: int = 0
    policy: draft_service_pb2.SpeculationPolicy = draft_service_pb2.SPECULATION_POLICY_UNSPECIFIED
    num_short_drafts: int = 0
    num_draft_recoveries: int = 0
    failovers: Failovers = field(default_factory=Failovers)
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    _beta_sum: float = 0.0
    _beta_count: int = 0
    _asked: int = 0

    def add(self, drafted: int, verdict: speculation_pb2.Verdict, *, asked: int | None = None) -> None:
        """Takes in the verdict on a proposal of `drafted` tokens; 0 where the target wrote alone.

        `asked` is the length that was chosen for it; None is what came.
        """
        asked = drafted if asked is None else asked
        self.num_rounds += 1
        self.num_short_drafts += drafted < asked
        self._asked += asked
        if not drafted:
            return
        self.num_drafts += 1
        missing = drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for position in range(drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < verdict.accepted
        if verdict.beta:
            self._beta_sum += sum(verdict.beta)
            self._beta_count += len(verdict.beta)
        else:  # a rule under which no chance is known: each judged token counts as what became of it
            self._beta_sum += verdict.accepted
            self._beta_count += verdict.judged

    def add_foresight(self, foresight: Foresight) -> None:
        """Takes in what was drafted before a verdict."""
        self.num_outcome_cache_queries += 1
        self.num_outcome_cache_hits += foresight.hit
        self.num_predrafted_tokens += foresight.drafted
        self.num_wasted_tokens += max(0, foresight.drafted - foresight.used)

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens."""
        return sum(self.drafted_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted ones among them."""
        return sum(self.accepted_per_position)

    @property
    def alpha(self) -> float:
        """Mean chance of acceptance over judged positions [L 3.2], or their accepted share; 0 where none was judged."""
        return self._beta_sum / self._beta_count if self._beta_count else 0.0

    @property
    def mean_gamma(self) -> float:
        """Mean of the lengths that were chosen, over rounds; 0 for each token that the target wrote alone."""
        return self._asked / self.num_rounds if self.num_rounds else 0.0

    def to_message(self) -> draft_service_pb2.SpeculationStatistics:
        """The counts as the contract has them."""
        drafted, accepted = self.num_draft_tokens, self.num_accepted_tokens
        return draft_service_pb2.SpeculationStatistics(
            num_drafts=self.num_drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=self.accepted_per_position,
            num_draft_tokens_per_pos=self.drafted_per_position,
            draft_acceptance_rate=accepted / drafted if drafted else 0.0,
            mean_acceptance_length=1 + accepted / self.num_drafts if self.num_drafts else 0.0,
            alpha=self.alpha,
            num_rounds=self.num_rounds,
            drafter=self.drafter,
            num_draft_failures=self.num_draft_failures,
            num_outcome_cache_queries=self.num_outcome_cache_queries,
            num_outcome_cache_hits=self.num_outcome_cache_hits,
            num_predrafted_tokens=self.num_predrafted_tokens,
            num_wasted_tokens=self.num_wasted_tokens,
            policy=self.policy,
            mean_gamma=self.mean_gamma,
            num_short_drafts=self.num_short_drafts,
            num_draft_recoveries=self.num_draft_recoveries,
            num_failovers=self.failovers.count,
            num_drain_moves=self.failovers.moves,
            num_reopened_tokens=self.failovers.tokens,
        )


class TokenWatch(Protocol):
    """Who is told when tokens leave for the client."""

    def first_token(self, seconds: float) -> None:
        """The first one leaves, so long after the request came."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """So many more leave together, so long after those before."""


@dataclass(slots=True)
class Timings:
    """Where one sample's time goes, in seconds since `arrived` (`time.perf_counter()`); `watch` hears of its tokens."""

    arrived: float
    watch: TokenWatch | None = None
    first_token: float | None = None
    draft: float = 0.0
    verdict: float = 0.0
    saved: float = 0.0
    queue_us: int = 0
    forward_us: int = 0
    verify_us: int = 0
    failovers: Failovers = field(default_factory=Failovers)
    _last_token: float = 0.0

    def add(self, waited: float, verdict: speculation_pb2.Verdict) -> None:
        """Takes in a verdict that came `waited` seconds after its proposal had left."""
        self.verdict += waited
        self.queue_us += verdict.timings.queue_us
        self.forward_us += verdict.timings.forward_us
        self.verify_us += verdict.timings.verify_us

    @STATISTICS.quiet
    def tokens_out(self, count: int) -> None:
        """So many tokens leave for the client, together."""
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now - self.arrived
            if self.watch is not None:
                self.watch.first_token(self.first_token)
        elif self.watch is not None:
            self.watch.next_tokens(now - self._last_token, count)
        self._last_token = now

    def to_message(self) -> draft_service_pb2.GenerateTimings:
        """The times until now as the contract has them."""
        return draft_service_pb2.GenerateTimings(
            time_to_first_token_us=_micros(self.first_token or 0.0),
            total_us=_micros(time.perf_counter() - self.arrived),
            draft_us=_micros(self.draft),
            verdict_us=_micros(self.verdict),
            queue_us=self.queue_us,
            forward_us=self.forward_us,
            verify_us=self.verify_us,
            saved_us=_micros(self.saved),
            failover_us=_micros(self.failovers.seconds),
        )


def _micros(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
