"""The gain of the outcome cache: tokens/s of a pair with it over the same pair without, in turns.

Placements: each service on a processor of its own, with a deepened target and with the demo target; and both services
on one processor, where drafting ahead takes time from the target.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.contenders import Task, outrider_writer, take_turns, texts, tokenised
from benchmarks.harness import Bench, Json, arms_table, compared, percent
from benchmarks.services import APART, ONE_CORE, Services, models_of

WAYS: dict[str, tuple[float, str]] = {
    "greedy": (0.0, "block"),
    "coupled": (1.0, "coupled"),
    "block": (1.0, "block"),
}
WITHOUT, WITH = "without", "with"
# Before anything is measured: after so many the services have round times and have tried doing without.
WARM_UP_TOKENS = 512


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("outcome_cache", __doc__, quick="the demo pair, one γ and repetition")
    harness.target_options(parser, factor=3)
    harness.text_options(parser, prompts=4, new_tokens=96)
    parser.set_defaults(gammas=[4, 8])
    parser.add_argument("--dtype", default="bfloat16", help="of both models")
    few = {"only": "demo", "gammas": [3], "repetitions": 1, "prompts": 2, "new_tokens": 48}
    figures = partial(compared, reference=WITHOUT, names=(WITHOUT, WITH))
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("placement", "way", "gamma"), figures)
    return harness.run("outcome_cache", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    pairs = {models.name: models for models in models_of(bench)}
    placements = {
        f"target x{given.factor}, {APART}": ("deepened", APART),
        f"demo target, {APART}": ("demo", APART),
        f"target x{given.factor}, {ONE_CORE}": ("deepened" if given.only is None else "", ONE_CORE),
    }
    for placement, (pair, place) in placements.items():
        if pair not in pairs:
            continue
        prompts = tokenised(pairs[pair].target, bench.some_prompts)
        with Services(pairs[pair].target, pairs[pair].draft, dtype=given.dtype, place=place) as services:
            for way, (temperature, rule) in WAYS.items():
                if not given.quick:
                    outrider_writer(services, rule=rule)(Task(0, prompts[0], WARM_UP_TOKENS, temperature, 1))
                for gamma in given.gammas:
                    writers = {
                        name: outrider_writer(services, rule=rule, gamma=gamma, outcome_cache=name == WITH)
                        for name in (WITHOUT, WITH)
                    }
                    written = texts(prompts, given.new_tokens, given.repetitions, [temperature])
                    take_turns(bench, {"placement": placement, "way": way, "gamma": gamma}, written, writers)


def table(document: Json) -> str:
    same = {"same texts": lambda arm: percent(arm["same_text"])}
    return arms_table(document["summary"], ("placement", "way", "drafts"), **same)


def draw(document: Json, path: Path) -> None:
    plots.comparison(
        path,
        document,
        [
            (placement, f"γ = {gamma}", {way: arms[WITH]})
            for (placement, way, gamma), arms in harness.flat(document["summary"], 3)
        ],
        label="tokens/s with the outcome cache over without",
        note=". White: hit rate.",
        text=lambda arm: "" if arm["hit_rate"] is None else percent(arm["hit_rate"]),
    )


if __name__ == "__main__":
    sys.exit(main())
