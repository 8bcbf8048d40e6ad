"""What each drafter is worth: α and tokens/s on code to go on with and on code to be written once more.

Every drafter writes every text through both services, in turns; ratios are to `none`, the target alone, in the same
repetition. `ngram` counts what the demo target was trained on, none of which is in the prompts.

    python -m benchmarks.drafters --prompts 4    the demo pair and a deepened one, about fifteen minutes on two cores
    python -m benchmarks.drafters --quick        does it work at all
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import harness, plots
from benchmarks.contenders import Task
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.outrider_contender import APART, Services, completion_run, models_of
from models.corpus import training_documents

DRAFTERS = ("none", "model", "staged", "ngram", "lookup", "random")
"""In the order of tables and pictures; the first is what the others are held against."""
TEMPERATURES = (0.0, 1.0)
# Judged token by token, so that α is the paper's.
RULE = "tokenwise"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("drafters", __doc__, quick="few texts, the demo pair only")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--factor", type=int, default=3, help="how many times as deep the deepened target is")
    parser.add_argument("--prompts", type=int, default=12, help="how many prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of each text")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each drafter writes each text")
    parser.add_argument("--gamma", type=int, default=5, help="tokens of a proposal")
    parser.add_argument("--corpus-mb", type=float, default=4.0, help="of the training text that ngram counts")
    parser.add_argument("--staged-by", choices=("lookup", "ngram"), default="lookup", help="what guesses in staged")
    few = {"only": "demo", "prompts": 1, "new_tokens": 16, "repetitions": 1, "corpus_mb": 0.1}
    return harness.run("drafters", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    """Each text by every drafter in turn."""
    given = bench.given
    pairs = models_of(given.target, given.draft, given.only, given.factor)
    bench.document["models"] = {models.name: models.document() for models in pairs}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        text = "\n".join(document.text for document in training_documents())
        corpus.write_text(text[: int(given.corpus_mb * 1e6)], encoding="utf-8")
        flags = {
            "verifier_service": ["--no-prefix-cache"],
            "draft_service": ["--ngram-corpus", str(corpus), "--staged-by", given.staged_by],
        }
        for models in pairs:
            with Services(models.target, models.draft, place=APART, flags=flags) as services:
                for drafter in DRAFTERS:  # not measured
                    _write(bench, services, drafter, bench.prompts[0], Task(0, (), given.new_tokens, 1.0, 1))
                for turn, (keys, text) in enumerate(_texts(bench)):
                    if bench.has(pair=models.name, **keys):
                        continue
                    seed = 1 + 1000 * keys["repetition"] + keys["prompt"]
                    task = Task(keys["prompt"], (), given.new_tokens, float(keys["temperature"]), seed)
                    runs = [
                        {
                            "pair": models.name,
                            **keys,
                            "drafter": drafter,
                            **_write(bench, services, drafter, text, task),
                        }
                        for drafter in harness.rotated(DRAFTERS, turn)
                    ]
                    bench.add(*runs)
                    shown = ", ".join(f"{run['drafter']} {run['tokens'] / run['seconds']:.1f}" for run in runs)
                    tell(f"{models.name}, {', '.join(map(str, keys.values()))}: {shown}")


def _texts(bench: Bench) -> list[tuple[Json, str]]:
    """All that is written, in order: kinds and temperatures alternate, so that they too meet the same machine."""
    return [
        ({"kind": kind, "temperature": f"{at:g}", "repetition": repetition, "prompt": nth}, text)
        for repetition in range(bench.given.repetitions)
        for nth, prompt in enumerate(harness.spread(bench.prompts, bench.given.prompts))
        for at in TEMPERATURES
        for kind, text in kinds(prompt).items()
    ]


def kinds(prompt: str) -> dict[str, str]:
    """Code to go on with, and the same code to be edited: it is there, and its beginning once more behind it."""
    lines = prompt.rstrip("\n").split("\n")
    beginning = "\n".join(lines[: max(1, len(lines) // 3)])
    return {"completion": prompt, "edit": f"{prompt}\n\n# Edited: the same, once more.\n{beginning}\n"}


def _write(bench: Bench, services: Services, drafter: str, text: str, task: Task) -> Json:
    """One text, and what it took; of `staged` also how its inner game went."""
    before = services.metrics_of(services.draft)
    begin = time.perf_counter()
    done = services.client.complete(
        text,
        drafter=drafter,
        temperature=task.temperature,
        max_new_tokens=task.new_tokens,
        ignore_eos=True,
        gamma=bench.given.gamma,
        rule=RULE,
        seed=task.seed,
    )
    run = completion_run(done, time.perf_counter() - begin, task)
    after = services.metrics_of(services.draft)
    inner = {
        f"inner_{name}": after[f"outrider_staged_{name}_tokens_total"] - before[f"outrider_staged_{name}_tokens_total"]
        for name in ("guessed", "accepted")
    }
    return run | inner | {"draft_failures": done.statistics.num_draft_failures}


def summarise(bench: Bench) -> Json:
    """By pair, kind of prompt, temperature and drafter."""
    return {"summary": harness.tree(bench.runs, ("pair", "kind", "temperature"), figures)}


def figures(runs: Sequence[Json]) -> Json:
    """All drafters on one kind of text at one temperature."""
    by_drafter = harness.grouped(runs, "drafter")
    rates = {name: harness.rates(own) for name, own in by_drafter.items()}
    found = {}
    for name in sorted(by_drafter, key=DRAFTERS.index):
        own = by_drafter[name]
        drafted, guessed = harness.total(own, "drafted"), harness.total(own, "inner_guessed")
        found[name] = {
            "tokens_per_second": median(rates[name].values()),
            **harness.ratio(rates[name], rates[DRAFTERS[0]]),
            "alpha": harness.alpha_of(own),
            "tokens_per_round": harness.total(own, "tokens") / harness.total(own, "rounds"),
            "drafted": int(drafted),
            "accepted": int(harness.total(own, "accepted")),
            "us_per_drafted_token": 1e6 * sum(run["phases"]["draft"] for run in own) / drafted if drafted else None,
            "inner_acceptance": harness.total(own, "inner_accepted") / guessed if guessed else None,
            "draft_failures": int(harness.total(own, "draft_failures")),
        }
    return found


def table(document: Json) -> str:
    """A table for each pair, kind and temperature."""
    head = ["drafter", "tokens/s", "to none", "α", "tokens/round", "drafted", "accepted", "µs/drafted", "inner"]
    parts = []
    for pair, by_kind in document["summary"].items():
        for kind, by_temperature in by_kind.items():
            for temperature, found in by_temperature.items():
                rows = [
                    [
                        name,
                        number(each["tokens_per_second"], 1),
                        harness.between(each),
                        number(each["alpha"]),
                        number(each["tokens_per_round"]),
                        f"{each['drafted']:,}",
                        f"{each['accepted']:,}",
                        number(each["us_per_drafted_token"], 0),
                        number(each["inner_acceptance"]),
                    ]
                    for name, each in found.items()
                ]
                layers = document["models"][pair]["target_layers"]
                parts.append(harness.table(head, rows, f"{pair} pair ({layers} layers), {kind}, T = {temperature}"))
    return "\n".join(parts)


def draw(document: Json, path: Path) -> None:
    """A panel for each pair and temperature, a group of bars a kind: tokens/s to the target alone, with α."""
    shown = [
        (pair, temperature, by_kind)
        for pair, by_kind in document["summary"].items()
        for temperature in next(iter(by_kind.values()))
    ]
    colours = dict(
        zip(DRAFTERS, (plots.LIGHT, plots.BLUE, plots.GREEN, plots.ORANGE, plots.VIOLET, plots.SAND), strict=True)
    )
    note = f"{plots.caption(document)}. White: α."
    with plots.picture(
        path, -(-len(shown) // 2), min(2, len(shown)), size=(5.4, 3.8), note=note, sharey=True
    ) as panels:
        for panel, (pair, temperature, by_kind) in zip(panels.flat, shown, strict=False):
            cells = [by_temperature[temperature] for by_temperature in by_kind.values()]
            series = {name: [(cell[name]["ratio"], *cell[name]["ratio_range"]) for cell in cells] for name in DRAFTERS}
            plots.bars(panel, list(by_kind), series, colours=colours)
            for nth, cell in enumerate(cells):
                for place, name in enumerate(DRAFTERS):
                    if cell[name]["alpha"] is not None:
                        plots.foot(panel, nth + (place - 2.5) * 0.86 / 6, f"α {cell[name]['alpha']:.2f}")
            plots.level(panel)
            layers = document["models"][pair]["target_layers"]
            panel.set_title(f"{pair} pair ({layers} layers), T = {temperature}", fontsize=10)
            panel.set_ylabel("tokens/s, to the target alone")


if __name__ == "__main__":
    sys.exit(main())
