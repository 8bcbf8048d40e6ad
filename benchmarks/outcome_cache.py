"""What the outcome cache is worth: tokens/s of a pair with it over the same pair without, through both services.

    python -m benchmarks.outcome_cache [--quick] [--prompts 8] [--tokens 128] [--repetitions 3]

One service of each kind a placement; a request says whether it wants the cache, and the two ways take turns prompt by
prompt, so that whatever else the machine does falls on both. Placements: each service on a processor of its own, with a
target three times as deep as the demo pair's, and with the demo pair itself; and both services on one processor, where
drafting ahead takes its time from the target and ought to be found not to pay. What counts are ratios: at each γ, and
of the best γ with the cache over the best without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.arguments import DEMO
from benchmarks.deepen import cached
from benchmarks.outcome_cache_picture import draw
from benchmarks.plan import read_prompts, spread
from benchmarks.services import Processes, RunningPair
from outrider.client import Client, Completion, Options

RESULT = Path(__file__).parent / "results" / "outcome-cache.json"
DEPTH = 3
GAMMAS = (3, 5, 8)
WAYS: dict[str, Options] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"rule": "coupled"},
    "block": {"rule": "block"},
    "tokenwise": {"rule": "tokenwise"},
}
# Before anything is measured: by then the services know what a wait is like, and have tried doing without.
WARM_UP_TOKENS = 512

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the services run, and with what target."""

    name: str
    depth: int
    on_one: bool = False


PLACEMENTS = (
    Placement(f"target x{DEPTH}, a core each", DEPTH),
    Placement("demo target, a core each", 1),
    Placement(f"target x{DEPTH}, both on one core", DEPTH, on_one=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = _parse(arguments)
    console = Console(stderr=True, highlight=False)
    prompts = spread(read_prompts(given.prompts_file), given.prompts)
    document: Json = {
        "benchmark": "outcome_cache",
        "command": machine.command("benchmarks.outcome_cache", arguments),
        "machine": machine.describe(),
        "load_average_before": machine.load_average(),
        "settings": {
            "prompts": len(prompts),
            "tokens": given.tokens,
            "repetitions": given.repetitions,
            "dtype": given.dtype,
            "gammas": given.gammas,
        },
        "results": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for placement in PLACEMENTS[1:2] if given.quick else PLACEMENTS:
            target = _target(placement, Path(folder))
            how = Processes(given.dtype, 1, given.dtype, 1, apart=not placement.on_one, on_one=placement.on_one)
            with RunningPair(target, DEMO / "draft", how) as pair:
                for way in given.ways:
                    _warm_up(pair.client, prompts[0], WAYS[way], given.tokens if given.quick else WARM_UP_TOKENS)
                    for gamma in given.gammas:
                        found = measure(pair.client, prompts, {**WAYS[way], "gamma": gamma}, given)
                        document["results"].append({"placement": placement.name, "way": way, "gamma": gamma, **found})
                        console.print(f"{placement.name}, {way}, γ = {gamma}: {found['ratio']:.2f}", style="dim")
    document["best"] = best(document["results"])
    document["load_average_after"] = machine.load_average()
    output = given.output or (None if given.quick else RESULT)
    if output is not None:
        output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draw(document, output.with_suffix(".png"))
    print(table(document), json.dumps(document, ensure_ascii=False), sep="\n\n")
    return 0


def _target(placement: Placement, folder: Path) -> Path:
    demo = DEMO / "target"
    return demo if placement.depth == 1 else cached(demo, placement.depth, folder)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.outcome_cache", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="the demo pair, one γ and repetition: does it run?")
    parser.add_argument("--prompts", type=int, default=8, help="of the demo corpus")
    parser.add_argument("--tokens", type=int, default=128, help="to write after each")
    parser.add_argument("--repetitions", type=int, default=3, help="with each prompt")
    parser.add_argument("--gammas", type=int, nargs="+", default=list(GAMMAS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--dtype", default="bfloat16", help="of both models")
    parser.add_argument("--output", type=Path, help="JSON file to write, with a picture beside it")
    parser.add_argument("--prompts-file", type=Path, default=DEMO / "prompts.jsonl")
    given = parser.parse_args(arguments)
    if given.quick:
        given.gammas, given.repetitions, given.ways = given.gammas[:1], 1, given.ways[:2]
    return given


def _warm_up(client: Client, prompt: str, way: Options, tokens: int) -> None:
    client.complete(prompt, **_asked(way, tokens, seed=1))


def _asked(way: Options, tokens: int, **more: Any) -> Options:
    options = way.copy()
    options.update({"max_new_tokens": tokens, "ignore_eos": True, **more})  # type: ignore[typeddict-item]
    return options


def measure(client: Client, prompts: Sequence[str], options: Options, given: argparse.Namespace) -> Json:
    """One row: the ways in turn, prompt by prompt, and which comes first in turn too."""
    ratios, rates, same = list[float](), {True: list[float](), False: list[float]()}, 0
    told: dict[bool, list[Completion]] = {True: [], False: []}
    for number in range(given.repetitions * len(prompts)):
        prompt, rate = prompts[number % len(prompts)], {}
        for on in (True, False) if number % 2 else (False, True):
            begin = time.perf_counter()
            done = client.complete(prompt, **_asked(options, given.tokens, seed=number, outcome_cache=on))
            rate[on] = len(done.token_ids) / (time.perf_counter() - begin)
            rates[on].append(rate[on])
            told[on].append(done)
        ratios.append(rate[True] / rate[False])
        same += told[True][-1].token_ids == told[False][-1].token_ids
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(each, 3) for each in _quartiles(ratios)],
        "tokens_per_second": {
            name: round(statistics.median(rates[on]), 1) for name, on in (("with", True), ("without", False))
        },
        "same_text": [same, len(ratios)],
        **_cache(told[True]),
        "per_round_ms": {name: _per_round(told[on]) for name, on in (("with", True), ("without", False))},
    }


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def _cache(done: list[Completion]) -> Json:
    told = [each.statistics for each in done]
    rounds = sum(each.num_drafts for each in told)
    queries = sum(each.num_outcome_cache_queries for each in told)
    return {
        "hit_rate": round(sum(each.num_outcome_cache_hits for each in told) / queries, 3) if queries else None,
        "rounds_served": round(queries / rounds, 3),
        "predrafted_per_round": round(sum(each.num_predrafted_tokens for each in told) / rounds, 2),
        "wasted_per_round": round(sum(each.num_wasted_tokens for each in told) / rounds, 2),
        "acceptance": round(
            sum(each.num_accepted_tokens for each in told) / sum(each.num_draft_tokens for each in told), 3
        ),
    }


def _per_round(done: list[Completion]) -> Json:
    rounds = sum(each.statistics.num_rounds for each in done)
    figures: dict[str, Callable[[Completion], int]] = {
        "draft": lambda each: each.timings.draft_us,
        "verdict": lambda each: each.timings.verdict_us,
        "forward": lambda each: each.timings.forward_us,
        "verify": lambda each: each.timings.verify_us,
        "saved": lambda each: each.timings.saved_us,
    }
    return {name: round(sum(map(of, done)) / rounds / 1e3, 3) for name, of in figures.items()}


def best(rows: list[Json]) -> list[Json]:
    """For each placement and way the best γ of either arm, and the ratio of their tokens/s."""
    found = []
    for placement, way in dict.fromkeys((row["placement"], row["way"]) for row in rows):
        some = [row for row in rows if (row["placement"], row["way"]) == (placement, way)]
        arms = {name: max(some, key=lambda row: row["tokens_per_second"][name]) for name in ("with", "without")}
        rates = {name: row["tokens_per_second"][name] for name, row in arms.items()}
        found.append(
            {
                "placement": placement,
                "way": way,
                "gamma": {name: row["gamma"] for name, row in arms.items()},
                "tokens_per_second": rates,
                "ratio": round(rates["with"] / rates["without"], 3),
            }
        )
    return found


def table(document: Json) -> str:
    """The rows for people."""
    head = ["placement", "way", "γ", "with / without", "quartiles", "hit rate", "pre-drafted a round", "tokens/s with"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in document["results"]:
        low, high = row["ratio_quartiles"]
        hit = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
        lines.append(
            f"| {row['placement']} | {row['way']} | {row['gamma']} | {row['ratio']:.2f} | {low:.2f} to {high:.2f} "
            f"| {hit} | {row['predrafted_per_round']:.1f} | {row['tokens_per_second']['with']:.0f} |"
        )
    lines.append("\nAt the best γ of each arm:\n")
    for row in document["best"]:
        gamma = row["gamma"]
        lines.append(
            f"- {row['placement']}, {row['way']}: {row['ratio']:.2f} (γ = {gamma['with']} over {gamma['without']})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
