"""What one verification costs on a device: Outrider's kernel against what others do, and against the memory's speed.

    python -m benchmarks.kernel                  all of it, on a GPU: about seven minutes
    python -m benchmarks.kernel --parts gamma    one part; --resume goes on with what the file holds
    python -m benchmarks.kernel --quick          does it work at all: small sizes, on a CPU too

Parts: `batch` (B from 1 to 256), `gamma` (γ from 1 to 20 at B = 1, as [W Fig. 3-5, Table 8]) and `rules`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.clocks import Clock, clock_of
from benchmarks.kernel_cases import Case, Rows, Shape
from benchmarks.kernel_contenders import Contender, FlashInfer, Outrider, Ready, Torch, Transformers
from benchmarks.kernel_picture import draw
from benchmarks.kernel_report import SHOWN_GAMMAS, summarise, tables
from benchmarks.record import Record
from kernels.verify import Rule, implementation_for, implementations

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".models-cache"
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("rules", "batch", "gamma")
COUNTED = 64  # sequences that the accepted share by γ is a mean of


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        vocabularies: each V.
        gammas: of the part `gamma`, at B = 1.
        batches: each B of the part `batch`, at `gamma`.
        gamma: of the parts `batch` and `rules`.
        rules_batches: each B of the part `rules`, at the second V.
        repeats: runs of one measurement at the most.
    """

    vocabularies: tuple[int, ...]
    gammas: tuple[int, ...]
    batches: tuple[int, ...]
    gamma: int
    rules_batches: tuple[int, ...]
    repeats: int

    def shapes(self, part: str) -> Iterator[Shape]:
        """The shapes of a part."""
        if part == "gamma":
            yield from (Shape(V, 1, gamma) for V in self.vocabularies for gamma in self.gammas)
        elif part == "batch":
            yield from (Shape(V, B, self.gamma) for V in self.vocabularies for B in self.batches)
        else:
            V = self.vocabularies[min(1, len(self.vocabularies) - 1)]
            yield from (Shape(V, B, self.gamma, rule) for B in self.rules_batches for rule in Rule)


FULL = Plan(
    vocabularies=(32_000, 128_256, 151_936, 262_144),
    gammas=tuple(range(1, 21)),
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    gamma=5,
    rules_batches=(1, 64, 128, 256),
    repeats=50,
)
QUICK = Plan(vocabularies=(512, 1000), gammas=(1, 3), batches=(1, 2), gamma=2, rules_batches=(2,), repeats=5)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = given.path or implementation_for(device)
    plan = QUICK if given.quick else FULL
    try:
        if device.type == "cpu" and not given.quick:
            raise ValueError("there is no CUDA device; --quick runs small sizes on a CPU")
        if path not in implementations():
            raise ValueError(f"--path is {path}; this build has {', '.join(implementations())}")
        clock = clock_of(device, plan.repeats)
        output = given.output or (CACHE / "kernel-quick.json" if given.quick else RESULTS / "kernel.json")
        record = Record.open(output, _head(plan, path, clock, arguments), resume=given.resume)
    except (OSError, ValueError) as error:
        console.print(f"benchmarks.kernel: {error}", markup=False, soft_wrap=True)
        return 2
    record.once("copy", "bytes_per_second", clock.copy_bandwidth)
    whole = measure(plan, given.parts, contenders_of(path), clock, record, given.seconds, console)
    record.put("summary", summarise(record.document))
    draw(record.document, record.path.with_suffix(".png"))
    text = tables(record.document)
    record.path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    if not whole:
        console.print(f"{given.seconds:g} s are over; --resume goes on", markup=False)
    print(json.dumps({key: value for key, value in record.document.items() if key != "runs"}, ensure_ascii=False))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--resume", action="store_true", help="go on with what the output file holds")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="begin nothing after so long (default: %(default)g)"
    )
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: CUDA where there is one)")
    parser.add_argument("--path", help="which of Outrider's implementations (default: the fastest on the device)")
    parser.add_argument("--output", type=Path, help="JSON file to write; tables and picture go beside it")
    return parser.parse_args(arguments)


def _head(plan: Plan, path: str, clock: Clock, arguments: Sequence[str]) -> dict[str, Any]:
    return {
        "benchmark": "kernel",
        "command": machine.command("benchmarks.kernel", arguments),
        "machine": machine.describe(),
        "settings": json.loads(json.dumps(asdict(plan))) | {"path": path, "device": clock.describe()},
    }


def contenders_of(path: str) -> dict[str, Contender]:
    """All who verify, by name; `path` is Outrider's implementation."""
    return {
        "outrider": Outrider(path),
        "transformers": Transformers(),
        "torch": Torch(),
        "compiled": Torch(compiled=True),
        "flashinfer": FlashInfer(),
    }


def measure(
    plan: Plan,
    parts: Sequence[str],
    contenders: dict[str, Contender],
    clock: Clock,
    record: Record,
    seconds: float,
    console: Console,
) -> bool:
    """Puts into the record what is not there yet; False where the time was over first."""
    end = time.monotonic() + seconds
    rows = lru_cache(maxsize=1)(lambda V: Rows.make(V, torch.bfloat16, clock.device))
    for part in parts:
        for shape in plan.shapes(part):
            left = [name for name in contenders if not record.has_run(part=part, contender=name, **shape.keys())]
            if not left:
                continue
            if time.monotonic() > end:
                return False
            case = Case(shape, rows(shape.V))
            runs = [
                {"part": part, "contender": name, **shape.keys(), **_timed(contenders[name], case, clock)}
                for name in left
            ]
            if part == "gamma" and shape.gamma in SHOWN_GAMMAS:
                _count_accepted(runs, contenders, Case(replace(shape, B=COUNTED), rows(shape.V)))
            record.add_runs(runs)
            console.print(_line(part, runs), style="dim", markup=False, soft_wrap=True)
            del case
            gc.collect()
    return True


def _timed(contender: Contender, case: Case, clock: Clock) -> dict[str, Any]:
    """Everything that is known of one contender on one case, or why it takes no part. Ours must not fail."""
    refusal = contender.refusal(case)
    if refusal is not None:
        return {"refusal": refusal}
    try:
        with torch.inference_mode():
            return _figures(contender.start(case), case, clock)
    except Exception as error:  # another's library may be of another version than we know
        if isinstance(contender, Outrider):
            raise
        return {"refusal": f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def _figures(ready: Ready, case: Case, clock: Clock) -> dict[str, Any]:
    times = {f"eager {name}": clock.times(ready.run, cold=cold) for name, cold in (("cold", True), ("warm", False))}
    graph = clock.captured(ready.run) if ready.graphable else None
    if graph is not None:
        for name, cold in (("cold", True), ("warm", False)):
            times[f"graph {name}"] = clock.times(graph, cold=cold, launched=False)
    times["whole"] = clock.wall(ready.whole or ready.run)
    return {
        "us": {name: asdict(found) for name, found in times.items()},
        "must_bytes": case.must_bytes,
        "moved_bytes": ready.moved_bytes() if ready.moved_bytes is not None else None,
        "peak_bytes": clock.peak_bytes(ready.whole or ready.run),
        "accepted": ready.accepted(),
    }


def _count_accepted(runs: Sequence[dict[str, Any]], contenders: dict[str, Contender], many: Case) -> None:
    """Puts what is accepted of many sequences in place of what was of one."""
    for run in runs:
        if "us" in run:
            with torch.inference_mode():
                run["accepted"] = contenders[run["contender"]].start(many).accepted()


def _line(part: str, runs: Sequence[dict[str, Any]]) -> str:
    first = runs[0]
    told = ", ".join(
        f"{run['contender']} {min(found['median'] for found in run['us'].values()):.1f}" for run in runs if "us" in run
    )
    return (
        f"{part}: V {first['V']}, B {first['B']}, γ {first['gamma']}, {first['rule']}: {told or 'nobody'} (µs, least)"
    )


if __name__ == "__main__":
    sys.exit(main())
