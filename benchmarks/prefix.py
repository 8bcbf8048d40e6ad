"""Time to the first token of prompts that begin alike, with the beginning cached and without; through both services.

Each prompt with a cached beginning is followed by the same prompt under a salt of its own, which finds nothing.
"""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import harness, plots
from benchmarks.harness import Bench, Json, by_repetition, progress
from benchmarks.services import Services
from outrider.client import Client, Completion
from outrider.evaluation import pictures

TAIL = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("prefix", __doc__, quick="one length, once")
    parser.set_defaults(lengths=[64, 256, 768], repetitions=9)  # tokens of the common beginning
    few = {"lengths": [64], "repetitions": 1}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("length",), figures)
    return harness.run("prefix", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    with Services(given.target, given.draft, verifier_flags=(), draft_flags=()) as services:
        for length in given.lengths:
            _write(services.client, length, 0, "known")
            for nth in range(1, given.repetitions + 1):
                keys = {"length": length, "repetition": nth}
                if bench.has(**keys):
                    continue
                known = _write(services.client, length, nth, "known")
                fresh = _write(services.client, length, nth, secrets.token_hex(8))
                times = {
                    "known_ms": known.timings.time_to_first_token_us / 1e3,
                    "fresh_ms": fresh.timings.time_to_first_token_us / 1e3,
                }
                bench.add({**keys, "cached_tokens": known.usage.cached_tokens, **times})
            progress(f"{length} tokens")


def _write(client: Client, length: int, nth: int, salt: str) -> Completion:
    beginning = [3 + 7 * i % 1900 for i in range(length)]
    tail = [11 + 31 * (nth * TAIL + i) % 1900 for i in range(TAIL)]
    return client.complete(beginning + tail, max_new_tokens=1, gamma=1, seed=1, ignore_eos=True, cache_salt=salt)


def figures(runs: Sequence[Json]) -> Json:
    return {
        "prompt_tokens": runs[0]["length"] + TAIL,
        "cached_tokens": runs[-1]["cached_tokens"],
        **{name: median(run[name] for run in runs) for name in ("known_ms", "fresh_ms")},
        **harness.ratio(by_repetition(runs, "fresh_ms"), by_repetition(runs, "known_ms")),
    }


def table(document: Json) -> str:
    columns: harness.Columns = {
        "of a prompt of": lambda found: found["prompt_tokens"],
        "found": lambda found: found["cached_tokens"],
        "first token, cached": lambda found: f"{found['known_ms']:.1f} ms",
        "not cached": lambda found: f"{found['fresh_ms']:.1f} ms",
        "ratio": harness.between,
    }
    return harness.summary_table(document["summary"], ["common tokens"], columns)


def draw(document: Json, path: Path) -> None:
    with pictures.picture(path, 1, 1, size=(5.2, 3.6), note=plots.caption(document)) as panels:
        for name, label, colour in (("known_ms", "cached", pictures.BLUE), ("fresh_ms", "not cached", pictures.GREY)):
            points = [(float(length), found[name]) for length, found in document["summary"].items()]
            pictures.line(panels[0][0], points, marker="o", label=label, color=colour)
        panels[0][0].set_ylim(bottom=0)
        panels[0][0].set_xlabel("tokens of the common beginning")
        panels[0][0].set_ylabel("ms to the first token")


if __name__ == "__main__":
    sys.exit(main())
