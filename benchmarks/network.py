"""What distance between draft and verifier costs: tokens per second by added round-trip time, and what is foretold.

Between the two services stands a proxy that holds every byte back for half of the added round trip. All arms write the
same texts (rule `coupled`, one seed a prompt), in turns, at each delay in turn. What counts is the ratio to the target
alone (drafter `none`) in the same turn. *Foretold* is what Theorem 3.8 says with the network in it, from α, the draft's
step and the target's pass as measured at the least delay.

    python -m benchmarks.network --prompts 3 --repetitions 3     about five minutes on two cores
    python -m benchmarks.network --quick                         does it work at all
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from benchmarks import harness, plots
from benchmarks.contenders import Task
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.outrider_contender import Services, completion_run
from outrider.theory import best_gamma, tokens_per_second

ALONE, SHALLOW = "none", "γ = 1"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("network", __doc__, quick="two delays, one prompt, one turn")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 5, 20, 50], help="added round trips, in ms")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=7, help="turns of all")
    parser.add_argument("--dtype", default="bfloat16")
    few = {"delays": [0.0, 20.0], "prompts": 1, "repetitions": 1, "tokens": 24}
    return harness.run("network", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def arms(gamma: int) -> dict[str, Json]:
    """The arms by name."""
    return {
        ALONE: {"drafter": "none"},
        "sequential": {"gamma": gamma, "outcome_cache": False},
        "outcome cache": {"gamma": gamma, "outcome_cache": True},
        "adaptive": {"speculation": "adaptive", "outcome_cache": False},
    }


def measure(bench: Bench) -> None:
    """Every arm at every delay, in turns."""
    given = bench.given
    tokenizer = AutoTokenizer.from_pretrained(given.target, local_files_only=True)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in bench.prompts[: given.prompts]]
    with Services(given.target, given.draft, dtype=given.dtype, distant=True) as services:

        def write_all(options: Json) -> Json:
            runs = []
            for seed, prompt in enumerate(prompts):
                task = Task(seed, prompt, given.tokens, 1.0, seed)
                begin = time.perf_counter()
                done = services.client.complete(
                    list(prompt), temperature=1.0, rule="coupled", max_new_tokens=given.tokens, ignore_eos=True,
                    seed=seed, **options,
                )  # fmt: skip
                statistics = done.statistics
                cache = {"hits": statistics.num_outcome_cache_hits, "queries": statistics.num_outcome_cache_queries}
                runs.append(completion_run(done, time.perf_counter() - begin, task) | cache)
            phases = {phase: sum(run["phases"][phase] for run in runs) for phase in runs[0]["phases"]}
            summed = {
                name: harness.total(runs, name)
                for name in ("tokens", "seconds", "rounds", "drafted", "hits", "queries")
            }
            return summed | {"phases": phases, "alpha": harness.alpha_of(runs)}

        for turn in range(-1, given.repetitions):  # the first warms up
            for delay in given.delays:
                services.proxy.delay(delay / 2e3)
                for name, options in harness.rotated(arms(given.gamma).items(), turn):
                    if turn < 0 or not bench.has(delay=delay, arm=name, repetition=turn):
                        found = write_all(options)
                        if turn >= 0:
                            bench.add({"delay": delay, "arm": name, "repetition": turn, **found})
            services.proxy.delay(0.0)
            # It takes proposals of two lengths to tell what a token more costs the target's pass.
            if turn >= 0 and not bench.has(arm=SHALLOW, repetition=turn):
                bench.add({"delay": 0.0, "arm": SHALLOW, "repetition": turn, **write_all({"gamma": 1})})
            tell(f"turn {turn + 1} of {given.repetitions}")


@dataclass(frozen=True)
class Foretold:
    """The formulas' parameters, measured at the least delay; times in seconds."""

    alpha: float
    gamma: int
    draft_step: float
    pass_of_one: float
    pass_token: float  # what a token more costs
    round_trip: float
    alone_trip: float

    @classmethod
    def of(cls, paired: Sequence[Json], alone: Sequence[Json], shallow: Sequence[Json], gamma: int) -> Foretold:
        """From the runs of three arms."""
        width = (_a_round(paired, "drafted") - _a_round(shallow, "drafted")) or 1.0
        return cls(
            alpha=min(harness.alpha_of(paired) or 0.0, 1.0),
            gamma=gamma,
            draft_step=_a_round(paired, "draft") / _a_round(paired, "drafted"),
            pass_of_one=_pass(alone),
            pass_token=max((_pass(paired) - _pass(shallow)) / width, 0.0),
            round_trip=max(_a_round(paired, "wire"), 0.0),
            alone_trip=max(_a_round(alone, "wire"), 0.0),
        )

    def verify_pass(self, tokens: int) -> float:
        """t_p of so many tokens."""
        return self.pass_of_one + self.pass_token * (tokens - 1)

    def rate(self, name: str, added: float, hit_rate: float, tokens: float) -> float:
        """Tokens per second of an arm, `added` seconds of round trip further away [L Thm 3.8, with the network]."""
        if name == ALONE:  # one request for all tokens: its verdicts stream, and the way is paid once
            return 1 / (self.pass_of_one + self.alone_trip + added / tokens)
        trip, one, gamma = self.round_trip + added, self.pass_of_one, self.gamma
        if name == "adaptive":
            gamma = best_gamma(
                self.alpha, self.draft_step / one, trip / one, lambda width: self.verify_pass(width) / one
            )
            if not gamma:
                return self.rate(ALONE, added, 0.0, tokens)
        drafting = self.draft_step * (1 - hit_rate)  # where the outcome was in the cache nobody waits for the draft
        return tokens_per_second(self.alpha, gamma, drafting, self.verify_pass(gamma + 1), trip)


def _a_round(runs: Sequence[Json], name: str) -> float:
    """The mean over rounds of a count, or of the seconds of a phase."""
    return sum(run[name] if name in run else run["phases"][name] for run in runs) / harness.total(runs, "rounds")


def _pass(runs: Sequence[Json]) -> float:
    return sum(_a_round(runs, phase) for phase in ("queue", "forward", "verify"))


def summarise(bench: Bench) -> Json:
    """One row for each delay and arm."""
    by_arm = {
        delay: harness.grouped([run for run in runs if run["arm"] != SHALLOW], "arm")
        for delay, runs in harness.grouped(bench.runs, "delay").items()
    }
    least = min(by_arm)
    shallow = [run for run in bench.runs if run["arm"] == SHALLOW]
    foretell = Foretold.of(by_arm[least]["sequential"], by_arm[least][ALONE], shallow, bench.given.gamma)
    return {
        "rows": [
            _row(delay, name, of_delay[name], harness.rates(of_delay[ALONE]), foretell, (delay - least) / 1e3)
            for delay, of_delay in by_arm.items()
            for name in arms(0)
        ]
    }


def _row(delay: float, name: str, runs: Sequence[Json], alone: Json, foretold: Foretold, added: float) -> Json:
    rates, queries = harness.rates(runs), harness.total(runs, "queries")
    hit_rate = harness.total(runs, "hits") / queries if queries else 0.0
    tokens = harness.total(runs, "tokens") / len(rates)
    return {
        "added_ms": delay,
        "arm": name,
        "tokens_per_second": median(rates.values()),
        **harness.ratio(rates, alone),
        "foretold_ratio": foretold.rate(name, added, hit_rate, tokens) / foretold.rate(ALONE, added, 0.0, tokens),
        "alpha": harness.alpha_of(runs),
        "tokens_per_round": _a_round(runs, "tokens"),
        "gamma": _a_round(runs, "drafted"),
        "wire_ms": 1e3 * _a_round(runs, "wire"),
        "hit_rate": hit_rate,
    }


def table(document: Json) -> str:
    """The rows."""
    rows = [
        [
            f"{row['added_ms']:g}",
            row["arm"],
            number(row["tokens_per_second"], 1),
            harness.between(row),
            number(row["foretold_ratio"]),
            number(row["alpha"]),
            number(row["gamma"], 1),
            number(row["tokens_per_round"]),
            number(row["wire_ms"]),
        ]
        for row in document["rows"]
    ]
    return harness.table(
        ["added, ms", "arm", "tokens/s", "to none", "foretold", "α", "γ", "tokens/round", "wire, ms"], rows
    )


def draw(document: Json, path: Path) -> None:
    """A line for each arm, whole where measured and dashed where foretold."""
    rows = document["rows"]
    delays = sorted({row["added_ms"] for row in rows})
    colours = (plots.GREY, plots.BLUE, plots.ORANGE, plots.VIOLET)
    with plots.picture(path, 1, 1, size=(6.6, 4.0), note=f"{plots.caption(document)}. Dashed: foretold.") as panels:
        panel = panels[0][0]
        for colour, (arm, own) in zip(colours, harness.grouped(rows, "arm").items(), strict=False):
            at = [delays.index(row["added_ms"]) for row in own]
            ratios = [row["ratio"] for row in own]
            errors = [[abs(row["ratio"] - row["ratio_range"][end]) for row in own] for end in (0, 1)]
            panel.errorbar(at, ratios, yerr=errors, marker="o", markersize=4, capsize=2, color=colour, label=arm)
            foretold = [(x, row["foretold_ratio"]) for x, row in zip(at, own, strict=True)]
            plots.line(panel, foretold, linestyle="--", linewidth=1, color=colour)
        panel.set_xticks(range(len(delays)), [f"{delay:g}" for delay in delays])
        panel.set_xlabel("added round trip between draft and verifier, ms")
        panel.set_ylabel("tokens/s, to the target alone")


if __name__ == "__main__":
    sys.exit(main())
