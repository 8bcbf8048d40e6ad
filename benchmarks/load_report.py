"""The figures of `benchmarks.load`: from requests to rates and times, the tables, and a picture of each loop.

Times between tokens are counted twice, as a round brings several tokens in one piece. By token, each token counts: the
first of a piece has waited since the piece before, the others not at all. By piece, the pieces alone count: that is how
long a reader sees nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import harness, plots
from benchmarks.contenders import Outcome, Served
from benchmarks.harness import Json, number

BATCHING, STATIC = "transformers-batching", "transformers-static"
ALONE, PAIR = "outrider-alone", "outrider-pair"
CONTENDERS = (BATCHING, STATIC, ALONE, PAIR)
IN_OPEN_LOOP = (BATCHING, ALONE, PAIR)  # a static batch admits no request while it runs
REFERENCES = (BATCHING, ALONE)
"""What the pair is held against; a static batch stands beside them only."""
LABELS = {
    BATCHING: "target alone, transformers, continuous batching",
    STATIC: "target alone, transformers, static batches",
    ALONE: "target alone, Outrider (Decode)",
    PAIR: "the pair, Outrider",
}
CLOSED, SHORT, OPEN = "closed", "short-texts", "open"
LEVELS = {CLOSED: "streams", SHORT: "tokens a text", OPEN: "share of capacity"}
"""What differs from one level of a loop to the next."""
AIM = 0.97
"""What the pair is to keep of the better reference's rate at any load."""

_TIMES = {
    "ttft_ms": "TTFT ms",
    "tpot_ms": "time per token ms",
    "itl_token_ms": "between tokens ms",
    "itl_piece_ms": "between pieces ms",
}
_COLOURS = {BATCHING: plots.ORANGE, STATIC: plots.SAND, ALONE: plots.GREY, PAIR: plots.BLUE}
_MARKERS = {BATCHING: "s", STATIC: "v", ALONE: "^", PAIR: "o"}


def figures(outcome: Outcome) -> Json:
    """One run. Times in milliseconds; a figure that nothing was measured of is None.

    - `ttft_ms`: from when a request was due to its first token.
    - `tpot_ms`: of each text, the time from its first to its last piece over its tokens but one.
    - `gamma`: drafted tokens over all rounds, those of `Decode` included. `decode_share`: of the rounds, those.
    - `rounds_per_pass`: verdicts over calls of `verify`: how full passes are.
    - `verifier_cpu_us`, `draft_cpu_us`: processor time of each service a token, prompts included.
    """
    served, costs = outcome
    answered = [each for each in served if not each.refused]
    tokens = sum(each.tokens for each in answered)
    seconds = max((each.end for each in answered), default=0.0) - min(each.due for each in served)
    rounds, drafted = sum(each.rounds for each in answered), sum(each.drafted for each in answered)
    by_token, by_piece = gaps(answered)
    per_token = [(each.end - each.stamps[0][0]) / (each.tokens - 1) for each in answered if each.tokens > 1]
    return {
        "requests": len(served),
        "refused": len(served) - len(answered),
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "requests_per_second": len(answered) / seconds if seconds > 0 else 0.0,
        "ttft_ms": percentiles([each.stamps[0][0] - each.due for each in answered]),
        "tpot_ms": percentiles(per_token),
        "itl_token_ms": percentiles(by_token),
        "itl_piece_ms": percentiles(by_piece),
        "alpha": harness.alpha_of([{"alpha": each.alpha, "drafted": each.drafted} for each in answered]),
        "gamma": drafted / rounds if drafted else None,
        "decode_share": 1 - sum(each.proposals for each in answered) / rounds if drafted else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "kv_usage": costs.get("kv_usage"),
        "rounds_per_pass": rounds / costs["passes"] if costs.get("passes") else None,
        **{
            f"{name}_cpu_us": 1e6 * costs[f"{name}_cpu_seconds"] / tokens if tokens and costs else None
            for name in ("verifier", "draft")
        },
    }


def gaps(served: Iterable[Served]) -> tuple[list[float], list[float]]:
    """Times between tokens, by token and by piece. What a text's first piece waited for is no gap."""
    by_token: list[float] = []
    by_piece: list[float] = []
    for each in served:
        for nth, (at, count) in enumerate(each.stamps):
            waited = [at - each.stamps[nth - 1][0]] if nth else []
            by_piece += waited
            by_token += [*waited, *[0.0] * (count - 1)]
    return by_token, by_piece


def percentiles(seconds: Sequence[float]) -> Json | None:
    """The 50th, 95th and 99th, in milliseconds, between neighbours in proportion; None of nothing."""
    if not seconds:
        return None
    return {f"p{percent}": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 95, 99)}


def summarise(runs: Sequence[Json]) -> Json:
    """By pair, mode, mix, level and contender: medians over repetitions of the repetition's own figures."""
    return harness.tree(runs, ("pair", "mode", "mix", "level"), _cell)


def _cell(runs: Sequence[Json]) -> Json:
    best: dict[int, float] = {}
    for run in runs:
        if run["contender"] in REFERENCES:
            best[run["repetition"]] = max(best.get(run["repetition"], 0.0), run["tokens_per_second"])
    cell: Json = {}
    by_contender = harness.grouped(runs, "contender")
    for name in sorted(by_contender, key=CONTENDERS.index):
        own = by_contender[name]
        rates = {run["repetition"]: run["tokens_per_second"] for run in own}
        cell[name] = {
            "repetitions": len(own),
            "tokens_per_second_range": [min(rates.values()), max(rates.values())],
            **({"ratio_range": None} | harness.ratio(rates, best)),
            **{
                key: medians([run[key] for run in own])
                for key in own[0]
                if key not in ("pair", "mode", "mix", "level", "repetition", "contender")
            },
        }
    return cell


def medians(values: Sequence[Any]) -> Any:
    """The median of those that are known; of percentiles, each by itself."""
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], dict):
        return {name: median(each[name] for each in known) for name in known[0]}
    return median(known) if known else None


# ------------------------------------------------------------------------------------------------------------ tables


def table(document: Json) -> str:
    """Where the pair falls behind, and two tables for each pair, loop and mix."""
    behind = missed(document["summary"])
    parts = ["\n".join(f"- BEHIND: {line}" for line in behind) or f"The pair keeps {AIM:.0%} or more everywhere.", ""]
    for pair, by_mode in document["summary"].items():
        for name, reason in document["unavailable"].get(pair, {}).items():
            parts.append(f"{pair} pair: {LABELS[name]} is not there: {reason}\n")
        for mode, by_mix in by_mode.items():
            for mix, by_level in by_mix.items():
                title = f"{pair} pair, {mix} prompts, {mode}"
                rows = [[level, LABELS[name], *_rates(found)] for level, name, found in _flat(by_level)]
                parts.append(harness.table([LEVELS[mode], "", *_RATES], rows, title))
                rows = [
                    [level, LABELS[name], *(_three(found[key]) for key in _TIMES)]
                    for level, name, found in _flat(by_level)
                ]
                parts.append(harness.table([LEVELS[mode], "p50 / p95 / p99", *_TIMES.values()], rows) + "\n")
    return "\n".join(parts)


def missed(summary: Json) -> list[str]:
    """Where the pair keeps less than `AIM` of the better reference, a line each."""
    return [
        f"{pair} pair, {mode}, {mix} prompts, {LEVELS[mode]} {level}: {cell[PAIR]['ratio']:.2f} of the better reference"
        for pair, by_mode in summary.items()
        for mode, by_mix in by_mode.items()
        for mix, by_level in by_mix.items()
        for level, cell in by_level.items()
        if PAIR in cell and cell[PAIR]["ratio"] is not None and cell[PAIR]["ratio"] < AIM
    ]


_RATES = (
    "tokens/s", "ratio", "requests/s", "refused", "α", "γ", "Decode", "tokens/round", "rounds/pass", "KV use",
    "CPU µs: verifier + draft",
)  # fmt: skip


def _rates(found: Json) -> list[str]:
    cpu = [number(found[f"{name}_cpu_us"], 0) for name in ("verifier", "draft")]
    return [
        number(found["tokens_per_second"], 1),
        harness.between(found),
        number(found["requests_per_second"]),
        f"{found['refused']:.0f}/{found['requests']:.0f}" if found["refused"] else "0",
        number(found["alpha"], 3),
        number(found["gamma"], 1),
        _share(found["decode_share"]),
        number(found["tokens_per_round"]),
        number(found["rounds_per_pass"], 1),
        _share(found["kv_usage"]),
        " + ".join(cpu) if found["verifier_cpu_us"] else "–",
    ]


def _flat(by_level: Json) -> list[tuple[str, str, Json]]:
    return [(level, name, found) for level, cell in by_level.items() for name, found in cell.items()]


def _three(found: Json | None) -> str:
    return "–" if found is None else " / ".join(f"{value:.{0 if value >= 100 else 1}f}" for value in found.values())


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


# ---------------------------------------------------------------------------------------------------------- pictures

Figure = Callable[[Json], float | None]


def _plain(name: str, percent: str | None = None) -> Figure:
    return lambda found: found[name] if percent is None or found[name] is None else found[name][percent]


def _times(title: str, name: str, high: str = "p95") -> tuple[str, str, Figure, Figure]:
    return f"{title}, ms\np50, dotted {high}", "log", _plain(name, "p50"), _plain(name, high)


_RATIO = "the pair over the better of the two references"
_PANELS: list[tuple[str, str, Figure, Figure | None]] = [
    ("tokens/s, all streams", "linear", _plain("tokens_per_second"), None),
    (_RATIO, "linear", _plain("ratio"), None),
    _times("time to first token", "ttft_ms"),
    _times("time per output token", "tpot_ms"),
    _times("between pieces of text", "itl_piece_ms", "p99"),
    ("γ: drafted tokens a round", "linear", _plain("gamma"), None),
    ("acceptance α\ndotted: share of rounds by Decode", "share", _plain("alpha"), _plain("decode_share")),
]
_LAST = {
    OPEN: ("refused, share of requests", "share", lambda found: found["refused"] / found["requests"], None),
    CLOSED: ("KV use, share of blocks", "share", _plain("kv_usage"), None),
}
_COLUMNS = 4


def draw(document: Json, path: Path) -> list[Path]:
    """Writes a PNG for each pair and loop, named after both; returns where they lie."""
    written = []
    for pair, by_mode in document["summary"].items():
        for mode, by_mix in by_mode.items():
            written.append(path.with_name(f"{path.stem.removesuffix(f'-{pair}')}-{pair}-{mode}.png"))
            missing = document["unavailable"].get(pair, {})
            note = "\n".join([*(f"not there: {LABELS[name]}" for name in missing), plots.caption(document)])
            title = f"{pair} pair, target of {document['models'][pair]['target_layers']} layers, {mode}"
            shown = [*_PANELS, _LAST.get(mode, _LAST[CLOSED])]
            rows = len(shown) // _COLUMNS
            with plots.picture(
                written[-1], rows * len(by_mix), _COLUMNS, size=(3.7, 3.1), note=note, title=title
            ) as grid:
                for nth, (mix, by_level) in enumerate(by_mix.items()):
                    some = grid[nth * rows : (nth + 1) * rows]
                    for panel, (named, scale, line, dotted) in zip(some.flat, shown, strict=True):
                        _draw_panel(panel, mode, by_level, named, scale, line, dotted)
                    for panel in some[:, 0]:
                        panel.set_ylabel(f"{mix} prompts", fontsize=10)
    return written


def _draw_panel(
    panel: Axes, mode: str, by_level: Json, title: str, scale: str, of: Figure, dotted: Figure | None
) -> None:
    names = [PAIR] if title == _RATIO else CONTENDERS
    for name in names:
        cells = [(float(level), cell[name]) for level, cell in by_level.items() if name in cell]
        how = {"color": _COLOURS[name], "linewidth": 1.5}
        plots.line(panel, [(x, of(cell)) for x, cell in cells], marker=_MARKERS[name], label=LABELS[name], **how)
        if dotted is not None:
            plots.line(panel, [(x, dotted(cell)) for x, cell in cells], linestyle=":", **how)
    levels = [float(level) for level in by_level]
    if mode == OPEN:
        panel.set_xticks(levels, list(by_level))
    else:
        plots.powers_of_two(panel, levels)
    if title == _RATIO:
        plots.level(panel, AIM, linestyle="--")
        plots.level(panel)
    if scale == "log":  # times differ by orders of magnitude
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(0, 1.03 if scale == "share" else 1.05 * panel.get_ylim()[1])
    panel.set_title(title, fontsize=9)
    panel.set_xlabel(LEVELS[mode], fontsize=8)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.6)
