r"""What many requests at once do to it: the pair, the target alone by `Decode`, and transformers' batching, in turns.

Three loops. `closed` keeps so many streams busy; `short-texts` does so with texts of 1, 4 and 16 tokens, at the most
streams; in `open` requests arrive as a Poisson process, at shares of the capacity that the closed loop found.

    python -m benchmarks.load --only demo        one pair, about twenty minutes on two cores (or --only deepened)
    python -m benchmarks.load --only demo --parts short-texts
    python -m benchmarks.load --only demo --parts closed --contenders outrider-alone outrider-pair --mixes short \
        --streams 1 8 64 --repetitions 1         two minutes; in two trees, in turns, it compares them
    python -m benchmarks.load --quick            does it work at all

γ is chosen by the policy `adaptive`; `--gamma` fixes it. Services have one thread each and bfloat16, the pair a
core each, as `outrider serve` starts them; continuous batching has one thread, static batches all cores: with these
each was fastest on two cores.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks import harness, load_report
from benchmarks.contenders import Server, Task, Unavailable
from benchmarks.harness import Bench, Json, tell
from benchmarks.load_report import (
    ALONE,
    BATCHING,
    CLOSED,
    CONTENDERS,
    IN_OPEN_LOOP,
    OPEN,
    PAIR,
    SHORT,
    STATIC,
    draw,
    figures,
    table,
)
from benchmarks.outrider_contender import ANYWHERE, APART, Models, OutriderServer, Services, models_of
from benchmarks.transformers_contender import ContinuousBatching, StaticBatches, load
from outrider.cli.processes import processors

__all__ = ["draw", "main"]

PARTS = (CLOSED, SHORT, OPEN)
MIXES = ("short", "long")
# Of the prompt of a long request, as shares of `--long-tokens`: prompts of one length would all prefill alike.
_LONG_SHARES = (1.0, 0.5, 0.75)
# The deepened target takes twelve times as long: fewer and shorter texts, unless the command says otherwise.
_DEEPENED: Json = {"mixes": ["short"], "new_tokens": 32, "least_texts": 4, "short_texts_per_stream": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("load", __doc__, quick="few texts, the demo pair only")
    parser.add_argument("--busy", action="store_true", help="note that the machine had other work to do")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what of it (default: all)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="(default: all)")
    parser.add_argument("--factor", type=int, default=12, help="how many times as deep the deepened target is")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of the closed loop")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, help="of prompts (default: both; deepened: short)")
    parser.add_argument("--new-tokens", type=int, help="tokens of each text (default: 64; deepened: 32)")
    parser.add_argument("--long-tokens", type=int, default=384, help="of the longest prompts")
    parser.add_argument("--texts-per-stream", type=int, default=2, help="of a run of the closed loop")
    parser.add_argument("--least-texts", type=int, help="of such a run (default: 8; deepened: 4)")
    parser.add_argument("--short-texts", type=int, nargs="+", default=[1, 4, 16], help="tokens of each short text")
    parser.add_argument("--short-texts-per-stream", type=int, help="(default: 8; deepened: 2)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.8, 1.2], help="of the open loop")
    parser.add_argument("--open-seconds", type=float, default=8.0, help="how long requests of the open loop arrive")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each run is made")
    parser.add_argument("--temperature", type=float, default=1.0, help="of all texts; nothing is filtered")
    parser.add_argument("--gamma", type=int, help="of the pair, fixed (default: adaptive)")
    parser.add_argument("--place", choices=(APART, ANYWHERE), default=APART, help="where the pair's services run")
    few = {
        "only": "demo", "streams": [1, 2], "mixes": ["short"], "new_tokens": 8, "texts_per_stream": 1, "least_texts": 2,
        "short_texts": [1], "short_texts_per_stream": 1, "rates": [0.8], "open_seconds": 1.0, "repetitions": 1,
    }  # fmt: skip
    return harness.run("load", _named(harness.parse(parser, arguments, few)), measure, summarise, table, draw)


def _named(given: argparse.Namespace) -> argparse.Namespace:
    if given.output is None and given.only and not given.quick:
        given.output = harness.RESULTS / f"load-{given.only}.json"
    return given


def measure(bench: Bench) -> None:
    """All runs on all pairs."""
    given = bench.given
    bench.document |= {"busy": given.busy, "models": {}, "contenders": {}, "unavailable": {}, "capacity": {}}
    for name in ("streams", "rates", "short_texts", "new_tokens", "repetitions"):
        value = getattr(given, name)
        if value is not None and min(value if isinstance(value, list) else [value]) <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    for models in models_of(given.target, given.draft, given.only, given.factor):
        bench.document["models"][models.name] = models.document()
        Loops(bench, models).run()
        load.cache_clear()


class Loops:
    """All runs on one pair of models."""

    def __init__(self, bench: Bench, models: Models) -> None:
        asked = {key: value for key, value in vars(bench.given).items() if value is not None}
        usual = {"mixes": list(MIXES), "new_tokens": 64, "least_texts": 8, "short_texts_per_stream": 8}
        self._given = argparse.Namespace(gamma=None)
        vars(self._given).update(usual | (_DEEPENED if models.name == "deepened" else {}) | asked)
        self._bench = bench
        self._models = models
        tokenizer = AutoTokenizer.from_pretrained(models.target, local_files_only=True)
        self._work = Workload([tuple(tokenizer(text)["input_ids"]) for text in bench.prompts], self._given)
        left_out = (STATIC,) if models.name == "deepened" else ()
        self._names = [name for name in CONTENDERS if name in self._given.contenders and name not in left_out]

    def run(self) -> None:
        """Makes the runs that are not there yet."""
        cells = [(turn, cell) for turn, cell in enumerate(self._cells()) if self._missing(cell)]
        if cells:
            with ExitStack() as running:
                servers = self._servers(running)
                for turn, cell in cells:
                    self._measure(cell, servers, turn)

    def _servers(self, running: ExitStack) -> dict[str, Server]:
        """All contenders that can run here, warm."""
        given, target = self._given, self._models.target
        most = max(8, *given.streams)

        def services(place: str) -> Services:
            return running.enter_context(Services(target, self._models.draft, place=place, max_sequences=most))

        # Asked for by each request: one that gives a seed gets a fixed γ otherwise.
        options: Json = {"speculation": "adaptive"}
        if given.gamma is not None:
            options = {"speculation": "fixed", "gamma": given.gamma}
        makers: dict[str, Callable[[], Server]] = {
            BATCHING: lambda: ContinuousBatching(
                target, dtype="bfloat16", threads=1, longest=self._work.longest(), most=most
            ),
            STATIC: lambda: StaticBatches(target, dtype="bfloat16", threads=len(processors())),
            ALONE: lambda: OutriderServer(services(ANYWHERE), gamma=0),
            PAIR: lambda: OutriderServer(services(given.place), **options),
        }
        servers: dict[str, Server] = {}
        for name in self._names:
            try:
                server = makers[name]()
                server.closed(self._work.warm_up(2), 2)
                servers[name] = server
            except Unavailable as error:
                self._leave_out(name, error)
        self._bench.document["contenders"][self._models.name] = {
            name: each.settings() for name, each in servers.items()
        }
        return servers

    def _leave_out(self, name: str, error: Unavailable) -> None:
        tell(f"{self._models.name}: {name} is not there: {error}")
        self._bench.document["unavailable"].setdefault(self._models.name, {})[name] = str(error)

    def _cells(self) -> Iterator[Json]:
        """The grid, in order. Repetitions are outermost, so that each meets the machine at another time."""
        given = self._given
        for mode, levels in ((CLOSED, given.streams), (SHORT, given.short_texts), (OPEN, given.rates)):
            if mode in given.parts:
                for repetition in range(given.repetitions):
                    for mix in given.mixes[: 1 if mode == SHORT else None]:
                        for level in levels:
                            keys = {"pair": self._models.name, "mode": mode, "mix": mix, "level": f"{level:g}"}
                            yield keys | {"repetition": repetition}

    def _missing(self, cell: Json) -> list[str]:
        names = [name for name in self._names if cell["mode"] != OPEN or name in IN_OPEN_LOOP]
        return [name for name in names if not self._bench.has(**cell, contender=name)]

    def _measure(self, cell: Json, servers: dict[str, Server], turn: int) -> None:
        shown = []
        for name in harness.rotated([name for name in self._missing(cell) if name in servers], turn):
            try:
                found = self._served(cell, servers[name])
            except Unavailable as error:
                self._leave_out(name, error)
                del servers[name]
                continue
            self._bench.add({**cell, "contender": name, **found})
            shown.append(f"{name} {found['tokens_per_second']:.1f}")
        tell(f"{' '.join(map(str, cell.values()))}: {', '.join(shown)} tokens/s")

    def _served(self, cell: Json, server: Server) -> Json:
        work, mix, repetition = self._work, cell["mix"], cell["repetition"]
        if cell["mode"] == CLOSED:
            streams = int(cell["level"])
            return figures(server.closed(work.closed(mix, streams, repetition), streams))
        if cell["mode"] == SHORT:
            return figures(server.closed(work.short(mix, int(cell["level"]), repetition), max(self._given.streams)))
        key = f"{self._models.name} {mix}"
        capacity = self._bench.once(key, lambda: self._capacity(mix))
        self._bench.document["capacity"][key] = capacity
        tasks, due = work.open(mix, float(cell["level"]) * capacity, repetition)
        return figures(server.open(tasks, due))

    def _capacity(self, mix: str) -> float:
        """Requests a second that the closed loop found at the most, of Outrider's contenders.

        Raises:
            ValueError: it has not run.
        """
        runs = [run for run in self._bench.runs if run["mode"] == CLOSED and run["contender"] in (ALONE, PAIR)]
        here = [{**run, "at": (run["contender"], run["level"])} for run in runs if run["mix"] == mix]
        found = [median(run["requests_per_second"] for run in own) for own in harness.grouped(here, "at").values()]
        if not found:
            raise ValueError(f"the open loop needs the closed loop of {mix} prompts before it: no capacity is known")
        return max(found)


class Workload:
    """The requests, as tokens: the same for all contenders."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], given: argparse.Namespace) -> None:
        self._prompts = prompts
        self._given = given

    def closed(self, mix: str, streams: int, repetition: int) -> list[Task]:
        """All texts of a run of the closed loop, in the order they are begun."""
        return self._tasks(mix, max(self._given.least_texts, self._given.texts_per_stream * streams), repetition)

    def short(self, mix: str, new_tokens: int, repetition: int) -> list[Task]:
        """All texts of a run of texts of so many tokens."""
        count = self._given.short_texts_per_stream * max(self._given.streams)
        return [replace(task, new_tokens=new_tokens) for task in self._tasks(mix, count, repetition)]

    def open(self, mix: str, rate: float, repetition: int) -> tuple[list[Task], list[float]]:
        """All texts of a run of the open loop, and when each arrives, in seconds; `rate` is in requests a second."""
        due = list(arrivals(rate, self._given.open_seconds, seed=1 + repetition))
        return self._tasks(mix, len(due), repetition), due

    def warm_up(self, streams: int) -> list[Task]:
        """Short texts that are not measured, after the longest prompts there are."""
        tokens = min(8, self._given.new_tokens)
        return [replace(task, new_tokens=tokens) for task in self._tasks(self._given.mixes[-1], streams, 10_000)]

    def longest(self) -> int:
        """Tokens of the longest sequence of all, its text included."""
        mixes = self._given.mixes
        lengths = [len(self._prompt(mix, nth)) for mix in mixes for nth in range(max(3, len(self._prompts)))]
        return max(lengths) + max(self._given.new_tokens, *self._given.short_texts)

    def _tasks(self, mix: str, count: int, repetition: int) -> list[Task]:
        first = repetition * count  # other prompts each time, as long as there are any
        return [
            Task(nth, self._prompt(mix, nth), self._given.new_tokens, self._given.temperature, 1 + nth)
            for nth in range(first, first + count)
        ]

    def _prompt(self, mix: str, nth: int) -> tuple[int, ...]:
        """The prompt as it is, or followed by those that come after it up to the length of a long one."""
        count = len(self._prompts)
        if mix == "short":
            return self._prompts[nth % count]
        length = round(self._given.long_tokens * _LONG_SHARES[nth % len(_LONG_SHARES)])
        following = (token for i in range(nth, nth + length) for token in self._prompts[i % count])
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


def summarise(bench: Bench) -> Json:
    """All figures: by pair, mode, mix, level and contender."""
    found: Any = load_report.summarise(bench.runs)
    return {"summary": found}


if __name__ == "__main__":
    sys.exit(main())
