"""The cost of one verification on a device: Outrider's kernel against other implementations and the memory bandwidth.

Parts: `batch` (B from 1 to 256), `gamma` (γ from 1 to 20 at B = 1, as [W Fig. 3-5, Table 8]) and `rules`. Bandwidth is
the bytes that must move over the time with cold caches; its share is of a plain copy in the same run. Logits have a
Zipf-like distribution, and the draft's are near them. All but Outrider read the whole of q, and turn both models'
logits to float32 first.

On a CPU the walk ends at the first rejection, so the time of one proposal is that of a lucky draw. There 16 proposals
with other seeds take turns at B = 1, and `accepted` is their mean. (At temperature 0 nothing is drawn: they are alike.)
A CUDA graph holds one proposal; `accepted` is its own.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from inspect import signature
from itertools import cycle, product
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
from matplotlib.axes import Axes
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from benchmarks import harness
from benchmarks.contenders import Unavailable
from benchmarks.harness import Bench, Json, Runs, number, percent, progress
from benchmarks.timing import Timer, Work
from kernels.rng import Domain, gumbel, uniform
from kernels.sampling import SamplingParams
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.sparse import SparseConfig, SparseDistribution, truncate
from kernels.verify import Proposed, Rule, implementation_for, verify
from outrider.evaluation import pictures

PARTS = ("rules", "batch", "gamma")
GREEDY = "greedy"
RULES = (*(rule.value for rule in Rule), GREEDY)
"""The acceptance rules, and temperature 0, at which all of them are one."""
NAMES = ("outrider", "transformers", "torch")
MAX_GAMMA = 20
BASE_LENGTH = 1000
SECONDS = 420.0
"""After so long no measurement begins."""
TURNS = 16
"""Proposals that take turns at B = 1 on a CPU."""
MOST_ALONE = 16
"""Sequences that a contender without batches verifies one after another; more would only take longer."""
_EXPONENT = 1.5  # p ∝ rank^-1.5: the best 64 of 128k tokens have nine tenths of the mass
_DRAFT_NOISE = 0.7  # standard deviation of draft from target logits
_SUPPORT = SparseConfig(keep_mass=0.99, max_support=64)
_SCALES = SigmoidScales(-1e3, 1e3)


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of γ drafted tokens over a vocabulary of V."""

    V: int
    B: int
    gamma: int
    rule: str = Rule.TOKENWISE.value  # of RULES

    @property
    def acceptance(self) -> Rule:
        return Rule.TOKENWISE if self.rule == GREEDY else Rule(self.rule)


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence, of which all others are copies."""

    logits: Tensor  # `[MAX_GAMMA + 1, V]`
    draft_logits: Tensor  # `[MAX_GAMMA, V]`
    q: Sequence[SparseDistribution]  # q̂ of each draft, `[MAX_GAMMA]`

    @classmethod
    def make(cls, V: int, dtype: torch.dtype, device: torch.device) -> Self:
        source = torch.Generator().manual_seed(V)
        ranks = torch.stack([torch.randperm(V, generator=source) for _ in range(MAX_GAMMA + 1)])
        logits = -_EXPONENT * (1 + ranks).log()
        noise = _DRAFT_NOISE * torch.randn(MAX_GAMMA, V, generator=source)
        draft_logits = (logits[:-1] + noise).to(dtype)
        q = [truncate(row, _SUPPORT) for row in torch.softmax(draft_logits.float(), dim=-1).cpu().numpy()]
        return cls(logits.to(dtype).to(device), draft_logits.to(device), q)


class Case:
    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.shape = shape
        self._rows = rows

    @cached_property
    def logits(self) -> Tensor:
        """`[B, γ+1, V]`."""
        return self._rows.logits[: self.shape.gamma + 1].repeat(self.shape.B, 1, 1)

    @cached_property
    def draft_logits(self) -> Tensor:
        """`[B, γ, V]`, for contenders that read the whole of q."""
        return self._rows.draft_logits[: self.shape.gamma].repeat(self.shape.B, 1, 1)

    @cached_property
    def turns(self) -> int:
        """The number of batches of proposals that are timed in turn."""
        return TURNS if self.shape.B == 1 and self._rows.logits.device.type == "cpu" else 1

    @cached_property
    def drafted(self) -> tuple[Tensor, ...]:
        """For each turn: tokens drawn from the whole of q, int64 `[B, γ]`."""
        source = torch.Generator().manual_seed(self.shape.B)
        q = torch.softmax(self._rows.draft_logits[: self.shape.gamma].cpu().float(), dim=-1)
        drawn = torch.multinomial(q, self.turns * self.shape.B, replacement=True, generator=source)
        return drawn.T.contiguous().to(self._rows.logits.device).split(self.shape.B)

    @cached_property
    def proposals(self) -> list[list[Proposed]]:
        """For Outrider, for each turn: see `_proposals`."""
        B = self.shape.B
        return [self._proposals(range(turn * B, (turn + 1) * B)) for turn in range(self.turns)]

    def _proposals(self, seeds: range) -> list[Proposed]:
        """Tokens drawn from q̂, or by the shared noise under `coupled`; at temperature 0 the best ones."""
        shape, kept, plain = self.shape, self._rows.q[: self.shape.gamma], SamplingParams()
        if shape.rule == GREEDY:
            tokens = tuple(self._rows.draft_logits[: shape.gamma].argmax(dim=-1).tolist())
            greedy = SamplingParams(temperature=0.0)
            return [Proposed(tokens, (None,) * shape.gamma, greedy, 0, BASE_LENGTH)] * shape.B
        if shape.acceptance is Rule.COUPLED:
            noise = gumbel(seeds[0], range(BASE_LENGTH, BASE_LENGTH + shape.gamma), shape.V)
            log_q = torch.log_softmax(self._rows.draft_logits[: shape.gamma].cpu().float(), dim=-1)
            tokens = tuple((log_q + noise).argmax(dim=-1).tolist())
            return [Proposed(tokens, (), plain, seeds[0], BASE_LENGTH, Rule.COUPLED)] * shape.B
        q: tuple[Any, ...] = tuple(kept)
        scales = None
        if shape.acceptance is Rule.SIGMOID:
            q = tuple(DraftLogits(row) for row in self._rows.draft_logits[: shape.gamma].to(torch.float16))
            scales = _SCALES
        return [
            Proposed(
                tuple(each.token_at(uniform(b, BASE_LENGTH, i, Domain.DRAFT)) for i, each in enumerate(kept)),
                q, plain, b, BASE_LENGTH, shape.acceptance, sigmoid=scales,
            )
            for b in seeds
        ]  # fmt: skip

    @property
    def must_bytes(self) -> int:
        """Each row of the target's logits once; under `sigmoid` also one logit of each draft row."""
        shape = self.shape
        logits = shape.B * (shape.gamma + 1) * shape.V + shape.B * shape.gamma * (shape.acceptance is Rule.SIGMOID)
        return logits * self._rows.logits.element_size()


@dataclass(frozen=True, slots=True)
class Ready:
    run: Work  # is timed: from logits on the device to results on the device
    accepted: Callable[[], float]  # runs each turn once more; mean drafted tokens accepted
    graphable: bool  # whether a CUDA graph may capture `run`
    whole: Work | None = None  # with all work of the host before and after, where `run` leaves it out


Contender = Callable[[Case], Ready]
"""Raises `Unavailable` where it cannot verify a case."""


def outrider(path: str) -> Contender:
    """`kernels.verify` by the named path; of `triton` the launches are timed apart from packing and copying."""

    def start(case: Case) -> Ready:
        logits = case.logits.flatten(0, 1)

        turns = cycle(case.proposals)

        def whole() -> Any:
            return verify(logits, next(turns), path)

        def accepted() -> float:
            return fmean(result.accepted for own in case.proposals for result in verify(logits, own, path))

        if path != "triton":
            return Ready(whole, accepted, graphable=False)
        from kernels.verify_triton import prepare  # triton is optional

        return Ready(prepare(logits, case.proposals[0]).run, accepted, graphable=True, whole=whole)

    return start


def _only_tokenwise(case: Case) -> None:
    if case.shape.rule != Rule.TOKENWISE.value:
        raise Unavailable(f"it does not know the rule {case.shape.rule}")


def transformers(case: Case) -> Ready:
    """Transformers' `_speculative_sampling`, a sequence at a time: it takes no batch."""
    _only_tokenwise(case)
    if case.shape.B > MOST_ALONE:
        raise Unavailable(f"it takes one sequence at a time, not {case.shape.B}")
    logits, draft_logits, turns = case.logits, case.draft_logits, cycle(case.drafted)
    # Some releases also ask whether the draft has ended.
    more = {"is_done_candidate": False} if "is_done_candidate" in signature(_speculative_sampling).parameters else {}

    def run() -> list[Any]:
        drafted = next(turns)
        return [
            _speculative_sampling(drafted[b : b + 1], q[None].float(), case.shape.gamma, p[None].float(), **more)
            for b, (p, q) in enumerate(zip(logits, draft_logits, strict=True))
        ]

    def accepted() -> float:
        return fmean(float(matches) for _ in case.drafted for _, matches in run())

    return Ready(run, accepted, graphable=False)


def torch_unfused(case: Case) -> Ready:
    _only_tokenwise(case)
    logits, draft_logits, turns = case.logits, case.draft_logits, cycle(case.drafted)

    def run() -> tuple[Tensor, Tensor]:
        return unfused(logits, draft_logits, next(turns))

    return Ready(run, lambda: fmean(float(run()[0].float().mean()) for _ in case.drafted), graphable=True)


def unfused(logits: Tensor, draft_logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """[L Alg. 1] on a batch in plain torch, without host syncs: accepted tokens and next tokens, int64 `[B]`."""
    # logits: [B, γ+1, V], draft_logits: [B, γ, V], drafted: int64 [B, γ]
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


@dataclass(frozen=True, slots=True)
class Plan:
    vocabularies: tuple[int, ...] = (32_000, 128_256, 151_936, 262_144)
    gammas: tuple[int, ...] = tuple(range(1, 21))  # of the part `gamma`, at B = 1
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of the part `batch`
    gamma: int = 5  # of the parts `batch` and `rules`
    rules_batches: tuple[int, ...] = (1, 64, 128, 256)  # of the part `rules`, at the second V
    rules: tuple[str, ...] = (Rule.TOKENWISE.value,)  # of the parts `gamma` and `batch`
    repeats: int = 50  # runs of one measurement at the most

    def shapes(self, part: str) -> Iterator[Shape]:
        if part in ("gamma", "batch"):
            sizes = product((1,), self.gammas) if part == "gamma" else product(self.batches, (self.gamma,))
            for V, (B, gamma), rule in product(self.vocabularies, sizes, self.rules):
                yield Shape(V, B, gamma, rule)
        else:
            V = self.vocabularies[min(1, len(self.vocabularies) - 1)]
            yield from (Shape(V, B, self.gamma, rule) for B in self.rules_batches for rule in RULES)


FULL = Plan()
QUICK = Plan(vocabularies=(512, 1000), gammas=(1, 3), batches=(1, 2), gamma=2, rules_batches=(2,), repeats=5)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("kernel", __doc__, quick="small sizes, few runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: CUDA where there is one)")
    return harness.run("kernel", harness.parse(parser, arguments, {}), _measure, summarise, table, draw)


def _measure(bench: Bench) -> None:
    given = bench.given
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not given.quick:
        raise ValueError("there is no CUDA device; benchmarks.verification measures on a CPU; --quick runs small sizes")
    plan = QUICK if given.quick else FULL
    timer = Timer(device, plan.repeats)
    bench.document |= head(plan, timer) | {"copy_bytes_per_second": bench.once("copy", timer.copy_bandwidth)}
    if not measure(plan, given.parts, timer, bench, SECONDS):
        progress(f"{SECONDS:g} s are over; --resume goes on")


def head(plan: Plan, timer: Timer) -> Json:
    return {"plan": asdict(plan), "path": implementation_for(timer.device), "device": timer.describe()}


def measure(plan: Plan, parts: Sequence[str], timer: Timer, runs: Runs, seconds: float) -> bool:
    """Adds the runs that are not there yet; False where the time was over first."""
    end = time.monotonic() + seconds
    ours = outrider(implementation_for(timer.device))
    contenders: dict[str, Contender] = dict(zip(NAMES, (ours, transformers, torch_unfused), strict=True))
    rows = lru_cache(maxsize=1)(lambda V: Rows.make(V, torch.bfloat16, timer.device))
    for part in parts:
        for shape in plan.shapes(part):
            keys = {"part": part, **asdict(shape)}
            left = [name for name in contenders if not runs.has(**keys, contender=name)]
            if left and time.monotonic() > end:
                return False
            if left:
                case = Case(shape, rows(shape.V))
                found = [{**keys, "contender": name, **_timed(name, contenders[name], case, timer)} for name in left]
                runs.add(*found)
                shown = ", ".join(f"{run['contender']} {device_us(run):.1f}" for run in found if "us" in run)
                progress(f"{', '.join(f'{name} {value}' for name, value in keys.items())}: {shown} µs")
                del case
                gc.collect()
    return True


def _timed(name: str, contender: Contender, case: Case, timer: Timer) -> Json:
    """The figures of one contender on one case, or why there are none. Outrider must not fail."""
    try:
        with torch.inference_mode():
            return _figures(contender(case), case, timer)
    except Unavailable as error:
        return {"refusal": str(error)}
    except Exception as error:  # another version of the library may fail
        if name == "outrider":
            raise
        return {"refusal": f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def _figures(ready: Ready, case: Case, timer: Timer) -> Json:
    times = {f"eager {name}": timer.times(ready.run, cold=name == "cold") for name in ("cold", "warm")}
    graph = timer.captured(ready.run) if ready.graphable else None
    if graph is not None:
        for name in ("cold", "warm"):
            times[f"graph {name}"] = timer.times(graph, cold=name == "cold", launched=False)
    whole = ready.whole or ready.run
    times["whole"] = timer.wall(whole)
    return {
        "us": times,
        "must_bytes": case.must_bytes,
        "peak_bytes": timer.peak_bytes(whole),
        "accepted": ready.accepted(),
    }


def device_us(run: Json, state: str = "warm") -> float:
    """The time on the device, caches `cold` or `warm`: of a graph where there is one, with its launches else."""
    us = run["us"]
    return float(us.get(f"graph {state}", us[f"eager {state}"])["median"])


def share_of_copy(run: Json, bandwidth: float) -> float:
    """The bytes that must move, over the time with cold caches, as a share of `bandwidth` in bytes a second."""
    return float(run["must_bytes"]) / (device_us(run, "cold") * 1e-6) / bandwidth


def _peak_mib(run: Json) -> float | None:
    return run["peak_bytes"] and run["peak_bytes"] / 2**20


def summarise(bench: Bench) -> Json:
    return {"rows": bench.runs, "aims": aims(bench.document | {"rows": bench.runs})}


def _select(document: Json, **keys: Any) -> list[Json]:
    return [run for run in document["rows"] if "us" in run and all(run[name] == value for name, value in keys.items())]


def aims(document: Json) -> list[Json]:
    """Each aim, for an H200, with its worst case."""
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
    """An aim with the worst of the known values; `met` is None where none is known."""
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
    times = ("eager cold", "eager warm", "graph cold", "graph warm", "whole")
    rows = [
        [
            run["contender"],
            run["rule"],
            f"{run['V']:,}",
            run["B"],
            run["gamma"],
            *(number(run["us"].get(name, {"median": None})["median"], 1) for name in times),
            percent(run["accepted"] / run["gamma"]),
            f"{run['must_bytes'] / 1e6:.1f}",
            percent(share_of_copy(run, bandwidth)),
            number(_peak_mib(run), 1),
        ]
        for run in _select(document)
    ]
    head = ["", "rule", "V", "B", "γ", *(f"{name}, µs" for name in times), "accepted"]
    head += ["must move, MB", "of a copy", "peak, MiB"]
    reasons = {(run["contender"], run["refusal"]) for run in document["rows"] if "refusal" in run}
    return "\n\n".join(
        [
            f"{device}; path `{document['path']}`; a copy moves {bandwidth / 1e9:.0f} GB/s.",
            aims_list(document["aims"]),
            harness.table(head, rows, "One verification, medians"),
            harness.table(["contender", "why, at least in some cases"], sorted(reasons), "Left out"),
        ]
    )


def draw(document: Json, path: Path) -> None:
    """A column a vocabulary, after [W Fig. 3-5]: time by γ, peak memory by γ, and share of the copy bandwidth by B."""
    plan = document["plan"]
    share_of = partial(share_of_copy, bandwidth=document["copy_bytes_per_second"])
    note = f"{document['device']['name']}; path {document['path']}"
    with pictures.picture(path, 3, len(plan["vocabularies"]), size=(3.4, 2.8), note=note) as panels:
        for V, (times, memory, share) in zip(plan["vocabularies"], panels.T, strict=True):
            _lines(times, document, "gamma", V, device_us)
            _lines(memory, document, "gamma", V, _peak_mib)
            _lines(share, document, "batch", V, share_of)
            times.set_title(f"V = {V:,}", fontsize=10)
            times.set_yscale("log")
            share.set_xscale("log", base=2)
            pictures.level(share)
            share.set_xlabel(f"B (γ = {plan['gamma']})", fontsize=8)
            for panel in (times, memory):
                panel.set_xlabel("γ (B = 1)", fontsize=8)
        labels = ("µs, warm caches", "peak memory, MiB", "of a copy, cold caches")
        for panel, label in zip(panels[:, 0], labels, strict=True):
            panel.set_ylabel(label, fontsize=8)


def _lines(panel: Axes, document: Json, part: str, V: int, value: Callable[[Json], float | None]) -> None:
    along = "gamma" if part == "gamma" else "B"
    for name, colour in zip(NAMES, pictures.COLOURS, strict=False):
        points = sorted((run[along], value(run)) for run in _select(document, part=part, contender=name, V=V))
        pictures.line(panel, points, marker="o", label=name, color=colour)


if __name__ == "__main__":
    sys.exit(main())
