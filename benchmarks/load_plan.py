"""What load is put on: how many streams, which prompts, when requests arrive, with which seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from benchmarks.contenders import Task

MIXES = ("short", "long")
# Of the prompt of a long request, as shares of `LoadPlan.long_tokens`: prompts of one length would all prefill alike.
_LONG_SHARES = (1.0, 0.5, 0.75)
_WARM_UP_SEED = 2_000_000

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How much load.

    Attributes:
        streams: of the closed loop: requests in progress at once.
        mixes: of `MIXES`.
        new_tokens: tokens of each text.
        long_tokens: tokens of the longest prompts of the long mix.
        texts_per_stream: texts of a run of the closed loop, over its streams.
        least_texts: texts of such a run at the least.
        short_texts: tokens of each text of the runs of short texts, which have as many streams as the closed loop at
            the most.
        short_texts_per_stream: texts of such a run, over its streams.
        repetitions: how often each run is made, with other seeds.
        rates: of the open loop: arrivals as shares of the capacity that the closed loop found.
        open_seconds: how long requests arrive.
        temperature: of all texts; nothing is filtered.
        factor: how many times as deep the deepened target is; 1: there is none.
        engine_streams: streams at which the engine's own share is taken.
        engine_tokens: tokens of each of their texts.
        tuned: whether threads and processors are tried before.
        static_batches: whether transformers' static batches stand beside the others.
    """

    streams: tuple[int, ...]
    mixes: tuple[str, ...]
    new_tokens: int
    long_tokens: int
    texts_per_stream: int
    least_texts: int
    short_texts: tuple[int, ...]
    short_texts_per_stream: int
    repetitions: int
    rates: tuple[float, ...]
    open_seconds: float
    temperature: float
    factor: int
    engine_streams: int
    engine_tokens: int
    tuned: bool
    static_batches: bool = True

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


FULL = LoadPlan(
    streams=(1, 2, 4, 8, 16, 32),
    mixes=MIXES,
    new_tokens=64,
    long_tokens=384,
    texts_per_stream=2,
    least_texts=8,
    short_texts=(1, 4, 16),
    short_texts_per_stream=8,
    repetitions=3,
    rates=(0.5, 0.8, 1.2),
    open_seconds=8.0,
    temperature=1.0,
    factor=12,
    engine_streams=8,
    engine_tokens=160,
    tuned=True,
)
# Twelve times as slow, in the same time: texts half as long, fewer of them, and of the short mix alone.
DEEPENED = replace(
    FULL,
    mixes=("short",),
    new_tokens=32,
    least_texts=4,
    short_texts_per_stream=2,
    engine_tokens=120,
    static_batches=False,
)
QUICK = LoadPlan(
    streams=(1, 2),
    mixes=("short",),
    new_tokens=8,
    long_tokens=64,
    texts_per_stream=1,
    least_texts=2,
    short_texts=(1,),
    short_texts_per_stream=1,
    repetitions=1,
    rates=(0.8,),
    open_seconds=1.0,
    temperature=1.0,
    factor=1,
    engine_streams=2,
    engine_tokens=160,
    tuned=False,
)


class Workload:
    """The requests of a plan, as tokens. The same for whoever asks: contenders write the same texts.

    Raises:
        ValueError: there is no prompt, or a mix that does not exist is asked for.
    """

    def __init__(self, prompts: Sequence[str], plan: LoadPlan, encode: Encode) -> None:
        if not prompts:
            raise ValueError("there is no prompt to write after")
        if unknown := [mix for mix in plan.mixes if mix not in MIXES]:
            raise ValueError(f"mix is {unknown[0]}; there are {', '.join(MIXES)}")
        self.mixes = plan.mixes
        self._plan = plan
        self._prompts = [tuple(encode(text)) for text in prompts]

    def closed(self, mix: str, streams: int, repetition: int) -> list[Task]:
        """All texts of a run of the closed loop, in the order they are begun."""
        return self._tasks(mix, max(self._plan.least_texts, self._plan.texts_per_stream * streams), repetition)

    def short(self, mix: str, new_tokens: int, repetition: int) -> list[Task]:
        """All texts of a run of texts of so many tokens."""
        count = self._plan.short_texts_per_stream * max(self._plan.streams)
        return [replace(task, new_tokens=new_tokens) for task in self._tasks(mix, count, repetition)]

    def open(self, mix: str, rate: float, repetition: int) -> tuple[list[Task], list[float]]:
        """All texts of a run of the open loop, and when each arrives, in seconds; `rate` is in requests a second."""
        due = list(arrivals(rate, self._plan.open_seconds, seed=1 + repetition))
        return self._tasks(mix, len(due), repetition), due

    def warm_up(self, streams: int) -> list[Task]:
        """Short texts that are not measured: the longest prompts there are, and as many as streams."""
        mix = self._plan.mixes[-1]
        tokens = min(8, self._plan.new_tokens)
        return [
            Task(i, self._prompt(mix, i), tokens, self._plan.temperature, _WARM_UP_SEED + i) for i in range(streams)
        ]

    def longest(self) -> int:
        """Tokens of the longest sequence of all, its text included."""
        lengths = [len(self._prompt(mix, i)) for mix in self._plan.mixes for i in range(len(self._prompts))]
        return max(lengths) + max(self._plan.new_tokens, self._plan.engine_tokens)

    def greedy(self, streams: int, tokens: int) -> list[Task]:
        """One text for each stream, of the short mix at temperature 0."""
        return [Task(i, self._prompt("short", i), tokens, 0.0, 1 + i) for i in range(streams)]

    def _tasks(self, mix: str, count: int, repetition: int) -> list[Task]:
        first = repetition * count  # other prompts each time, as long as there are any
        return [
            Task(i, self._prompt(mix, i), self._plan.new_tokens, self._plan.temperature, 1 + i)
            for i in range(first, first + count)
        ]

    def _prompt(self, mix: str, number: int) -> tuple[int, ...]:
        """The prompt as it is, or followed by those that come after it up to the length of a long one."""
        count = len(self._prompts)
        if mix == "short":
            return self._prompts[number % count]
        length = round(self._plan.long_tokens * _LONG_SHARES[number % len(_LONG_SHARES)])
        following = (token for i in range(number, number + length) for token in self._prompts[i % count])
        return tuple(islice(following, length))


def arrivals(rate: float, seconds: float, *, seed: int) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second, from 0 to `seconds`; at least one.

    Another rate stretches the same times, so that rates differ in their pace alone.
    """
    generator = random.Random(seed)
    at = generator.expovariate(1.0) / rate
    yield at
    while (at := at + generator.expovariate(1.0) / rate) < seconds:
        yield at
