"""What the outcome cache is worth: tokens/s of a pair with it over the same pair without, through both services.

A request says whether it wants the cache, and the two ways take turns prompt by prompt. Placements: each service on a
processor of its own, with a target three times as deep as the demo pair's, and with the demo pair itself; and both
services on one processor, where drafting ahead takes its time from the target and ought to be found not to pay.

    python -m benchmarks.outcome_cache --prompts 6 --repetitions 2     about fifteen minutes on two cores
    python -m benchmarks.outcome_cache --quick                         does it work at all
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import harness, plots
from benchmarks.harness import Bench, Json, tell
from benchmarks.outrider_contender import APART, ONE_CORE, Services, models_of
from outrider.client import Client, Completion, Options

WAYS: dict[str, Options] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"rule": "coupled"},
    "block": {"rule": "block"},
    "tokenwise": {"rule": "tokenwise"},
}
# Before anything is measured: by then the services know what a wait is like, and have tried doing without.
WARM_UP_TOKENS = 512
_TIMES = ("draft", "verdict", "forward", "verify", "saved")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("outcome_cache", __doc__, quick="the demo pair, one γ and repetition, two ways")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs, a core each")
    parser.add_argument("--factor", type=int, default=3, help="how many times as deep the deepened target is")
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts")
    parser.add_argument("--tokens", type=int, default=128, help="to write after each")
    parser.add_argument("--repetitions", type=int, default=3, help="with each prompt")
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--dtype", default="bfloat16", help="of both models")
    few = {"only": "demo", "gammas": [3], "repetitions": 1, "prompts": 2, "ways": ["greedy", "coupled"], "tokens": 48}
    return harness.run("outcome_cache", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    """Every placement, way and γ."""
    given = bench.given
    pairs = {models.name: models for models in models_of(given.target, given.draft, given.only, given.factor)}
    placements = {
        f"target x{given.factor}, {APART}": ("deepened", APART),
        f"demo target, {APART}": ("demo", APART),
        f"target x{given.factor}, {ONE_CORE}": ("deepened" if given.only is None else "", ONE_CORE),
    }
    prompts = harness.spread(bench.prompts, given.prompts)
    for placement, (name, place) in placements.items():
        if name not in pairs:
            continue
        with Services(pairs[name].target, pairs[name].draft, dtype=given.dtype, place=place) as services:
            for way in given.ways:
                if not given.quick:
                    _complete(services.client, prompts[0], WAYS[way], WARM_UP_TOKENS, seed=1)
                for gamma in given.gammas:
                    keys = {"placement": placement, "way": way, "gamma": gamma}
                    if not bench.has(**keys):
                        options: Any = {**WAYS[way], "gamma": gamma}
                        found = compare(services.client, prompts, options, given.tokens, given.repetitions)
                        bench.add({**keys, **found})
                        tell(f"{placement}, {way}, γ = {gamma}: {found['ratio']:.2f}")


def _complete(client: Client, prompt: str, way: Options, tokens: int, **more: Any) -> Completion:
    options: Any = {**way, "max_new_tokens": tokens, "ignore_eos": True, **more}
    return client.complete(prompt, **options)


def compare(client: Client, prompts: Sequence[str], options: Options, tokens: int, repetitions: int) -> Json:
    """With the cache and without in turn, prompt by prompt, and which comes first in turn too."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    done: dict[str, list[Completion]] = {"with": [], "without": []}
    for nth in range(repetitions * len(prompts)):
        for way in harness.rotated(rates, nth):
            begin = time.perf_counter()
            prompt = prompts[nth % len(prompts)]
            text = _complete(client, prompt, options, tokens, seed=nth, outcome_cache=way == "with")
            rates[way].append(len(text.token_ids) / (time.perf_counter() - begin))
            done[way].append(text)
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    same = [a.token_ids == b.token_ids for a, b in zip(done["with"], done["without"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    known = [each.statistics for each in done["with"]]
    rounds, queries = sum(each.num_drafts for each in known), sum(each.num_outcome_cache_queries for each in known)
    return {
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "tokens_per_second": {way: median(own) for way, own in rates.items()},
        "same_text": [sum(same), len(same)],
        "hit_rate": sum(each.num_outcome_cache_hits for each in known) / queries if queries else None,
        "rounds_served": queries / rounds,
        "predrafted_per_round": sum(each.num_predrafted_tokens for each in known) / rounds,
        "acceptance": sum(each.num_accepted_tokens for each in known) / sum(each.num_draft_tokens for each in known),
        "per_round_ms": {way: _per_round(own) for way, own in done.items()},
    }


def _per_round(done: Sequence[Completion]) -> Json:
    rounds = sum(each.statistics.num_rounds for each in done)
    return {name: sum(getattr(each.timings, f"{name}_us") for each in done) / rounds / 1e3 for name in _TIMES}


def summarise(bench: Bench) -> Json:
    """All rows, and the best γ of either arm."""
    return {"results": bench.runs, "best": best(bench.runs)}


def best(rows: Sequence[Json]) -> list[Json]:
    """For each placement and way the best γ of either arm, and the ratio of their tokens/s."""
    found = []
    for placement, of_placement in harness.grouped(rows, "placement").items():
        for way, some in harness.grouped(of_placement, "way").items():
            arms = {name: max(some, key=lambda row: row["tokens_per_second"][name]) for name in ("with", "without")}
            rates = {name: row["tokens_per_second"][name] for name, row in arms.items()}
            gamma = {name: row["gamma"] for name, row in arms.items()}
            found.append(
                {"placement": placement, "way": way, "gamma": gamma, "ratio": rates["with"] / rates["without"]}
            )
    return found


def table(document: Json) -> str:
    """The rows, and the best γ of each arm."""
    rows = [
        [
            row["placement"],
            row["way"],
            row["gamma"],
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["ratio_quartiles"]),
            "–" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
            f"{row['predrafted_per_round']:.1f}",
            f"{row['tokens_per_second']['with']:.0f}",
        ]
        for row in document["results"]
    ]
    head = ["placement", "way", "γ", "with / without", "quartiles", "hit rate", "pre-drafted a round", "tokens/s with"]
    lines = [
        f"- {row['placement']}, {row['way']}: {row['ratio']:.2f} (γ = {' over '.join(map(str, row['gamma'].values()))})"
        for row in document["best"]
    ]
    return "\n".join([harness.table(head, rows), "", "At the best γ of each arm:", "", *lines])


def draw(document: Json, path: Path) -> None:
    """A panel a placement: the gain at each γ, with quartiles and hit rates."""
    placements = harness.grouped(document["results"], "placement")
    colours = dict(zip(WAYS, (plots.BLUE, plots.ORANGE, plots.GREY, plots.LIGHT), strict=True))
    note = f"{plots.caption(document)}. White: hit rate. Bars: quartiles over texts."
    with plots.picture(path, 1, len(placements), size=(4.4, 3.8), note=note) as panels:
        for panel, (placement, rows) in zip(panels[0], placements.items(), strict=True):
            ways = harness.grouped(rows, "way")
            gammas = list(harness.grouped(rows, "gamma"))
            series = {way: [(row["ratio"], *row["ratio_quartiles"]) for row in own] for way, own in ways.items()}
            panel.set_ylim(0.7, max(1.3, 0.05 + max(row["ratio_quartiles"][1] for row in document["results"])))
            plots.bars(panel, [f"γ = {gamma}" for gamma in gammas], series, colours=colours)
            for place, own in enumerate(ways.values()):
                for nth, row in enumerate(own):
                    if row["hit_rate"] is not None:
                        x = nth + (place - (len(ways) - 1) / 2) * 0.86 / len(ways)
                        plots.foot(panel, x, f"{row['hit_rate']:.0%}")
            plots.level(panel)
            panel.set_title(placement, fontsize=10)
        panels[0][0].set_ylabel("tokens/s with the outcome cache\nover tokens/s without")


if __name__ == "__main__":
    sys.exit(main())
