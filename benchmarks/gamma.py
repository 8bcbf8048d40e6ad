"""How long to speculate: fixed γ from 1 to 16 against the policies that choose it, one stream.

All arms write the same texts, one after another on each prompt, through the same two services; only requests differ. By
default under the rule `coupled`, so that at any temperature the text too is the same in every arm. (Many streams:
`benchmarks.load`, with `--gamma` for a fixed one.)

    python -m benchmarks.gamma --prompts 5 --repetitions 2      about ten minutes on two cores
    python -m benchmarks.gamma --only demo --prompts 3          about a minute and a half
    python -m benchmarks.gamma --quick                          does it work at all
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import AutoTokenizer

from benchmarks import harness, plots
from benchmarks.contenders import Task
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.outrider_contender import APART, OutriderWriter, Services, models_of

ALONE = "alone"
TEMPERATURES = (0.0, 1.0)
CEILING = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("gamma", __doc__, quick="two prompts, few arms, the demo pair only")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--factor", type=int, default=3, help="how many times as deep the deepened target is")
    parser.add_argument("--prompts", type=int, default=12, help="how many prompts")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each text")
    parser.add_argument("--repetitions", type=int, default=1, help="how often each text is written in each arm")
    parser.add_argument("--rule", default="coupled", choices=("tokenwise", "block", "coupled"), help="of acceptance")
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 12, 16], help="each γ")
    parser.add_argument("--entropies", type=float, nargs="*", default=[2.0, 3.0], help="bounds of the draft's, in nats")
    few = {"only": "demo", "prompts": 2, "new_tokens": 24, "fixed": [2, 8], "entropies": [2.0]}
    return harness.run("gamma", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def arms_of(rule: str, fixed: Sequence[int], entropies: Sequence[float]) -> dict[str, Mapping[str, Any]]:
    """What each arm asks for, by its name."""
    arms: dict[str, dict[str, Any]] = {ALONE: {"gamma": 0}}
    arms |= {f"fixed {gamma}": {"gamma": gamma} for gamma in fixed}
    arms |= {name: {"gamma": CEILING, "speculation": name} for name in ("heuristic", "adaptive")}
    arms |= {f"entropy {bound:g}": {"gamma": CEILING, "max_entropy": bound} for bound in entropies}
    arms |= {
        f"adaptive, entropy {bound:g}": {"gamma": CEILING, "speculation": "adaptive", "max_entropy": bound}
        for bound in entropies
    }
    return {name: {"rule": rule, **options} for name, options in arms.items()}


def measure(bench: Bench) -> None:
    """Each text by every arm in turn."""
    given = bench.given
    arms = arms_of(given.rule, given.fixed, given.entropies)
    pairs = models_of(given.target, given.draft, given.only, given.factor)
    bench.document["models"] = {models.name: models.document() for models in pairs}
    for models in pairs:
        tokenizer = AutoTokenizer.from_pretrained(models.target, local_files_only=True)
        prompts = [tuple(tokenizer(text)["input_ids"]) for text in harness.spread(bench.prompts, given.prompts)]
        with Services(models.target, models.draft, place=APART) as services:
            writers = {name: OutriderWriter(services, **options) for name, options in arms.items()}
            for at in TEMPERATURES:
                for writer in writers.values():  # not measured
                    writer.write(Task(0, prompts[0], min(16, given.new_tokens), at, 0))
            turn = 0
            for repetition in range(given.repetitions):
                for nth, prompt in enumerate(prompts):
                    for at in TEMPERATURES:
                        keys = {"pair": models.name, "temperature": f"{at:g}", "repetition": repetition, "prompt": nth}
                        task = Task(nth, prompt, given.new_tokens, at, 1 + repetition * len(prompts) + nth)
                        turn += 5
                        if not bench.has(**keys):
                            order = harness.rotated(writers.items(), turn)
                            bench.add(*({**keys, "arm": name, **writer.write(task)} for name, writer in order))
                            shown = ", ".join(
                                f"{run['arm']} {run['tokens'] / run['seconds']:.0f}" for run in bench.runs[-len(arms) :]
                            )
                            tell(f"{', '.join(map(str, keys.values()))}: {shown}")


def summarise(bench: Bench) -> Json:
    """By pair and temperature."""
    names = list(arms_of("", bench.given.fixed, bench.given.entropies))
    return {"summary": harness.tree(bench.runs, ("pair", "temperature"), lambda runs: figures(runs, names))}


def figures(runs: Sequence[Json], names: Sequence[str]) -> Json:
    """Each arm's rate over all its texts, over the target's alone and over that of the best fixed γ.

    `range`: where the middle nine tenths of the ratio of single texts lie.
    """
    by_arm = harness.grouped(runs, "arm")
    speed = {name: harness.total(own, "tokens") / harness.total(own, "seconds") for name, own in by_arm.items()}
    best = max((name for name in speed if name.startswith("fixed ")), key=lambda name: speed[name])
    alone = {(run["repetition"], run["prompt"]): run["seconds"] for run in by_arm[ALONE]}
    arms = {}
    for name in (name for name in names if name in by_arm):
        own = by_arm[name]
        ratios = sorted(alone[run["repetition"], run["prompt"]] / run["seconds"] for run in own)
        drafted, last = harness.total(own, "drafted"), len(ratios) - 1
        arms[name] = {
            "tokens_per_second": speed[name],
            "ratio_to_alone": speed[name] / speed[ALONE],
            "range": [ratios[round(0.05 * last)], ratios[round(0.95 * last)]],
            "ratio_to_best_fixed": speed[name] / speed[best],
            "mean_gamma": fmean(run["drafted"] / run["rounds"] for run in own),
            "tokens_per_round": harness.total(own, "tokens") / harness.total(own, "rounds"),
            "accepted_share": harness.total(own, "accepted") / drafted if drafted else None,
            "round_ms": 1e3 * median(run["seconds"] / run["rounds"] for run in own),
        }
    texts = harness.grouped([{**run, "text": (run["repetition"], run["prompt"])} for run in runs], "text").values()
    differ = sum(len({run["digest"] for run in text}) > 1 for text in texts)
    return {"best_fixed": best, "arms": arms, "texts": len(texts), "texts_that_differ": differ}


def table(document: Json) -> str:
    """All arms."""
    rows = []
    for pair, by_temperature in document["summary"].items():
        for temperature, found in by_temperature.items():
            for name, arm in found["arms"].items():
                low, high = arm["range"]
                rows.append(
                    [
                        pair,
                        temperature,
                        f"{name} (best fixed)" if name == found["best_fixed"] else name,
                        number(arm["tokens_per_second"], 1),
                        f"{arm['ratio_to_alone']:.2f} ({low:.2f} to {high:.2f})",
                        number(arm["ratio_to_best_fixed"]),
                        number(arm["mean_gamma"], 1),
                        number(arm["tokens_per_round"]),
                    ]
                )
    head = ["pair", "T", "arm", "tokens/s", "over alone", "over best fixed", "mean γ", "tokens/round"]
    return harness.table(head, rows)


def draw(document: Json, path: Path) -> None:
    """A panel for each pair and temperature: fixed γ as a curve, the others as lines across it."""
    summary = document["summary"]
    temperatures = list(dict.fromkeys(at for by_temperature in summary.values() for at in by_temperature))
    note = plots.caption(document)
    with plots.picture(path, len(summary), len(temperatures), size=(5.4, 3.6), note=note) as panels:
        for row, (pair, by_temperature) in zip(panels, summary.items(), strict=True):
            for panel, temperature in zip(row, temperatures, strict=True):
                arms = by_temperature.get(temperature, {"arms": {}})["arms"]
                fixed = {int(name.split()[1]): arm for name, arm in arms.items() if name.startswith("fixed ")}
                lengths = sorted(fixed)
                ratios = [(gamma, fixed[gamma]["ratio_to_alone"]) for gamma in lengths]
                plots.line(panel, ratios, marker="o", color=plots.GREY, label="fixed γ")
                low, high = ([fixed[gamma]["range"][end] for gamma in lengths] for end in (0, 1))
                panel.fill_between(lengths, low, high, color=plots.LIGHT, alpha=0.3)
                others = [name for name in arms if not name.startswith("fixed ") and name != ALONE]
                for name, colour in zip(others, (plots.ORANGE, plots.BLUE, *plots.COLOURS[3:]), strict=False):
                    plots.level(
                        panel, arms[name]["ratio_to_alone"], color=colour, linewidth=1.4, linestyle="-", label=name
                    )
                plots.level(panel)
                panel.set_title(f"{pair}, T = {temperature}", fontsize=10)
                panel.set_xlabel("γ, where it is fixed", fontsize=8)
            row[0].set_ylabel("speed-up over the target alone")


if __name__ == "__main__":
    sys.exit(main())
