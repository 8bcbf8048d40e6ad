"""The choice of γ: fixed values against the policies that choose it, one stream.

Under the rule `coupled`, so that all arms write the same text at any temperature. (Many streams: `benchmarks.load`,
with `--gamma` for a fixed one.)
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.contenders import outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import Bench, Json, arms_table, between, compared
from benchmarks.services import Services, models_of

ALONE = "alone"
RULE = "coupled"
MOST_DRAFTED = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("gamma", __doc__, quick="two prompts, few arms, the demo pair only")
    harness.target_options(parser, factor=3)
    harness.text_options(parser, prompts=4, new_tokens=96)
    parser.set_defaults(fixed=[2, 3, 5, 8, 12, 16])
    few = {"only": "demo", "prompts": 2, "new_tokens": 24, "repetitions": 1, "fixed": [2, 8]}
    given = harness.parse(parser, arguments, few)
    names = list(arms_of(given.fixed))
    summarise = harness.summary_of(("pair", "temperature"), partial(figures, names=names))
    return harness.run("gamma", given, measure, summarise, table, draw)


def arms_of(fixed: Sequence[int]) -> dict[str, Json]:
    return {
        ALONE: {"gamma": 0},
        **{f"fixed {gamma}": {"gamma": gamma} for gamma in fixed},
        **{name: {"gamma": MOST_DRAFTED, "speculation": name} for name in ("heuristic", "adaptive")},
    }


def measure(bench: Bench) -> None:
    given = bench.given
    arms = arms_of(given.fixed)
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        with Services(models.target, models.draft) as services:
            writers = {name: outrider_writer(services, rule=RULE, **how) for name, how in arms.items()}
            warm_up(writers, [task for _, task in islice(texts(prompts, min(16, given.new_tokens), 1), 2)])
            take_turns(bench, {"pair": models.name}, texts(prompts, given.new_tokens, given.repetitions), writers)


def figures(runs: Sequence[Json], names: Sequence[str]) -> Json:
    """Each arm, over the target alone and over the best fixed γ in the same repetition."""
    found = compared(runs, ALONE, names)
    fixed = {name: arm["tokens_per_second"] for name, arm in found.items() if name.startswith("fixed ")}
    best = compared(runs, max(fixed, key=lambda name: fixed[name]), names)
    for name, arm in found.items():
        arm["over_best_fixed"], arm["over_best_fixed_range"] = best[name]["ratio"], best[name]["ratio_range"]
    return found


def table(document: Json) -> str:
    over_best = partial(between, name="over_best_fixed")
    return arms_table(document["summary"], ("pair", "T"), **{"over the best fixed γ": over_best})


def draw(document: Json, path: Path) -> None:
    layers = {pair: models["target_layers"] for pair, models in document["models"].items()}
    plots.comparison(
        path,
        document,
        [
            (f"{pair} pair ({layers[pair]} layers)", f"T = {temperature}", arms)
            for (pair, temperature), arms in harness.flat(document["summary"], 2)
        ],
        label="speed-up over the target alone",
        note=". White: mean γ.",
        text=lambda arm: f"{arm['gamma']:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
