"""Find each contender's fastest settings on a short calibration: number format, threads, tokens per proposal.

One thing after another, the later ones at the best of the earlier: a full grid would take longer than the benchmark.
What depends on the text, tokens per proposal above all, is tried on a few texts, and the best on more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

from benchmarks.contenders import Contender, Task
from benchmarks.local import Assistance, Local, TransformersAlone, TransformersAssisted
from benchmarks.services import OverGrpc, Processes, RunningPair

DTYPES = ("bfloat16", "float32")
THREADS = (1, 2)
GAMMAS = (2, 3, 4, 5, 6, 8, 10)
FIRST_GAMMA = 5
ASSISTANT_TOKENS = (3, 5, 8, 12)
SCHEDULES = ("constant", "heuristic")
THRESHOLDS = (0.0, 0.4)
FEW_TEXTS = 2
FINALISTS = 3

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Tuned:
    """The settings of all contenders on one pair; γ and assistance by temperature."""

    transformers: Local
    assisted: Local
    assistance: dict[float, Assistance]
    alone: Processes
    pair: Processes
    gamma: dict[float, int]

    @classmethod
    def untuned(cls, temperatures: Iterable[float]) -> Self:
        """Settings to begin from."""
        temperatures = tuple(temperatures)
        return cls(
            transformers=Local(),
            assisted=Local(),
            assistance=dict.fromkeys(temperatures, Assistance()),
            alone=Processes(),
            pair=Processes(),
            gamma=dict.fromkeys(temperatures, FIRST_GAMMA),
        )

    def document(self) -> dict[str, Any]:
        """As JSON, whose keys are text."""
        document = asdict(self)
        for name in ("assistance", "gamma"):
            document[name] = {f"{temperature:g}": value for temperature, value in document[name].items()}
        return document

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """The settings that `document` was made of."""
        return cls(
            transformers=Local(**document["transformers"]),
            assisted=Local(**document["assisted"]),
            assistance={float(at): Assistance(**value) for at, value in document["assistance"].items()},
            alone=Processes(**document["alone"]),
            pair=Processes(**document["pair"]),
            gamma={float(at): int(value) for at, value in document["gamma"].items()},
        )


class Tuner:
    """Tunes the contenders on one pair.

    Args:
        tasks: what is written with each setting, by temperature.
        told: called with a line on each setting tried.
    """

    def __init__(
        self, target: Path, draft: Path, tasks: Mapping[float, Sequence[Task]], told: Callable[[str], None]
    ) -> None:
        self._target, self._draft = target, draft
        self._tasks = tasks
        self._told = told
        self.tried: list[dict[str, Any]] = []

    def tune(self) -> Tuned:
        """All of it."""
        transformers = self._tune_transformers()
        assisted, assistance = self._tune_assisted()
        alone, pair, gamma = self._tune_services()
        return Tuned(transformers, assisted, assistance, alone, pair, gamma)

    # --------------------------------------------------------------------------------------------------- transformers

    def _tune_transformers(self) -> Local:
        rates = {how: self._overall("transformers", TransformersAlone(self._target, how)) for how in _locals()}
        return _fastest(rates)

    def _tune_assisted(self) -> tuple[Local, dict[float, Assistance]]:
        def assisted(how: Local, assistance: Assistance) -> Contender:
            return TransformersAssisted(self._target, self._draft, how, assistance)

        first = Assistance()
        how = _fastest({how: self._overall("assisted", assisted(how, first)) for how in _locals()})
        choices = [Assistance(*choice) for choice in product(ASSISTANT_TOKENS, SCHEDULES, THRESHOLDS)]
        contenders = {choice: assisted(how, choice) for choice in choices}
        return how, {at: self._fastest_at("assisted", contenders, at) for at in self._tasks}

    # ------------------------------------------------------------------------------------------------------- services

    def _tune_services(self) -> tuple[Processes, Processes, dict[float, int]]:
        alone: dict[Processes, float] = {}
        pair: dict[Processes, float] = {}
        for dtype, threads in product(DTYPES, THREADS):
            how = Processes(target_dtype=dtype, target_threads=threads)
            with RunningPair(self._target, self._draft, how) as running:
                alone[how] = self._overall("outrider alone", OverGrpc(running, 0))
                pair[how] = self._overall("outrider pair", OverGrpc(running, FIRST_GAMMA))
        best = _fastest(pair)
        for other in (replace(best, draft_dtype="float32"), replace(best, target_threads=1, apart=True)):
            with RunningPair(self._target, self._draft, other) as running:
                pair[other] = self._overall("outrider pair", OverGrpc(running, FIRST_GAMMA))
        best = _fastest(pair)
        with RunningPair(self._target, self._draft, best) as running:
            contenders = {gamma: OverGrpc(running, gamma) for gamma in GAMMAS}
            gamma = {at: self._fastest_at("outrider pair", contenders, at) for at in self._tasks}
        return _fastest(alone), best, gamma

    # ------------------------------------------------------------------------------------------------------ measuring

    def _fastest_at(self, name: str, contenders: Mapping[Choice, Contender], temperature: float) -> Choice:
        """The fastest at one temperature: all on a few texts, then the best of them on all texts."""
        tasks = self._tasks[temperature]
        few = {choice: self._rate(name, each, temperature, tasks[:FEW_TEXTS]) for choice, each in contenders.items()}
        if len(tasks) <= FEW_TEXTS:
            return _fastest(few)
        finalists = sorted(few, key=lambda choice: few[choice], reverse=True)[:FINALISTS]
        return _fastest({choice: self._rate(name, contenders[choice], temperature, tasks) for choice in finalists})

    def _overall(self, name: str, contender: Contender) -> float:
        """Tokens per second over all temperatures, each with the same weight, on a few texts."""
        rates = [self._rate(name, contender, at, tasks[:FEW_TEXTS]) for at, tasks in self._tasks.items()]
        return len(rates) / sum(1 / rate for rate in rates)

    def _rate(self, name: str, contender: Contender, temperature: float, tasks: Sequence[Task]) -> float:
        """Tokens per second at one temperature, after a warm-up."""
        contender.write(replace(tasks[0], new_tokens=min(16, tasks[0].new_tokens)))
        runs = [contender.write(task) for task in tasks]
        rate = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
        settings = contender.settings()
        self.tried.append(
            {
                "contender": name,
                "temperature": temperature,
                "settings": settings,
                "texts": len(tasks),
                "tokens_per_second": round(rate, 2),
            }
        )
        told = ", ".join(f"{key} {value}" for key, value in settings.items())
        self._told(f"{name}, T={temperature:g}, {told}: {rate:.1f} tokens/s")
        return rate


def _locals() -> list[Local]:
    return [Local(dtype, threads) for dtype, threads in product(DTYPES, THREADS)]


def _fastest(rates: dict[Choice, float]) -> Choice:
    return max(rates, key=lambda choice: rates[choice])
