"""Events put together: what a whole generation came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.client.events import (
    AcceptanceRule,
    Chunk,
    Drafter,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    Round,
    Started,
    Statistics,
    Timings,
    TokenOrigin,
    Usage,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason
    stop: str | None
    stop_token_id: int | None
    usage: Usage
    statistics: Statistics
    timings: Timings
    token_texts: tuple[str, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    rounds: tuple[Round, ...] = ()
    num_resumes: int = 0  # how often it went on at another draft service; see `Finished`


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation. Its own properties speak of the first sample, which is the only one unless `n` was given."""

    started: Started
    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.samples[0].usage

    @property
    def statistics(self) -> Statistics:
        return self.samples[0].statistics

    @property
    def timings(self) -> Timings:
        return self.samples[0].timings

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return self.samples[0].logprobs

    @property
    def seed(self) -> int:
        return self.started.seed

    @property
    def rule(self) -> AcceptanceRule:
        return self.started.rule

    @property
    def drafter(self) -> Drafter:
        """What proposed."""
        return self.started.drafter

    @property
    def lossy(self) -> bool:
        """Whether the text does not follow the target's law: the rule `sigmoid`, or lenience below 1."""
        return self.started.lossy


@dataclass(slots=True)
class Collector:
    """Takes events one by one and holds what they come to.

    Raises (from `completion`):
        ValueError: the events did not begin with `Started`, or end with a `Finished` for each sample.
    """

    started: Started | None = None
    _chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    _finished: dict[int, Finished] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Chunk():
                self._chunks.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event

    def completion(self) -> Completion:
        unfinished = self._chunks.keys() - self._finished.keys()
        if self.started is None or not self._finished or unfinished:
            raise ValueError(
                f"the generation is not whole: started {self.started is not None}, open {sorted(unfinished)}"
            )
        return Completion(self.started, tuple(self._sample(end) for _, end in sorted(self._finished.items())))

    def _sample(self, end: Finished) -> Sample:
        chunks = self._chunks.get(end.index, [])
        told = sum(len(chunk.token_ids) for chunk in chunks)
        kept = slice(max(0, told - end.cut_tokens))
        return Sample(
            index=end.index,
            text="".join(chunk.text for chunk in chunks),
            token_ids=_joined(chunk.token_ids for chunk in chunks)[kept],
            origins=_joined(chunk.origins for chunk in chunks)[kept],
            finish_reason=end.finish_reason,
            stop=end.stop,
            stop_token_id=end.stop_token_id,
            usage=end.usage,
            statistics=end.statistics,
            timings=end.timings,
            token_texts=_joined(chunk.token_texts for chunk in chunks)[kept],
            logprobs=_joined(chunk.logprobs for chunk in chunks)[kept],
            rounds=_joined(chunk.rounds for chunk in chunks),
            num_resumes=end.num_resumes,
        )


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(item for part in parts for item in part)
