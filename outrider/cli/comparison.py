"""One prompt with the draft and without, timed in turns. It draws nothing and starts no service."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from outrider.client import Client, Completion, Event, Options

# Enough tokens for either way to have run each of its steps.
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of writing the text came to.

    `alpha` and `mean_acceptance_length` are None where nothing was drafted. `tokens_per_second` is by the client's
    clock, prompt and wire included, and the median of the repeats.
    """

    tokens: int
    rounds: int
    alpha: float | None
    mean_acceptance_length: float | None
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways side by side. `first_difference` is the first position where any two texts differ, or None."""

    pair: Cost
    target_alone: Cost
    ratio: float
    repeats: int
    first_difference: int | None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared: a prompt and its options at a draft service."""

    client: Client
    prompt: str
    options: Options

    def warm_up(self) -> None:
        """Lets both ways run for a moment, so that neither pays for first times later."""
        for changes in ({}, {"gamma": 0}):
            self._complete(max_new_tokens=_WARM_UP_TOKENS, **changes)

    def stream(self) -> Iterator[Event]:
        """The generation with its rounds, as it comes."""
        return self.client.generate(self.prompt, **self._with(report_rounds=True))

    def compare(self, shown: Completion, repeats: int) -> Comparison:
        """Times both ways in turns, so that whatever else the machine does falls on both.

        Seed and rule are those of `shown`, also where the service chose them.
        """
        fixed: dict[str, Any] = {"seed": shown.seed, "rule": shown.started.rule}
        pair, alone = [], []
        for _ in range(repeats):
            pair.append(_timed(lambda: self._complete(**fixed)))
            alone.append(_timed(lambda: self._complete(**fixed, gamma=0)))
        texts = [shown.token_ids, *(done.token_ids for done, _ in (*pair, *alone))]
        with_draft, without = _cost(pair), _cost(alone)
        return Comparison(
            pair=with_draft,
            target_alone=without,
            ratio=with_draft.tokens_per_second / without.tokens_per_second,
            repeats=repeats,
            first_difference=_first_difference(texts),
        )

    def _complete(self, **changes: Any) -> Completion:
        return self.client.complete(self.prompt, **self._with(**changes))

    def _with(self, **changes: Any) -> Options:
        return cast("Options", {**self.options, **changes})


def _timed(work: Callable[[], Completion]) -> tuple[Completion, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def _cost(runs: list[tuple[Completion, float]]) -> Cost:
    last = runs[-1][0]
    drafted = last.statistics.num_drafts > 0
    return Cost(
        tokens=last.usage.completion_tokens,
        rounds=last.statistics.num_rounds,
        alpha=last.statistics.alpha or None,  # 0 where nothing was drafted, or the rule knows no β
        mean_acceptance_length=last.statistics.mean_acceptance_length if drafted else None,
        tokens_per_second=statistics.median(done.usage.completion_tokens / seconds for done, seconds in runs),
    )


def _first_difference(texts: list[tuple[int, ...]]) -> int | None:
    for position, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return position
    shortest = min(len(text) for text in texts)
    return shortest if any(len(text) > shortest for text in texts) else None
