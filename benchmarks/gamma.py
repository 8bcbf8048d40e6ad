"""How long to speculate: fixed γ against the policies that choose it, one stream.

All arms write the same texts, one after another on each prompt, through the same two services; only requests differ. By
default under the rule `coupled`, so that at any temperature the text too is the same in every arm. (Many streams:
`benchmarks.load`, with `--gamma` for a fixed one.)

    python -m benchmarks.gamma                                           about five minutes on two cores
    python -m benchmarks.gamma --only demo --prompts 3 --repetitions 1   half a minute
    python -m benchmarks.gamma --quick                                   does it work at all
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import harness, plots
from benchmarks.contenders import arms_table, compared, outrider_writer, take_turns, texts, tokenised
from benchmarks.harness import Bench, Json, number
from benchmarks.services import Services, models_of

ALONE = "alone"
CEILING = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("gamma", __doc__, quick="two prompts, few arms, the demo pair only")
    harness.pair_options(parser, factor=3, prompts=4, new_tokens=96)
    parser.add_argument("--rule", default="coupled", choices=("tokenwise", "block", "coupled"), help="of acceptance")
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 3, 5, 8, 12, 16], help="each γ")
    parser.add_argument("--entropies", type=float, nargs="*", default=[2.0, 3.0], help="bounds of the draft's, in nats")
    few = {"only": "demo", "prompts": 2, "new_tokens": 24, "repetitions": 1, "fixed": [2, 8], "entropies": [2.0]}
    return harness.run("gamma", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def arms_of(fixed: Sequence[int], entropies: Sequence[float]) -> dict[str, Mapping[str, Any]]:
    arms: dict[str, dict[str, Any]] = {ALONE: {"gamma": 0}}
    arms |= {f"fixed {gamma}": {"gamma": gamma} for gamma in fixed}
    arms |= {name: {"gamma": CEILING, "speculation": name} for name in ("heuristic", "adaptive")}
    arms |= {f"entropy {bound:g}": {"gamma": CEILING, "max_entropy": bound} for bound in entropies}
    return dict(arms)


def measure(bench: Bench) -> None:
    given = bench.given
    pairs = models_of(given.target, given.draft, given.only, given.factor)
    bench.document["models"] = {models.name: models.document() for models in pairs}
    for models in pairs:
        prompts = tokenised(models.target, harness.spread(bench.prompts, given.prompts))
        with Services(models.target, models.draft) as services:
            writers = {
                name: outrider_writer(services, rule=given.rule, **options)
                for name, options in arms_of(given.fixed, given.entropies).items()
            }
            for _, task in islice(texts(prompts, min(16, given.new_tokens), 1), 2):  # not measured
                for write in writers.values():
                    write(task)
            take_turns(bench, {"pair": models.name}, texts(prompts, given.new_tokens, given.repetitions), writers)


def summarise(bench: Bench) -> Json:
    names = list(arms_of(bench.given.fixed, bench.given.entropies))
    return {"summary": harness.tree(bench.runs, ("pair", "temperature"), partial(figures, names=names))}


def figures(runs: Sequence[Json], names: Sequence[str]) -> Json:
    """Each arm, over the target alone and over the best fixed γ in the same repetition."""
    found = compared(runs, ALONE, names)
    fixed = {name: arm["tokens_per_second"] for name, arm in found.items() if name.startswith("fixed ")}
    best = compared(runs, max(fixed, key=lambda name: fixed[name]), names)
    for name, arm in found.items():
        arm["over_best_fixed"], arm["over_best_fixed_range"] = best[name]["ratio"], best[name]["ratio_range"]
    return found


def table(document: Json) -> str:
    def over_best(arm: Json) -> str:
        return f"{number(arm['over_best_fixed'])} ({' to '.join(map(number, arm['over_best_fixed_range']))})"

    return arms_table(document["summary"], ("pair", "T"), **{"over the best fixed γ": over_best})


def draw(document: Json, path: Path) -> None:
    panels = {
        f"{pair} pair ({document['models'][pair]['target_layers']} layers)": {
            f"T = {temperature}": arms for temperature, arms in by_temperature.items()
        }
        for pair, by_temperature in document["summary"].items()
    }
    plots.comparison(
        path,
        document,
        panels,
        label="speed-up over the target alone",
        note=". White: mean γ.",
        text=lambda arm: f"{arm['gamma']:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
