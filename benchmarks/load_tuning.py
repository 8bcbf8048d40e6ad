"""How each contender of load runs fastest: threads, and for the pair processors of its own.

All settings are tried at one number of streams, in the middle of those that are measured: a service cannot change them
with its load. Each is tried a few times in turns, and its best run counts, so that one moment of a busy machine decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.load_batching import ContinuousBatching, StaticBatches
from benchmarks.load_contenders import LoadContender, Unavailable
from benchmarks.load_plan import LoadPlan, Workload
from benchmarks.load_services import OutriderUnderLoad
from benchmarks.load_summary import ALONE, BATCHING, PAIR, STATIC, figures
from benchmarks.local import Local
from benchmarks.pair import Models
from benchmarks.services import Processes, RunningPair
from outrider.cli.processes import processors

STREAMS = 8
TRIES = 2

Json = dict[str, Any]
Told = Callable[[str], None]
How = Local | Processes


@dataclass(frozen=True, slots=True)
class Setting:
    """How each contender runs on one pair."""

    batching: Local = field(default_factory=Local)
    static: Local = field(default_factory=Local)
    alone: Processes = field(default_factory=Processes)
    pair: Processes = field(default_factory=Processes)

    @classmethod
    def of(cls, document: Json) -> Setting:
        """That of a record."""
        return cls(
            Local(**document["batching"]),
            Local(**document["static"]),
            Processes(**document["alone"]),
            Processes(**document["pair"]),
        )


class Factory:
    """Makes the contenders of one pair, in any setting."""

    def __init__(self, models: Models, plan: LoadPlan, work: Workload) -> None:
        self.models = models
        self._plan = plan
        self._work = work

    def services(self, how: Processes) -> RunningPair:
        """Both services, to be entered, with one place more than streams: the probe's."""
        places = max(*self._plan.streams, self._plan.engine_streams, STREAMS) + 1
        return RunningPair(self.models.target, self.models.draft, how, places)

    def batching(self, how: Local) -> ContinuousBatching:
        """Raises `Unavailable` where transformers has none."""
        return ContinuousBatching(
            self.models.target, how, longest=self._work.longest(), most=max(*self._plan.streams, STREAMS)
        )

    def static(self, how: Local) -> StaticBatches:
        """Static batches."""
        return StaticBatches(self.models.target, how)


class LoadTuner:
    """Tries settings of the contenders that are named."""

    def __init__(self, factory: Factory, work: Workload, told: Told) -> None:
        self._factory = factory
        self._work = work
        self._told = told
        self._tasks = work.closed(work.mixes[0], STREAMS, 1_000)[:STREAMS]
        self.tried: list[Json] = []

    def tune(self, names: tuple[str, ...]) -> Setting:
        """The fastest settings; those of a contender that is not named or cannot run are the plain ones."""
        some, all_ = 1, len(processors())
        local = list(dict.fromkeys((Local(threads=some), Local(threads=all_))))
        alone = list(dict.fromkeys((Processes(target_threads=some), Processes(target_threads=all_))))
        pair = [*alone, *([Processes(apart=True)] if all_ > 1 else [])]
        choices: dict[str, list[Any]] = {BATCHING: local, STATIC: local, ALONE: alone, PAIR: pair}
        best = {name: self._fastest(name, found) if name in names else found[0] for name, found in choices.items()}
        return Setting(best[BATCHING], best[STATIC], best[ALONE], best[PAIR])

    def _fastest(self, name: str, choices: list[Any]) -> Any:
        rates = {how: self._rate(name, how) for how in choices}
        return max(rates, key=lambda how: rates[how])

    def _rate(self, name: str, how: How) -> float:
        """Tokens a second of the best try; 0 where it cannot run."""
        try:
            with self._contender(name, how) as contender:
                contender.closed(self._work.warm_up(2), 2)
                rates = [
                    float(figures(contender.closed(self._tasks, STREAMS))["tokens_per_second"]) for _ in range(TRIES)
                ]
        except Unavailable:
            return 0.0
        settings = contender.settings()
        self.tried.append({"contender": name, "settings": settings, "tokens_per_second": rates})
        told = ", ".join(f"{key} {value}" for key, value in settings.items())
        self._told(
            f"{self._factory.models.name}: {name}, {told}: {', '.join(f'{rate:.1f}' for rate in rates)} tokens/s"
        )
        return max(rates)

    @contextmanager
    def _contender(self, name: str, how: How) -> Iterator[LoadContender]:
        if isinstance(how, Processes):
            with self._factory.services(how) as services:
                yield OutriderUnderLoad(services, 0 if name == ALONE else None)
        else:
            yield self._factory.batching(how) if name == BATCHING else self._factory.static(how)


def tuned(factory: Factory, plan: LoadPlan, work: Workload, names: tuple[str, ...], told: Told) -> Json:
    """The settings to run with, and what was tried, as JSON."""
    if not plan.tuned:
        return {"settings": asdict(Setting()), "tried": []}
    tuner = LoadTuner(factory, work, told)
    return {"settings": asdict(tuner.tune(names)), "tried": tuner.tried}
