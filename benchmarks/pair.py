"""The gain of speculation over gRPC: the target alone, the pair, and transformers' own ways to speculate, in turns.

These are assisted generation and prompt lookup. Each way to speculate takes part with several numbers of drafted
tokens, so that it is seen at its best.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, plots
from benchmarks.contenders import (
    Task,
    Write,
    load_model,
    outrider_writer,
    take_turns,
    texts,
    tokenised,
    transformers_writer,
)
from benchmarks.harness import PHASES, Bench, Json, arms_table, compared, number, predicted_ratio
from benchmarks.services import ANYWHERE, APART, Models, Services, models_of
from outrider.cli.processes import processors

GENERATE, DECODE = "generate", "Decode"
ALONE = (GENERATE, DECODE)
ASSISTED, LOOKUP, PAIR = "assisted", "prompt lookup", "pair"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("pair", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=5, new_tokens=64)
    parser.add_argument("--gammas", type=int, nargs="*", default=[4, 10], help="of the pair, beside `adaptive`")
    parser.add_argument("--assistant-tokens", type=int, nargs="*", default=[8, 12], help="of assisted generation")
    parser.add_argument("--lookup-tokens", type=int, nargs="*", default=[4, 10], help="of prompt lookup")
    few = {
        "only": "demo", "prompts": 2, "new_tokens": 16, "repetitions": 1, "gammas": [4], "assistant_tokens": [8],
        "lookup_tokens": [4],
    }  # fmt: skip
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "temperature"), figures)
    return harness.run("pair", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    pairs = models_of(given)
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
    target, draft = load_model(models.target), load_model(models.draft)
    alone = _fastest(services, lambda each: outrider_writer(each, gamma=0), task)
    pair = _fastest(services, lambda each: outrider_writer(each, gamma=given.gammas[0]), task)
    threads = _fastest([all_cores, 1], lambda each: transformers_writer(target, threads=each), task)
    bench.document.setdefault("placement", {})[models.name] = {
        "transformers": {"threads": threads}, DECODE: alone.how, PAIR: pair.how,
    }  # fmt: skip
    assisted = {
        f"{ASSISTED}, {tokens}": transformers_writer(target, threads=threads, draft=draft, tokens=tokens)
        for tokens in given.assistant_tokens
    }
    return {
        GENERATE: transformers_writer(target, threads=threads),
        DECODE: outrider_writer(alone, gamma=0),
        **assisted,
        **{
            f"{LOOKUP}, {tokens}": transformers_writer(target, threads=threads, lookup=tokens)
            for tokens in given.lookup_tokens
        },
        **{f"{PAIR}, γ = {gamma}": outrider_writer(pair, gamma=gamma) for gamma in given.gammas},
        f"{PAIR}, adaptive": outrider_writer(pair, speculation="adaptive"),
    }


def _fastest(candidates: Sequence[Any], writer: Callable[[Any], Write], task: Task) -> Any:
    def seconds(candidate: Any) -> float:
        write = writer(candidate)
        write(task)
        return min(float(write(task)["seconds"]) for _ in range(3))

    return min(candidates, key=seconds)


def figures(runs: Sequence[Json]) -> Json:
    """One pair at one temperature. Ratios are to the faster target alone in the same repetition."""
    by_arm = harness.grouped(runs, "arm")
    rates = {name: median(harness.rates(by_arm[name]).values()) for name in ALONE if name in by_arm}
    best = max(rates, key=lambda name: rates[name])
    # Assisted generation reports no α; that of the pair holds for it, whose models are the same.
    alpha = harness.alpha_of([run for run in runs if run["arm"].startswith(PAIR)])
    order = [*ALONE, ASSISTED, LOOKUP, PAIR]
    found = compared(runs, best, sorted(by_arm, key=lambda name: order.index(name.split(",")[0])))
    for arm in found.values():
        arm["predicted_ratio"] = predicted_ratio(arm, alpha, rates[best])
    return found


def table(document: Json) -> str:
    keys, summary = ("pair", "T"), document["summary"]
    speeds = arms_table(summary, keys, **{"Thm 3.8": lambda arm: number(arm["predicted_ratio"])})
    times = [
        [*where, *(f"{arm['round_us'][phase]:.0f}" for phase in PHASES)] for where, arm in harness.flat(summary, 3)
    ]
    return f"{speeds}\n\n{harness.table([*keys, 'µs of a round', *PHASES], times)}"


def draw(document: Json, path: Path) -> None:
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
        predicted=lambda arm: arm["predicted_ratio"],
    )


if __name__ == "__main__":
    sys.exit(main())
