"""What one verification costs on a device: Outrider's kernel against what others do, and against the memory's speed.

    python -m benchmarks.kernel                  all of it, on a GPU: about seven minutes
    python -m benchmarks.kernel --parts gamma    one part; --resume goes on with what there is
    python -m benchmarks.kernel --quick          does it work at all: small sizes, on a CPU too

Parts: `batch` (B from 1 to 256), `gamma` (γ from 1 to 20 at B = 1, as [W Fig. 3-5, Table 8]) and `rules`. Bandwidth is
what must move over the time with cold caches; its share is of what a plain copy moves in the same run. Logits are of a
Zipf-like distribution, and drafts of one near it. All but Outrider take the whole of q, and turn both models' logits to
float32 first.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from benchmarks import harness, plots
from benchmarks.clocks import Clock, Work, clock_of
from benchmarks.contenders import Unavailable
from benchmarks.harness import Bench, Json, Runs, tell
from kernels.dense import DraftLogits, SigmoidScales
from kernels.rng import Domain, gumbel, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule, implementation_for, verify

PARTS = ("rules", "batch", "gamma")
NAMES = ("outrider", "transformers", "torch")
MEASURES = ("eager cold", "eager warm", "graph cold", "graph warm", "whole")
MAX_GAMMA = 20
BASE_LENGTH = 1000
_EXPONENT = 1.5  # p ∝ rank^-1.5: the best 64 of 128k tokens have nine tenths of the mass
_APART = 0.7  # standard deviation of draft and target logits from each other
_SUPPORT = SparseConfig(keep_mass=0.99, max_support=64)
_SCALES = SigmoidScales(-1e3, 1e3)


# -------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of γ drafted tokens over a vocabulary of V."""

    V: int
    B: int
    gamma: int
    rule: Rule = Rule.TOKENWISE

    def keys(self) -> dict[str, Any]:
        return {"V": self.V, "B": self.B, "gamma": self.gamma, "rule": self.rule.value}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence of `MAX_GAMMA` drafts, which those of all others are copies of.

    Attributes:
        logits: `[MAX_GAMMA + 1, V]`.
        draft_logits: `[MAX_GAMMA, V]`.
        q: q̂ of each draft, `[MAX_GAMMA]`.
    """

    logits: Tensor
    draft_logits: Tensor
    q: Sequence[SparseDistribution]

    @classmethod
    def make(cls, V: int, dtype: torch.dtype, device: torch.device) -> Rows:
        source = torch.Generator().manual_seed(V)
        ranks = torch.stack([torch.randperm(V, generator=source) for _ in range(MAX_GAMMA + 1)])
        logits = -_EXPONENT * (1 + ranks).log()
        apart = _APART * torch.randn(MAX_GAMMA, V, generator=source)
        draft_logits = (logits[:-1] + apart).to(dtype)
        q = sparsify(torch.softmax(draft_logits.float(), dim=-1), _SUPPORT)
        return cls(logits.to(dtype).to(device), draft_logits.to(device), q)


class Case:
    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.shape = shape
        self._rows = rows

    @cached_property
    def logits(self) -> Tensor:
        shape = self.shape
        return self._rows.logits[: shape.gamma + 1].repeat(shape.B, 1, 1)

    @cached_property
    def draft_logits(self) -> Tensor:
        """The draft's, `[B, γ, V]`: what is read by those who take the whole of q."""
        return self._rows.draft_logits[: self.shape.gamma].repeat(self.shape.B, 1, 1)

    @cached_property
    def drafted(self) -> Tensor:
        """Tokens drawn from the whole of q, int64 `[B, γ]`."""
        source = torch.Generator().manual_seed(self.shape.B)
        q = torch.softmax(self._rows.draft_logits[: self.shape.gamma].cpu().float(), dim=-1)
        drawn = torch.multinomial(q, self.shape.B, replacement=True, generator=source)
        return drawn.T.contiguous().to(self._rows.logits.device)

    @cached_property
    def proposals(self) -> list[Proposed]:
        """As Outrider takes them: tokens drawn from q̂, or by the shared noise under `coupled`."""
        shape, kept = self.shape, self._rows.q[: self.shape.gamma]
        plain = SamplingParams()
        if shape.rule is Rule.COUPLED:
            return [Proposed(self._coupled_tokens(), (), plain, 0, BASE_LENGTH, Rule.COUPLED)] * shape.B
        q: tuple[Any, ...] = tuple(kept)
        scales = None
        if shape.rule is Rule.SIGMOID:
            q = tuple(DraftLogits(row) for row in self._rows.draft_logits[: shape.gamma].to(torch.float16))
            scales = _SCALES
        return [
            Proposed(
                tuple(each.token_at(uniform(b, BASE_LENGTH, i, Domain.DRAFT)) for i, each in enumerate(kept)),
                q, plain, b, BASE_LENGTH, shape.rule, sigmoid=scales,
            )
            for b in range(shape.B)
        ]  # fmt: skip

    @property
    def must_bytes(self) -> int:
        """What must move at the least: each row of logits once; under `sigmoid` the draft's too."""
        shape = self.shape
        rows = shape.B * (shape.gamma + 1) + (shape.B * shape.gamma if shape.rule is Rule.SIGMOID else 0)
        return rows * shape.V * self._rows.logits.element_size()

    def _coupled_tokens(self) -> tuple[int, ...]:
        gamma = self.shape.gamma
        noise = gumbel(0, range(BASE_LENGTH, BASE_LENGTH + gamma), self.shape.V)
        scores = torch.log_softmax(self._rows.draft_logits[:gamma].cpu().float(), dim=-1) + noise
        return tuple(scores.argmax(dim=-1).tolist())


# ----------------------------------------------------------------------------------------------------------- contenders

MOST_IN_TURN = 16
"""Sequences that a contender without batches takes one after the other; more would only take longer."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A contender that has a case in hand.

    Attributes:
        run: what is timed: from logits on the device to results on the device.
        accepted: runs once more; drafted tokens accepted a sequence.
        graphable: whether `run` may be captured in a CUDA graph.
        whole: the same with all that the host does before and after, where that is not in `run`.
    """

    run: Work
    accepted: Callable[[], float]
    graphable: bool
    whole: Work | None = None


Contender = Callable[[Case], Ready]
"""Takes a case in hand; raises `Unavailable` where it cannot."""


def outrider(path: str) -> Contender:
    """`kernels.verify` by the path named; of `triton` the launches are timed apart from packing and copying."""

    def start(case: Case) -> Ready:
        if case.shape.rule not in importlib.import_module(f"kernels.verify_{path}").RULES:
            raise Unavailable(f"{path} does not know the rule {case.shape.rule.value}")
        logits = case.logits.flatten(0, 1)

        def whole() -> Any:
            return verify(logits, case.proposals, path)

        def accepted() -> float:
            return sum(result.accepted for result in whole()) / case.shape.B

        if path != "triton":
            return Ready(whole, accepted, graphable=False, whole=whole)
        launch: Any = importlib.import_module("kernels.verify_triton").prepare(logits, case.proposals)
        return Ready(launch.run, accepted, graphable=True, whole=whole)

    return start


def _tokenwise_alone(case: Case) -> None:
    if case.shape.rule is not Rule.TOKENWISE:
        raise Unavailable(f"it does not know the rule {case.shape.rule.value}")


def transformers(case: Case) -> Ready:
    """Transformers' `_speculative_sampling`, a sequence at a time: it takes no batch."""
    _tokenwise_alone(case)
    if case.shape.B > MOST_IN_TURN:
        raise Unavailable(f"it takes one sequence at a time, not {case.shape.B}")
    logits, draft_logits, drafted = case.logits, case.draft_logits, case.drafted

    def run() -> list[Any]:
        return [
            _speculative_sampling(drafted[b : b + 1], q[None].float(), case.shape.gamma, p[None].float())
            for b, (p, q) in enumerate(zip(logits, draft_logits, strict=True))
        ]

    return Ready(run, lambda: sum(float(matches) for _, matches in run()) / case.shape.B, graphable=False)


def torch_unfused(case: Case) -> Ready:
    _tokenwise_alone(case)
    arguments = case.logits, case.draft_logits, case.drafted
    return Ready(lambda: unfused(*arguments), lambda: float(unfused(*arguments)[0].float().mean()), graphable=True)


def contenders_of(path: str) -> dict[str, Contender]:
    """All who verify, by name; `path` is Outrider's implementation."""
    return {
        "outrider": outrider(path),
        "transformers": transformers,
        "torch": torch_unfused,
    }


def unfused(logits: Tensor, draft_logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """[L Alg. 1] on a batch, in as many operations as it reads, and without waiting for the host.

    Args:
        logits: `[B, γ+1, V]`.
        draft_logits: `[B, γ, V]`.
        drafted: int64 `[B, γ]`.

    Returns:
        How many are accepted, int64 `[B]`, and the next token, int64 `[B]`.
    """
    gamma = drafted.shape[1]
    p, q = torch.softmax(logits.float(), dim=-1), torch.softmax(draft_logits.float(), dim=-1)
    p_x = p[:, :gamma].gather(2, drafted[..., None])[..., 0]
    q_x = q.gather(2, drafted[..., None])[..., 0]
    stands = torch.rand_like(p_x) * q_x < p_x
    accepted = stands.long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(len(p), device=p.device)
    stopped = (accepted < gamma)[:, None]
    rest = p[row, accepted] - q[row, accepted.clamp(max=gamma - 1)] * stopped
    # The least of exponential times with these rates; `multinomial` would wait for the host.
    times = torch.empty_like(rest).exponential_()
    return accepted, (rest.clamp(min=0) / times).argmax(dim=1)


# -------------------------------------------------------------------------------------------------------- measurement


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
    parser = harness.parser("kernel", __doc__, quick="small sizes, few runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing after so long")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: CUDA where there is one)")
    return harness.run("kernel", harness.parse(parser, arguments, {}), _measure, summarise, table, draw)


def _measure(bench: Bench) -> None:
    given = bench.given
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = implementation_for(device)
    if device.type == "cpu" and not given.quick:
        raise ValueError("there is no CUDA device; --quick runs small sizes on a CPU")
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
                found = [{**keys, "contender": name, **_timed(name, contenders[name], case, clock)} for name in left]
                runs.add(*found)
                shown = ", ".join(f"{run['contender']} {device_us(run):.1f}" for run in found if "us" in run)
                tell(f"{', '.join(f'{name} {value}' for name, value in keys.items())}: {shown} µs")
                del case
                gc.collect()
    return True


def _timed(name: str, contender: Contender, case: Case, clock: Clock) -> Json:
    """Everything that is known of one contender on one case, or why it takes no part. Ours must not fail."""
    try:
        with torch.inference_mode():
            return _figures(contender(case), case, clock)
    except Unavailable as error:
        return {"refusal": str(error)}
    except Exception as error:  # another's library may be of another version than we know
        if name == "outrider":
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
    words = {True: "Holds", False: "Does not hold", None: "Not measured"}
    worst = ["" if each["found"] is None else f"; {each['found']:.2f} at worst" for each in found]
    return "\n".join(f"- **{words[each['met']]}**: {each['aim']}{at}." for each, at in zip(found, worst, strict=True))


def table(document: Json) -> str:
    device = ", ".join(f"{name} {value}" for name, value in document["device"].items())
    bandwidth = document["copy_bytes_per_second"]
    rows = [
        [
            run["contender"],
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
    reasons = {(run["contender"], run["refusal"]) for run in document["rows"] if "refusal" in run}
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
    for name, colour in zip(NAMES, plots.COLOURS, strict=False):
        points = sorted((run[along], value(run)) for run in _select(document, part=part, contender=name, V=V))
        plots.line(panel, points, marker="o", label=name, color=colour)


if __name__ == "__main__":
    sys.exit(main())
