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

ALONE = "Decode"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("skip_layers", __doc__, quick="the demo target, one layer")
    harness.target_options(parser, factor=3)
    harness.text_options(parser, prompts=4, new_tokens=64)
    # Layers of the demo target to find, and the tokens that α is measured on in the search.
    parser.set_defaults(count=7, tokens=500, gamma=4)
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
    layers = {pair: models["target_layers"] for pair, models in document["models"].items()}
    plots.comparison(
        path,
        document,
        [
            (f"{pair} target, {layers[pair]} layers", name, {f"T = {temperature}": arm})
            for (pair, temperature, name), arm in harness.flat(document["summary"], 3)
            if name != ALONE
        ],
        label="tokens/s, to the target alone",
        note=". White: α.",
        text=lambda arm: f"{arm['alpha']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
