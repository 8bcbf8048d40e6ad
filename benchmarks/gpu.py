"""Outrider on a GPU: whether it works, and how fast it is; three runs of nine minutes.

Each part has its own time, and one that fails does not stop the others. All write into one result. The parts are in
`gpu_checks` and `gpu_speed`.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from benchmarks import gpu_checks, gpu_speed, harness, synthetic_models
from benchmarks import kernel as kernel_benchmark
from benchmarks.contenders import Task, Unavailable
from benchmarks.harness import Json, number, progress, write_json
from benchmarks.kernel import Plan as KernelPlan
from benchmarks.kernel import aim, aims_list
from benchmarks.services import ANYWHERE, NO_PREFIXES, Services
from benchmarks.synthetic_models import LLAMA_1B, LLAMA_8B, LLAMA_13B, TINY_DRAFT, TINY_TARGET, KnownText, Shape
from benchmarks.timing import Timer
from outrider.runtime.device import work_on
from outrider.runtime.loader import LoadedModel

Result = TypeVar("Result")

RUNS: dict[int, dict[str, float]] = {
    1: {"choices": 40.0, "tests": 440.0},
    2: {"kernel": 60.0, "alone": 120.0, "profile": 30.0, "pair": 130.0, "streams": 120.0, "engine": 40.0},
    3: {"memcheck": 480.0},
}
"""The parts of each run, with the seconds of each."""
WITH_SERVICES = ("pair", "streams", "engine")
BUDGETS = {name: seconds for parts in RUNS.values() for name, seconds in parts.items()}
RUN_SECONDS = 500.0
"""After so much of a run no part begins; the rest of nine minutes is for imports."""
DRY_RUN = "A dry run with tiny models on a CPU: it shows that the benchmark works. None of its figures means anything."
OF_BOUND = {"1B": 0.5, "8B": 0.7, "13B": 0.8}
"""Aims at one stream: the share of the rate at which the weights can be read."""
KERNEL = KernelPlan((128_256,), gammas=(1, 5, 20), batches=(1, 16, 64, 256), rules_batches=(64, 256), repeats=30)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    is_dry: bool = False  # whether it only shows that everything runs
    dtype: str = "bfloat16"  # of all models
    shapes: tuple[Shape, ...] = (LLAMA_1B, LLAMA_8B, LLAMA_13B)  # of the parts `choices` and `alone`
    draft: Shape = LLAMA_1B
    target: Shape = LLAMA_8B
    alphas: tuple[float, ...] = (0.6, 0.7, 0.8, 0.9)  # of the synthetic pair
    gamma: int = 4  # drafted tokens of a round
    prompt_tokens: int = 32  # of each text
    alone_tokens: int = 64  # of each text of the part `alone`
    repeats: int = 5  # turns of each contender, unless the part's time is over before
    pair_tokens: int = 128  # of each text of the part `pair`
    streams: tuple[int, ...] = (1, 4, 16, 64)  # of the parts `streams` and `engine`
    stream_tokens: int = 96  # of each text of the part `streams`
    kernel: KernelPlan = KERNEL
    kv_mb: int = 6144  # keys and values of each service, MiB

    def text(self, shape: Shape) -> KnownText:
        return KnownText(shape.vocab, self.alphas)


FULL = GpuPlan()
DRY = GpuPlan(
    is_dry=True, shapes=(TINY_DRAFT, TINY_TARGET), draft=TINY_DRAFT, target=TINY_TARGET, alphas=(0.6, 0.8), gamma=2,
    prompt_tokens=4, alone_tokens=6, repeats=1, pair_tokens=16, streams=(1, 2), stream_tokens=6,
    kernel=KernelPlan((512,), gammas=(2,), batches=(2,), gamma=2, rules_batches=(1,), repeats=5), kv_mb=16,
)  # fmt: skip


class GpuBench:
    """Shared by the parts: time left, errors, models and services.

    Attributes:
        errors: of the part in progress, a line each; its other figures hold.
    """

    def __init__(self, plan: GpuPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.timer = Timer(device, plan.kernel.repeats)
        self.errors: list[str] = []
        self._end = 0.0
        self._running = ExitStack()
        self._services: Services | None = None

    def begin(self, seconds: float) -> None:
        """Begins a part. After so many seconds nothing new begins in it."""
        self._end = time.monotonic() + seconds
        self.errors = []

    @property
    def left(self) -> float:
        """Seconds that the part has left; 0 once they are over."""
        return max(0.0, self._end - time.monotonic())

    def turns(self, most: int) -> Iterator[int]:
        """0 and so on up to `most`, but for the first only as long as there is time."""
        for turn in range(most):
            if turn and not self.left:
                return
            yield turn

    def progress(self, line: str) -> None:
        progress(f"  {line} ({self.left:.0f} s left)")

    def attempt(self, name: str, measure: Callable[[], Result], *, ours: bool = True) -> Result | Json:
        """The result of `measure`, or `{"error": why}`: the part goes on. Only errors of ours fail it."""
        try:
            return measure()
        except Exception as error:
            line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if ours and not isinstance(error, Unavailable):
                self.errors.append(f"{name}: {line}")
            self.progress(f"{name}: {line}")
            return {"error": str(error) if isinstance(error, Unavailable) else line}
        finally:
            self.free_memory()

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def model(self, shape: Shape, *, drafts: bool = False) -> Any:
        """A synthetic model on the device, as transformers runs it."""
        text, dtype = self.plan.text(shape), synthetic_models.DTYPES[self.plan.dtype]
        return synthetic_models.build(shape, text, drafts=drafts, device=self.device, dtype=dtype)

    def loaded(self, shape: Shape, dtype: str | None = None) -> LoadedModel:
        """A synthetic target on the device, as Outrider runs it."""
        text, format_ = self.plan.text(shape), synthetic_models.DTYPES[dtype or self.plan.dtype]
        return synthetic_models.loaded(shape, text, drafts=False, device=self.device, dtype=format_)

    def task(self, shape: Shape, number: int, tokens: int, alpha: float | None = None, temperature: float = 0) -> Task:
        """A text of so many tokens; by default of the last α."""
        alpha = self.plan.alphas[-1] if alpha is None else alpha
        prompt = self.plan.text(shape).prompt(alpha, number, length=self.plan.prompt_tokens, output=tokens)
        return Task(number, prompt, tokens, temperature, 1 + number)

    def services(self) -> Services:
        """Both services of the synthetic pair on this device; started where they are not running."""
        if self._services is None:
            plan = self.plan
            scratch = Path(self._running.enter_context(tempfile.TemporaryDirectory(prefix="outrider-gpu-")))
            target, draft = (
                synthetic_models.save(scratch / name, shape, plan.text(shape), drafts=name == "draft")
                for name, shape in (("target", plan.target), ("draft", plan.draft))
            )
            memory = ("--kv-cache-mb", str(plan.kv_mb))
            made = Services(
                target,
                draft,
                dtype=plan.dtype,
                device=str(self.device),
                place=ANYWHERE,
                max_sequences=max(plan.streams) + 1,
                verifier_flags=[*memory, *NO_PREFIXES],
                draft_flags=[*memory, *NO_PREFIXES, "--no-outcome-cache"],
                command=["benchmarks.synthetic_models"],
            )
            self._services = self._running.enter_context(made)
            self.progress("the services of the synthetic pair are up")
        return self._services

    def close_services(self) -> None:
        self._running.close()
        self._services = None


PARTS: dict[str, Callable[[GpuBench], Json]] = {
    "choices": gpu_checks.choices,
    "tests": gpu_checks.tests,
    "kernel": gpu_speed.kernel,
    "alone": gpu_speed.alone,
    "profile": gpu_speed.profile,
    "pair": gpu_speed.pair,
    "streams": gpu_speed.streams,
    "engine": gpu_speed.engine,
    "memcheck": gpu_checks.memcheck,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="all of it with tiny models; figures mean nothing")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--run", type=int, choices=list(RUNS), help="the parts of one run")
    chosen.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the output file has already")
    parser.add_argument(
        "--output", type=Path, help="JSON file; new figures are added to it, and tables written beside it"
    )
    given = harness.parse(parser, arguments, {})
    parts = [name for name in PARTS if name in (RUNS[given.run] if given.run else given.parts)]
    transformers.logging.set_verbosity_error()
    try:
        bench = GpuBench(DRY if given.dry_run else FULL, _device(given))
        path, document = _result(given)
    except (OSError, RuntimeError, ValueError) as error:
        progress(f"benchmarks.gpu: {error}")
        return 2
    try:
        _measure(bench, parts, path, document, resume=given.resume)
    except KeyboardInterrupt:
        progress("benchmarks.gpu: interrupted; --resume goes on from here")
        return 130
    finally:
        bench.close_services()
    return _report(parts, path, document)


def _device(given: argparse.Namespace) -> torch.device:
    if given.dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; --dry-run runs all of it with tiny models on a CPU")
    device = torch.device("cuda", 0)
    work_on(device)
    return device


def _result(given: argparse.Namespace) -> tuple[Path, Json]:
    """The result's file, and the document to add parts to."""
    dry_path = Path(tempfile.gettempdir()) / "outrider-gpu-dry-run" / "gpu.json"
    path: Path = given.output or (dry_path if given.dry_run else harness.RESULTS / "gpu.json")
    document: Json = {"meaning": DRY_RUN} if given.dry_run else {}
    document |= {"benchmark": "gpu", "command": given.command, "machine": harness.machine(), "parts": {}}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("meaning") != document.get("meaning"):
            raise ValueError(f"{path.name} cannot be added to: one of the two is a dry run")
        document["parts"] = found["parts"]
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, document


def _measure(bench: GpuBench, parts: Sequence[str], path: Path, document: Json, *, resume: bool) -> None:
    """Measures parts, each in its time: all of them, or those that the result lacks."""
    done: Json = document["parts"]
    left = [name for name in parts if not (resume and name in done and not done[name]["errors"])]
    versions = harness.versions("outrider", *harness.PACKAGES, "triton", "flashinfer-python")
    end = time.monotonic() + RUN_SECONDS * sum(any(name in parts for name in run) for run in RUNS.values())
    for nth, name in enumerate(left):
        if time.monotonic() > end:
            progress(f"the time is over; --resume goes on with {', '.join(left[nth:])}")
            return
        if name not in WITH_SERVICES:
            bench.close_services()
        progress(f"{nth + 1} of {len(left)}, {name}: up to {BUDGETS[name]:.0f} s")
        done[name] = _part(bench, name) | {"device": bench.timer.describe(), "versions": versions}
        _write(path, document)


def _part(bench: GpuBench, name: str) -> Json:
    begin = time.monotonic()
    bench.begin(BUDGETS[name])
    entry: Json = {}
    try:
        entry["figures"] = json.loads(json.dumps(harness.rounded(PARTS[name](bench))))
    except Exception as error:  # the other parts go on
        bench.errors.append(f"{type(error).__name__}: {error}")
        bench.progress(f"it failed: {bench.errors[-1]}")
    finally:
        bench.free_memory()
    return entry | {"errors": bench.errors, "seconds": round(time.monotonic() - begin, 1)}


def _write(path: Path, document: Json) -> None:
    document["aims"] = aims(document)
    write_json(path, document)
    path.with_suffix(".md").write_text(page(document), encoding="utf-8")


def _report(parts: Sequence[str], path: Path, document: Json) -> int:
    _write(path, document)
    found = document["parts"]
    print(page(document))
    print(json.dumps({key: value for key, value in document.items() if key != "parts"}, ensure_ascii=False))
    failed = [f"{name}: {line}" for name in parts for line in found.get(name, {"errors": ["no figures"]})["errors"]]
    for line in failed:
        progress(f"benchmarks.gpu: {line}")
    return 1 if failed else 0


def aims(document: Json) -> list[Json]:
    """Each aim with its worst case; none in a dry run."""
    if "meaning" in document:
        return []
    figures = {name: entry["figures"] for name, entry in document["parts"].items() if "figures" in entry}
    shapes = figures.get("alone", {}).get("shapes", {})
    rows = figures.get("engine", {}).get("rows", [])
    shares = [row["share"] for row in rows if row["rounds"] == "Decode" and "share" in row]
    pairs = [row["of_predicted"] for row in figures.get("pair", {}).get("rows", [])]
    return [
        *(
            aim(f"{name} alone, {least:g} of the bound by its weights", [_of_bound(shapes.get(name, {}))], least=least)
            for name, least in OF_BOUND.items()
        ),
        aim("the pair, 0.9 of Theorem 3.8", pairs, least=0.9),
        aim("most streams, Decode: at most 0.1 of the time between passes", shares[-1:], most=0.1),
        *figures.get("kernel", {}).get("aims", []),
    ]


def _of_bound(shape: Json) -> float | None:
    """The share of the bound that Outrider reaches as it serves: by steps in a row, with graphs where they work."""
    names = (gpu_speed.IN_A_ROW, gpu_speed.GRAPHS, gpu_speed.EAGER)
    found = [shape.get("contenders", {}).get(name, {}) for name in names]
    return next((each["of_bound"] for each in found if "of_bound" in each), None)


def page(document: Json) -> str:
    parts = ["# Outrider on a GPU\n", *([f"**{document['meaning']}**\n"] if "meaning" in document else [])]
    if document["aims"]:
        parts.append(f"## Which aims hold\n\n{aims_list(document['aims'])}\n")
    for name, entry in document["parts"].items():
        where = ", ".join(f"{each} {value}" for each, value in (entry["device"] | entry["versions"]).items() if value)
        parts.append(f"## {name}\n\n{where}; {entry['seconds']:g} s.\n")
        parts += [f"- ERROR: {line}\n" for line in entry["errors"]]
        if "figures" in entry:
            parts.append((kernel_benchmark.table if name == "kernel" else _table)(entry["figures"]))
    return "\n".join(parts)


def _table(found: Json) -> str:
    """A row for each object of a part, with its numbers and words as the JSON document names them."""
    rows = found.get("rows", [found])
    if "shapes" in found:
        rows = [
            {"shape": shape, "contender": contender, "bound": row["bound_tokens_per_second"], **each}
            for shape, row in found["shapes"].items()
            for contender, each in row.get("contenders", {}).items()
        ]
    flat = [
        {key: value for key, value in _with_inner(row).items() if not isinstance(value, dict | list)} for row in rows
    ]
    head = list(dict.fromkeys(key for row in flat for key in row))
    return harness.table(head, [[_cell(row.get(key)) for key in head] for row in flat]) + "\n"


def _with_inner(row: Json) -> Json:
    """A row with the entries of its objects as its own."""
    inner = {f"{key} {name}": value for key, own in row.items() if isinstance(own, dict) for name, value in own.items()}
    return row | inner


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return number(None) if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
