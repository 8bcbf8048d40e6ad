"""Time to the first token of prompts that begin alike, with the prefix at hand and without; through both services.

    python -m benchmarks.prefix

Every measurement of a prompt whose beginning is known is followed by one of the same prompt under a salt of its own,
which finds nothing. What counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine
from outrider.cli.processes import running_pair
from outrider.client import Client, Completion

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "models" / "demo"
RESULT = ROOT / "benchmarks" / "results" / "prefix.json"
TAIL = 16
LENGTHS = (64, 256, 768)


def measure(address: str, lengths: tuple[int, ...], repetitions: int) -> list[dict[str, Any]]:
    """Return one row for each length of the common beginning."""
    rows = []
    with Client(address) as client:
        for length in lengths:
            beginning = [3 + 7 * i % 1900 for i in range(length)]
            _write(client, beginning, 0, "known")
            known, fresh, cached = [], [], 0
            for number in range(1, repetitions + 1):
                done = _write(client, beginning, number, "known")
                cached = done.usage.cached_tokens
                known.append(done.timings.time_to_first_token_us / 1000)
                done = _write(client, beginning, number, secrets.token_hex(8))
                fresh.append(done.timings.time_to_first_token_us / 1000)
                print(f"\r{length} tokens: {number} of {repetitions}", end="", file=sys.stderr)
            print(file=sys.stderr)
            rows.append(
                {
                    "beginning_tokens": length,
                    "prompt_tokens": length + TAIL,
                    "cached_tokens": cached,
                    "known_ms": round(statistics.median(known), 2),
                    "fresh_ms": round(statistics.median(fresh), 2),
                    "ratio": round(statistics.median(a / b for a, b in zip(fresh, known, strict=True)), 2),
                }
            )
    return rows


def _write(client: Client, beginning: list[int], number: int, salt: str) -> Completion:
    tail = [11 + 31 * (number * TAIL + i) % 1900 for i in range(TAIL)]
    return client.complete(beginning + tail, max_new_tokens=1, gamma=1, seed=1, ignore_eos=True, cache_salt=salt)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    load_before = machine.load_average()
    target, draft = (["--model", str(MODELS / name), "--threads", "1"] for name in ("target", "draft"))
    with running_pair(target, draft, threads=1) as pair:
        pair.wait_healthy(120)
        rows = measure(pair.address, tuple(arguments.lengths), arguments.repetitions)
    print(f"{'beginning':>10} {'at hand':>8} {'known, ms':>10} {'fresh, ms':>10} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['beginning_tokens']:>10} {row['cached_tokens']:>8} {row['known_ms']:>10} {row['fresh_ms']:>10} "
            f"{row['ratio']:>6}"
        )
    document = {
        "command": machine.command("benchmarks.prefix", sys.argv[1:]),
        "machine": machine.describe(),
        "load_average_before": load_before,
        "repetitions": arguments.repetitions,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
