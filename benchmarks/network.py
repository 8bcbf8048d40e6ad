"""The cost of distance between draft and verifier: tokens per second by added round-trip time.

A proxy between the two services delays every byte by half of the added round trip. All arms write the same texts (rule
`coupled`, one seed a prompt), in turns, at each delay in turn. Ratios are to the target alone (drafter `none`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.contenders import outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import Bench, Json, arms_table, compared, number, predicted_ratio
from benchmarks.services import Services
from outrider.evaluation import pictures

ALONE = "none"
RULE = "coupled"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("network", __doc__, quick="two delays, one prompt, one turn")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 5, 20, 50], help="added round trips, in ms")
    parser.add_argument("--gamma", type=int, default=4)
    harness.text_options(parser, prompts=3, new_tokens=96)
    parser.add_argument("--dtype", default="bfloat16")
    few = {"delays": [0.0, 20.0], "prompts": 1, "repetitions": 1, "new_tokens": 24}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("added_ms",), figures)
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
    prompts = tokenised(given.target, bench.prompts[: given.prompts])
    with Services(given.target, given.draft, dtype=given.dtype, distant=True) as services:
        writers = {name: outrider_writer(services, rule=RULE, **how) for name, how in arms(given.gamma).items()}
        warm_up(writers, [task for _, task in texts(prompts, given.new_tokens, 1, [1.0])])
        every = list(texts(prompts, given.new_tokens, given.repetitions, [1.0]))
        for repetition in range(given.repetitions):
            some = [(keys, task) for keys, task in every if keys["repetition"] == repetition]
            for delay in given.delays:
                services.proxy.delay(delay / 2e3)
                take_turns(bench, {"added_ms": f"{delay:g}"}, some, writers, turn=repetition)


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
    return arms_table(document["summary"], ["added, ms"], **more)


def draw(document: Json, path: Path) -> None:
    delays = list(document["summary"])
    with pictures.picture(
        path, 1, 1, size=(6.6, 4.0), note=f"{plots.caption(document)}. Dashed: Theorem 3.8."
    ) as panels:
        panel = panels[0][0]
        for name, colour in zip(arms(0), (pictures.GREY, pictures.BLUE, pictures.ORANGE, pictures.VIOLET), strict=True):
            found = [document["summary"][delay][name] for delay in delays]
            errors = [[abs(arm["ratio"] - arm["ratio_range"][end]) for arm in found] for end in (0, 1)]
            ratios = [arm["ratio"] for arm in found]
            panel.errorbar(
                range(len(delays)), ratios, yerr=errors, marker="o", markersize=4, capsize=2, color=colour, label=name
            )
            predicted = [(x, arm["predicted_ratio"]) for x, arm in enumerate(found)]
            pictures.line(panel, predicted, linestyle="--", linewidth=1, color=colour)
        panel.set_xticks(range(len(delays)), delays)
        panel.set_xlabel("added round trip between draft and verifier, ms")
        panel.set_ylabel("tokens/s, to the target alone")


if __name__ == "__main__":
    sys.exit(main())
