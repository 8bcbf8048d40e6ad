"""What one verification costs on a device: Outrider's kernel against what others do, and against the memory's speed.

    python -m benchmarks.kernel                  all of it, on a GPU: about seven minutes
    python -m benchmarks.kernel --parts gamma    one part; --resume goes on with what there is
    python -m benchmarks.kernel --quick          does it work at all: small sizes, on a CPU too

Parts: `batch` (B from 1 to 256), `gamma` (γ from 1 to 20 at B = 1, as [W Fig. 3-5, Table 8]) and `rules`. Bandwidth is
what must move over the time with cold caches; its share is of what a plain copy moves in the same run.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from benchmarks import harness, plots
from benchmarks.clocks import Clock, clock_of
from benchmarks.harness import Bench, Json, Runs, tell
from benchmarks.kernel_contenders import Case, Contender, Outrider, Ready, Rows, Shape, contenders_of
from kernels.verify import Rule, implementation_for, implementations

PARTS = ("rules", "batch", "gamma")
LABELS = {
    "outrider": "Outrider",
    "transformers": "transformers",
    "torch": "torch, unfused",
    "compiled": "torch.compile",
    "flashinfer": "FlashInfer",
}
MEASURES = ("eager cold", "eager warm", "graph cold", "graph warm", "whole")


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

    vocabularies: tuple[int, ...] = (32_000, 128_256, 151_936, 262_144)
    gammas: tuple[int, ...] = tuple(range(1, 21))
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    gamma: int = 5
    rules_batches: tuple[int, ...] = (1, 64, 128, 256)
    repeats: int = 50

    def shapes(self, part: str) -> Iterator[Shape]:
        """The shapes of a part."""
        if part == "gamma":
            yield from (Shape(V, 1, gamma) for V in self.vocabularies for gamma in self.gammas)
        elif part == "batch":
            yield from (Shape(V, B, self.gamma) for V in self.vocabularies for B in self.batches)
        else:
            V = self.vocabularies[min(1, len(self.vocabularies) - 1)]
            yield from (Shape(V, B, self.gamma, rule) for B in self.rules_batches for rule in Rule)


FULL = Plan()
QUICK = Plan(vocabularies=(512, 1000), gammas=(1, 3), batches=(1, 2), gamma=2, rules_batches=(2,), repeats=5)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("kernel", __doc__, quick="small sizes, few runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing after so long")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: CUDA where there is one)")
    parser.add_argument("--path", help="which of Outrider's implementations (default: the fastest on the device)")
    return harness.run("kernel", harness.parse(parser, arguments, {}), _measure, summarise, table, draw)


def _measure(bench: Bench) -> None:
    given = bench.given
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = given.path or implementation_for(device)
    if device.type == "cpu" and not given.quick:
        raise ValueError("there is no CUDA device; --quick runs small sizes on a CPU")
    if path not in implementations():
        raise ValueError(f"--path is {path}; this build has {', '.join(implementations())}")
    plan = QUICK if given.quick else FULL
    clock = clock_of(device, plan.repeats)
    bench.document |= {"plan": asdict(plan), "path": path, "device": clock.describe()}
    bench.document["copy_bytes_per_second"] = bench.once("copy", clock.copy_bandwidth)
    if not measure(plan, given.parts, contenders_of(path), clock, bench, given.seconds):
        tell(f"{given.seconds:g} s are over; --resume goes on")


def measure(
    plan: Plan, parts: Sequence[str], contenders: Mapping[str, Contender], clock: Clock, runs: Runs, seconds: float
) -> bool:
    """Adds the runs that are not there yet; False where the time was over first."""
    end = time.monotonic() + seconds
    rows = lru_cache(maxsize=1)(lambda V: Rows.make(V, torch.bfloat16, clock.device))
    for part in parts:
        for shape in plan.shapes(part):
            keys = {"part": part, **shape.keys()}
            left = [name for name in contenders if not runs.has(**keys, contender=name)]
            if left and time.monotonic() > end:
                return False
            if left:
                case = Case(shape, rows(shape.V))
                found = [{**keys, "contender": name, **_timed(contenders[name], case, clock)} for name in left]
                runs.add(*found)
                shown = ", ".join(f"{run['contender']} {device_us(run):.1f}" for run in found if "us" in run)
                tell(f"{', '.join(f'{name} {value}' for name, value in keys.items())}: {shown} µs")
                del case
                gc.collect()
    return True


def _timed(contender: Contender, case: Case, clock: Clock) -> Json:
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


def _figures(ready: Ready, case: Case, clock: Clock) -> Json:
    times = {f"eager {name}": clock.times(ready.run, cold=name == "cold") for name in ("cold", "warm")}
    graph = clock.captured(ready.run) if ready.graphable else None
    if graph is not None:
        for name in ("cold", "warm"):
            times[f"graph {name}"] = clock.times(graph, cold=name == "cold", launched=False)
    times["whole"] = clock.wall(ready.whole or ready.run)
    return {
        "us": {name: asdict(found) for name, found in times.items()},
        "must_bytes": case.must_bytes,
        "peak_bytes": clock.peak_bytes(ready.whole or ready.run),
        "accepted": ready.accepted(),
    }


# ----------------------------------------------------------------------------------------------------------- figures


def device_us(run: Json, state: str = "warm") -> float:
    """The time on the device, caches `cold` or `warm`: of a graph where there is one, with its launches else."""
    us = run["us"]
    return float(us.get(f"graph {state}", us[f"eager {state}"])["median"])


def share_of_copy(run: Json, bandwidth: float) -> float:
    """What must move, over the time with cold caches, as a share of `bandwidth` in bytes a second."""
    return float(run["must_bytes"]) / (device_us(run, "cold") * 1e-6) / bandwidth


def summarise(bench: Bench) -> Json:
    """All runs, each of which is a median already, and the aims."""
    return {"rows": bench.runs, "aims": aims(bench.document | {"rows": bench.runs})}


def _select(document: Json, **keys: Any) -> list[Json]:
    """The runs with these keys that have figures."""
    return [run for run in document["rows"] if "us" in run and all(run[name] == value for name, value in keys.items())]


def aims(document: Json) -> list[Json]:
    """Each aim, for an H200, with the worst that was found; `met` is None where nothing that bears on it was there."""
    if document["device"]["name"] == "cpu":
        return []
    ours = _select(document, contender="outrider")
    alone = [run for run in ours if run["part"] == "gamma"]
    theirs = {(run["V"], run["gamma"]): run for run in _select(document, contender="transformers", part="gamma")}
    by_size = {(run["V"], run["gamma"]): device_us(run) for run in alone}

    def shares(rules: tuple[str, ...], least: float) -> list[float]:
        runs = [run for run in ours if run["rule"] in rules and run["must_bytes"] >= least]
        return [share_of_copy(run, document["copy_bytes_per_second"]) for run in runs]

    graphs = [run["us"]["graph warm"]["median"] for run in alone if run["gamma"] == 5 and "graph warm" in run["us"]]
    faster = [device_us(theirs[at]) / us for at, us in by_size.items() if at in theirs]
    growth = [us / by_size[V, 1] for (V, gamma), us in by_size.items() if gamma == 20 and (V, 1) in by_size]
    return [
        aim("85 % of a copy's bandwidth from 100 MB of logits up", shares(("tokenwise", "block"), 100e6), least=0.85),
        aim("coupled: 45 % from 200 MB up", shares(("coupled",), 200e6), least=0.45),
        aim("at most 8 µs at B = 1, γ = 5, in a graph, warm", graphs, most=8),
        aim("20 times transformers' path at B = 1", faster, least=20),
        aim("γ = 20 at most 1.5 times γ = 1, at B = 1, warm", growth, most=1.5),
    ]


def aim(text: str, values: Sequence[float | None], *, least: float | None = None, most: float | None = None) -> Json:
    """An aim with the worst of the values that are known."""
    known = [value for value in values if value is not None]
    found = None if not known else min(known) if least is not None else max(known)
    met = None if found is None else found >= least if least is not None else found <= (most or 0.0)
    return {"aim": text, "found": found, "met": met}


def aims_list(found: Sequence[Json]) -> str:
    """Each aim as a line."""
    words = {True: "Holds", False: "Does not hold", None: "Not measured"}
    worst = ["" if each["found"] is None else f"; {each['found']:.2f} at worst" for each in found]
    return "\n".join(f"- **{words[each['met']]}**: {each['aim']}{at}." for each, at in zip(found, worst, strict=True))


def table(document: Json) -> str:
    """The aims, every measurement, and who took no part in what, and why."""
    device = ", ".join(f"{name} {value}" for name, value in document["device"].items())
    bandwidth = document["copy_bytes_per_second"]
    rows = [
        [
            LABELS[run["contender"]],
            run["rule"],
            f"{run['V']:,}",
            run["B"],
            run["gamma"],
            *(harness.number(run["us"].get(name, {"median": None})["median"], 1) for name in MEASURES),
            f"{run['accepted'] / run['gamma']:.0%}",
            f"{run['must_bytes'] / 1e6:.1f}",
            f"{share_of_copy(run, bandwidth):.0%}",
            harness.number(run["peak_bytes"] and run["peak_bytes"] / 2**20, 1),
        ]
        for run in _select(document)
    ]
    head = ["", "rule", "V", "B", "γ", *(f"{name}, µs" for name in MEASURES), "accepted"]
    head += ["must move, MB", "of a copy", "peak, MiB"]
    reasons = {(LABELS[run["contender"]], run["refusal"]) for run in document["rows"] if "refusal" in run}
    return "\n\n".join(
        [
            f"{device}; path `{document['path']}`; a copy moves {bandwidth / 1e9:.0f} GB/s.",
            aims_list(document["aims"]),
            harness.table(head, rows, "One verification, medians"),
            harness.table(["who", "why, for some of the cases at least"], sorted(reasons), "Left out"),
        ]
    )


def draw(document: Json, path: Path) -> None:
    """A column a vocabulary, after [W Fig. 3-5]: time by γ, peak memory by γ, and share of the copy bandwidth by B."""
    vocabularies = document["plan"]["vocabularies"]
    bandwidth = document["copy_bytes_per_second"]
    note = f"{document['device']['name']}; path {document['path']}"
    with plots.picture(path, 3, len(vocabularies), size=(3.4, 2.8), note=note) as panels:
        for V, (times, memory, share) in zip(vocabularies, panels.T, strict=True):
            _lines(times, document, "gamma", V, device_us)
            _lines(memory, document, "gamma", V, lambda run: run["peak_bytes"] and run["peak_bytes"] / 2**20)
            _lines(share, document, "batch", V, partial(share_of_copy, bandwidth=bandwidth))
            times.set_title(f"V = {V:,}", fontsize=10)
            times.set_yscale("log")
            share.set_xscale("log", base=2)
            plots.level(share)
            share.set_xlabel(f"B (γ = {document['plan']['gamma']})", fontsize=8)
            for panel in (times, memory):
                panel.set_xlabel("γ (B = 1)", fontsize=8)
        for panel, named in zip(
            panels[:, 0], ("µs, warm caches", "peak memory, MiB", "of a copy, cold caches"), strict=True
        ):
            panel.set_ylabel(named, fontsize=8)


def _lines(panel: Axes, document: Json, part: str, V: int, value: Callable[[Json], float | None]) -> None:
    along = "gamma" if part == "gamma" else "B"
    for (name, label), colour in zip(LABELS.items(), plots.COLOURS, strict=False):
        points = sorted((run[along], value(run)) for run in _select(document, part=part, contender=name, V=V))
        plots.line(panel, points, marker="o", label=label, color=colour)


if __name__ == "__main__":
    sys.exit(main())
