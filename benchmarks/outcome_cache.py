"""What the outcome cache is worth: tokens/s of a pair with it over the same pair without, through both services.

A request says whether it wants the cache, and the two arms take turns text by text. Placements: each service on a
processor of its own, with a target three times as deep as the demo pair's, and with the demo pair itself; and both
services on one processor, where drafting ahead takes its time from the target and ought to be found not to pay.

    python -m benchmarks.outcome_cache            about six minutes on two cores
    python -m benchmarks.outcome_cache --quick    does it work at all
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, plots
from benchmarks.contenders import Task, arms_table, compared, outrider_writer, take_turns, texts, tokenised
from benchmarks.harness import Bench, Json
from benchmarks.services import APART, ONE_CORE, Services, models_of

WAYS: dict[str, tuple[float, str]] = {
    "greedy": (0.0, "block"),
    "coupled": (1.0, "coupled"),
    "block": (1.0, "block"),
    "tokenwise": (1.0, "tokenwise"),
}
WITHOUT, WITH = "without", "with"
# Before anything is measured: by then the services know what a wait is like, and have tried doing without.
WARM_UP_TOKENS = 512


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("outcome_cache", __doc__, quick="the demo pair, one γ and repetition, two ways")
    harness.pair_options(parser, factor=3, prompts=4, new_tokens=96)
    parser.add_argument("--gammas", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["greedy", "coupled", "block"])
    parser.add_argument("--dtype", default="bfloat16", help="of both models")
    few = {
        "only": "demo", "gammas": [3], "repetitions": 1, "prompts": 2, "ways": ["greedy", "coupled"], "new_tokens": 48,
    }  # fmt: skip
    return harness.run("outcome_cache", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    pairs = {models.name: models for models in models_of(given.target, given.draft, given.only, given.factor)}
    placements = {
        f"target x{given.factor}, {APART}": ("deepened", APART),
        f"demo target, {APART}": ("demo", APART),
        f"target x{given.factor}, {ONE_CORE}": ("deepened" if given.only is None else "", ONE_CORE),
    }
    for placement, (name, place) in placements.items():
        if name not in pairs:
            continue
        prompts = tokenised(pairs[name].target, harness.spread(bench.prompts, given.prompts))
        with Services(pairs[name].target, pairs[name].draft, dtype=given.dtype, place=place) as services:
            for way in given.ways:
                temperature, rule = WAYS[way]
                if not given.quick:
                    outrider_writer(services, rule=rule)(Task(0, prompts[0], WARM_UP_TOKENS, temperature, 1))
                for gamma in given.gammas:
                    writers = {
                        name: outrider_writer(services, rule=rule, gamma=gamma, outcome_cache=name == WITH)
                        for name in (WITHOUT, WITH)
                    }
                    written = texts(prompts, given.new_tokens, given.repetitions, [temperature])
                    take_turns(bench, {"placement": placement, "way": way, "gamma": gamma}, written, writers)


def summarise(bench: Bench) -> Json:
    figures = partial(compared, reference=WITHOUT, names=(WITHOUT, WITH))
    return {"summary": harness.tree(bench.runs, ("placement", "way", "gamma"), figures)}


def table(document: Json) -> str:
    same = {"same texts": lambda arm: f"{arm['same_text']:.0%}"}
    return arms_table(document["summary"], ("placement", "way", "drafts"), **same)


def draw(document: Json, path: Path) -> None:
    """A panel a placement: the gain of each way at each γ, with hit rates."""
    panels: dict[str, dict[str, dict[str, Any]]] = {}
    for (placement, way, gamma), arms in harness.flat(document["summary"], 3):
        groups: dict[str, Any] = panels.setdefault(placement, {})
        groups.setdefault(f"γ = {gamma}", {})[way] = arms[WITH]

    def hits(arm: Mapping[str, Any]) -> str:
        return "" if arm["hit_rate"] is None else f"{arm['hit_rate']:.0%}"

    label = "tokens/s with the outcome cache over without"
    plots.comparison(path, document, panels, label=label, note=". White: hit rate.", text=hits)


if __name__ == "__main__":
    sys.exit(main())
