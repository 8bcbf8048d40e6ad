"""The gain of speculation over gRPC: the target alone, the pair, and other implementations of both, in turns.

Each pair runs by torch, beside transformers, its assisted generation and its prompt lookup; and by llama.cpp from GGUF
files, of bfloat16 by default. llama.cpp's own server and its speculation take part beside both. Each way to speculate
takes part with several numbers of drafted tokens, so that it is seen at its best.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, plots
from benchmarks.contenders import (
    PAUSE_S,
    Task,
    Unavailable,
    Write,
    load_model,
    outrider_writer,
    take_turns,
    texts,
    tokenised,
    transformers_writer,
    warm_up,
)
from benchmarks.harness import PHASES, Bench, Json, arms_table, between, compared, number, predicted_ratio, progress
from benchmarks.llama_cpp import LlamaServer, find_server, gguf_pair
from benchmarks.services import ANYWHERE, APART, Models, Services, models_of
from outrider.cli.processes import processors

GENERATE, DECODE = "generate", "Decode"
ASSISTED, LOOKUP, PAIR = "assisted", "prompt lookup", "pair"
LLAMA, DRAFTING = "llama.cpp alone", "llama.cpp drafting"
"""Its target alone, and its own speculation with the settings that are fastest at each temperature."""
ALONE = (GENERATE, DECODE)
THEIRS = (LLAMA, DRAFTING)
GGUF_TYPES = ("bf16", "q8_0")
TORCH, LLAMA_CPP = RUNTIMES = ("torch", "llama.cpp")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("pair", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    harness.text_options(parser, prompts=5, new_tokens=96)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES, help="of both services")
    parser.add_argument("--gguf-type", choices=GGUF_TYPES, default="bf16", help="of the weights for llama.cpp")
    parser.add_argument("--places", nargs="+", choices=(ANYWHERE, APART), default=(ANYWHERE, APART), help="of ours")
    parser.add_argument("--gammas", type=int, nargs="*", default=[4, 10], help="of the pair, beside `adaptive`")
    parser.add_argument("--assistant-tokens", type=int, nargs="*", default=[8, 12], help="of assisted generation")
    parser.add_argument("--lookup-tokens", type=int, nargs="*", default=[4, 10], help="of prompt lookup")
    parser.add_argument(
        "--llama-threads", type=int, nargs="+", default=sorted({1, len(processors())}), help="of llama.cpp; the fastest"
    )
    parser.add_argument("--llama-tokens", type=int, nargs="+", default=[4, 8, 12], help="of llama.cpp's speculation")
    parser.add_argument("--llama-chances", type=float, nargs="+", default=[0.0, 0.5], help="least, of its drafts")
    few = {
        "only": "demo", "prompts": 2, "new_tokens": 16, "repetitions": 1, "gammas": [4], "assistant_tokens": [8],
        "lookup_tokens": [4], "llama_tokens": [4], "llama_chances": [0.0],
    }  # fmt: skip
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("pair", "temperature"), figures)
    return harness.run("pair", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document |= {"placement": {}, "unavailable": {}}
    for models in models_of(bench):
        prompts = tokenised(models.target, bench.some_prompts)
        for runtime in given.runtimes:
            name = models.name if runtime == TORCH else f"{models.name}, {runtime}"
            with ExitStack() as running:
                arms = Arms(bench, models, running, _trials(prompts, min(32, given.new_tokens)))
                try:
                    writers, placement = arms.by_torch() if runtime == TORCH else arms.by_llama_cpp()
                except Unavailable as error:
                    progress(f"{name} is not measured: {error}")
                    bench.document["unavailable"][name] = str(error)
                    continue
                bench.document["models"][name], bench.document["placement"][name] = models.document(), placement
                warm_up(writers, arms.trials[0])
                take_turns(
                    bench,
                    {"pair": name},
                    texts(prompts, given.new_tokens, given.repetitions),
                    writers,
                    # It is the slowest by far, and its pace does not depend on the text.
                    skips=lambda name, keys: name == GENERATE and keys["prompt"] > 0,
                )
            load_model.cache_clear()


def _trials(prompts: Sequence[tuple[int, ...]], new_tokens: int) -> list[list[Task]]:
    """A text of each prompt at each temperature: a single prompt may be unlike the others."""
    tasks = [task for _, task in texts(prompts, new_tokens, 1)]
    return [[task for task in tasks if task.prompt == nth] for nth in range(len(prompts))]


Made = tuple[dict[str, Write], Json]
"""The writer of each arm, and the threads, processors and settings with which it is fastest."""


@dataclass(frozen=True, slots=True)
class Arms:
    """Makes the arms of one pair."""

    bench: Bench
    models: Models
    running: ExitStack  # takes the services and servers
    trials: Sequence[Sequence[Task]]  # texts that are not measured, a sequence for each prompt

    def by_torch(self) -> Made:
        given, trials = self.bench.given, [self.trials[0][:1]]
        target, draft = load_model(self.models.target), load_model(self.models.draft)
        ours, placement = self._ours(self.models.target, self.models.draft)
        threads = _fastest([len(processors()), 1], lambda each: transformers_writer(target, threads=each), trials)
        write = partial(transformers_writer, target, threads=threads)
        transformers = {
            GENERATE: write(),
            **{f"{ASSISTED}, {tokens}": write(draft=draft, tokens=tokens) for tokens in given.assistant_tokens},
            **{f"{LOOKUP}, {tokens}": write(lookup=tokens) for tokens in given.lookup_tokens},
        }
        try:
            theirs, settings = self._theirs()
        except Unavailable:  # the runtime llama.cpp says so
            theirs, settings = {}, {}
        return transformers | theirs | ours, {"transformers": {"threads": threads}, **settings, **placement}

    def by_llama_cpp(self) -> Made:
        """Raises `Unavailable` without llama.cpp."""
        theirs, settings = self._theirs()
        files = gguf_pair(self.models, self.bench.given.gguf_type)
        ours, placement = self._ours(files.target, files.draft)
        return theirs | ours, settings | placement

    def _ours(self, target: Path, draft: Path) -> Made:
        given = self.bench.given
        services = [
            self.running.enter_context(Services(target, draft, threads=threads, place=place))
            for threads, place in ((len(processors()), ANYWHERE), (1, ANYWHERE), (1, APART))
            if place in given.places
        ]
        arms: dict[str, Json] = {
            DECODE: {"gamma": 0},
            **{f"{PAIR}, γ = {gamma}": {"gamma": gamma} for gamma in given.gammas},
            f"{PAIR}, adaptive": {"speculation": "adaptive"},
        }
        placed = {arm: _fastest(services, partial(outrider_writer, **how), self.trials) for arm, how in arms.items()}
        writers = {arm: outrider_writer(each, **arms[arm]) for arm, each in placed.items()}
        return writers, {arm: each.how for arm, each in placed.items()}

    def _theirs(self) -> Made:
        """llama.cpp's own server. Raises `Unavailable` without it."""
        program, files = find_server(), gguf_pair(self.models, self.bench.given.gguf_type)
        longest = max(len(tasks[0].token_ids) for tasks in self.trials) + 1024
        start = partial(LlamaServer, program, files, longest=longest)
        settings: Json = self.bench.once(f"{self.models.name}, {LLAMA_CPP}", lambda: self._fastest_servers(start))
        servers = {name: self.running.enter_context(start(**how)) for name, how in settings.items()}
        theirs: dict[str, Write] = {
            LLAMA: servers[LLAMA].write,
            DRAFTING: lambda task: servers[f"{DRAFTING}, T = {task.temperature:g}"].write(task),
        }
        return theirs, settings

    def _fastest_servers(self, start: Callable[..., LlamaServer]) -> Json:
        """The fastest settings of its target alone, and of its speculation at each temperature, of all combinations."""

        def fastest(settings: Sequence[Json], tried: Sequence[Sequence[Task]]) -> Json:
            with ExitStack() as candidates:
                servers = [candidates.enter_context(start(**each)) for each in settings]
                found = _fastest(servers, lambda server: server.write, tried)
                return settings[servers.index(found)]

        given = self.bench.given
        alone = [{"threads": each} for each in given.llama_threads]
        grid = [
            {"threads": threads, "draft_tokens": tokens, "least_chance": chance}
            for threads, tokens, chance in product(given.llama_threads, given.llama_tokens, given.llama_chances)
        ]
        found = {LLAMA: fastest(alone, [tasks[:1] for tasks in self.trials])}
        for i, task in enumerate(self.trials[0]):
            found[f"{DRAFTING}, T = {task.temperature:g}"] = fastest(grid, [[tasks[i]] for tasks in self.trials])
        return found


def _fastest(candidates: Sequence[Any], writer: Callable[[Any], Write], trials: Sequence[Sequence[Task]]) -> Any:
    """They take turns, so that a slow moment of the machine is one of all. In the first half `adaptive` learns."""
    writers = [writer(each) for each in candidates]

    def seconds_of(write: Write, tasks: Sequence[Task]) -> float:
        time.sleep(PAUSE_S)
        return sum(float(write(task)["seconds"]) for task in tasks)

    turns = [[seconds_of(write, tasks) for write in writers] for tasks in islice(cycle(trials), 12)]
    seconds = [median(each) for each in zip(*turns[6:], strict=True)]
    return candidates[seconds.index(min(seconds))]


def figures(runs: Sequence[Json]) -> Json:
    """One pair at one temperature. Ratios are to our or transformers' target alone, the faster in the same repetition.

    `over_llama`: the same to llama.cpp's own; its target alone for ours, and the better of its ways for the pair.
    """
    by_arm = harness.grouped(runs, "arm")
    rates = {name: median(harness.rates(by_arm[name]).values()) for name in ALONE if name in by_arm}
    best = max(rates, key=lambda name: rates[name])
    # Assisted generation reports no α; that of the pair is near, whose models are the same.
    alpha = harness.alpha_of([run for run in runs if run["arm"].startswith(PAIR)])
    order = [*ALONE, ASSISTED, LOOKUP, LLAMA, DRAFTING, PAIR]
    found = compared(runs, best, sorted(by_arm, key=lambda name: (order.index(name.split(",")[0]), len(name), name)))
    for name, arm in found.items():
        arm["predicted_ratio"] = predicted_ratio(arm, alpha if arm["alpha"] is None else arm["alpha"], rates[best])
        theirs = [harness.rates(by_arm[each]) for each in THEIRS[: 1 if name == DECODE else 2] if each in by_arm]
        if theirs and name not in THEIRS:
            better = {nth: max(each[nth] for each in theirs) for nth in theirs[0]}
            own = harness.ratio(harness.rates(by_arm[name]), better)
            arm |= {"over_llama": own["ratio"], "over_llama_range": own["ratio_range"]}
    return found


def table(document: Json) -> str:
    keys, summary = ("pair", "T"), document["summary"]
    missing = [f"- {name} is not measured: {reason}\n" for name, reason in document["unavailable"].items()]
    speeds = arms_table(
        summary,
        keys,
        **{
            "Thm 3.8": lambda arm: number(arm["predicted_ratio"]),
            "over llama.cpp": lambda arm: between(arm, "over_llama") if "over_llama" in arm else "–",
        },
    )
    times = [
        [*where, *(f"{arm['round_us'][phase]:.0f}" for phase in PHASES)] for where, arm in harness.flat(summary, 3)
    ]
    return f"{''.join(missing)}{speeds}\n\n{harness.table([*keys, 'µs of a round', *PHASES], times)}"


def draw(document: Json, path: Path) -> None:
    """A panel for each runtime and temperature, with the fastest arm of each way to write."""
    measured = []
    for (pair, temperature), arms in harness.flat(document["summary"], 2):
        models, _, runtime = pair.partition(", ")
        fastest: dict[str, Json] = {}
        for name, arm in sorted(arms.items(), key=lambda item: item[1]["ratio"]):
            fastest[name.split(",")[0]] = arm
        group = f"{models} pair\n{document['models'][pair]['target_layers']} layers"
        ways = {way: fastest[way] for way in (*ALONE, LLAMA, ASSISTED, LOOKUP, DRAFTING, PAIR) if way in fastest}
        measured.append((f"{runtime or TORCH}, T = {temperature}", group, ways))
    plots.comparison(
        path,
        document,
        measured,
        label="speed-up over the faster target alone",
        note=". Each way with its fastest setting of those tried. Marks: Theorem 3.8 from measured α and times.",
        text=lambda arm: f"{arm['ratio']:.2f}",
        predicted=lambda arm: arm["predicted_ratio"],
    )


if __name__ == "__main__":
    sys.exit(main())
