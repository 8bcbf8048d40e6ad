"""Time to the first token of prompts that begin alike, with the prefix at hand and without; through both services.

Every measurement of a prompt whose beginning is known is followed by one of the same prompt under a salt of its own,
which finds nothing. What counts is the ratio.

    python -m benchmarks.prefix            a minute
    python -m benchmarks.prefix --quick    does it work at all
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import harness, plots
from benchmarks.harness import Bench, Json, tell
from benchmarks.services import Services
from outrider.client import Client, Completion

TAIL = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("prefix", __doc__, quick="one length, three times")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 768], help="of the common beginning")
    parser.add_argument("--repetitions", type=int, default=9)
    few = {"lengths": [64], "repetitions": 3}
    return harness.run("prefix", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    with Services(given.target, given.draft, verifier_flags=()) as services:
        for length in given.lengths:
            _write(services.client, length, 0, "known")
            for nth in range(1, given.repetitions + 1):
                if bench.has(length=length, repetition=nth):
                    continue
                known = _write(services.client, length, nth, "known")
                fresh = _write(services.client, length, nth, secrets.token_hex(8))
                bench.add(
                    {
                        "length": length,
                        "repetition": nth,
                        "cached_tokens": known.usage.cached_tokens,
                        "known_ms": known.timings.time_to_first_token_us / 1e3,
                        "fresh_ms": fresh.timings.time_to_first_token_us / 1e3,
                    }
                )
            tell(f"{length} tokens")


def _write(client: Client, length: int, number_: int, salt: str) -> Completion:
    beginning = [3 + 7 * nth % 1900 for nth in range(length)]
    tail = [11 + 31 * (number_ * TAIL + nth) % 1900 for nth in range(TAIL)]
    return client.complete(beginning + tail, max_new_tokens=1, gamma=1, seed=1, ignore_eos=True, cache_salt=salt)


def summarise(bench: Bench) -> Json:
    return {"summary": harness.tree(bench.runs, ("length",), figures)}


def figures(runs: Sequence[Json]) -> Json:
    ratios = [run["fresh_ms"] / run["known_ms"] for run in runs]
    return {
        "prompt_tokens": runs[0]["length"] + TAIL,
        "cached_tokens": runs[-1]["cached_tokens"],
        "known_ms": median(run["known_ms"] for run in runs),
        "fresh_ms": median(run["fresh_ms"] for run in runs),
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def table(document: Json) -> str:
    rows = [
        [
            length,
            found["prompt_tokens"],
            found["cached_tokens"],
            *(f"{found[name]:.1f} ms" for name in ("known_ms", "fresh_ms")),
            harness.between(found),
        ]
        for length, found in document["summary"].items()
    ]
    return harness.table(["known tokens", "of a prompt of", "found", "first token, known", "fresh", "ratio"], rows)


def draw(document: Json, path: Path) -> None:
    with plots.picture(path, 1, 1, size=(5.2, 3.6), note=plots.caption(document)) as panels:
        for name, label, colour in (("known_ms", "known", plots.BLUE), ("fresh_ms", "fresh", plots.GREY)):
            points = [(float(length), found[name]) for length, found in document["summary"].items()]
            plots.line(panels[0][0], points, marker="o", label=label, color=colour)
        panels[0][0].set_ylim(bottom=0)
        panels[0][0].set_xlabel("tokens of the common beginning")
        panels[0][0].set_ylabel("ms to the first token")


if __name__ == "__main__":
    sys.exit(main())
