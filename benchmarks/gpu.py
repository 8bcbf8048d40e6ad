"""Outrider on a GPU: what runs there, whether it is right, and how fast it is; three runs of nine minutes.

    python -m benchmarks.gpu --run 1                which kernels it takes, tests, memory accesses
    python -m benchmarks.gpu --run 2                one device: the kernel, one stream
    python -m benchmarks.gpu --run 3                the services: the pair, many streams, the verifier's engine
    python -m benchmarks.gpu --parts alone,pair     some parts
    python -m benchmarks.gpu --resume               those that the result lacks, or that failed
    python -m benchmarks.gpu --dry-run              does it work at all: all of it with tiny models on a CPU

Each part has its own time, and one that fails takes no other with it. All write into one result. This file knows the
order of things, and what they come to; what a part does is in `gpu_checks` and `gpu_speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import gpu_checks, gpu_speed, harness
from benchmarks import kernel as kernel_benchmark
from benchmarks.clocks import clock_of
from benchmarks.gpu_bench import BUDGETS, DRY, FULL, RUNS, GpuBench
from benchmarks.gpu_speed import EAGER, GRAPHS
from benchmarks.harness import Json, number, tell
from benchmarks.kernel import aim, aims_list
from outrider.runtime.device import work_on

RUN_SECONDS = 500.0
"""After so much of a run no part begins; the rest is for imports."""
DRY_RUN = "A dry run with tiny models on a CPU: it shows that the benchmark works. None of its figures means anything."
OF_BOUND = {"1B": 0.5, "8B": 0.7, "13B": 0.8}
"""Aims: of the bound by the weights, for Outrider as it serves."""

MEASURES: dict[str, Callable[[GpuBench], Json]] = {
    "choices": gpu_checks.choices,
    "tests": gpu_checks.tests,
    "memcheck": gpu_checks.memcheck,
    "kernel": gpu_speed.kernel,
    "alone": gpu_speed.alone,
    "pair": gpu_speed.pair,
    "streams": gpu_speed.streams,
    "engine": gpu_speed.engine,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 1 where a part failed, 2 where nothing can be measured at all."""
    given = _parse(arguments)
    transformers.logging.set_verbosity_error()  # what it has to say of its own generation flags is not ours
    plan = DRY if given.dry_run else FULL
    try:
        device, parts = _device(given), _parts(given)
        result = Result(given)
        scratch = tempfile.TemporaryDirectory(prefix="outrider-gpu-")
    except (OSError, RuntimeError, ValueError) as error:
        tell(f"benchmarks.gpu: {error}")
        return 2
    with scratch as folder:
        bench = GpuBench(plan, device, clock_of(device, plan.clock_repeats), Path(folder))
        try:
            _measure(bench, parts, result, resume=given.resume)
        except KeyboardInterrupt:
            tell("benchmarks.gpu: interrupted; --resume goes on from here")
            return 130
        finally:
            bench.close_services()
    return _report(result, parts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="all of it with tiny models; figures mean nothing")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--run", type=int, choices=list(RUNS), help="the parts of one run")
    chosen.add_argument("--parts", default=",".join(MEASURES), help="which, with commas (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the output file has already")
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s); a dry run takes the CPU")
    parser.add_argument("--output", type=Path, help="JSON file to write, beside what it holds; tables go beside it")
    return harness.parse(parser, arguments, {})


def _device(given: argparse.Namespace) -> torch.device:
    if given.dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; --dry-run runs all of it with tiny models on a CPU")
    device = torch.device(given.device)
    work_on(device)
    return torch.device("cuda", device.index or 0)


def _parts(given: argparse.Namespace) -> list[str]:
    if given.run is not None:
        return list(RUNS[given.run])
    asked = [name.strip() for name in given.parts.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in MEASURES]:
        raise ValueError(f"--parts names {unknown[0]}; there are {', '.join(MEASURES)}")
    return [name for name in MEASURES if name in asked]


class Result:
    """The document, on disk part by part: a run goes on with the one that is there."""

    def __init__(self, given: argparse.Namespace) -> None:
        default = harness.RESULTS / "gpu.json"
        if given.dry_run:
            default = Path(tempfile.gettempdir()) / "outrider-gpu-dry-run" / "gpu.json"
        self.path: Path = given.output or default
        meaning = {"meaning": DRY_RUN} if given.dry_run else {}
        head = {"benchmark": "gpu", "command": given.command, "machine": harness.machine(), "parts": {}}
        self.document: Json = meaning | head
        if self.path.is_file():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.get("meaning") != self.document.get("meaning"):
                raise ValueError(f"{self.path.name} cannot be added to: one of the two is a dry run")
            self.document["parts"] = found["parts"]
        self.save()

    def save(self) -> None:
        """Writes it, under its name only when whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def _measure(bench: GpuBench, parts: Sequence[str], result: Result, *, resume: bool) -> None:
    """Measures parts, each in its time: all of them, or those that the result does not hold yet."""
    if bench.plan.is_dry:
        tell(DRY_RUN)
    done: Json = result.document["parts"]
    left = [name for name in parts if not (resume and name in done and not _troubles(done[name]))]
    versions = harness.versions("outrider", *harness.PACKAGES, "triton", "flashinfer-python")
    end = time.monotonic() + RUN_SECONDS * sum(any(name in parts for name in run) for run in RUNS.values())
    for nth, name in enumerate(left):
        if time.monotonic() > end:
            tell(f"the time is over; --resume goes on with {', '.join(left[nth:])}")
            return
        if name not in RUNS[3]:
            bench.close_services()
        tell(f"{nth + 1} of {len(left)}, {name}: up to {BUDGETS[name]:.0f} s")
        done[name] = _part(bench, name) | {"device": bench.clock.describe(), "versions": versions}
        result.save()


def _part(bench: GpuBench, name: str) -> Json:
    """A part's entry: its figures, or why there are none."""
    begin = time.monotonic()
    bench.begin(BUDGETS[name])
    entry: Json = {}
    try:
        entry["figures"] = json.loads(json.dumps(harness.rounded(MEASURES[name](bench))))
    except Exception as error:  # whatever it is, the other parts go on
        bench.troubles.append(f"{type(error).__name__}: {error}")
        bench.told(f"it failed: {bench.troubles[-1]}")
    finally:
        bench.clean()
    return entry | {"troubles": bench.troubles, "seconds": round(time.monotonic() - begin, 1)}


def _troubles(entry: Json) -> list[str]:
    found: list[str] = entry["troubles"]
    return found


def _report(result: Result, parts: Sequence[str]) -> int:
    document = result.document
    document["aims"] = aims(document)
    result.save()
    text = page(document)
    result.path.with_suffix(".md").write_text(text, encoding="utf-8")
    found = document["parts"]
    if "figures" in found.get("kernel", {}):
        kernel_benchmark.draw(found["kernel"]["figures"], result.path.with_name(f"{result.path.stem}-kernel.png"))
    print(text)
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}, ensure_ascii=False))
    failed = [f"{name}: {line}" for name in parts for line in found.get(name, {"troubles": ["no figures"]})["troubles"]]
    for line in failed:
        tell(f"benchmarks.gpu: {line}")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------------------------ report


def aims(document: Json) -> list[Json]:
    """What was aimed at, and the worst that was found; none holds or fails in a dry run."""
    if "meaning" in document:
        return []
    figures = _figures(document)
    shapes = figures.get("alone", {}).get("shapes", {})
    engine = [row for row in figures.get("engine", {}).get("rows", []) if row["rounds"] == "Decode" and "share" in row]
    return [
        *(
            aim(f"{name} alone, {least:g} of the bound by its weights", [_served(shapes.get(name, {}))], least=least)
            for name, least in OF_BOUND.items()
        ),
        aim(
            "the pair, 0.9 of Theorem 3.8",
            [row["of_foretold"] for row in figures.get("pair", {}).get("rows", [])],
            least=0.9,
        ),
        aim(
            "most streams, Decode: at most 0.1 of the time between passes",
            [row["share"] for row in engine[-1:]],
            most=0.1,
        ),
        *figures.get("kernel", {}).get("aims", []),
    ]


def _figures(document: Json) -> Json:
    return {name: entry["figures"] for name, entry in document["parts"].items() if "figures" in entry}


def _served(shape: Json) -> float | None:
    """Of the bound, what Outrider reaches as it serves: with graphs where there are any."""
    shares = [shape.get("contenders", {}).get(name, {}).get("of_bound") for name in (GRAPHS, EAGER)]
    return next((share for share in shares if share is not None), None)


def page(document: Json) -> str:
    figures = _figures(document)
    parts = ["# Outrider on a GPU\n", *([f"**{document['meaning']}**\n"] if "meaning" in document else [])]
    if document["aims"]:
        parts.append(f"## Which aims hold\n\n{aims_list(document['aims'])}\n")
    for name, entry in document["parts"].items():
        told = ", ".join(f"{each} {value}" for each, value in (entry["device"] | entry["versions"]).items() if value)
        parts.append(f"## {name}\n\n{told}; {entry['seconds']:g} s.\n")
        parts += [f"- WENT WRONG: {line}\n" for line in entry["troubles"]]
        if name in figures:
            parts.append(kernel_benchmark.table(figures[name]) if name == "kernel" else _table(name, figures[name]))
    return "\n".join(parts)


def _table(name: str, found: Json) -> str:
    """A row for each flat object of a part, its numbers and words as they are named in the JSON document."""
    rows = found.get("rows", [found])
    if name == "alone":
        rows = [
            {"shape": shape, "contender": contender, "bound": row["bound_tokens_per_second"], **each}
            for shape, row in found["shapes"].items()
            for contender, each in row.get("contenders", {}).items()
        ]
    flat = [_flat(row) for row in rows]
    head = list(dict.fromkeys(key for row in flat for key in row))
    alone = {key: value for key, value in found.items() if key not in ("rows", "shapes")} if rows != [found] else {}
    told = "".join(f"{key}: {_cell(value)}\n\n" for key, value in alone.items())
    return told + harness.table(head, [[_cell(row.get(key)) for key in head] for row in flat]) + "\n"


def _flat(row: Json) -> Json:
    """The same with the entries of inner objects as its own, named after both; lists are left to the document."""
    inner: Iterable[tuple[str, Any]] = (
        (f"{key} {name}", value) for key, own in row.items() if isinstance(own, dict) for name, value in own.items()
    )
    return {key: value for key, value in (*row.items(), *inner) if not isinstance(value, dict | list)}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return number(None) if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
