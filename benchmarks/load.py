"""What many requests at once do to it: the pair, the target alone by `Decode`, and transformers' continuous batching.

A closed loop keeps so many streams busy; another one, as many as that has at the most, with texts of a few tokens; an
open loop lets requests arrive as a Poisson process, at shares of the capacity that the closed loop found. In each run
of the grid the contenders take turns, beginning with another one each time, so that whatever else the machine does
falls on all of them. Last comes what the verifier's engine costs beside the model.

    python -m benchmarks.load            both pairs, about forty minutes on two cores; --only and --parts for less of it
    python -m benchmarks.load --resume   goes on where the same command was interrupted
    python -m benchmarks.load --quick    does it work at all: the demo pair, few texts, nothing tuned
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks import machine
from benchmarks.arguments import pair_parser
from benchmarks.deepen import cached
from benchmarks.load_contenders import LoadContender, Outcome, Unavailable
from benchmarks.load_engine import engine_share
from benchmarks.load_picture import draw
from benchmarks.load_plan import DEEPENED, FULL, MIXES, QUICK, LoadPlan, Workload
from benchmarks.load_services import OutriderUnderLoad
from benchmarks.load_summary import (
    ALONE,
    BATCHING,
    CLOSED,
    CONTENDERS,
    IN_OPEN_LOOP,
    OPEN,
    PAIR,
    SHORT,
    STATIC,
    capacity,
    figures,
    summarise,
)
from benchmarks.load_tables import show
from benchmarks.load_tuning import Factory, Setting, tuned
from benchmarks.local import unload
from benchmarks.pair import CACHE, RESULTS, Models
from benchmarks.plan import read_prompts
from benchmarks.record import Record
from benchmarks.services import Processes, RunningPair

PARTS = ("engine", CLOSED, SHORT, OPEN)
# Where there is no terminal to ask.
TABLE_WIDTH = 200
# The rounds that the engine's share is taken on, and their γ: none, or the service's own.
_KINDS: dict[str, int | None] = {"Decode": 0, "proposals": None}

Json = dict[str, Any]
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the grid, in which the contenders take turns."""

    mode: str
    mix: str
    level: str  # streams, tokens of each text, or the share of the capacity
    repetition: int


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)

    def told(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)

    try:
        prompts = read_prompts(given.prompts_file)
        pairs = _pairs(given)
        record = Record.open(_output(given), _head(pairs, given, arguments), resume=given.resume)
        for models, plan in pairs:
            Bench(models, plan, prompts, record, told).run(given.parts)
            unload()
    except (OSError, ValueError) as error:
        told(f"benchmarks.load: {error}")
        return 2
    except KeyboardInterrupt:
        told("benchmarks.load: interrupted; --resume goes on from here")
        return 130
    record.put("load_average_after", machine.load_average())
    record.put("summary", summarise(record.runs))
    show(record.document, Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH))
    for picture in draw(record.document, record.path.with_suffix("")):
        told(f"drew {picture.name}")
    print(json.dumps({key: value for key, value in record.document.items() if key != "runs"}, ensure_ascii=False))
    return 0


# -------------------------------------------------------------------------------------------------------- what is asked


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = pair_parser("benchmarks.load", __doc__ or "", quick="few texts, the demo pair only, no tuning")
    parser.add_argument("--busy", action="store_true", help="note that the machine had other work to do")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what of it (default: all)")
    parser.add_argument("--factor", type=int, help="how many times as deep the deepened target is; 1: leave it out")
    parser.add_argument("--streams", type=int, nargs="+", help="of the closed loop")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, help="of prompts")
    parser.add_argument("--rates", type=float, nargs="+", help="of the open loop, as shares of the capacity")
    parser.add_argument("--open-seconds", type=float, help="how long requests of the open loop arrive")
    parser.add_argument("--new-tokens", type=int, help="tokens of each text")
    parser.add_argument("--engine-tokens", type=int, help="tokens of each text that the engine's share is taken on")
    parser.add_argument("--texts-per-stream", type=int, help="texts of a run of the closed loop, over its streams")
    parser.add_argument("--least-texts", type=int, help="texts of such a run at the least")
    parser.add_argument("--short-texts", type=int, nargs="+", help="tokens of each short text")
    parser.add_argument("--short-texts-per-stream", type=int, help="texts of a run of short texts, over its streams")
    parser.add_argument("--repetitions", type=int, help="how often each run is made")
    parser.add_argument("--temperature", type=float, help="of all texts; nothing is filtered")
    parser.add_argument("--no-tuning", dest="tuned", action="store_false", default=None, help="do not try settings")
    return parser.parse_args(arguments)


def _pairs(given: argparse.Namespace) -> list[tuple[Models, LoadPlan]]:
    """The pairs that are asked for, each with what is put on it."""
    pairs = []
    if given.only != "deepened":
        pairs.append((Models("demo", given.target, given.draft), _plan(QUICK if given.quick else FULL, given)))
    plan = _plan(QUICK if given.quick else DEEPENED, given)
    if given.only != "demo" and plan.factor > 1:
        pairs.append((Models("deepened", cached(given.target, plan.factor, CACHE), given.draft), plan))
    return pairs


def _plan(plan: LoadPlan, given: argparse.Namespace) -> LoadPlan:
    """A plan with what the command line says in place of its own."""
    changes = {name: value for name in plan.document() if (value := getattr(given, name, None)) is not None}
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    for name, value in changes.items():
        least = min(value) if isinstance(value, tuple) and name != "mixes" else value
        if isinstance(least, int | float) and (least < 0 or (least == 0 and name not in ("temperature", "tuned"))):
            raise ValueError(f"{name} is {least}; it must be above 0")
    return replace(plan, **changes)


def _output(given: argparse.Namespace) -> Path:
    name = f"load-{given.only}.json" if given.only else "load.json"
    return given.output or (CACHE / "load-quick.json" if given.quick else RESULTS / name)


def _head(pairs: Sequence[tuple[Models, LoadPlan]], given: argparse.Namespace, arguments: Sequence[str]) -> Json:
    return {
        "benchmark": "load",
        "command": machine.command("benchmarks.load", arguments),
        "machine": machine.describe(),
        "busy": given.busy,
        "load_average_before": machine.load_average(),
        "settings": {models.name: plan.document() for models, plan in pairs},
        "models": {models.name: models.document() for models, _ in pairs},
        "contenders": {},
        "unavailable": {},
        "engine": {},
    }


# ------------------------------------------------------------------------------------------------------------- one pair


class Bench:
    """All runs on one pair of models."""

    def __init__(self, models: Models, plan: LoadPlan, prompts: Sequence[str], record: Record, told: Told) -> None:
        tokenizer = AutoTokenizer.from_pretrained(models.target, local_files_only=True)
        self._models = models
        self._plan = plan
        self._record = record
        self._told = told
        self._work = Workload(prompts, plan, lambda text: tokenizer(text)["input_ids"])
        self._factory = Factory(models, plan, self._work)
        self._names = tuple(name for name in CONTENDERS if plan.static_batches or name != STATIC)

    def run(self, parts: Sequence[str]) -> None:
        """Makes the runs of these parts that the record does not hold yet."""
        cells = [(turn, cell) for turn, cell in enumerate(self._cells(parts)) if self._missing(cell)]
        engine = "engine" in parts and set(self._shares()) != set(_KINDS)
        if not cells and not engine:
            return
        chosen = self._record.once(
            "tuning",
            self._models.name,
            lambda: tuned(self._factory, self._plan, self._work, self._names, self._told),
        )
        setting = Setting.of(chosen["settings"])
        with ExitStack() as running:
            pairs = {
                how: running.enter_context(self._factory.services(how))
                for how in dict.fromkeys((setting.alone, setting.pair))
            }
            if engine:
                self._measure_engine({"Decode": pairs[setting.alone], "proposals": pairs[setting.pair]})
            if cells:
                contenders = self._contenders(setting, pairs)
                for turn, cell in cells:
                    self._measure(cell, contenders, turn)

    def _contenders(self, setting: Setting, pairs: dict[Processes, RunningPair]) -> dict[str, LoadContender]:
        """All that can run here, warm. Those that cannot are in the record with the reason."""
        makers: dict[str, Callable[[], LoadContender]] = {
            BATCHING: lambda: self._factory.batching(setting.batching),
            STATIC: lambda: self._factory.static(setting.static),
            ALONE: lambda: OutriderUnderLoad(pairs[setting.alone], gamma=0),
            PAIR: lambda: OutriderUnderLoad(pairs[setting.pair], gamma=None),
        }
        contenders: dict[str, LoadContender] = {}
        for name in self._names:
            try:
                contender = makers[name]()
                contender.closed(self._work.warm_up(2), 2)
            except Unavailable as error:
                self._leave_out(name, error)
            else:
                contenders[name] = contender
        told = {name: contender.settings() for name, contender in contenders.items()}
        self._record.put("contenders", self._record.document["contenders"] | {self._models.name: told})
        return contenders

    def _leave_out(self, name: str, error: Unavailable) -> None:
        self._told(f"{self._models.name}: {name} is not there: {error}")
        self._record.document["unavailable"].setdefault(self._models.name, {})[name] = str(error)
        self._record.save()

    # ---------------------------------------------------------------------------------------------------- the grid

    def _cells(self, parts: Sequence[str]) -> Iterator[Cell]:
        """In order. Repetitions are outermost within a loop, so that each meets the machine at another time."""
        for mode, levels in (
            (CLOSED, [str(each) for each in self._plan.streams]),
            (SHORT, [str(each) for each in self._plan.short_texts]),
            (OPEN, map("{:g}".format, self._plan.rates)),
        ):
            if mode in parts:
                levels = list(levels)
                for repetition in range(self._plan.repetitions):
                    for mix in self._plan.mixes[: 1 if mode == SHORT else None]:
                        for level in levels:
                            yield Cell(mode, mix, level, repetition)

    def _measure(self, cell: Cell, contenders: dict[str, LoadContender], turn: int) -> None:
        named = [name for name in self._missing(cell) if name in contenders]
        if not named:
            return
        keys = self._keys(cell)
        runs = []
        first = turn % len(named)
        for name in named[first:] + named[:first]:
            try:
                outcome, asked = self._served(cell, contenders[name])
            except Unavailable as error:
                self._leave_out(name, error)
                del contenders[name]
                continue
            runs.append({**keys, "contender": name, **asked, **figures(outcome), "served": _compact(outcome)})
        self._record.add_runs(runs)
        rates = ", ".join(f"{run['contender']} {run['tokens_per_second']:.1f}" for run in runs)
        self._told(f"{' '.join(str(value) for value in keys.values())}: {rates} tokens/s")

    def _missing(self, cell: Cell) -> list[str]:
        """The contenders whose run in a cell is still to be made."""
        gone = self._record.document["unavailable"].get(self._models.name, {})
        return [
            name
            for name in self._names
            if name not in gone
            and (cell.mode != OPEN or name in IN_OPEN_LOOP)
            and not self._record.has_run(**self._keys(cell), contender=name)
        ]

    def _keys(self, cell: Cell) -> Json:
        return {"pair": self._models.name, **asdict(cell)}

    def _served(self, cell: Cell, contender: LoadContender) -> tuple[Outcome, Json]:
        if cell.mode == CLOSED:
            tasks = self._work.closed(cell.mix, int(cell.level), cell.repetition)
            return contender.closed(tasks, int(cell.level)), {}
        if cell.mode == SHORT:
            tasks = self._work.short(cell.mix, int(cell.level), cell.repetition)
            return contender.closed(tasks, max(self._plan.streams)), {}
        found = self._record.once("capacity", f"{self._models.name} {cell.mix}", lambda: self._capacity(cell.mix))
        rate = float(cell.level) * found
        tasks, due = self._work.open(cell.mix, rate, cell.repetition)
        return contender.open(tasks, due), {"arrivals_per_second": rate}

    def _capacity(self, mix: str) -> float:
        found = capacity(self._record.runs, self._models.name, mix)
        if found is None:
            raise ValueError(f"the open loop needs the closed loop of {mix} prompts before it: no capacity is known")
        return found

    # ------------------------------------------------------------------------------------------ before and after it

    def _shares(self) -> Json:
        """What the engine itself costs, as far as it is known, by `_KINDS`."""
        found: Json = self._record.document["engine"].setdefault(self._models.name, {})
        return found

    def _measure_engine(self, services: dict[str, RunningPair]) -> None:
        tasks = self._work.greedy(self._plan.engine_streams, self._plan.engine_tokens)
        found = self._shares()
        for kind, gamma in _KINDS.items():
            if kind not in found:
                found[kind] = engine_share(services[kind], tasks, gamma)
                self._record.save()
            self._told(f"{self._models.name}: {found[kind]['share']:.1%} of the engine's time is its own, {kind}")


def _compact(outcome: Outcome) -> list[list[float | int | None]]:
    """Of each request: when it was due, when its first and its last token came (seconds), tokens; None if refused."""
    return [
        [round(each.due, 4), None, None, 0]
        if each.refused
        else [round(each.due, 4), round(each.stamps[0][0], 4), round(each.end, 4), each.tokens]
        for each in outcome.served
    ]


if __name__ == "__main__":
    sys.exit(main())
