"""Outrider on a GPU: what runs there, whether it is right, and how fast it is; three runs of nine minutes.

    python -m benchmarks.gpu --run 1                choices of kernels, tests, memory accesses
    python -m benchmarks.gpu --run 2                the kernel, one stream, a saturated verifier
    python -m benchmarks.gpu --run 3                the pair, many streams, the outcome cache
    python -m benchmarks.gpu --parts alone,pair     some parts
    python -m benchmarks.gpu --resume               those that the result lacks, or that failed
    python -m benchmarks.gpu --dry-run              does it work at all: all of it with tiny models on a CPU

`make gpu` looks after packages first (`benchmarks.gpu_packages`). Each part has its own time, and one that fails takes
no other with it. All write into one result. This file knows the order of things; what a part does is known elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from benchmarks import machine
from benchmarks.clocks import clock_of
from benchmarks.gpu_alone import alone, device_rates
from benchmarks.gpu_bench import Bench, Json
from benchmarks.gpu_checks import choices, memcheck, tests
from benchmarks.gpu_kernel import kernel
from benchmarks.gpu_pair import cache, pair
from benchmarks.gpu_picture import draw
from benchmarks.gpu_plan import DRY, FULL, PARTS, RUN_SECONDS, RUNS, GpuPlan
from benchmarks.gpu_profile import profiled
from benchmarks.gpu_report import DRY_RUN, summarise, tables
from benchmarks.gpu_streams import share, streams
from benchmarks.record import Record
from outrider.runtime.device import work_on

RESULT = Path(__file__).resolve().parent / "results" / "gpu.json"
DRY_FOLDER = "outrider-gpu-dry-run"
_WITH_SERVICES = ("pair", "streams")
_VERSIONS = ("triton", "flashinfer-python")

Measure = Callable[[Bench, Json], Json]
MEASURES: dict[str, Measure] = {
    "choices": lambda bench, found: choices(bench),
    "tests": lambda bench, found: tests(bench),
    "memcheck": lambda bench, found: bench.tried("memcheck", lambda: memcheck(bench), ours=False),
    "device": lambda bench, found: device_rates(bench),
    "alone": lambda bench, found: alone(bench, _bandwidth(bench, found)),
    "pair": lambda bench, found: pair(bench),
    "streams": lambda bench, found: streams(bench),
    "cache": lambda bench, found: cache(bench),
    "share": lambda bench, found: share(bench),
    "kernel": lambda bench, found: kernel(bench),
    "profile": lambda bench, found: profiled(bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 1 where a part failed, 2 where nothing can be measured at all."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)

    def told(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)

    transformers.logging.set_verbosity_error()  # what it has to say of its own generation flags is not ours
    plan = DRY if given.dry_run else FULL
    try:
        device = _device(given)
        parts = _parts(given)
        clock = clock_of(device, plan.clock_repeats)
        record = Record.open(_output(given), _head(given, arguments), resume=given.resume or given.run is not None)
        scratch = tempfile.TemporaryDirectory(prefix="outrider-gpu-", dir=given.scratch)
    except (OSError, RuntimeError, ValueError) as error:
        told(f"benchmarks.gpu: {error}")
        return 2
    with scratch as folder:
        bench = Bench(plan, device, clock, Path(folder), told)
        try:
            _measure(bench, parts, record, _key(plan, clock.describe()), told, anew=not given.resume)
        except KeyboardInterrupt:
            told("benchmarks.gpu: interrupted; --resume goes on from here")
            return 130
        finally:
            bench.close_services()
    return _report(record, parts, told)


# -------------------------------------------------------------------------------------------------------- what is asked


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--dry-run", action="store_true", help="all of it with tiny models on a CPU; figures mean nothing"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--run", type=int, choices=list(RUNS), help="the parts of one run, beside what the file holds")
    chosen.add_argument("--parts", default=",".join(PARTS), help="which, with commas (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the output file has already")
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s); a dry run takes the CPU")
    parser.add_argument("--scratch", type=Path, help="folder for what need not be kept (default: the system's own)")
    parser.add_argument("--output", type=Path, help="JSON file to write; tables and pictures go beside it")
    return parser.parse_args(arguments)


def _device(given: argparse.Namespace) -> torch.device:
    if given.dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; --dry-run runs all of it with tiny models on a CPU")
    device = torch.device(given.device)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {given.device}; torch sees {torch.cuda.device_count()} CUDA devices")
    work_on(device)
    return torch.device("cuda", device.index or 0)


def _parts(given: argparse.Namespace) -> list[str]:
    if given.run is not None:
        return list(RUNS[given.run])
    asked = [name.strip() for name in given.parts.split(",") if name.strip()]
    if unknown := [name for name in asked if name not in PARTS]:
        raise ValueError(f"--parts names {unknown[0]}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def _output(given: argparse.Namespace) -> Path:
    if given.output:
        return Path(given.output)
    return Path(tempfile.gettempdir()) / DRY_FOLDER / RESULT.name if given.dry_run else RESULT


def _head(given: argparse.Namespace, arguments: Sequence[str]) -> Json:
    head = {
        "benchmark": "gpu",
        "command": machine.command("benchmarks.gpu", arguments),
        "machine": machine.describe(),
        "settings": {"dry_run": given.dry_run},
        "parts": {},
    }
    return {"meaning": DRY_RUN, **head} if given.dry_run else head


def _key(plan: GpuPlan, device: Json) -> Json:
    """What a part's figures hold for: where one of these differs it is measured anew."""
    versions = {**machine.describe()["versions"], **{name: _version(name) for name in _VERSIONS}}
    key: Json = json.loads(json.dumps({"device": device, "versions": versions, "settings": plan.document()}))
    return key


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---------------------------------------------------------------------------------------------------------- measurement


def _measure(
    bench: Bench, parts: Sequence[str], record: Record, key: Json, told: Callable[[str], None], *, anew: bool
) -> None:
    """Measures parts, each in its time: all of them `anew`, or those that the record does not hold yet."""
    if "meaning" in record.document:
        told(DRY_RUN)
    budgets = bench.plan.budgets
    done: Json = record.document["parts"]
    left = [name for name in parts if anew or not _is_done(done.get(name), key)]
    for name in (name for name in parts if name not in left):
        told(f"{PARTS[name]}: it is there already")
    end = time.monotonic() + RUN_SECONDS * sum(any(name in parts for name in run) for run in RUNS.values())
    for number, name in enumerate(left):
        if time.monotonic() > end:
            told(f"the time is over; --resume goes on with {', '.join(left[number:])}")
            return
        if name not in _WITH_SERVICES:
            bench.close_services()
        rest = sum(budgets[each] for each in left[number:])
        told(f"{number + 1} of {len(left)}, {PARTS[name]}: up to {budgets[name]:.0f} s; all that is left, {rest:.0f} s")
        done[name] = _part(bench, name, done) | {"key": key}
        record.save()


def _part(bench: Bench, name: str, done: Json) -> Json:
    """A part's entry: its figures, or why there are none."""
    budget, begin = bench.plan.budgets[name], time.monotonic()
    bench.begin(budget)
    entry: Json = {"budget_seconds": budget}
    try:
        entry["figures"] = json.loads(json.dumps(MEASURES[name](bench, done)))
    except Exception as error:  # whatever it is, the other parts go on
        entry["error"] = f"{type(error).__name__}: {error}"
        bench.told(f"it failed: {entry['error']}")
    finally:
        bench.clean()
    return entry | {"troubles": bench.troubles, "seconds": round(time.monotonic() - begin, 1)}


def _is_done(entry: Json | None, key: Json) -> bool:
    return entry is not None and entry["key"] == key and not _troubles(entry)


def _troubles(entry: Json) -> list[str]:
    return [*([entry["error"]] if "error" in entry else []), *entry["troubles"]]


def _bandwidth(bench: Bench, done: Json) -> float:
    """What this device copies; another may have been measured before."""
    known = done.get("device", {})
    if "figures" in known and known["key"]["device"] == json.loads(json.dumps(bench.clock.describe())):
        return float(known["figures"]["copy_bytes_per_second"])
    return bench.clock.copy_bandwidth()


# --------------------------------------------------------------------------------------------------------------- report


def _report(record: Record, parts: Sequence[str], told: Callable[[str], None]) -> int:
    document: dict[str, Any] = record.document
    record.put("summary", summarise(document))
    text = tables(document)
    record.path.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(document, record.path.with_suffix(""))
    print(text)
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}, ensure_ascii=False))
    failed = {name: _troubles(document["parts"][name]) for name in parts if name in document["parts"]}
    for name, lines in failed.items():
        for line in lines:
            told(f"benchmarks.gpu: {PARTS[name]}: {line}")
    missing = [name for name in parts if name not in document["parts"]]
    told(f"wrote {record.path.name} and what goes with it")
    return 1 if missing or any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
