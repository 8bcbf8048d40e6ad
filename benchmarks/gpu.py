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
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks import harness
from benchmarks.clocks import clock_of
from benchmarks.gpu_bench import DRY, FULL, PARTS, RUN_SECONDS, RUNS, GpuBench, GpuPlan
from benchmarks.gpu_checks import choices, memcheck, tests
from benchmarks.gpu_device import alone, device_rates, kernel, share
from benchmarks.gpu_pair import cache, pair, streams
from benchmarks.gpu_profile import profiled
from benchmarks.gpu_report import DRY_RUN, draw, summarise, table
from benchmarks.harness import Json, tell
from outrider.runtime.device import work_on

__all__ = ["draw", "main"]

RESULT = harness.RESULTS / "gpu.json"
DRY_FOLDER = "outrider-gpu-dry-run"
_WITH_SERVICES = ("pair", "streams")

Measure = Callable[[GpuBench, Json], Json]
MEASURES: dict[str, Measure] = {
    "choices": lambda bench, found: choices(bench),
    "tests": lambda bench, found: tests(bench),
    "memcheck": lambda bench, found: bench.tried("memcheck", lambda: memcheck(bench), ours=False),
    "device": lambda bench, found: device_rates(bench),
    "kernel": lambda bench, found: kernel(bench),
    "alone": lambda bench, found: alone(bench, _bandwidth(bench, found)),
    "share": lambda bench, found: share(bench),
    "profile": lambda bench, found: profiled(bench),
    "pair": lambda bench, found: pair(bench),
    "streams": lambda bench, found: streams(bench),
    "cache": lambda bench, found: cache(bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 1 where a part failed, 2 where nothing can be measured at all."""
    given = _parse(arguments)
    transformers.logging.set_verbosity_error()  # what it has to say of its own generation flags is not ours
    plan = DRY if given.dry_run else FULL
    try:
        device, parts = _device(given), _parts(given)
        clock = clock_of(device, plan.clock_repeats)
        default = Path(tempfile.gettempdir()) / DRY_FOLDER / RESULT.name if given.dry_run else RESULT
        result = Result(given.output or default, given)
        scratch = tempfile.TemporaryDirectory(prefix="outrider-gpu-", dir=given.scratch)
    except (OSError, RuntimeError, ValueError) as error:
        tell(f"benchmarks.gpu: {error}")
        return 2
    with scratch as folder:
        bench = GpuBench(plan, device, clock, Path(folder), tell)
        try:
            _measure(bench, parts, result, _key(plan, clock.describe()), anew=not given.resume)
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
    chosen.add_argument("--run", type=int, choices=list(RUNS), help="the parts of one run, beside what the file holds")
    chosen.add_argument("--parts", default=",".join(PARTS), help="which, with commas (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the output file has already")
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s); a dry run takes the CPU")
    parser.add_argument("--scratch", type=Path, help="folder for what need not be kept (default: the system's own)")
    parser.add_argument("--output", type=Path, help="JSON file to write; tables and pictures go beside it")
    return harness.parse(parser, arguments, {})


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


class Result:
    """The document, on disk part by part: a run or `--resume` goes on with the one that is there."""

    def __init__(self, path: Path, given: argparse.Namespace) -> None:
        self.path = path
        meaning = {"meaning": DRY_RUN} if given.dry_run else {}
        head = {"benchmark": "gpu", "command": given.command, "machine": harness.machine(), "parts": {}}
        self.document: Json = meaning | head
        if (given.resume or given.run is not None) and path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("meaning") != self.document.get("meaning"):
                raise ValueError(f"{path.name} cannot be resumed: one of the two is a dry run")
            self.document = found
        self.save()

    def save(self) -> None:
        """Writes it, under its name only when whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def _key(plan: GpuPlan, device: Json) -> Json:
    """What a part's figures hold for: where one of these differs it is measured anew."""
    versions = harness.versions("outrider", *harness.PACKAGES, "triton", "flashinfer-python")
    key: Json = json.loads(json.dumps({"device": device, "versions": versions, "settings": plan.document()}))
    return key


def _measure(bench: GpuBench, parts: Sequence[str], result: Result, key: Json, *, anew: bool) -> None:
    """Measures parts, each in its time: all of them `anew`, or those that the result does not hold yet."""
    if "meaning" in result.document:
        tell(DRY_RUN)
    budgets = bench.plan.budgets
    done: Json = result.document["parts"]
    left = [name for name in parts if anew or not _is_done(done.get(name), key)]
    for name in (name for name in parts if name not in left):
        tell(f"{PARTS[name]}: it is there already")
    end = time.monotonic() + RUN_SECONDS * sum(any(name in parts for name in run) for run in RUNS.values())
    for nth, name in enumerate(left):
        if time.monotonic() > end:
            tell(f"the time is over; --resume goes on with {', '.join(left[nth:])}")
            return
        if name not in _WITH_SERVICES:
            bench.close_services()
        rest = sum(budgets[each] for each in left[nth:])
        tell(f"{nth + 1} of {len(left)}, {PARTS[name]}: up to {budgets[name]:.0f} s; all that is left, {rest:.0f} s")
        done[name] = _part(bench, name, done) | {"key": key}
        result.save()


def _part(bench: GpuBench, name: str, done: Json) -> Json:
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


def _bandwidth(bench: GpuBench, done: Json) -> float:
    """What this device copies; another may have been measured before."""
    known = done.get("device", {})
    if "figures" in known and known["key"]["device"] == json.loads(json.dumps(bench.clock.describe())):
        return float(known["figures"]["copy_bytes_per_second"])
    return bench.clock.copy_bandwidth()


def _report(result: Result, parts: Sequence[str]) -> int:
    document = result.document
    document["summary"] = summarise(document)
    result.save()
    text = table(document)
    result.path.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(document, result.path.with_suffix(".png"))
    print(text)
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}, ensure_ascii=False))
    failed = {name: _troubles(document["parts"][name]) for name in parts if name in document["parts"]}
    for name, lines in failed.items():
        for line in lines:
            tell(f"benchmarks.gpu: {PARTS[name]}: {line}")
    tell(f"wrote {result.path.name} and what goes with it")
    missing = [name for name in parts if name not in document["parts"]]
    return 1 if missing or any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
