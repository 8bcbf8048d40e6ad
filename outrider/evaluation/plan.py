"""Plans a pair: the best γ, its speed-up and operations, and where drafting does not pay.

The formulas are those of `outrider.theory`; their inputs are given, or measured at a running pair.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any

from outrider import theory
from outrider.client import Completion, Prompt
from outrider.evaluation import EvaluationError
from outrider.evaluation.intervals import LEAST_OBSERVATIONS, interval_of_share, ratio_error
from outrider.evaluation.streams import judged_tokens, phase_seconds, target_passes

MAX_GAMMA = 16
"""Default of the largest γ considered: that of both services."""

STREAMS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of streams that a plan considers."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The input of a plan. Times are in target steps: the time in which the target alone writes a token.

    Attributes:
        alpha: α [L 3.1].
        c: time of a draft step [L Def. 3.7].
        round_trip: R, time of a round outside draft and target.
        token_cost: growth of the target's forward pass with each further token in it; 0 in the paper.
        c_hat: ĉ, operations of the draft per token [L Def. 3.10]; None: c.
        hit_rate: share of drafting that the outcome cache saves.
        parallel: one draft step drafts all γ tokens.
        max_gamma: the largest γ considered.
        step_ms: a target step in milliseconds; None: unknown.
        by_position: α of each position, given that all positions before it are accepted; empty: α at all of them.
        share: share of rounds that have a draft; the others write one token. Below 1 with a drafter such as `lookup`.
    """

    alpha: float
    c: float
    round_trip: float = 0.0
    token_cost: float = 0.0
    c_hat: float | None = None
    hit_rate: float = 0.0
    parallel: bool = False
    max_gamma: int = MAX_GAMMA
    step_ms: float | None = None
    by_position: tuple[float, ...] = ()
    share: float = 1.0

    @property
    def ways(self) -> dict[str, Any]:
        """The last arguments of the theory's functions."""
        return {"verify_cost": self.verify_cost, "hit_rate": self.hit_rate, "parallel": self.parallel}

    def verify_cost(self, tokens: int) -> float:
        """Time of the target's forward pass over so many tokens."""
        return 1 + self.token_cost * (tokens - 1)

    @property
    def alphas(self) -> theory.Alpha:
        """α by position if it is known, else α."""
        return self.by_position or self.alpha

    def tokens(self, gamma: int, alpha: float | None = None) -> float:
        """Expected tokens of a round; with one other α if given."""
        return 1 + self.share * (theory.expected_tokens(self.alphas if alpha is None else alpha, gamma) - 1)

    def round_time(self, gamma: int) -> float:
        """Mean time of a round."""
        drafted = theory.round_time(gamma, self.c, self.round_trip, **self.ways)
        return self.share * drafted + (1 - self.share) * (1 + self.round_trip)

    def improvement(self, gamma: int, alpha: float | None = None) -> float:
        """Speed-up of this γ, over the target alone; with one other α if given."""
        return self.tokens(gamma, alpha) / self.round_time(gamma)

    def operations(self, gamma: int, alpha: float | None = None) -> float:
        """Operations per token of this γ, over the target alone; with one other α if given."""
        chosen, c_hat = self.alphas if alpha is None else alpha, self.c if self.c_hat is None else self.c_hat
        drafted = theory.operations(chosen, gamma, c_hat, parallel=self.parallel)
        share = self.share * theory.expected_tokens(chosen, gamma) / self.tokens(gamma, alpha)  # of tokens
        return share * drafted + (1 - share)

    def best_gamma(self, alpha: float | None = None) -> int:
        """The fastest γ; 0 if the target alone is faster; with one other α if given."""
        best = max(range(1, self.max_gamma + 1), key=lambda gamma: self.improvement(gamma, alpha))
        return best if self.improvement(best, alpha) > 1 else 0

    def of_streams(self, streams: int) -> "Pair":
        """The pair with so many streams in each pass, in steps of the target alone with as many.

        A draft step is assumed to take no longer.
        """
        step = self.verify_cost(streams)
        return replace(
            self, c=self.c / step, round_trip=self.round_trip / step, token_cost=self.token_cost * streams / step
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One γ: expected tokens of a round, speed-up and operations over the target alone."""

    gamma: int
    tokens: float
    speed_up: float
    operations: float


@dataclass(frozen=True, slots=True)
class OfStreams:
    """The best γ of so many streams in each pass, and its speed-up; γ = 0: the target alone is faster."""

    streams: int
    gamma: int
    speed_up: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a pair.

    Attributes:
        gamma: the best γ; 0: drafting does not pay.
        rows: each γ from 1.
        lower_bound: speed-up of γ = 1 [L Cor. 3.9]; None with a parallel draft.
        oracle: that of the best γ of each round in hindsight [L 3.5], up to `max_gamma`; None with a parallel draft.
        target_share: share of a round of one stream, with the fastest γ, in which the target works.
        draft_share: that in which the draft works.
        drafts: drafts that one target feeds, each with one stream, if no pass holds two streams.
        least_alpha: the α of all positions below which drafting is slower; None: no α pays.
        most_round_trip: the R above which drafting is slower; below 0: it never pays.
        of_streams: several streams in each pass; empty if a pass does not grow with its tokens.
    """

    pair: Pair
    gamma: int
    rows: tuple[Row, ...]
    lower_bound: float | None
    oracle: float | None
    target_share: float
    draft_share: float
    drafts: float
    least_alpha: float | None
    most_round_trip: float
    of_streams: tuple[OfStreams, ...]

    @property
    def fastest(self) -> Row:
        """The row of the best γ; where drafting does not pay, of the γ that loses least."""
        return max(self.rows, key=lambda row: row.speed_up)

    @property
    def tokens_per_second(self) -> tuple[float, float] | None:
        """Of one stream: with the fastest γ, and of the target alone; None without the time of a step."""
        step = self.pair.step_ms
        return None if step is None else (1e3 * self.fastest.speed_up / step, 1e3 / step)


def make_plan(pair: Pair) -> Plan:
    """Return the plan of a pair.

    Raises:
        ValueError: a value is out of range; the text names it.
    """
    rows = tuple(
        Row(gamma, pair.tokens(gamma), pair.improvement(gamma), pair.operations(gamma))
        for gamma in range(1, pair.max_gamma + 1)
    )
    fastest = max(rows, key=lambda row: row.speed_up).gamma
    whole = pair.round_time(fastest)
    verify = 1 + pair.share * (pair.verify_cost(fastest + 1) - 1)
    limits = {"max_gamma": pair.max_gamma, **pair.ways}
    bound = limit = None
    if not pair.parallel:
        bound = pair.improvement(1)
        # The α with as many tokens in a round of any γ as the largest one has.
        endless = 1 - 1 / theory.expected_tokens(pair.alphas, pair.max_gamma)
        endless = pair.share * endless / (1 - endless + pair.share * endless)
        limit = theory.oracle(endless, (1 - pair.hit_rate) * pair.c + pair.token_cost, pair.round_trip)
    return Plan(
        pair=pair,
        gamma=pair.best_gamma(),
        rows=rows,
        lower_bound=bound,
        oracle=limit,
        target_share=verify / whole,
        draft_share=(whole - verify - pair.round_trip) / whole,
        drafts=whole / verify,
        # What the drafted rounds gain pays for the network of all rounds.
        least_alpha=theory.break_even_alpha(pair.c, pair.round_trip / pair.share, **limits),
        most_round_trip=pair.share * theory.break_even_round_trip(pair.alphas, pair.c, **limits),
        of_streams=tuple(_of_streams(pair, streams) for streams in STREAMS) if pair.token_cost else (),
    )


def _of_streams(pair: Pair, streams: int) -> OfStreams:
    several = pair.of_streams(streams)
    gamma = several.best_gamma()
    return OfStreams(streams, gamma, several.improvement(gamma) if gamma else 1.0)


# ---------------------------------------------------------------------------------------------------------- measuring

SMALL_GAMMA = 2
"""γ of measured texts, beside the largest one and the target alone."""

# Positions beyond the measured ones accept as often as this many measured ones before them.
_LAST_POSITIONS = 4


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Tokens per second over those of the target alone: the median of the prompts, the least and the most."""

    median: float
    low: float
    high: float

    @property
    def is_unclear(self) -> bool:
        """Some prompts are faster with drafts, and some slower."""
        return self.low < 1 < self.high


@dataclass(frozen=True, slots=True)
class Measurement:
    """A pair as measured, one text at a time.

    Attributes:
        prompts: how many.
        judged: drafted tokens that the target judged: α is their mean.
        interval: of α, of 95 %, by prompt; None for too few prompts.
        speed_ups: by γ.
    """

    pair: Pair
    prompts: int
    judged: int
    interval: tuple[float, float] | None
    speed_ups: Mapping[int, SpeedUp]


def measure(
    complete: Callable[..., Completion],
    prompts: Sequence[Prompt],
    *,
    max_gamma: int = MAX_GAMMA,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Measurement:
    """Measure a running pair: each prompt with the target alone and with each of some γ, in turns.

    Args:
        complete: asks the draft service for a text; it takes a prompt and `gamma`.
        max_gamma: the largest γ of a proposal.
        report: called with the number of texts done, and of all.

    Raises:
        EvaluationError: the texts are too short, or the service drafts nothing.
    """
    by_gamma: dict[int, list[_Sums]] = {gamma: [] for gamma in sorted({0, min(SMALL_GAMMA, max_gamma), max_gamma})}
    count = len(by_gamma) * (1 + len(prompts))
    for nth, prompt in enumerate([prompts[0], *prompts]):
        for place, (gamma, texts) in enumerate(by_gamma.items(), 1):
            completion = complete(prompt, gamma=gamma)
            if nth:  # the first turn warms up
                texts.append(_sums_of(completion))
            report(nth * len(by_gamma) + place, count)
    # Without the prompts of which a text ended in its first round: there is no time of a round.
    turns = [texts for texts in zip(*by_gamma.values(), strict=True) if all(sums.rounds for sums in texts)]
    if not turns:
        raise EvaluationError("the texts ended after their first round; ask for longer ones")
    by_gamma = dict(zip(by_gamma, map(list, zip(*turns, strict=True)), strict=True))
    alone = by_gamma.pop(0)
    if not any(sums.drafted for texts in by_gamma.values() for sums in texts):
        raise EvaluationError("the draft service drafted nothing; its drafter may be none: name another one")
    return _measurement(alone, by_gamma, max_gamma)


@dataclass(slots=True)
class _Sums:
    """Sums over texts of one γ, without the first round of each, which reads the prompt; times in seconds.

    Attributes:
        proposals: drafted rounds, first ones included.
        chances: rounds that could have had a draft, first ones included; the last token of a text has none.
    """

    rounds: int = 0
    proposals: int = 0
    chances: int = 0
    tokens: float = 0.0
    drafted: float = 0.0
    judged: int = 0
    accepted: float = 0.0  # expected: Σ β
    time: float = 0.0
    drafting: float = 0.0
    saved: float = 0.0  # of drafting, by the outcome cache
    at_verifier: float = 0.0
    drafted_at: Counter[int] = field(default_factory=Counter)  # by position
    accepted_at: Counter[int] = field(default_factory=Counter)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.time


_TIMES = ("time", "drafting", "saved", "at_verifier")


def _sums_of(completion: Completion) -> _Sums:
    times, statistics = completion.timings, completion.statistics
    whole, first = phase_seconds(times), phase_seconds(times.first_round)
    later = {phase: whole[phase] - first[phase] for phase in whole}
    tokens = completion.usage.completion_tokens
    passes, judged = target_passes(statistics, tokens), judged_tokens(statistics)
    share = (passes - 1) / passes
    return _Sums(
        rounds=passes - 1,
        proposals=statistics.num_drafts,
        chances=max(statistics.num_drafts, passes - 1),
        tokens=share * tokens,
        drafted=share * statistics.num_draft_tokens,
        judged=judged,
        accepted=judged * statistics.alpha,
        time=(times.total_us - times.time_to_first_token_us - times.failover_us) / 1e6,
        drafting=later["draft"],
        saved=times.saved_us / 1e6,
        at_verifier=later["queue"] + later["forward"] + later["verify"],
        drafted_at=Counter(dict(enumerate(statistics.num_draft_tokens_per_pos))),
        accepted_at=Counter(dict(enumerate(statistics.num_accepted_tokens_per_pos))),
    )


def _typical(texts: Sequence[_Sums]) -> _Sums:
    """The sums over texts, with the times of the median text's round: one stall does not decide."""
    found = _Sums()
    for each in fields(_Sums):
        values = [getattr(text, each.name) for text in texts]
        setattr(found, each.name, sum(values, start=type(values[0])()))
    for name in _TIMES:
        setattr(found, name, found.rounds * median(getattr(text, name) / text.rounds for text in texts))
    return found


def _measurement(alone: Sequence[_Sums], by_gamma: Mapping[int, Sequence[_Sums]], max_gamma: int) -> Measurement:
    target, all_sums = _typical(alone), [_typical(texts) for texts in by_gamma.values()]
    step = target.time / target.rounds
    drafting, saved = sum(sums.drafting for sums in all_sums), sum(sums.saved for sums in all_sums)
    drafted = sum(sums.drafted for sums in all_sums)
    drafts = [(sums.drafted / sums.rounds, (sums.drafting + sums.saved) / sums.rounds) for sums in all_sums]
    passes = [(sums.drafted / sums.rounds, sums.at_verifier / sums.rounds) for sums in (target, *all_sums)]
    judged = sum(sums.judged for sums in all_sums)
    pair = Pair(
        alpha=min(1.0, sum(sums.accepted for sums in all_sums) / judged),
        c=(_slope(drafts) or (drafting + saved) / drafted) / step,
        token_cost=(_slope(passes) or 0.0) / step,
        hit_rate=saved / (drafting + saved) if saved else 0.0,
        max_gamma=max_gamma,
        step_ms=step * 1e3,
        by_position=_by_position(all_sums, max_gamma),
        share=sum(sums.proposals for sums in all_sums) / sum(sums.chances for sums in all_sums),
    )
    # R is the rest of the measured rounds, after c and the passes: the network, and the other work of both services.
    known = sum(
        sums.rounds + pair.token_cost * sums.drafted + (1 - pair.hit_rate) * pair.c * sums.drafted for sums in all_sums
    )
    rest = sum(sums.time for sums in all_sums) / step - known
    return Measurement(
        pair=replace(pair, round_trip=max(0.0, rest / sum(sums.rounds for sums in all_sums))),
        prompts=len(alone),
        judged=judged,
        interval=_interval(list(zip(*by_gamma.values(), strict=True))),
        speed_ups={gamma: _speed_up(alone, texts) for gamma, texts in by_gamma.items()},
    )


def _speed_up(alone: Sequence[_Sums], texts: Sequence[_Sums]) -> SpeedUp:
    ratios = [text.speed / own.speed for own, text in zip(alone, texts, strict=True)]
    return SpeedUp(median(ratios), min(ratios), max(ratios))


def _interval(by_prompt: Sequence[Sequence[_Sums]]) -> tuple[float, float] | None:
    """Of α, from the texts of each prompt."""
    accepted = [sum(text.accepted for text in texts) for texts in by_prompt]
    judged = [sum(text.judged for text in texts) for texts in by_prompt]
    known = [each for each in zip(accepted, judged, strict=True) if each[1]]
    if len(known) < LEAST_OBSERVATIONS:
        return None
    accepted, judged = map(list, zip(*known, strict=True))
    error = ratio_error(accepted, judged)
    return None if error is None else interval_of_share(sum(accepted) / sum(judged), error, len(known))


def _by_position(all_sums: Sequence[_Sums], max_gamma: int) -> tuple[float, ...]:
    """α of positions 1..max_gamma. They differ: where many tokens are accepted the text is easy."""
    reached = [1.0]  # share of proposals of which all tokens up to a position are accepted
    while drafted := sum(sums.drafted_at[len(reached) - 1] for sums in all_sums):
        accepted = sum(sums.accepted_at[len(reached) - 1] for sums in all_sums)
        reached.append(min(reached[-1], accepted / drafted))
    return extended([after / before if before else 0.0 for before, after in pairwise(reached)], max_gamma)


def extended(alphas: Sequence[float], max_gamma: int) -> tuple[float, ...]:
    """α of positions 1..max_gamma: those beyond the known ones accept as often as the last known four together."""
    last = alphas[:max_gamma][-_LAST_POSITIONS:]
    beyond = math.prod(last) ** (1 / len(last))
    return (*alphas[:max_gamma], *[beyond] * (max_gamma - len(alphas)))


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of the line through (drafted tokens, time) of a round, at least 0; None of rounds that are too much alike."""
    widths, times = zip(*points, strict=True)
    if max(widths) - min(widths) < 1:
        return None
    return max(0.0, linear_regression(widths, times).slope)
