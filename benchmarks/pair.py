"""What speculation over gRPC is worth: the target alone, the pair, and transformers' assisted generation, in turns.

Every contender writes the same number of tokens after the same prompts, at its own fastest settings, found beforehand
on other prompts. They take turns on each prompt, so that whatever else the machine does falls on all of them. Two pairs
of models: the demo pair, and the same with a deepened target (`benchmarks.deepen`).

    python -m benchmarks.pair --prompts 8       about half an hour on two cores
    python -m benchmarks.pair --only demo --prompts 4 --repetitions 1 --calibration-tokens 0     about a minute
    python -m benchmarks.pair --quick           does it work at all
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks import harness, plots
from benchmarks.contenders import PHASES, Task, Writer
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.outrider_contender import ANYWHERE, APART, Models, OutriderWriter, Services, models_of
from benchmarks.transformers_contender import TransformersWriter, load
from outrider.cli.processes import processors
from outrider.theory import improvement

ALONE = ("transformers", "outrider-alone")
ASSISTED, PAIR = "assisted", "outrider-pair"
CONTENDERS = (*ALONE, ASSISTED, PAIR)
LABELS = {
    "transformers": "target alone, transformers",
    "outrider-alone": "target alone, Outrider",
    "assisted": "assisted generation, transformers",
    "outrider-pair": "the pair over gRPC, Outrider",
}
TEMPERATURES = (0.0, 1.0)
GAMMAS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
ASSISTANT_TOKENS = (3, 5, 8, 12)
# Where nothing is tuned.
PLAIN: Json = {
    "transformers": {"threads": 1},
    "outrider-alone": {"threads": 1, "place": ANYWHERE},
    ASSISTED: {"threads": 1, "tokens": {"0": 5, "1": 5}},
    PAIR: {"threads": 1, "place": APART, "gamma": {"0": 5, "1": 5}},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("pair", __doc__, quick="few texts, the demo pair only, nothing tuned")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--factor", type=int, default=12, help="how many times as deep the deepened target is")
    parser.add_argument("--prompts", type=int, default=12, help="how many prompts")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of each text")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each contender writes each text")
    parser.add_argument("--calibration-tokens", type=int, default=48, help="of each text to tune on; 0: do not tune")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of both models")
    few = {"only": "demo", "prompts": 2, "new_tokens": 16, "repetitions": 1, "calibration_tokens": 0}
    return harness.run("pair", harness.parse(parser, arguments, few), measure, summarise, table, draw)


# ------------------------------------------------------------------------------------------------------- measurement


def measure(bench: Bench) -> None:
    """All texts by all contenders."""
    given = bench.given
    pairs = models_of(given.target, given.draft, given.only, given.factor)
    bench.document |= {"models": {models.name: models.document() for models in pairs}, "tuning": {}}
    for models in pairs:
        texts = Texts(bench, models)
        tuning = bench.once(models.name, partial(_tuned, bench, models, texts))
        bench.document["tuning"][models.name] = tuning
        left = [(turn, keys, task) for turn, keys, task in texts.measured() if not bench.has(pair=models.name, **keys)]
        if left:
            with ExitStack() as running:
                _write_all(bench, models.name, texts, _contenders(models, given.dtype, tuning, running), left)
        load.cache_clear()


class Texts:
    """What is written: prompts as tokens, measured ones and others to tune on."""

    def __init__(self, bench: Bench, models: Models) -> None:
        self._given = bench.given
        tokenizer = AutoTokenizer.from_pretrained(models.target, local_files_only=True)
        measured = harness.spread(bench.prompts, bench.given.prompts)
        others = harness.spread([text for text in bench.prompts if text not in measured] or measured, 6)
        self._measured, self._others = (
            [tuple(tokenizer(text)["input_ids"]) for text in texts] for texts in (measured, others)
        )

    def measured(self) -> list[tuple[int, Json, Task]]:
        """Turn, keys and task, in order; temperatures alternate, so that they too meet the same machine."""
        found: list[tuple[int, Json, Task]] = []
        for repetition in range(self._given.repetitions):
            for nth, prompt in enumerate(self._measured):
                for at in TEMPERATURES:
                    task = Task(nth, prompt, self._given.new_tokens, at, 1 + repetition * len(self._measured) + nth)
                    keys = {"temperature": f"{at:g}", "repetition": repetition, "prompt": nth}
                    found.append((len(found), keys, task))
        return found

    def calibration(self, temperature: float, count: int) -> list[Task]:
        """Texts to tune on."""
        tokens = self._given.calibration_tokens
        return [Task(nth, prompt, tokens, temperature, 10**6 + nth) for nth, prompt in enumerate(self._others[:count])]

    def warm_up(self, temperature: float) -> Task:
        """A short text that is not measured."""
        return Task(0, self._others[0], min(16, self._given.new_tokens), temperature, 0)


def _contenders(models: Models, dtype: str, tuning: Json, running: ExitStack) -> dict[str, dict[str, Writer]]:
    """All contenders by temperature and name. Services are shared where their settings are the same."""
    services: dict[tuple[int, str], Services] = {}
    for name in ("outrider-alone", PAIR):
        how = tuning[name]["threads"], tuning[name]["place"]
        if how not in services:
            made = Services(models.target, models.draft, dtype=dtype, threads=how[0], place=how[1])
            services[how] = running.enter_context(made)
    alone, pair = (services[tuning[name]["threads"], tuning[name]["place"]] for name in ("outrider-alone", PAIR))
    assisted = tuning[ASSISTED]
    return {
        at: {
            "transformers": TransformersWriter(models.target, dtype=dtype, **tuning["transformers"]),
            "outrider-alone": OutriderWriter(alone, gamma=0),
            ASSISTED: TransformersWriter(
                models.target,
                dtype=dtype,
                threads=assisted["threads"],
                draft=models.draft,
                tokens=assisted["tokens"][at],
            ),
            PAIR: OutriderWriter(pair, gamma=tuning[PAIR]["gamma"][at]),
        }
        for at in (f"{temperature:g}" for temperature in TEMPERATURES)
    }


def _write_all(
    bench: Bench,
    pair: str,
    texts: Texts,
    contenders: dict[str, dict[str, Writer]],
    left: list[tuple[int, Json, Task]],
) -> None:
    for at, by_name in contenders.items():
        for writer in by_name.values():
            writer.write(texts.warm_up(float(at)))
    for turn, keys, task in left:
        runs = [
            {"pair": pair, **keys, "contender": name, "settings": writer.settings(), **writer.write(task)}
            for name, writer in harness.rotated(contenders[keys["temperature"]].items(), turn)
        ]
        bench.add(*runs)
        shown = ", ".join(f"{run['contender']} {run['tokens'] / run['seconds']:.1f}" for run in runs)
        tell(f"{pair}, {', '.join(f'{name} {value}' for name, value in keys.items())}: {shown} tokens/s")


# ------------------------------------------------------------------------------------------------------------ tuning


def _tuned(bench: Bench, models: Models, texts: Texts) -> Json:
    """The fastest settings of each contender: threads first, then what depends on the text, by temperature."""
    if not bench.given.calibration_tokens:
        return PLAIN
    dtype, threads = bench.given.dtype, list(dict.fromkeys((1, len(processors()))))

    def rate(name: str, writer: Writer, at: Sequence[float], count: int) -> float:
        seconds = 0.0
        for temperature in at:
            writer.write(texts.warm_up(temperature))
            runs = [writer.write(task) for task in texts.calibration(temperature, count)]
            seconds += harness.total(runs, "seconds") / harness.total(runs, "tokens")
        tell(f"{models.name}: {name} {writer.settings()}: {len(at) / seconds:.1f} tokens/s")
        return len(at) / seconds

    def fastest(name: str, writers: dict[Any, Writer]) -> Any:
        return max(writers, key=lambda choice: rate(name, writers[choice], TEMPERATURES, 2))

    def by_temperature(name: str, writers: dict[int, Writer]) -> dict[str, int]:
        """All on two texts, then the best three on six."""
        found = {}
        for at in TEMPERATURES:
            few = {choice: rate(name, writer, [at], 2) for choice, writer in writers.items()}
            best = sorted(few, key=lambda choice: -few[choice])[:3]
            found[f"{at:g}"] = max(best, key=lambda choice: rate(name, writers[choice], [at], 6))
        return found

    plain = fastest("transformers", {n: TransformersWriter(models.target, dtype=dtype, threads=n) for n in threads})
    assisted: dict[int, Writer] = {
        n: TransformersWriter(models.target, dtype=dtype, threads=plain, draft=models.draft, tokens=n)
        for n in ASSISTANT_TOKENS
    }
    tuned: Json = {
        "transformers": {"threads": plain},
        ASSISTED: {"threads": plain, "tokens": by_temperature(ASSISTED, assisted)},
    }
    alone: dict[Any, float] = {}
    pair: dict[Any, float] = {}
    for n, place in [(n, ANYWHERE) for n in threads] + [(1, APART)]:
        with Services(models.target, models.draft, dtype=dtype, threads=n, place=place) as services:
            alone[n, place] = rate("outrider-alone", OutriderWriter(services, gamma=0), TEMPERATURES, 2)
            pair[n, place] = rate(PAIR, OutriderWriter(services, gamma=5), TEMPERATURES, 2)
    for name, found in (("outrider-alone", alone), (PAIR, pair)):
        n, place = max(found, key=lambda how: found[how])
        tuned[name] = {"threads": n, "place": place}
    with Services(models.target, models.draft, dtype=dtype, **tuned[PAIR]) as services:
        lengths: dict[int, Writer] = {gamma: OutriderWriter(services, gamma=gamma) for gamma in GAMMAS}
        tuned[PAIR]["gamma"] = by_temperature(PAIR, lengths)
    return tuned


# ----------------------------------------------------------------------------------------------------------- figures


def summarise(bench: Bench) -> Json:
    """All figures: by pair, temperature and contender."""
    return {"summary": harness.tree(bench.runs, ("pair", "temperature"), figures)}


def figures(runs: Sequence[Json]) -> Json:
    """One pair at one temperature. Ratios are to the faster target alone in the same repetition."""
    by_contender = harness.grouped(runs, "contender")
    rates = {name: harness.rates(own) for name, own in by_contender.items()}
    best = max((name for name in ALONE if name in rates), key=lambda name: median(rates[name].values()))
    alpha = harness.alpha_of(by_contender.get(PAIR, ()))
    texts = {(run["repetition"], run["prompt"]): run["digest"] for run in by_contender.get("outrider-alone", ())}
    found = {}
    for name in sorted(by_contender, key=CONTENDERS.index):
        own = by_contender[name]
        same = [texts.get((run["repetition"], run["prompt"])) == run["digest"] for run in own]
        found[name] = {
            "tokens_per_second": median(rates[name].values()),
            "repetitions": len(rates[name]),
            **harness.ratio(rates[name], rates[best]),
            **per_round(own),
            "predicted_ratio": _predicted(own, alpha, median(rates[best].values())),
            "same_text": sum(same) / len(same),
            "settings": own[-1]["settings"],
        }
    return {"best_alone": best, "contenders": found}


def per_round(runs: Sequence[Json]) -> Json:
    """Means over all rounds of all texts, those that read the prompt included; times in microseconds."""
    rounds, drafted = harness.total(runs, "rounds"), harness.total(runs, "drafted")
    times = {phase: 1e6 * sum(run["phases"][phase] for run in runs) / rounds for phase in PHASES}
    return {
        "texts": len(runs),
        "rounds": int(rounds),
        "gamma": drafted / rounds,
        "alpha": harness.alpha_of(runs),
        "tokens_per_round": harness.total(runs, "tokens") / rounds,
        "round_us": times,
        "draft_step_us": times["draft"] * rounds / drafted if drafted else None,  # t_q
        "target_pass_us": times["forward"],  # t_p(γ+1)
        "round_trip_us": times["wire"] + times["queue"] + times["verify"],  # R, acceptance included
    }


def _predicted(runs: Sequence[Json], alpha: float | None, alone: float) -> float | None:
    """The speed-up of [L Thm 3.8] from measured times, over a target alone of `alone` tokens a second.

    Where a contender does not tell its α, it is that of the same two models elsewhere.
    """
    found = per_round(runs)
    if not found["draft_step_us"] or alpha is None:
        return None
    step = 1e6 / alone
    return improvement(
        alpha,
        round(found["gamma"]),
        c=found["draft_step_us"] / step,
        round_trip=found["round_trip_us"] / step,
        verify_cost=found["target_pass_us"] / step,
    )


def table(document: Json) -> str:
    """Two tables for each pair and temperature: speeds, and where a round's time goes."""
    parts = []
    for pair, by_temperature in document["summary"].items():
        models = document["models"][pair]
        for temperature, summary in by_temperature.items():
            title = f"{pair} pair ({models['target_layers']} layers, {models['target_mib']} MiB), T = {temperature}"
            found = summary["contenders"].items()
            head = ["", "tokens/s", "ratio", "Thm 3.8", "α", "tokens/round", "γ", "t_q µs", "t_p(γ+1) µs", "R µs"]
            rows = [
                [
                    LABELS[name],
                    number(each["tokens_per_second"], 1),
                    harness.between(each),
                    number(each["predicted_ratio"]),
                    number(each["alpha"], 3),
                    number(each["tokens_per_round"]),
                    number(each["gamma"] or None, 1),
                    number(each["draft_step_us"], 0),
                    number(each["target_pass_us"], 0),
                    number(each["round_trip_us"] or None, 0),
                ]
                for name, each in found
            ]
            times = [[LABELS[name], *(f"{each['round_us'][phase]:.0f}" for phase in PHASES)] for name, each in found]
            parts += [harness.table(head, rows, title), harness.table(["µs of a round", *PHASES], times) + "\n"]
    return "\n".join(parts)


def draw(document: Json, path: Path) -> None:
    """A panel a temperature, a group of bars a pair: speed-up over the target alone, measured and foretold."""
    summary = document["summary"]
    temperatures = list(dict.fromkeys(at for by_temperature in summary.values() for at in by_temperature))
    colours = dict(
        zip(LABELS.values(), (plots.LIGHT, plots.GREY, plots.ORANGE, plots.BLUE), strict=True),
    )
    note = plots.caption(document)
    with plots.picture(path, 1, len(temperatures), size=(5.2, 4.0), note=note, sharey=True) as panels:
        for panel, temperature in zip(panels[0], temperatures, strict=True):
            pairs = [pair for pair in summary if temperature in summary[pair]]
            cells = [summary[pair][temperature]["contenders"] for pair in pairs]
            groups = [f"{pair} pair\n{document['models'][pair]['target_layers']} layers" for pair in pairs]
            series = {
                LABELS[name]: [
                    (cell[name]["ratio"], *cell[name]["ratio_range"]) if name in cell else None for cell in cells
                ]
                for name in CONTENDERS
            }
            plots.bars(panel, groups, series, colours=colours, text="{:.2f}")
            at = [nth + (CONTENDERS.index(name) - 1.5) * 0.86 / 4 for nth, cell in enumerate(cells) for name in cell]
            foretold = [each["predicted_ratio"] for cell in cells for each in cell.values()]
            plots.line(
                panel, list(zip(at, foretold, strict=True)), linestyle="none", marker="D", markersize=5, color="black",
                markerfacecolor="white", label="Theorem 3.8 from measured α and times",
            )  # fmt: skip
            plots.level(panel)
            panel.set_title(f"T = {temperature}", fontsize=10)
        panels[0][0].set_ylabel("speed-up over the faster target alone")


if __name__ == "__main__":
    sys.exit(main())
