"""A target without some of its layers as a draft of itself [W A.7]: α by layers left out, and the speed over `Decode`.

`outrider alpha --find-skip-layers` finds the layers, on the demo target and on a deepened one, whose added layers do
nothing. Then each service has a processor, and the texts are written with the target alone and with each draft.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.contenders import Write, outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import Bench, Json, arms_table, compared, number
from benchmarks.services import NO_PREFIXES, Models, Services, models_of
from outrider.evaluation.alpha import Options, run
from outrider.evaluation.pictures import COLOURS, level, line, picture

ALONE = "Decode"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("skip_layers", __doc__, quick="the demo target, one layer")
    harness.target_options(parser, factor=3)
    harness.text_options(parser, prompts=4, new_tokens=64)
    parser.add_argument("--count", type=int, default=7, help="layers of the demo target to find")
    parser.add_argument("--tokens", type=int, default=500, help="that α is measured on in the search")
    parser.add_argument("--gamma", type=int, default=4, help="tokens of a proposal")
    few = {"only": "demo", "prompts": 1, "new_tokens": 16, "repetitions": 1, "count": 1, "tokens": 64}
    given = harness.parse(parser, arguments, few)
    return harness.run("skip_layers", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document["search"] = {}
    for models in models_of(bench):
        steps = bench.document["search"][models.name] = _search(bench, models)
        prompts = tokenised(models.target, bench.some_prompts)
        written = list(texts(prompts, given.new_tokens, given.repetitions))
        writers: dict[str, Write] = {}
        with ExitStack() as running:
            for step in _chosen(steps, idle=_idle(models)):
                flags = [*NO_PREFIXES, "--skip-layers", step["skip_layers"]]
                services = running.enter_context(Services(models.target, models.target, draft_flags=flags))
                writers.setdefault(ALONE, outrider_writer(services, gamma=0))
                writers[_arm(step)] = outrider_writer(services, gamma=given.gamma)
            warm_up(writers, [written[0][1]])
            take_turns(bench, {"pair": models.name}, written, writers)


def _search(bench: Bench, models: Models) -> list[Json]:
    given = bench.given
    found = run(
        Options(
            str(models.target),
            None,
            (),
            tuple(bench.prompts),
            tokens=given.tokens,
            find_skip_layers=_idle(models) + given.count,
            dtype="bfloat16",
            device="cpu",
        )
    )
    return [
        {"left_out": number, "skip_layers": step.skip_layers, "alpha": step.alpha}
        for number, step in enumerate(found.steps, start=1)
    ]


def _idle(models: Models) -> int:
    """The layers of a deepened target that do nothing."""
    layers = int(models.document()["target_layers"])
    return layers - layers // 3 if models.name != "demo" else 0


def _chosen(steps: Sequence[Json], idle: int) -> list[Json]:
    """The steps whose speed is measured: without idle layers, and with every second layer more."""
    return [step for step in steps if step["left_out"] >= idle and (step["left_out"] - idle) % 2 == (idle == 0)]


def _arm(step: Json) -> str:
    return f"{step['left_out']} left out"


def summarise(bench: Bench) -> Json:
    arms = [ALONE, *dict.fromkeys(run["arm"] for run in bench.runs if run["arm"] != ALONE)]
    figures = partial(compared, reference=ALONE, names=arms)
    return harness.summary_of(("pair", "temperature"), figures)(bench)


def table(document: Json) -> str:
    rows = [
        [pair, step["left_out"], step["skip_layers"], number(step["alpha"], 3)]
        for pair, steps in document["search"].items()
        for step in steps
    ]
    searched = harness.table(["pair", "left out", "layers", "α"], rows)
    return f"{arms_table(document['summary'], ('pair', 'T'))}\n\n{searched}"


def draw(document: Json, path: Path) -> None:
    note = f"{plots.caption(document)}. Numbers: α of the proposals."
    with picture(path, 1, len(document["summary"]), size=(4.8, 3.6), note=note) as (panels,):
        for panel, (pair, by_temperature) in zip(panels, document["summary"].items(), strict=True):
            for (temperature, arms), colour in zip(by_temperature.items(), COLOURS, strict=False):
                points = {int(arm.split()[0]): found for arm, found in arms.items() if arm != ALONE}
                offset = 5 if temperature == "0" else -10
                ratios = [(float(left_out), found["ratio"]) for left_out, found in points.items()]
                line(panel, ratios, marker="o", color=colour, label=f"T = {temperature}")
                for (x, y), found in zip(ratios, points.values(), strict=True):
                    panel.annotate(f"{found['alpha']:.2f}", (x, y), (3, offset), textcoords="offset points", fontsize=7)
            level(panel)
            panel.set(title=f"{pair} target, {document['models'][pair]['target_layers']} layers", ylim=(0, None))
            panel.margins(y=0.12)
            panel.set(xlabel="layers left out of the draft", ylabel="tokens/s, to the target alone")


if __name__ == "__main__":
    sys.exit(main())
