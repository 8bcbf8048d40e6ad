"""What many requests at once do to speculation: the pair, the target alone, and transformers' continuous batching.

Three loops. `closed`: so many streams, each of which asks for its next text when one has ended. `short-texts`: the
same with 32 streams and texts of a few tokens, as a classifier or a tool call asks for. `open`: a Poisson process with
a fixed seed, at shares of the most requests a second that Outrider served in the closed loop; without transformers.

    python -m benchmarks.load --only demo            about eight minutes on two cores
    python -m benchmarks.load --only deepened        about five: the closed loop, without continuous batching
    python -m benchmarks.load --only demo --parts closed --contenders Decode pair --streams 1 8 64 --repetitions 1
                                                     one minute; in two trees, in turns, it compares them
    python -m benchmarks.load --quick                does it work at all

γ is chosen by the policy `adaptive`; `--gamma` fixes it. Services have one thread each and bfloat16, the pair a core
each, as `outrider serve` starts them; continuous batching has one thread: with these each was fastest on two cores.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks import harness, plots
from benchmarks.contenders import Task, Unavailable, load_model, tokenised
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.servers import ContinuousBatching, OutriderServer, Server, figures
from benchmarks.services import ANYWHERE, APART, Models, Services, models_of

BATCHING, ALONE, PAIR = "batching", "Decode", "pair"
CONTENDERS = (BATCHING, ALONE, PAIR)
REFERENCES = (BATCHING, ALONE)
"""What the pair is held against: the better of the two in the same repetition."""
CLOSED, SHORT, OPEN = "closed", "short-texts", "open"
LEVELS = {CLOSED: "streams", SHORT: "tokens a text", OPEN: "share of capacity"}
"""What differs from one level of a loop to the next."""
MIXES = ("short", "long")
AIM = 0.97
"""What the pair is to keep of the better reference's rate at any load."""

TEMPERATURE = 1.0
SHORT_STREAMS, SHORT_TEXTS = 32, 512  # of the short texts
# Of a long prompt: prompts of one length would all prefill alike.
_LONG_PROMPTS = (384, 192, 288)
_USUAL: Json = {"new_tokens": 64, "streams": [1, 2, 4, 8, 16, 32, 64], "parts": list(LEVELS), "contenders": CONTENDERS}
# Its target takes twelve times as long, and continuous batching was never faster there than half of `Decode`.
_DEEPENED: Json = {"new_tokens": 32, "streams": [1, 4, 16, 64], "parts": [CLOSED], "contenders": [ALONE, PAIR]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("load", __doc__, quick="few texts, the demo pair only")
    parser.add_argument("--only", choices=("demo", "deepened"), help="one of the two pairs")
    parser.add_argument("--factor", type=int, default=12, help="how many times as deep the deepened target is")
    parser.add_argument("--parts", nargs="+", choices=list(LEVELS), help="(default: all; deepened: closed)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="(default: all; deepened: Decode, pair)")
    parser.add_argument("--streams", type=int, nargs="+", help="of the closed loop (default: 1 to 64)")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=["short"], help="of prompts")
    parser.add_argument("--new-tokens", type=int, help="tokens of each text (default: 64; deepened: 32)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.9], help="of the open loop")
    parser.add_argument("--open-seconds", type=float, default=8.0, help="how long requests of the open loop arrive")
    parser.add_argument("--repetitions", type=int, default=3, help="how often each run is made")
    parser.add_argument("--gamma", type=int, help="of the pair, fixed (default: adaptive)")
    parser.set_defaults(short_tokens=[1, 4, 16], short_texts=SHORT_TEXTS, least_texts=12)
    few = {
        "only": "demo", "streams": [1, 2], "new_tokens": 8, "short_tokens": [1], "short_texts": 2, "least_texts": 2,
        "rates": [0.8], "open_seconds": 1.0, "repetitions": 1,
    }  # fmt: skip
    given = harness.parse(parser, arguments, few)
    if given.output is None and given.only and not given.quick:
        given.output = harness.RESULTS / f"load-{given.only}.json"
    return harness.run("load", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document |= {"models": {}, "contenders": {}, "unavailable": {}, "capacity": {}}
    for name in ("streams", "rates", "new_tokens", "repetitions"):
        value = getattr(given, name)
        if value is not None and min(value if isinstance(value, list) else [value]) <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    for models in models_of(given.target, given.draft, given.only, given.factor):
        bench.document["models"][models.name] = models.document()
        Loops(bench, models).run()
        load_model.cache_clear()


class Loops:
    def __init__(self, bench: Bench, models: Models) -> None:
        asked = {key: value for key, value in vars(bench.given).items() if value is not None}
        self._given = argparse.Namespace(gamma=None)
        vars(self._given).update(_USUAL | (_DEEPENED if models.name == "deepened" else {}) | asked)
        self._bench = bench
        self._models = models
        self._work = Workload(tokenised(models.target, bench.prompts), self._given)

    def run(self) -> None:
        cells = [(turn, cell) for turn, cell in enumerate(self._cells()) if self._missing(cell)]
        if cells:
            with ExitStack() as running:
                servers = self._servers(running)
                for turn, cell in cells:
                    self._measure(cell, servers, turn)

    def _servers(self, running: ExitStack) -> dict[str, Server]:
        """All contenders that can run here, warm."""
        given, target = self._given, self._models.target
        most = max(8, *given.streams, SHORT_STREAMS if SHORT in given.parts else 0)

        def services(place: str) -> Services:
            return running.enter_context(Services(target, self._models.draft, place=place, max_sequences=most))

        # Asked for by each request: one that gives a seed gets a fixed γ otherwise.
        options: Json = {"speculation": "adaptive"}
        if given.gamma is not None:
            options = {"speculation": "fixed", "gamma": given.gamma}
        makers: dict[str, Callable[[], Server]] = {
            BATCHING: lambda: ContinuousBatching(target, threads=1, longest=self._work.longest()),
            ALONE: lambda: OutriderServer(services(ANYWHERE), gamma=0),
            PAIR: lambda: OutriderServer(services(APART), **options),
        }
        servers: dict[str, Server] = {}
        for name in given.contenders:
            try:
                server = makers[name]()
                server.closed(self._work.warm_up(), 2)
                servers[name] = server
            except Unavailable as error:
                self._leave_out(name, error)
        self._bench.document["contenders"][self._models.name] = {
            name: each.settings() for name, each in servers.items()
        }
        return servers

    def _leave_out(self, name: str, error: Unavailable) -> None:
        tell(f"{self._models.name}: {name} is not there: {error}")
        self._bench.document["unavailable"].setdefault(self._models.name, {})[name] = str(error)

    def _cells(self) -> Iterator[Json]:
        """The grid, in order. Repetitions are outermost, so that each meets the machine at another time."""
        given = self._given
        for part, levels in ((CLOSED, given.streams), (SHORT, given.short_tokens), (OPEN, given.rates)):
            if part in given.parts:
                for repetition in range(given.repetitions):
                    for mix in given.mixes[: 1 if part == SHORT else None]:
                        for level in levels:
                            keys = {"pair": self._models.name, "part": part, "mix": mix, "level": f"{level:g}"}
                            yield keys | {"repetition": repetition}

    def _missing(self, cell: Json) -> list[str]:
        names = [name for name in self._given.contenders if name != BATCHING or cell["part"] != OPEN]
        return [name for name in names if not self._bench.has(**cell, contender=name)]

    def _measure(self, cell: Json, servers: dict[str, Server], turn: int) -> None:
        shown = []
        for name in harness.rotated([name for name in self._missing(cell) if name in servers], turn):
            try:
                found = self._served(cell, servers[name])
            except Unavailable as error:
                self._leave_out(name, error)
                del servers[name]
                continue
            self._bench.add({**cell, "contender": name, **found})
            shown.append(f"{name} {found['tokens_per_second']:.1f}")
        tell(f"{' '.join(map(str, cell.values()))}: {', '.join(shown)} tokens/s")

    def _served(self, cell: Json, server: Server) -> Json:
        work, mix, repetition = self._work, cell["mix"], cell["repetition"]
        if cell["part"] == CLOSED:
            streams = int(cell["level"])
            if not repetition and isinstance(server, OutriderServer):
                server.closed(work.closed(mix, streams, 1000), streams)  # it learns how long so many take
            return figures(server.closed(work.closed(mix, streams, repetition), streams))
        if cell["part"] == SHORT:
            return figures(server.closed(work.short(mix, int(cell["level"]), repetition), SHORT_STREAMS))
        key = f"{self._models.name} {mix}"
        capacity = self._bench.once(key, lambda: self._capacity(mix))
        self._bench.document["capacity"][key] = capacity
        assert isinstance(server, OutriderServer)
        return figures(server.open(*work.open(mix, float(cell["level"]) * capacity, repetition)))

    def _capacity(self, mix: str) -> float:
        """Requests a second that the closed loop found at the most, of Outrider's contenders.

        Raises:
            ValueError: it has not run.
        """
        runs = [run for run in self._bench.runs if run["part"] == CLOSED and run["contender"] in (ALONE, PAIR)]
        here = [
            {**run, "at": (run["contender"], run["level"])}
            for run in runs
            if (run["pair"], run["mix"]) == (self._models.name, mix)
        ]
        found = [median(run["requests_per_second"] for run in own) for own in harness.grouped(here, "at").values()]
        if not found:
            raise ValueError(f"the open loop needs the closed loop of {mix} prompts before it: no capacity is known")
        return max(found)


class Workload:
    """The requests, as tokens: the same for all contenders."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], given: argparse.Namespace) -> None:
        self._prompts = prompts
        self._given = given

    def closed(self, mix: str, streams: int, repetition: int) -> list[Task]:
        return self._tasks(mix, max(self._given.least_texts, 3 * streams), repetition, self._given.new_tokens)

    def short(self, mix: str, new_tokens: int, repetition: int) -> list[Task]:
        return self._tasks(mix, self._given.short_texts, repetition, new_tokens)

    def open(self, mix: str, rate: float, repetition: int) -> tuple[list[Task], list[float]]:
        """All texts of a run of the open loop, and when each arrives, in seconds; `rate` is in requests a second."""
        due = list(arrivals(rate, self._given.open_seconds, seed=1 + repetition))
        return self._tasks(mix, len(due), repetition, self._given.new_tokens), due

    def warm_up(self) -> list[Task]:
        """Two short texts that are not measured, after the longest prompts there are."""
        return self._tasks(self._given.mixes[-1], 2, 10_000, min(8, self._given.new_tokens))

    def longest(self) -> int:
        mixes = self._given.mixes
        lengths = [len(self._prompt(mix, nth)) for mix in mixes for nth in range(max(3, len(self._prompts)))]
        return max(lengths) + max(self._given.new_tokens, *self._given.short_tokens)

    def _tasks(self, mix: str, count: int, repetition: int, new_tokens: int) -> list[Task]:
        first = repetition * count  # other prompts each time, as long as there are any
        return [
            Task(nth, self._prompt(mix, nth), new_tokens, TEMPERATURE, 1 + nth) for nth in range(first, first + count)
        ]

    def _prompt(self, mix: str, nth: int) -> tuple[int, ...]:
        """The prompt as it is, or followed by those that come after it up to the length of a long one."""
        count = len(self._prompts)
        if mix == "short":
            return self._prompts[nth % count]
        length = _LONG_PROMPTS[nth % len(_LONG_PROMPTS)]
        following = (token for i in range(nth, nth + length) for token in self._prompts[i % count])
        return tuple(islice(following, length))


def arrivals(rate: float, seconds: float, *, seed: int) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second, from 0 to `seconds`; at least one.

    Another rate stretches the same times, so that rates differ in their pace alone.
    """
    generator = random.Random(seed)
    at = generator.expovariate(1.0) / rate
    yield at
    while (at := at + generator.expovariate(1.0) / rate) < seconds:
        yield at


# ------------------------------------------------------------------------------------------------------------ report


def summarise(bench: Bench) -> Json:
    """By pair, loop, mix, level and contender: medians over repetitions of the repetition's own figures."""
    return {"summary": harness.tree(bench.runs, ("pair", "part", "mix", "level"), cell)}


def cell(runs: Sequence[Json]) -> Json:
    best: dict[int, float] = {}
    for run in runs:
        if run["contender"] in REFERENCES:
            best[run["repetition"]] = max(best.get(run["repetition"], 0.0), run["tokens_per_second"])
    found: Json = {}
    by_contender = harness.grouped(runs, "contender")
    for name in sorted(by_contender, key=CONTENDERS.index):
        own = by_contender[name]
        rates = {run["repetition"]: run["tokens_per_second"] for run in own}
        keys = [key for key in own[0] if key not in ("pair", "part", "mix", "level", "repetition", "contender")]
        found[name] = {
            "repetitions": len(own),
            "tokens_per_second_range": [min(rates.values()), max(rates.values())],
            **({"ratio_range": None} | harness.ratio(rates, best)),
            **{key: medians([run[key] for run in own]) for key in keys},
        }
    return found


def medians(values: Sequence[Any]) -> Any:
    """The median of those that are known; of percentiles, each by itself."""
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], dict):
        return {name: median(each[name] for each in known) for name in known[0]}
    return median(known) if known else None


def missed(summary: Json) -> list[str]:
    """Where the pair keeps less than `AIM` of the better reference, a line each."""
    return [
        f"{pair} pair, {part}, {mix} prompts, {LEVELS[part]} {level}: {found[PAIR]['ratio']:.2f}"
        for (pair, part, mix, level), found in harness.flat(summary, 4)
        if PAIR in found and found[PAIR]["ratio"] is not None and found[PAIR]["ratio"] < AIM
    ]


def table(document: Json) -> str:
    """Where the pair falls behind, who is missing, and a table for each pair, loop and mix."""
    behind = [f"- BEHIND the better reference: {line}" for line in missed(document["summary"])]
    missing = [
        f"- {pair} pair: {name} is not there: {reason}"
        for pair, reasons in document["unavailable"].items()
        for name, reason in reasons.items()
    ]
    parts = ["\n".join([*(behind or [f"The pair keeps {AIM:.0%} or more everywhere."]), *missing, ""])]
    for (pair, part, mix), by_level in harness.flat(document["summary"], 3):
        rows = [[level, name, *_row(found)] for (level, name), found in harness.flat(by_level, 2)]
        head = [LEVELS[part], "", *_HEAD]
        parts.append(harness.table(head, rows, f"{pair} pair, {mix} prompts, {part}"))
    return "\n".join(parts)


_HEAD = (
    "tokens/s", "ratio", "requests/s", "refused", "α", "γ", "Decode", "tokens/round", "rounds/pass",
    "CPU µs: verifier + draft", "TTFT ms, p50 / p95 / p99", "time per token ms", "between pieces ms",
)  # fmt: skip


def _row(found: Json) -> list[str]:
    cpu = [number(found[f"{name}_cpu_us"], 0) for name in ("verifier", "draft")]
    times = [
        "–"
        if found[name] is None
        else " / ".join(f"{value:.{0 if value >= 100 else 1}f}" for value in found[name].values())
        for name in ("ttft_ms", "tpot_ms", "piece_ms")
    ]
    return [
        number(found["tokens_per_second"], 1),
        harness.between(found),
        number(found["requests_per_second"]),
        f"{found['refused']:.0f}/{found['requests']:.0f}" if found["refused"] else "0",
        number(found["alpha"], 3),
        number(found["gamma"], 1),
        "–" if found["decode_share"] is None else f"{found['decode_share']:.0%}",
        number(found["tokens_per_round"]),
        number(found["rounds_per_pass"], 1),
        " + ".join(cpu) if found["verifier_cpu_us"] else "–",
        *times,
    ]


_COLOURS = {BATCHING: plots.ORANGE, ALONE: plots.GREY, PAIR: plots.BLUE}
_PANELS: tuple[tuple[str, str, str | None], ...] = (
    ("tokens/s, all streams", "tokens_per_second", None),
    ("the pair over the better reference", "ratio", None),
    ("time to first token, ms; dotted: p95", "ttft_ms", "p95"),
    ("between pieces of text, ms; dotted: p99", "piece_ms", "p99"),
)


def draw(document: Json, path: Path) -> None:
    """Writes a PNG for each loop, named after it: a row for each pair and mix."""
    for part in LEVELS:
        rows = [(where, found) for where, found in harness.flat(document["summary"], 3) if where[1] == part]
        if rows:
            named = path.with_name(f"{path.stem}-{part}.png")
            with plots.picture(named, len(rows), len(_PANELS), size=(3.7, 3.1), note=plots.caption(document)) as grid:
                for panels, ((pair, _, mix), by_level) in zip(grid, rows, strict=True):
                    for panel, (title, figure, dotted) in zip(panels, _PANELS, strict=True):
                        _draw_panel(panel, part, by_level, figure, dotted)
                        panel.set_title(title, fontsize=9)
                    panels[0].set_ylabel(f"{pair} pair, {mix} prompts", fontsize=10)


def _draw_panel(panel: Axes, part: str, by_level: Json, figure: str, dotted: str | None) -> None:
    for name, colour in _COLOURS.items():
        if figure == "ratio" and name != PAIR:
            continue
        cells = [(float(level), found[name][figure]) for level, found in by_level.items() if name in found]
        for percent, style in (("p50", "-"), (dotted, ":")) if dotted else ((None, "-"),):
            points = [(at, value[percent] if percent and value else value) for at, value in cells]
            label = name if style == "-" else None
            plots.line(panel, points, color=colour, linestyle=style, marker="o", label=label)
    if part == OPEN:
        panel.set_xticks([float(level) for level in by_level], list(by_level))
    else:
        plots.powers_of_two(panel, [float(level) for level in by_level])
    if figure == "ratio":
        plots.level(panel, AIM, linestyle="--")
        plots.level(panel)
    if dotted:  # times differ by orders of magnitude
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(bottom=0)
    panel.set_xlabel(LEVELS[part], fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
