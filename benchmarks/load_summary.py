"""From requests to figures: rates, times to and between tokens, acceptance, and what stands beside what.

Pure arithmetic; it knows nothing of how the requests came about.

Times between tokens are counted twice, as a round brings several tokens in one piece. By token, each token counts: the
first of a piece has waited since the piece before, the others not at all. By piece, the pieces alone count: that is how
long a reader sees nothing new. Where each piece is one token the two are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.load_contenders import Outcome, Served

BATCHING = "transformers-batching"
STATIC = "transformers-static"
ALONE = "outrider-alone"
PAIR = "outrider-pair"
CONTENDERS = (BATCHING, STATIC, ALONE, PAIR)
IN_OPEN_LOOP = (BATCHING, ALONE, PAIR)  # a static batch takes nobody in while it runs
# What the pair is held against; a static batch stands beside them only.
REFERENCES = (BATCHING, ALONE)
LABELS = {
    BATCHING: "target alone, transformers, continuous batching",
    STATIC: "target alone, transformers, static batches",
    ALONE: "target alone, Outrider (Decode)",
    PAIR: "the pair, Outrider",
}
PERCENTILES = (50, 95, 99)
CLOSED, SHORT, OPEN = "closed", "short-texts", "open"
LEVELS = {CLOSED: "streams", SHORT: "tokens a text", OPEN: "share of capacity"}
"""What differs from one level of a mode to the next."""

AHEAD_UP_TO = 4
"""Streams of the closed loop up to which the pair is to be ahead of the better of `REFERENCES`."""
NOT_BEHIND = 0.95
"""What it is to keep of the better's rate at any load."""

Json = dict[str, Any]


def figures(outcome: Outcome) -> Json:
    """One run. Times in milliseconds; a figure that nothing was measured of is None.

    - `seconds`: from the first request to the last token. `tokens_per_second` and `requests_per_second` are over them.
    - `ttft_ms`: from when a request was due to its first token.
    - `tpot_ms`: of each text, the time from its first to its last piece over its tokens but one.
    - `itl_token_ms`, `itl_piece_ms`: the times between tokens, see above.
    - `gamma`: drafted tokens over all rounds, those of `Decode` included. `decode_share`: of the rounds, those.
    - `rounds_per_pass`: verdicts over calls of `verify`: how full passes are. The probe's own is one of them.
    - `verifier_cpu_us`, `draft_cpu_us`: processor time of each service a token, prompts included. Other work on the
      machine disturbs it less than rates.
    """
    answered = [each for each in outcome.served if not each.refused]
    tokens = sum(each.tokens for each in answered)
    seconds = max((each.end for each in answered), default=0.0) - min(each.due for each in outcome.served)
    rounds, drafted = sum(each.rounds for each in answered), sum(each.drafted for each in answered)
    told = outcome.told
    by_token, by_piece = gaps(answered)
    return {
        "requests": len(outcome.served),
        "refused": len(outcome.served) - len(answered),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "requests_per_second": len(answered) / seconds if seconds > 0 else 0.0,
        "ttft_ms": percentiles([1e3 * (each.stamps[0][0] - each.due) for each in answered]),
        "tpot_ms": percentiles([1e3 * _per_token(each) for each in answered if each.tokens > 1]),
        "itl_token_ms": percentiles([1e3 * gap for gap in by_token]),
        "itl_piece_ms": percentiles([1e3 * gap for gap in by_piece]),
        "alpha": _alpha(answered),
        "accepted_share": sum(each.accepted for each in answered) / drafted if drafted else None,
        "gamma": drafted / rounds if drafted else None,
        "decode_share": 1 - sum(each.proposals for each in answered) / rounds if drafted else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "kv_usage": told.get("kv_usage"),
        "rounds_per_pass": rounds / told["passes"] if told.get("passes") else None,
        "verifier_cpu_us": _micros_a_token(told, "verifier_cpu_seconds", tokens),
        "draft_cpu_us": _micros_a_token(told, "draft_cpu_seconds", tokens),
    }


MOST_OF_ENGINE = 0.10
"""The engine's own share at the most, on the deepened pair."""


def aim(mode: str, level: str) -> float:
    """What the pair's `ratio` is to reach: above 1 at few streams of the closed loop, elsewhere `NOT_BEHIND`."""
    return 1.0 if mode == CLOSED and float(level) <= AHEAD_UP_TO else NOT_BEHIND


def missed(summary: Json, engine: Json) -> list[str]:
    """Where the pair's `ratio` misses its `aim`, and the engine's share `MOST_OF_ENGINE`, a line each."""
    shares = [
        f"deepened pair, {kind}: {found['share']:.1%} of the engine's time is its own; aimed at {MOST_OF_ENGINE:.0%}"
        for kind, found in engine.get("deepened", {}).items()
        if found["share"] > MOST_OF_ENGINE
    ]
    return shares + [
        f"{pair} pair, {mode}, {mix} prompts, {LEVELS[mode]} {level}: "
        f"{cell[PAIR]['ratio']:.2f} of the better of the two; aimed at {cell[PAIR]['aim']:.2f}"
        for pair, by_mode in summary.items()
        for mode, by_mix in by_mode.items()
        for mix, by_level in by_mix.items()
        for level, cell in by_level.items()
        if PAIR in cell and cell[PAIR]["missed"]
    ]


def gaps(served: Iterable[Served]) -> tuple[list[float], list[float]]:
    """Times between tokens, by token and by piece. What a text's first piece waited for is no gap."""
    by_token: list[float] = []
    by_piece: list[float] = []
    for each in served:
        for place, (at, count) in enumerate(each.stamps):
            waited = [at - each.stamps[place - 1][0]] if place else []
            by_piece += waited
            by_token += [*waited, *[0.0] * (count - 1)]
    return by_token, by_piece


def percentiles(values: Sequence[float]) -> Json | None:
    """Those of `PERCENTILES`, between neighbours in proportion; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {}
    for percent in PERCENTILES:
        place = percent / 100 * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found[f"p{percent}"] = ordered[low] + (place - low) * (ordered[high] - ordered[low])
    return found


def capacity(runs: Sequence[Json], pair: str, mix: str) -> float | None:
    """Requests a second that the closed loop found at the most, of Outrider's contenders; None before it ran."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if (run["pair"], run["mode"], run["mix"]) == (pair, CLOSED, mix) and run["contender"] in (ALONE, PAIR):
            rates[run["contender"], run["level"]].append(run["requests_per_second"])
    return max((median(found) for found in rates.values()), default=None)


def summarise(runs: Sequence[Json]) -> Json:
    """All figures: by pair, mode, mix, level, then contender.

    Each is the median over repetitions of the repetition's own. `ratio` is the rate over that of the better of
    `REFERENCES` in the same repetition; of the pair it is said what it aims at, and whether it misses.
    """
    tree: Json = {}
    for run in runs:
        place = tree
        for key in ("pair", "mode", "mix", "level"):
            place = place.setdefault(run[key], {})
        place.setdefault(run["contender"], []).append(run)
    return {
        pair: {
            mode: {
                mix: {level: _cell(found, aim(mode, level)) for level, found in by_level.items()}
                for mix, by_level in by_mix.items()
            }
            for mode, by_mix in by_mode.items()
        }
        for pair, by_mode in tree.items()
    }


_PLAIN = (
    "requests", "refused", "tokens_per_second", "requests_per_second", "alpha", "accepted_share", "gamma",
    "decode_share", "tokens_per_round", "kv_usage", "rounds_per_pass", "verifier_cpu_us", "draft_cpu_us",
)  # fmt: skip
_TIMES = ("ttft_ms", "tpot_ms", "itl_token_ms", "itl_piece_ms")


def _cell(by_contender: dict[str, list[Json]], aimed: float) -> Json:
    best: dict[int, float] = {}
    for name in REFERENCES:
        for run in by_contender.get(name, ()):
            best[run["repetition"]] = max(best.get(run["repetition"], 0.0), run["tokens_per_second"])
    cell: Json = {}
    for name in sorted(by_contender, key=CONTENDERS.index):
        runs = by_contender[name]
        rates = [run["tokens_per_second"] for run in runs]
        ratios = [run["tokens_per_second"] / best[run["repetition"]] for run in runs if best.get(run["repetition"])]
        ratio = median(ratios) if ratios else None
        cell[name] = {
            "repetitions": len(runs),
            "tokens_per_second_range": [min(rates), max(rates)],
            "ratio": ratio,
            "ratio_range": [min(ratios), max(ratios)] if ratios else None,
            **{key: _median(run[key] for run in runs) for key in _PLAIN},
            **{key: _median_percentiles([run[key] for run in runs if run[key] is not None]) for key in _TIMES},
        }
        if name == PAIR:
            reached = ratio is None or ratio > aimed or (ratio == aimed and aimed < 1)
            cell[name] |= {"aim": aimed, "missed": not reached}
    return cell


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_percentiles(found: Sequence[Json]) -> Json | None:
    if not found:
        return None
    return {name: median(each[name] for each in found) for name in found[0]}


def _micros_a_token(told: Mapping[str, float], name: str, tokens: int) -> float | None:
    return 1e6 * told[name] / tokens if name in told and tokens else None


def _per_token(served: Served) -> float:
    return (served.end - served.stamps[0][0]) / (served.tokens - 1)


def _alpha(served: Sequence[Served]) -> float | None:
    """Mean over texts, each with the weight of its drafted tokens."""
    known = [(each.alpha, each.drafted) for each in served if each.alpha is not None]
    weight = sum(drafted for _, drafted in known)
    return sum(alpha * drafted for alpha, drafted in known) / weight if weight else None
