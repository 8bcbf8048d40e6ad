"""Several tokens from one pass of the draft: tokens/s by s, over one token a pass.

Under `coupled`, so that all arms of a temperature write the same text; a core for each service. Ratios are to the best
fixed γ of the same draft with s = 1; all s have the same γ. `s = γ` drafts a proposal in one pass, of at most 8 tokens.
`chosen` leaves s and γ to the service.
The plain draft was never taught to draft in parallel. The break-even is a formula of the measured costs.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression

from benchmarks import harness, plots
from benchmarks.contenders import Write, outrider_writer, take_turns, texts, tokenised
from benchmarks.harness import CACHE, Bench, Json, arms_table, between, compared, number
from benchmarks.services import NO_PREFIXES, Services, deepened
from outrider.theory import expected_tokens, round_time

RULE = "coupled"
S = 8  # the most tokens a pass; `chosen` leaves it to the service to take so many or 1
ONE, CHOSEN = "s = 1, adaptive", "chosen"
NO_CACHE = "no outcome cache, s = 1"
WHOLE = 4  # γ of both arms that the costs of a round come from, at each place
# Texts before anything is measured: the service then knows both s.
WARM_UP = {ONE: 6, CHOSEN: 24}
# Break-evens are for these α of s = 1, the same at all positions, and these c.
ALPHAS, COSTS = (0.7, 0.8, 0.9, 0.95), (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
MOST_DRAFTED = 16


@dataclass(frozen=True, slots=True)
class Place:
    """`deeper` are the factors of the layers of target and draft, `added_ms` the added round trip."""

    title: str
    deeper: tuple[int, int] = (1, 1)
    added_ms: float = 0.0
    gammas: tuple[int, ...] = (3, WHOLE, 8)
    temperatures: tuple[float, ...] = (0, 1)


PLACES = {
    "demo": Place("demo pair", temperatures=(0, 0.3, 0.7, 1)),
    "draft": Place("draft 4 times as deep", deeper=(1, 4), gammas=(2, WHOLE)),
    "far": Place("20 ms away, target 3 times as deep", deeper=(3, 1), added_ms=20, gammas=(WHOLE, 8, 12)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("parallel", __doc__, quick="the demo pair, one prompt")
    harness.text_options(parser, prompts=4, new_tokens=64)
    parser.add_argument(
        "--parallel-draft", type=Path, default=harness.DEMO / "parallel-draft", help="with a mask token"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PLACES), default=list(PLACES), help="places")
    few = {"parts": ["demo"], "prompts": 1, "new_tokens": 16, "repetitions": 1}
    given = harness.parse(parser, arguments, few)
    return harness.run("parallel", given, measure, summarise, table, draw)


def arms(place: Place) -> dict[str, Json]:
    """The options of each arm."""
    fixed: dict[str, Json] = {
        **{f"plain draft, γ = {gamma}": {"gamma": gamma, "drafter": "model"} for gamma in place.gammas},
        **{f"s = {s}, γ = {gamma}": {"gamma": gamma, "tokens_per_pass": s} for s in (1, 2) for gamma in place.gammas},
        NO_CACHE: {"gamma": WHOLE, "tokens_per_pass": 1, "outcome_cache": False},
        **{f"s = γ = {gamma}": {"gamma": gamma, "tokens_per_pass": gamma} for gamma in place.gammas if gamma <= S},
    }
    adaptive: Json = {"speculation": "adaptive", "gamma": MOST_DRAFTED}
    return fixed | {ONE: adaptive | {"tokens_per_pass": 1}, CHOSEN: adaptive}


@contextmanager
def _services(bench: Bench, place: Place) -> Iterator[dict[str, Services]]:
    """The services of the plain draft, of `ONE`, and of all other arms: `ONE` and `CHOSEN` share no statistics of γ."""
    given, (target, draft) = bench.given, place.deeper
    drafts = {"plain": given.draft, ONE: given.parallel_draft, CHOSEN: given.parallel_draft}
    with ExitStack() as running:
        found = {
            name: running.enter_context(
                Services(
                    deepened(given.target, target, CACHE) if target > 1 else given.target,
                    deepened(folder, draft, CACHE) if draft > 1 else folder,
                    draft_flags=(*NO_PREFIXES, "--tokens-per-pass", str(S)),
                    distant=place.added_ms > 0,
                )
            )
            for name, folder in drafts.items()
        }
        for services in found.values():
            if services.proxy is not None:
                services.proxy.delay(place.added_ms / 2e3)
        yield found


def measure(bench: Bench) -> None:
    given = bench.given
    prompts = tokenised(given.target, bench.some_prompts)
    for name in (name for name in PLACES if name in given.parts):
        place = PLACES[name]
        with _services(bench, place) as services:
            homes = {arm: ONE if arm == ONE else "plain" if arm.startswith("plain") else CHOSEN for arm in arms(place)}
            writers = {arm: outrider_writer(services[homes[arm]], rule=RULE, **how) for arm, how in arms(place).items()}
            _warm_up(bench, place, prompts, writers)
            written = texts(prompts, given.new_tokens, given.repetitions, place.temperatures)
            take_turns(bench, {"place": name}, written, writers)


def _warm_up(bench: Bench, place: Place, prompts: Sequence[tuple[int, ...]], writers: dict[str, Write]) -> None:
    given, temperatures = bench.given, place.temperatures
    turns = 1 if given.quick else -(-max(WARM_UP.values()) // len(prompts))
    for nth, (_, task) in enumerate(texts(prompts, given.new_tokens, turns, temperatures)):
        for arm, write in writers.items():
            if nth // len(temperatures) < (1 if given.quick else WARM_UP.get(arm, 1)):
                write(task)


def summarise(bench: Bench) -> Json:
    summary = harness.tree(bench.runs, ("place", "temperature"), figures)
    return {"summary": summary, "break_even": break_evens(summary["demo"]["0"]) if "demo" in summary else {}}


def figures(runs: Sequence[Json]) -> Json:
    """Ratios to the best fixed γ of s = 1, with the same draft and with the plain one, and to s = 1 with `adaptive`."""
    names = list(dict.fromkeys(run["arm"] for run in runs))
    alike = partial(compared, runs, names=names)
    rates = {name: arm["tokens_per_second"] for name, arm in alike(ONE).items()}
    found, by_plain, by_adaptive = (
        alike(reference) for reference in (_best(rates, "s = 1, γ"), _best(rates, "plain draft"), ONE)
    )
    for name, arm in found.items():
        for key, other in (("over_plain", by_plain), ("over_adaptive", by_adaptive)):
            arm[key], arm[f"{key}_range"] = other[name]["ratio"], other[name]["ratio_range"]
    return found


def _best(rates: dict[str, float], prefix: str) -> str:
    return max((name for name in rates if name.startswith(prefix)), key=rates.__getitem__)


# ---------------------------------------------------------------------------------------------------------- break-even


def break_evens(arms: Json) -> Json:
    """The α that masks need for a pass of γ tokens to be as fast as s = 1, by α of s = 1 and c, each with its best γ.

    Times are in passes of the target over one token. `measured` has the growth of that pass with its tokens, and R, of
    these arms. `flat` has a pass that costs the same for any number of tokens, as where it reads the weights and little
    else.
    """
    costs = measured_costs(arms)
    return {
        "costs": costs,
        "measured": _needed(costs["growth"], costs["round_trip"]),
        "flat": _needed(0.0, costs["round_trip"]),
    }


def measured_costs(arms: Json) -> Json:
    """t_p, and in units of it c, the growth for each token more, and R, with what drafting costs beside its passes."""
    points = [(arm["gamma"] + 1, arm["target_pass_us"]) for name, arm in arms.items() if name not in (ONE, CHOSEN)]
    slope, fixed = linear_regression(*zip(*points, strict=True))
    if slope <= 0:  # few rounds
        slope, fixed = 0.0, fmean(time for _, time in points)
    one = max(fixed + slope, 1.0)
    whole, single = (arms[name]["round_us"]["draft"] for name in (f"s = γ = {WHOLE}", NO_CACHE))
    draft_pass = max(0.0, single - whole) / (WHOLE - 1)
    rest = max(0.0, whole - draft_pass) + arms[f"s = γ = {WHOLE}"]["round_trip_us"]
    return {"t_p_us": one, "c": draft_pass / one, "growth": slope / one, "round_trip": rest / one}


def _needed(growth: float, round_trip: float) -> Json:
    return {
        f"{c:g}": {f"{alpha:g}": needed_alpha(alpha, c, growth=growth, round_trip=round_trip) for alpha in ALPHAS}
        for c in COSTS
    }


def needed_alpha(alpha: float, c: float, *, growth: float, round_trip: float) -> float:
    """The least α of the tokens after the first with which one pass of γ tokens is as fast as s = 1 with its best γ."""

    def rate(alphas: Sequence[float], gamma: int, *, parallel: bool) -> float:
        seconds = round_time(gamma, c, round_trip, lambda tokens: 1 + growth * (tokens - 1), parallel=parallel)
        return expected_tokens(alphas, gamma) / seconds

    def best(later: float, *, parallel: bool) -> float:
        alphas = [alpha, *[later] * (MOST_DRAFTED - 1)]
        return max(rate(alphas, gamma, parallel=parallel) for gamma in range(1, MOST_DRAFTED + 1))

    single, low, high = best(alpha, parallel=False), 0.0, alpha
    if best(0.0, parallel=True) >= single:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if best(middle, parallel=True) >= single else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------------------- figures


def table(document: Json) -> str:
    more: harness.Columns = {
        "over plain": partial(between, name="over_plain"),
        "over s = 1, adaptive": partial(between, name="over_adaptive"),
    }
    parts = [arms_table(document["summary"], ("place", "T"), **more)]
    for kind in ("measured", "flat"):
        if found := document["break_even"].get(kind):
            rows = [[c, *(number(value) for value in by_alpha.values())] for c, by_alpha in found.items()]
            parts.append(harness.table(["c", *(f"α = {alpha:g}" for alpha in ALPHAS)], rows, f"break-even, {kind}"))
    return "\n\n".join(parts)


def draw(document: Json, path: Path) -> None:
    measured = [
        (PLACES[name].title, f"T = {temperature}", _best_of_each(arms))
        for (name, temperature), arms in harness.flat(document["summary"], 2)
    ]
    plots.comparison(
        path,
        document,
        measured,
        label="tokens/s, to s = 1 with its best γ",
        note=". White: mean γ.",
        text=lambda arm: f"{arm['gamma']:.1f}",
    )


def _best_of_each(arms: Json) -> Json:
    rates = {name: arm["tokens_per_second"] for name, arm in arms.items()}
    best = {"plain draft": "plain draft", "s = 2": "s = 2", "one pass": "s = γ"}
    chosen = {title: _best(rates, prefix) for title, prefix in best.items()} | {ONE: ONE, CHOSEN: CHOSEN}
    return {title: arms[name] for title, name in chosen.items()}


if __name__ == "__main__":
    sys.exit(main())
