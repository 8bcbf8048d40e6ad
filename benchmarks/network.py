"""What distance between draft and verifier costs: tokens per second by added round-trip time, and what is foretold.

    python -m benchmarks.network [--quick] [--target DIR] [--draft DIR] [--delays MS ...] [--output FILE]

Two services on this machine, and between them a proxy that holds every byte back for half of the added round trip. All
arms write the same texts (rule `coupled`, one seed a prompt), in turns, at each delay in turn, so that whatever else
the machine does falls on all. What counts is the ratio to the target alone (drafter `none`) in the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.arguments import pair_parser
from outrider.cli.processes import ServiceProcess, halves, service_environment, terminated_as_interrupted
from outrider.client import Client, Completion
from outrider.theory import best_gamma, tokens_per_second
from tests.proxy import Proxy

RESULT = Path(__file__).parent / "results" / "network.json"
DELAYS_MS = (0.0, 1.0, 5.0, 20.0, 50.0)
ALONE = "none"
START_TIMEOUT_S = 300.0
# It takes proposals of two lengths to tell what a token more costs the target's pass.
_SHORT_GAMMA = 1

Json = dict[str, Any]


def arms(gamma: int) -> dict[str, Json]:
    """The arms by name."""
    return {
        ALONE: {"drafter": "none"},
        "sequential": {"gamma": gamma, "outcome_cache": False},
        "outcome cache": {"gamma": gamma, "outcome_cache": True},
        "adaptive": {"speculation": "adaptive", "outcome_cache": False},
    }


@dataclass
class Tally:
    """What one arm did at one delay: `rates` are tokens per second, one for each turn."""

    rates: list[float] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    judged_alpha: float = 0.0  # the sum of α times drafted tokens
    draft_s: float = 0.0
    verdict_s: float = 0.0
    pass_s: float = 0.0  # at the verifier: queue, forward, verification
    hits: int = 0
    queries: int = 0

    def turn(self, done: Sequence[Completion]) -> None:
        """Takes in one turn: every prompt once."""
        seconds = sum(each.timings.total_us for each in done) / 1e6
        self.rates.append(sum(len(each.token_ids) for each in done) / seconds)
        for each in done:
            told, times = each.statistics, each.timings
            self.tokens += len(each.token_ids)
            self.rounds += told.num_rounds
            self.drafts += told.num_drafts
            self.drafted += told.num_draft_tokens
            self.judged_alpha += told.alpha * told.num_draft_tokens
            self.draft_s += times.draft_us / 1e6
            self.verdict_s += times.verdict_us / 1e6
            self.pass_s += (times.queue_us + times.forward_us + times.verify_us) / 1e6
            self.hits += getattr(told, "num_outcome_cache_hits", 0)
            self.queries += getattr(told, "num_outcome_cache_queries", 0)

    @property
    def wire_s(self) -> float:
        """What a round spends on the way."""
        return (self.verdict_s - self.pass_s) / max(self.rounds, 1)


def measure(
    client: Client,
    proxy: Proxy,
    prompts: Sequence[str],
    *,
    gamma: int,
    delays_ms: Sequence[float],
    tokens: int,
    turns: int,
    progress: Any = sys.stderr,
) -> list[Json]:
    """One row for each delay and arm."""
    named = list(arms(gamma).items())
    tallies = {(delay, name): Tally() for delay in delays_ms for name, _ in named}
    shallow = Tally()  # one token a proposal, for what the target's pass costs by its width
    for turn in range(-1, turns):  # the first warms up
        for delay in delays_ms:
            proxy.delay(delay / 2e3)
            for name, options in _rotated(named, turn):
                done = _write_all(client, prompts, tokens, options)
                if turn >= 0:
                    tallies[delay, name].turn(done)
        proxy.delay(0.0)
        if turn >= 0:
            shallow.turn(_write_all(client, prompts, tokens, {"gamma": _SHORT_GAMMA}))
        print(f"turn {turn + 1} of {turns}", file=progress)
    foretell = Foretold.of(tallies[min(delays_ms), "sequential"], tallies[min(delays_ms), ALONE], shallow, gamma)
    return [
        _row(delay, name, tally, tallies[delay, ALONE], foretell, delay - min(delays_ms))
        for (delay, name), tally in tallies.items()
    ]


def _rotated(named: list[tuple[str, Json]], turn: int) -> Iterable[tuple[str, Json]]:
    first = turn % len(named)  # each arm begins in turn
    return named[first:] + named[:first]


def _write_all(client: Client, prompts: Sequence[str], tokens: int, options: Json) -> list[Completion]:
    law: Json = {"temperature": 1.0, "rule": "coupled", "max_new_tokens": tokens, "ignore_eos": True}
    return [client.complete(prompt, seed=seed, **law, **options) for seed, prompt in enumerate(prompts)]


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
    def of(cls, paired: Tally, alone: Tally, shallow: Tally, gamma: int) -> Foretold:
        """From what three arms did."""
        wide, narrow = paired.pass_s / paired.rounds, shallow.pass_s / shallow.rounds
        width = paired.drafted / paired.rounds - shallow.drafted / shallow.rounds
        return cls(
            alpha=min(paired.judged_alpha / paired.drafted, 1.0),
            gamma=gamma,
            draft_step=paired.draft_s / paired.drafted,
            pass_of_one=alone.pass_s / alone.rounds,
            pass_token=max((wide - narrow) / width, 0.0) if width > 0 else 0.0,
            round_trip=max(paired.wire_s, 0.0),
            alone_trip=max(alone.wire_s, 0.0),
        )

    def verify_pass(self, tokens: int) -> float:
        """t_p of so many tokens."""
        return self.pass_of_one + self.pass_token * (tokens - 1)

    def rate(self, name: str, added: float, hit_rate: float, tokens: float) -> float:
        """Tokens per second of an arm, `added` seconds of round trip further away [L Thm 3.8, with the network]."""
        if name == ALONE:  # one request for all tokens: its verdicts stream, and the way is paid once
            return 1 / (self.pass_of_one + self.alone_trip + added / tokens)
        trip = self.round_trip + added
        gamma = self.gamma
        if name == "adaptive":
            gamma = best_gamma(
                self.alpha,
                self.draft_step / self.pass_of_one,
                trip / self.pass_of_one,
                lambda width: self.verify_pass(width) / self.pass_of_one,
            )
            if not gamma:
                return self.rate(ALONE, added, 0.0, tokens)
        drafting = self.draft_step * (1 - hit_rate)  # where the outcome was in the cache nobody waits for the draft
        return tokens_per_second(self.alpha, gamma, drafting, self.verify_pass(gamma + 1), trip)


def _row(delay: float, name: str, tally: Tally, alone: Tally, foretold: Foretold, added_ms: float) -> Json:
    ratios = [own / other for own, other in zip(tally.rates, alone.rates, strict=True)]
    hit_rate = tally.hits / tally.queries if tally.queries else 0.0
    tokens = tally.tokens / len(tally.rates)
    base = foretold.rate(ALONE, added_ms / 1e3, 0.0, tokens)
    return {
        "added_ms": delay,
        "arm": name,
        "tokens_per_second": round(statistics.median(tally.rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "foretold_ratio": round(foretold.rate(name, added_ms / 1e3, hit_rate, tokens) / base, 3),
        "alpha": round(tally.judged_alpha / tally.drafted, 3) if tally.drafted else None,
        "tokens_per_round": round(tally.tokens / tally.rounds, 2),
        "gamma": round(tally.drafted / tally.drafts, 2) if tally.drafts else 0.0,
        "wire_ms": round(tally.wire_s * 1e3, 2),
        "hit_rate": round(hit_rate, 3),
    }


def table(rows: Sequence[Json]) -> str:
    """The rows for people."""
    lines = [
        "| added, ms | arm | tokens/s | to none | least | most | foretold | α | γ | tokens/round | wire, ms |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        low, high = row["ratio_range"]
        alpha = "–" if row["alpha"] is None else f"{row['alpha']:.2f}"
        lines.append(
            f"| {row['added_ms']:g} | {row['arm']} | {row['tokens_per_second']:.1f} | {row['ratio']:.2f} | {low:.2f} "
            f"| {high:.2f} | {row['foretold_ratio']:.2f} | {alpha} | {row['gamma']:.1f} "
            f"| {row['tokens_per_round']:.2f} | {row['wire_ms']:.2f} |"
        )
    return "\n".join(lines)


@contextmanager
def services(target: Path, draft: Path, dtype: str) -> Iterator[tuple[Client, Proxy]]:
    """Both, each on its own half of the processors, and the proxy between them."""
    first, second = halves(1) or (None, None)
    flags = ["--listen", "127.0.0.1:0", "--device", "cpu", "--dtype", dtype, "--threads", "1"]
    environment = service_environment(1)
    with (
        ServiceProcess.start(
            ["verifier_service", "--model", str(target), *flags], env=environment, cores=first
        ) as verifier,
        Proxy(verifier.address) as proxy,
        ServiceProcess.start(
            ["draft_service", "--model", str(draft), "--verifier", proxy.address, *flags], env=environment, cores=second
        ) as drafts,
    ):
        for service in (verifier, drafts):
            service.wait_healthy(START_TIMEOUT_S)
        with Client(drafts.address) as client:
            yield client, proxy


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = pair_parser("benchmarks.network", __doc__ or "", quick="two delays, one prompt, one turn")
    parser.add_argument("--delays", type=float, nargs="+", default=list(DELAYS_MS), help="added round trips, in ms")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args(given)
    if asked.quick:
        asked.delays, asked.prompts, asked.turns, asked.tokens = [0.0, 20.0], 1, 1, 24
    prompts = _prompts(asked)
    loads = [machine.load_average()]
    with terminated_as_interrupted(), services(asked.target, asked.draft, asked.dtype) as (client, proxy):
        rows = measure(
            client, proxy, prompts, gamma=asked.gamma, delays_ms=asked.delays, tokens=asked.tokens, turns=asked.turns
        )
    loads.append(machine.load_average())
    document = {
        "command": machine.command("benchmarks.network", given),
        "machine": machine.describe(),
        "load_average": loads,
        "settings": {name: getattr(asked, name) for name in ("gamma", "tokens", "turns", "dtype", "prompts")},
        "rows": rows,
    }
    print(table(rows), json.dumps(document, ensure_ascii=False), sep="\n\n")
    output = asked.output or (None if asked.quick else RESULT)
    if output is not None:
        from benchmarks.network_picture import draw  # not where nothing is drawn: matplotlib is an extra

        output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draw(document, output.with_suffix(".png"))
    return 0


def _prompts(asked: argparse.Namespace) -> list[str]:
    lines = asked.prompts_file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[: asked.prompts]]


if __name__ == "__main__":
    sys.exit(main())
