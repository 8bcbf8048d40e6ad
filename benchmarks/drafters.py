"""The gain of each drafter: α and tokens/s on code to complete and on code to edit.

All drafters write each text through both services, in turns; ratios are to `none`, the target alone. `ngram` counts the
training text of the demo target, none of which is in the prompts.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.contenders import Task, Write, outrider_writer, take_turns, texts, tokenised, warm_up
from benchmarks.harness import Bench, Json, arms_table, compared, number
from benchmarks.services import NO_PREFIXES, Services, models_of
from models.corpus import training_text

DRAFTERS = ("none", "model", "staged", "ngram", "lookup", "random")
"""In the order of tables and pictures; ratios are to the first."""
# Token by token, so that α is the paper's.
RULE = "tokenwise"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("drafters", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=3)
    harness.text_options(parser, prompts=4, new_tokens=64)
    parser.set_defaults(gamma=5, corpus_mb=4.0)  # of the training text that `ngram` counts
    few = {"only": "demo", "prompts": 1, "new_tokens": 16, "repetitions": 1, "corpus_mb": 0.1}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "kind", "temperature"), figures)
    return harness.run("drafters", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text(training_text(given.corpus_mb), encoding="utf-8")
        for models in models_of(bench):
            flags = [*NO_PREFIXES, "--ngram-corpus", str(corpus)]
            with Services(models.target, models.draft, draft_flags=flags) as services:
                writers = {drafter: _writer(services, drafter, given.gamma) for drafter in DRAFTERS}
                listed = list(_texts(bench, models.target))
                warm_up(writers, [listed[0][1]])
                take_turns(bench, {"pair": models.name}, listed, writers)


def _texts(bench: Bench, target: Path) -> Iterator[tuple[Json, Task]]:
    """All texts in order. Kinds and temperatures alternate: other work on the machine affects them alike."""
    given = bench.given
    prompts = [kinds(prompt) for prompt in bench.some_prompts]
    by_kind = {
        kind: texts(tokenised(target, [each[kind] for each in prompts]), given.new_tokens, given.repetitions)
        for kind in prompts[0]
    }
    for together in zip(*by_kind.values(), strict=True):
        for kind, (keys, task) in zip(by_kind, together, strict=True):
            yield {"kind": kind, **keys}, task


def kinds(prompt: str) -> dict[str, str]:
    """Code to complete; and to edit: the code, and its beginning once more behind it."""
    lines = prompt.rstrip("\n").split("\n")
    beginning = "\n".join(lines[: max(1, len(lines) // 3)])
    return {"completion": prompt, "edit": f"{prompt}\n\n# Edited: the same, once more.\n{beginning}\n"}


def _writer(services: Services, drafter: str, gamma: int) -> Write:
    """One text, with the tokens that `staged` guessed for its draft model and had accepted."""
    write = outrider_writer(services, drafter=drafter, gamma=gamma, rule=RULE)

    def counts() -> dict[str, float]:
        shown = services.metrics_of(services.draft)
        return {name: shown[f"outrider_staged_{name}_tokens_total"] for name in ("guessed", "accepted")}

    def counted(task: Task) -> Json:
        before = counts()
        run = write(task)
        after = counts()
        return run | {f"inner_{name}": after[name] - before[name] for name in before}

    return counted


def figures(runs: Sequence[Json]) -> Json:
    found = compared(runs, DRAFTERS[0], DRAFTERS)
    for name, own in harness.grouped(runs, "arm").items():
        guessed = harness.total(own, "inner_guessed")
        found[name]["inner_acceptance"] = harness.total(own, "inner_accepted") / guessed if guessed else None
    return found


def table(document: Json) -> str:
    return arms_table(document["summary"], ("pair", "texts", "T"), inner=lambda arm: number(arm["inner_acceptance"]))


def draw(document: Json, path: Path) -> None:
    layers = {pair: models["target_layers"] for pair, models in document["models"].items()}
    plots.comparison(
        path,
        document,
        [
            (f"{pair} pair ({layers[pair]} layers), T = {temperature}", kind, arms)
            for (pair, kind, temperature), arms in harness.flat(document["summary"], 3)
        ],
        label="tokens/s, to the target alone",
        note=". White: α.",
        text=lambda arm: "" if arm["alpha"] is None else f"{arm['alpha']:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
