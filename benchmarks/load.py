"""Speculation under many requests at once: the pair, the target alone, and other servers of the target alone.

The others are transformers' continuous batching, and llama.cpp's own server with a GGUF file of bfloat16. With
`--runtime llama.cpp` the pair runs from such files too.

Three loops. `closed`: a number of streams, each with its next text when one has ended. All contenders write the same
texts, so many that the fastest takes three seconds: each but continuous batching, the slowest, first serves a few
unmeasured. `short-texts`: the same with 32 streams and 512 texts of a few tokens. `open`: Poisson arrivals with a fixed
seed, at shares of the highest request rate of Outrider in the closed loop; without the other servers. Lengths of texts
vary by half of their mean.

    python -m benchmarks.load --only demo --parts closed --contenders Decode pair --streams 1 8 64 --repetitions 1
                                                     one minute; in two trees, in turns, it compares them

γ is chosen by the policy `adaptive`; `--gamma` fixes it. The pair and the target alone (`Decode`) run on the same two
services in bfloat16, where the target has a thread for each core, as `outrider serve` starts them on two cores. So has
llama.cpp's server. Continuous batching has one thread: so it was fastest on two cores. A text comes in one piece, ours
in one for each second.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks import harness, plots
from benchmarks.contenders import (
    ContinuousBatching,
    Outcome,
    OutriderServer,
    Task,
    Unavailable,
    load_model,
    tokenised,
)
from benchmarks.harness import Bench, Json, between, medians, number, percent, progress
from benchmarks.llama_cpp import LlamaServer, find_server, gguf_pair
from benchmarks.services import ANYWHERE, Models, Services, models_of
from outrider.cli.processes import processors
from outrider.evaluation import pictures

CONTENDERS = BATCHING, SERVER, ALONE, PAIR = "batching", "llama-server", "Decode", "pair"
CLOSED, SHORT, OPEN = "closed", "short-texts", "open"
LEVELS = {CLOSED: "streams", SHORT: "tokens a text", OPEN: "share of capacity"}
"""Differs between the levels of a loop."""
AIM = 0.97
"""The least ratio that the pair should have at any load."""

_GOLDEN = 0.6180339887
_USUAL: Json = {
    "new_tokens": 64, "streams": [1, 2, 4, 8, 16, 32, 64], "parts": list(LEVELS), "contenders": CONTENDERS
}  # fmt: skip
# Its target takes twelve times as long, and continuous batching was never faster there than half of `Decode`.
_DEEPENED: Json = {"streams": [1, 2, 4, 16], "parts": [CLOSED], "contenders": [SERVER, ALONE, PAIR]}
_BY_LLAMA: Json = {"streams": [1, 2, 4, 8, 16], "parts": [CLOSED], "contenders": [SERVER, ALONE, PAIR]}
TORCH, LLAMA_CPP = "torch", "llama.cpp"

Server = OutriderServer | ContinuousBatching | LlamaServer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("load", __doc__, quick="few texts, the demo pair only")
    harness.target_options(parser, factor=12)
    parser.add_argument("--parts", nargs="+", choices=list(LEVELS), help="(default: all; deepened: closed)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="(default: all of the runtime; deepened: "
                        "without batching)")  # fmt: skip
    parser.add_argument("--runtime", choices=(TORCH, LLAMA_CPP), default=TORCH, help="of both services")
    parser.add_argument("--streams", type=int, nargs="+", help="of the closed loop (default: 1 to 64; deepened: to 16)")
    parser.add_argument("--new-tokens", type=int, help="mean tokens of a text (default: 64)")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each run is made")
    parser.add_argument("--gamma", type=int, help="of the pair, fixed (default: adaptive)")
    parser.set_defaults(
        least_texts=12, least_seconds=3.0, short_tokens=[1, 4, 16], short_texts=512, short_streams=32,
        rates=[0.5, 0.9], open_seconds=8.0,
    )  # fmt: skip
    few = {  # so many requests of the open loop at once that most have to wait
        "only": "demo", "streams": [1, 2], "new_tokens": 6, "least_texts": 2, "least_seconds": 0.0, "short_tokens": [1],
        "short_texts": 2, "rates": [40.0], "open_seconds": 0.05, "repetitions": 1,
    }  # fmt: skip
    given = harness.parse(parser, arguments, few)
    if given.output is None and given.only and not given.quick:
        runtime = "" if given.runtime == TORCH else "-llama-cpp"
        given.output = harness.RESULTS / f"load-{given.only}{runtime}.json"
    summarise = harness.summary_of(("pair", "part", "level"), cell)
    return harness.run("load", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document |= {"contenders": {}, "unavailable": {}, "capacity": {}}
    for name in ("streams", "new_tokens", "repetitions"):
        value = getattr(given, name)
        if value is not None and min(value if isinstance(value, list) else [value]) <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    for models in models_of(bench, "" if given.runtime == TORCH else f", {LLAMA_CPP}"):
        Loops(bench, models).run()
        load_model.cache_clear()


class Loops:
    def __init__(self, bench: Bench, models: Models) -> None:
        asked = {key: value for key, value in vars(bench.given).items() if value is not None}
        self._given = argparse.Namespace(gamma=None)
        usual = _USUAL | (_DEEPENED if not models.name.startswith("demo") else {})
        vars(self._given).update(usual | (_BY_LLAMA if bench.given.runtime == LLAMA_CPP else {}) | asked)
        self._bench = bench
        self._models = models
        self._prompts = tokenised(models.target, bench.prompts)
        self._unmeasured_rates: dict[int, float] = {}  # by streams: the highest request rate, unmeasured

    def run(self) -> None:
        cells = [cell for cell in self._cells() if self._missing(cell)]
        if cells:
            with ExitStack() as running:
                servers = self._servers(running)
                for cell in cells:
                    self._measure(cell, servers)

    def _servers(self, running: ExitStack) -> dict[str, Server]:
        given, target = self._given, self._models.target
        by_llama = given.runtime == LLAMA_CPP
        most = max(8, *given.streams, given.short_streams if SHORT in given.parts else 0)
        threads = len(processors())

        @cache
        def services() -> Services:
            if by_llama:
                find_server()  # before any conversion
            files = gguf_pair(self._models) if by_llama else self._models
            return running.enter_context(
                Services(files.target, files.draft, threads=threads, place=ANYWHERE, max_sequences=most)
            )

        def llama_server() -> LlamaServer:
            program, files = find_server(), gguf_pair(self._models)
            return running.enter_context(LlamaServer(program, files, threads=threads, longest=longest, parallel=most))

        # Named in each request: one with a seed has a fixed γ otherwise.
        options: Json = {"speculation": "adaptive"}
        if given.gamma is not None:
            options = {"speculation": "fixed", "gamma": given.gamma}
        longest = max(map(len, self._prompts)) + 2 * max(given.new_tokens, *given.short_tokens)
        makers: dict[str, Callable[[], Server]] = {
            BATCHING: lambda: ContinuousBatching(target, threads=1, longest=longest),
            SERVER: llama_server,
            ALONE: lambda: OutriderServer(services(), gamma=0),
            PAIR: lambda: OutriderServer(services(), **options),
        }
        servers: dict[str, Server] = {}
        for name in given.contenders:
            try:
                server = makers[name]()
                server.closed(tasks(self._prompts, 2, 10_000, min(8, given.new_tokens)), 2)  # not measured
                servers[name] = server
            except Unavailable as error:
                self._leave_out(name, error)
        settings = {name: each.settings() for name, each in servers.items()}
        self._bench.document["contenders"][self._models.name] = settings
        return servers

    def _leave_out(self, name: str, error: Unavailable) -> None:
        progress(f"{self._models.name}: {name} is not there: {error}")
        self._bench.document["unavailable"].setdefault(self._models.name, {})[name] = str(error)

    def _cells(self) -> Iterator[Json]:
        """The grid, in order. Repetitions are outermost, so that other work on the machine affects all levels."""
        given = self._given
        for part, levels in ((CLOSED, given.streams), (SHORT, given.short_tokens), (OPEN, given.rates)):
            if part in given.parts:
                for repetition in range(given.repetitions):
                    for level in levels:
                        keys = {"pair": self._models.name, "part": part, "level": f"{level:g}"}
                        yield keys | {"repetition": repetition}

    def _missing(self, cell: Json) -> list[str]:
        names = [name for name in self._given.contenders if name in (ALONE, PAIR) or cell["part"] != OPEN]
        return [name for name in names if not self._bench.has(**cell, contender=name)]

    def _measure(self, cell: Json, servers: dict[str, Server]) -> None:
        shown, missing = [], [name for name in self._missing(cell) if name in servers]
        count = self._texts_of(int(cell["level"]), servers) if cell["part"] == CLOSED else 0
        for name in harness.shuffled(missing, cell["repetition"], f"{cell['part']} {cell['level']}"):
            try:
                found = self._served(cell, servers[name], count)
            except Unavailable as error:
                self._leave_out(name, error)
                del servers[name]
                continue
            self._bench.add({**cell, "contender": name, **found})
            shown.append(f"{name} {found['tokens_per_second']:.1f}")
        progress(f"{' '.join(map(str, cell.values()))}: {', '.join(shown)} tokens/s")

    def _texts_of(self, streams: int, servers: dict[str, Server]) -> int:
        """The number of texts that each contender writes in a run of the closed loop, see above.

        Each server serves a few before, twice, also when the benchmark is resumed: ours learns how long so many take.
        """
        given = self._given
        least = max(given.least_texts, 3 * streams)
        if streams not in self._unmeasured_rates:
            warm = [server for server in servers.values() if not isinstance(server, ContinuousBatching)]
            rates = [
                figures(server.closed(tasks(self._prompts, least, nth, given.new_tokens), streams))[
                    "requests_per_second"
                ]
                for nth in (1000, 1001)  # the first may be slow
                for server in warm
            ]
            self._unmeasured_rates[streams] = max(rates, default=0.0)
        wanted = math.ceil(given.least_seconds * self._unmeasured_rates[streams])
        return int(self._bench.once(f"{self._models.name}, {streams} streams", lambda: max(least, wanted)))

    def _served(self, cell: Json, server: Server, count: int) -> Json:
        given, repetition = self._given, cell["repetition"]
        if cell["part"] == SHORT:
            short = tasks(self._prompts, given.short_texts, repetition, int(cell["level"]))
            return figures(server.closed(short, given.short_streams))
        if cell["part"] == CLOSED:
            written = tasks(self._prompts, count, repetition, given.new_tokens)
            return figures(server.closed(written, int(cell["level"])))
        key = self._models.name
        capacity = self._bench.document["capacity"][key] = self._bench.once(key, self._capacity)
        assert isinstance(server, OutriderServer)
        due = list(arrivals(float(cell["level"]) * capacity, given.open_seconds, seed=1 + repetition))
        return figures(server.open(tasks(self._prompts, len(due), repetition, given.new_tokens), due))

    def _capacity(self) -> float:
        """The highest request rate of Outrider's contenders in the closed loop.

        Raises:
            ValueError: it has not run.
        """
        here = {"part": CLOSED, "pair": self._models.name}
        found = [
            median(run["requests_per_second"] for run in own)
            for name in (ALONE, PAIR)
            for own in harness.grouped(self._bench.select(**here, contender=name), "level").values()
        ]
        if not found:
            raise ValueError("the open loop needs the closed loop before it: no capacity is known")
        return max(found)


def tasks(prompts: Sequence[tuple[int, ...]], count: int, repetition: int, new_tokens: int) -> list[Task]:
    """The same for all contenders; other prompts in each repetition, as long as there are any.

    Lengths are spread evenly from half of `new_tokens` to one and a half, as requests do not end together.
    """
    return [
        Task(nth, prompts[nth % len(prompts)], int(new_tokens * (0.5 + nth * _GOLDEN % 1) + 0.5), 1.0, 1 + nth)
        for nth in range(repetition * count, (repetition + 1) * count)
    ]


def arrivals(rate: float, seconds: float, *, seed: int) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second, from 0 to `seconds`; at least one.

    Another rate stretches the same times, so that rates differ in their pace alone.
    """
    generator = random.Random(seed)
    at = generator.expovariate(1.0) / rate
    yield at
    while (at := at + generator.expovariate(1.0) / rate) < seconds:
        yield at


def figures(outcome: Outcome) -> Json:
    """One run. Times in milliseconds; None where nothing was measured.

    - `ttft_ms`: from when a request was due to its first token.
    - `tpot_ms`: of each text, the time per token after its first piece.
    - `gamma`: drafted tokens over all rounds, those of `Decode` included. `decode_share`: of the rounds, those.
    - `rounds_per_pass`: verdicts over calls of `verify`: how full batches are.
    - `verifier_cpu_us`, `draft_cpu_us`: processor time of each service a token, prompts included.
    """
    served, costs = outcome
    answered = [each for each in served if not each.refused]
    tokens = sum(each.tokens for each in answered)
    seconds = max((each.end for each in answered), default=0.0) - min(each.due for each in served)
    drafted = sum(each.drafted for each in answered)
    statistics = [each.statistics for each in answered if each.statistics is not None]  # of ours
    rounds, proposals = sum(each.num_rounds for each in statistics), sum(each.num_drafts for each in statistics)
    return {
        "requests": len(served),
        "refused": len(served) - len(answered),
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "requests_per_second": len(answered) / seconds if seconds > 0 else 0.0,
        "ttft_ms": _percentiles(each.seconds_to_first for each in answered),
        "tpot_ms": _percentiles(each.seconds_per_token for each in answered),
        "alpha": harness.alpha_of([{"alpha": each.alpha, "drafted": each.drafted} for each in answered]),
        "drafted": drafted,
        "gamma": drafted / rounds if rounds else None,
        "decode_share": 1 - proposals / rounds if rounds else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "rounds_per_pass": rounds / costs["passes"] if costs.get("passes") else None,
        **{
            f"{name}_cpu_us": 1e6 * costs[f"{name}_cpu_seconds"] / tokens if tokens and costs else None
            for name in ("verifier", "draft")
        },
    }


def _percentiles(seconds: Iterable[float | None]) -> Json | None:
    known = [each for each in seconds if each is not None]
    if not known:
        return None
    return {f"p{percent}": 1e3 * float(np.percentile(known, percent)) for percent in (50, 95, 99)}


def cell(runs: Sequence[Json]) -> Json:
    """One level, by contender: medians over repetitions of the repetition's own figures; α is that of all drafts.

    The ratio is to the best of the other contenders than the pair in the same repetition. `over_server`: to llama.cpp's
    server; None without it.
    """
    best: dict[int, float] = {}
    for run in runs:
        if run["contender"] != PAIR:
            best[run["repetition"]] = max(best.get(run["repetition"], 0.0), run["tokens_per_second"])
    found: Json = {}
    by_contender = harness.grouped(runs, "contender")
    server = harness.by_repetition(by_contender.get(SERVER, []), "tokens_per_second")
    for name in sorted(by_contender, key=CONTENDERS.index):
        own = by_contender[name]
        rates = harness.by_repetition(own, "tokens_per_second")
        keys = [key for key in own[0] if key not in ("pair", "part", "level", "repetition", "contender")]
        found[name] = {
            "repetitions": len(own),
            "tokens_per_second_range": [min(rates.values()), max(rates.values())],
            **({"ratio_range": None} | harness.ratio(rates, best)),
            "over_server": harness.ratio(rates, server)["ratio"] if name != SERVER else None,
            **{key: medians([run[key] for run in own]) for key in keys},
            "alpha": harness.alpha_of(own),
        }
    return found


def table(document: Json) -> str:
    """Levels at which the pair falls behind, missing contenders, and a table for each pair and loop."""
    lines = [
        f"- BEHIND the better reference: {pair} pair, {part}, {LEVELS[part]} {level}: {found[PAIR]['ratio']:.2f}"
        for (pair, part, level), found in harness.flat(document["summary"], 3)
        if PAIR in found and (found[PAIR]["ratio"] or AIM) < AIM
    ]
    if document["summary"] and not lines:
        lines = [f"The pair keeps {AIM:.0%} or more everywhere."]
    lines += [
        f"- {pair} pair: {name} is not there: {reason}"
        for (pair, name), reason in harness.flat(document["unavailable"], 2)
    ]
    tables = [
        harness.summary_table(by_level, [LEVELS[part], ""], _COLUMNS, f"{pair} pair, {part}")
        for (pair, part), by_level in harness.flat(document["summary"], 2)
    ]
    return "\n".join([*lines, "", *tables])


def _times(value: Json | None) -> str:
    return "–" if value is None else " / ".join(f"{each:.{0 if each >= 100 else 1}f}" for each in value.values())


_COLUMNS: harness.Columns = {
    "tokens/s": lambda found: number(found["tokens_per_second"], 1),
    "ratio": between,
    "over llama-server": lambda found: number(found["over_server"]),
    "requests/s": lambda found: number(found["requests_per_second"]),
    "refused": lambda found: f"{found['refused']:.0f}/{found['requests']:.0f}" if found["refused"] else "0",
    "α": lambda found: number(found["alpha"], 3),
    "γ": lambda found: number(found["gamma"], 1),
    "Decode": lambda found: percent(found["decode_share"]),
    "tokens/round": lambda found: number(found["tokens_per_round"]),
    "rounds/pass": lambda found: number(found["rounds_per_pass"], 1),
    "CPU µs: verifier": lambda found: number(found["verifier_cpu_us"], 0),
    "draft": lambda found: number(found["draft_cpu_us"], 0),
    "TTFT ms, p50 / p95 / p99": lambda found: _times(found["ttft_ms"]),
    "time per token ms": lambda found: _times(found["tpot_ms"]),
}
_COLOURS = {
    BATCHING: pictures.ORANGE,
    SERVER: pictures.VIOLET,
    ALONE: pictures.GREY,
    PAIR: pictures.BLUE,
}
_PANELS: tuple[tuple[str, str, str | None], ...] = (
    ("tokens/s, all streams", "tokens_per_second", None),
    ("the pair over the better reference", "ratio", None),
    ("time to first token, ms; dotted: p95", "ttft_ms", "p95"),
)


def draw(document: Json, path: Path) -> None:
    """Writes a PNG for each loop, named after it: a row for each pair."""
    for part in LEVELS:
        rows = [(where, found) for where, found in harness.flat(document["summary"], 2) if where[1] == part]
        if rows:
            named = path.with_name(f"{path.stem}-{part}.png")
            with pictures.picture(
                named, len(rows), len(_PANELS), size=(3.7, 3.1), note=plots.caption(document)
            ) as grid:
                for panels, ((pair, _), by_level) in zip(grid, rows, strict=True):
                    for panel, (title, figure, dotted) in zip(panels, _PANELS, strict=True):
                        _draw_panel(panel, part, by_level, figure, dotted)
                        panel.set_title(title, fontsize=9)
                    panels[0].set_ylabel(f"{pair} pair", fontsize=10)


def _draw_panel(panel: Axes, part: str, by_level: Json, figure: str, dotted: str | None) -> None:
    for name, colour in _COLOURS.items():
        if figure == "ratio" and name != PAIR:
            continue
        cells = [(float(level), found[name][figure]) for level, found in by_level.items() if name in found]
        for percentile, style in (("p50", "-"), (dotted, ":")) if dotted else ((None, "-"),):
            points = [(at, value[percentile] if percentile and value else value) for at, value in cells]
            label = name if style == "-" else None
            pictures.line(panel, points, color=colour, linestyle=style, marker="o", label=label)
    if part != OPEN:
        panel.set_xscale("log", base=2)
    panel.set_xticks([float(level) for level in by_level], list(by_level))
    panel.minorticks_off()
    if figure == "ratio":
        pictures.level(panel, AIM, linestyle="--")
        pictures.level(panel)
    if dotted:  # times differ by orders of magnitude
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(0, 1.05 * panel.dataLim.y1)
    panel.set_xlabel(LEVELS[part], fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
