"""Simulate many seeds, or show one of them: `python -m tests.simulation --seeds 100000`, or `--seed 17`.

The exit code is 1 if an invariant did not hold.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.simulation.plan import draw_plan
from tests.simulation.world import simulate

MOST_SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulates both services.")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="only this seed, with its plan and trace")
    options = parser.parse_args()
    if options.seed is not None:
        outcome = simulate(options.seed)
        print(draw_plan(options.seed), *outcome.trace, outcome.problem or "no error", sep="\n")
        return int(bool(outcome.problem))
    started, failed, statuses = time.monotonic(), [], Counter[str]()
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for done, outcome in enumerate(pool.imap_unordered(simulate, seeds, chunksize=50), 1):
            statuses.update(f"{outcome.kind} {code}" for code in outcome.codes.values())
            if outcome.problem:
                failed.append(outcome.seed)
                is_shown = len(failed) <= MOST_SHOWN
                print(outcome if is_shown else f"seed {outcome.seed}: {outcome.problem}", flush=True)
            if done % 1000 == 0 or done == options.seeds:
                pace = 60 * done / (time.monotonic() - started)
                print(f"{done} of {options.seeds} seeds, {len(failed)} failed, {pace:.0f} a minute", flush=True)
    print(*(f"{count:7d} {status}" for status, count in sorted(statuses.items())), sep="\n")
    print("failed:", failed or "none")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
