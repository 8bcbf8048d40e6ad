"""The cost of distance between draft and verifier: tokens per second by added round-trip time.

A proxy between the two services delays every byte by half of the added round trip; without a delay there is none. All
arms write the same texts (rule
`coupled`, one seed a prompt), in turns, at each delay, the shortest first: after a long one `adaptive` would try drafts
again only some thousand tokens later. Ratios are to the target alone (drafter `none`).
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.contenders import outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import Bench, Json, arms_table, compared, number, predicted_ratio
from benchmarks.services import Services, models_of

ALONE = "none"
RULE = "coupled"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("network", __doc__, quick="two delays, one prompt, one turn, the demo pair only")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=3, new_tokens=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.set_defaults(delays=[0, 1, 5, 20, 50], gamma=4)  # added round trips, in ms
    few = {"only": "demo", "delays": [0.0, 20.0], "prompts": 1, "repetitions": 1, "new_tokens": 24}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "added_ms"), figures)
    return harness.run("network", given, measure, summarise, table, draw)


def arms(gamma: int) -> dict[str, Json]:
    return {
        ALONE: {"drafter": "none"},
        "sequential": {"gamma": gamma, "outcome_cache": False},
        "outcome cache": {"gamma": gamma, "outcome_cache": True},
        "adaptive": {"speculation": "adaptive", "outcome_cache": False},
    }


def measure(bench: Bench) -> None:
    given = bench.given
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        for distant, delays in groupby(sorted(given.delays), key=bool):
            with Services(models.target, models.draft, dtype=given.dtype, distant=distant) as services:
                writers = {name: outrider_writer(services, rule=RULE, **how) for name, how in arms(given.gamma).items()}
                warm_up(writers, [task for _, task in texts(prompts, given.new_tokens, 1, [1.0])])
                every = list(texts(prompts, given.new_tokens, given.repetitions, [1.0]))
                for delay in delays:
                    if distant:
                        services.proxy.delay(delay / 2e3)
                    take_turns(bench, {"pair": models.name, "added_ms": f"{delay:g}"}, every, writers)


def figures(runs: Sequence[Json]) -> Json:
    found = compared(runs, ALONE, list(arms(0)))
    for arm in found.values():
        arm["predicted_ratio"] = predicted_ratio(arm, arm["alpha"], found[ALONE]["tokens_per_second"])
    return found


def table(document: Json) -> str:
    more: harness.Columns = {
        "Thm 3.8": lambda arm: number(arm["predicted_ratio"]),
        "wire, ms": lambda arm: number(arm["round_us"]["wire"] / 1e3),
    }
    return arms_table(document["summary"], ["pair", "added, ms"], **more)


def draw(document: Json, path: Path) -> None:
    plots.comparison(
        path,
        document,
        [(f"{pair} pair", f"{added} ms", by_arm) for (pair, added), by_arm in harness.flat(document["summary"], 2)],
        label="tokens/s, to the target alone",
        note=". By added round trip. Marks: Theorem 3.8.",
        predicted=lambda arm: arm["predicted_ratio"],
    )


if __name__ == "__main__":
    sys.exit(main())
