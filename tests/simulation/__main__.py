"""Run many seeds, or one of them again: `python -m tests.simulation --seeds 100000`, or `--seed 17`.

Exits with 1 where an invariant did not hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.simulation.plan import draw_plan
from tests.simulation.world import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulates both services.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="this one alone, with its plan and its whole trace")
    parser.add_argument("--show", type=int, default=5, help="failed seeds that are shown in full")
    asked = parser.parse_args()
    if asked.seed is not None:
        outcome = simulate(asked.seed)
        print(draw_plan(asked.seed), *outcome.trace, outcome.problem or "all is well", sep="\n")
        return int(bool(outcome.problem))
    started, failed, statuses = time.monotonic(), [], Counter[str]()
    with multiprocessing.get_context("fork").Pool(asked.jobs) as pool:
        seeds = range(asked.first, asked.first + asked.seeds)
        for done, outcome in enumerate(pool.imap_unordered(simulate, seeds, chunksize=50), 1):
            statuses.update(f"{outcome.kind} {code}" for code in outcome.codes.values())
            if outcome.problem:
                failed.append(outcome.seed)
                print(outcome if len(failed) <= asked.show else f"seed {outcome.seed}: {outcome.problem}", flush=True)
            if done % 1000 == 0 or done == asked.seeds:
                pace = 60 * done / (time.monotonic() - started)
                print(f"{done} of {asked.seeds} seeds, {len(failed)} failed, {pace:.0f} a minute", flush=True)
    print(*(f"{count:7d} {status}" for status, count in sorted(statuses.items())), sep="\n")
    print("failed:", *failed) if failed else print("all is well")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
