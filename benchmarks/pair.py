"""What speculation over gRPC is worth: the target alone, the pair, and transformers' assisted generation, in turns.

Every contender writes the same number of tokens after the same prompts. They take turns on each prompt, so that
whatever else the machine does falls on all of them. Both ways of speculating take part with several lengths of a
proposal, so that each is seen at its best. Two pairs of models: the demo pair, and the same with a deepened target
(`benchmarks.deepen`).

    python -m benchmarks.pair                                          about ten minutes on two cores
    python -m benchmarks.pair --only demo --prompts 4 --repetitions 1  half a minute
    python -m benchmarks.pair --quick                                  does it work at all
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks import harness, plots
from benchmarks.contenders import (
    PHASES,
    Task,
    Write,
    arms_table,
    compared,
    load_model,
    outrider_writer,
    predicted_ratio,
    take_turns,
    texts,
    tokenised,
    transformers_writer,
)
from benchmarks.harness import Bench, Json, number
from benchmarks.services import ANYWHERE, APART, Models, Services, models_of
from outrider.cli.processes import processors

GENERATE, DECODE = "generate", "Decode"
ALONE = (GENERATE, DECODE)
ASSISTED, PAIR = "assisted", "pair"

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("pair", __doc__, quick="few texts, the demo pair only")
    harness.pair_options(parser, factor=12, prompts=5, new_tokens=64)
    parser.add_argument("--gammas", type=int, nargs="*", default=[4, 10], help="of the pair, beside `adaptive`")
    parser.add_argument("--assistant-tokens", type=int, nargs="*", default=[8, 12], help="of assisted generation")
    few = {
        "only": "demo", "prompts": 2, "new_tokens": 16, "repetitions": 1, "gammas": [4], "assistant_tokens": [8],
    }  # fmt: skip
    return harness.run("pair", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    pairs = models_of(given.target, given.draft, given.only, given.factor)
    bench.document["models"] = {models.name: models.document() for models in pairs}
    for models in pairs:
        prompts = tokenised(models.target, harness.spread(bench.prompts, given.prompts))
        with ExitStack() as running:
            warm_up = list(islice(texts(prompts, min(32, given.new_tokens), 1), 2))  # not measured
            writers = _writers(bench, models, running, warm_up[0][1])
            for _, task in warm_up:
                for write in writers.values():
                    write(task)
            take_turns(
                bench,
                {"pair": models.name},
                texts(prompts, given.new_tokens, given.repetitions),
                writers,
                # It is the slowest by far, and its pace does not depend on the text.
                skips=lambda name, keys: name == GENERATE and keys["prompt"] > 0,
            )
        load_model.cache_clear()


def _writers(bench: Bench, models: Models, running: ExitStack, task: Task) -> dict[str, Write]:
    """Each contender, with the threads and processors that write a first text (`task`) fastest."""
    given, all_cores = bench.given, len(processors())
    services = [
        running.enter_context(Services(models.target, models.draft, threads=threads, place=place))
        for threads, place in ((all_cores, ANYWHERE), (1, APART))
    ]
    alone = _fastest(services, lambda each: outrider_writer(each, gamma=0), task)
    pair = _fastest(services, lambda each: outrider_writer(each, gamma=given.gammas[0]), task)
    threads = _fastest([all_cores, 1], lambda each: transformers_writer(models.target, threads=each), task)
    bench.document.setdefault("placement", {})[models.name] = {
        "transformers": {"threads": threads}, DECODE: alone.how, PAIR: pair.how,
    }  # fmt: skip
    writers = {
        GENERATE: transformers_writer(models.target, threads=threads),
        DECODE: outrider_writer(alone, gamma=0),
    }
    for tokens in given.assistant_tokens:
        writers[f"{ASSISTED}, {tokens}"] = transformers_writer(
            models.target, threads=threads, draft=models.draft, tokens=tokens
        )
    writers |= {f"{PAIR}, γ = {gamma}": outrider_writer(pair, gamma=gamma) for gamma in given.gammas}
    return writers | {f"{PAIR}, adaptive": outrider_writer(pair, speculation="adaptive")}


def _fastest(candidates: Sequence[T], writer: Callable[[T], Write], task: Task) -> T:
    def seconds(candidate: T) -> float:
        write = writer(candidate)
        write(task)
        return min(float(write(task)["seconds"]) for _ in range(3))

    return min(candidates, key=seconds)


# ----------------------------------------------------------------------------------------------------------- figures


def summarise(bench: Bench) -> Json:
    return {"summary": harness.tree(bench.runs, ("pair", "temperature"), figures)}


def figures(runs: Sequence[Json]) -> Json:
    """One pair at one temperature. Ratios are to the faster target alone in the same repetition."""
    by_arm = harness.grouped(runs, "arm")
    best = max(
        (name for name in ALONE if name in by_arm), key=lambda name: median(harness.rates(by_arm[name]).values())
    )
    # Assisted generation tells no α; that of the pair holds for it, whose models are the same.
    alpha = harness.alpha_of([run for run in runs if run["arm"].startswith(PAIR)])
    names = sorted(by_arm, key=lambda name: [*ALONE, ASSISTED, PAIR].index(name.split(",")[0]))
    found = compared(runs, best, names)
    for arm in found.values():
        arm["predicted_ratio"] = predicted_ratio(arm, alpha, found[best]["tokens_per_second"])
    return found


def table(document: Json) -> str:
    keys = ("pair", "T")
    times = [
        [*where, *(f"{arm['round_us'][phase]:.0f}" for phase in PHASES)]
        for where, arm in harness.flat(document["summary"], 3)
    ]
    speeds = arms_table(document["summary"], keys, **{"Thm 3.8": lambda arm: number(arm["predicted_ratio"])})
    return f"{speeds}\n\n{harness.table([*keys, 'µs of a round', *PHASES], times)}"


def draw(document: Json, path: Path) -> None:
    """A panel a temperature, a group of bars a pair: speed-up over the target alone, measured and foretold."""
    panels: dict[str, dict[str, Any]] = {}
    for (pair, temperature), arms in harness.flat(document["summary"], 2):
        group = f"{pair} pair\n{document['models'][pair]['target_layers']} layers"
        panels.setdefault(f"T = {temperature}", {})[group] = arms
    plots.comparison(
        path,
        document,
        panels,
        label="speed-up over the faster target alone",
        note=". Marks: Theorem 3.8 from measured α and times.",
        text=lambda arm: f"{arm['ratio']:.2f}",
        foretold=lambda arm: arm["predicted_ratio"],
    )


if __name__ == "__main__":
    sys.exit(main())
