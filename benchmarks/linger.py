"""What holding passes back is worth at a verifier: rounds per second and sequences per pass, by streams at once.

One verifier for each setting of `--max-linger`, all up together; they take turns, so that whatever else the machine
does falls on all. The drafts are elsewhere, as they should be: each stream is a `Verify` stream whose next proposal
comes a set time after the verdict, give or take a fifth.

    python -m benchmarks.linger --output benchmarks/results/linger-demo.json     about two minutes
    python -m benchmarks.deepen --factor 6 models/demo/target OUT
    python -m benchmarks.linger --target OUT --output benchmarks/results/linger-deepened.json
    python -m benchmarks.linger --quick                                          does it work at all
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from benchmarks import harness, plots
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.outrider_contender import VerifyStream, await_
from outrider.cli.processes import ServiceProcess, service_environment, terminated_as_interrupted
from protos.outrider.v1 import sampling_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

PROMPT = [5, 6, 7, 8]
MAX_NEW_TOKENS = 900


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = harness.parser("linger", __doc__, quick="two streams, one short turn")
    parser.add_argument("--linger", type=float, nargs="+", default=[20.0], help="milliseconds to compare with none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 8, 16], help="at once")
    parser.add_argument(
        "--turnaround", type=float, default=2.0, help="milliseconds from a verdict to the next proposal"
    )
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--repetitions", type=int, default=7)
    few = {"streams": [2], "seconds": 0.3, "repetitions": 1}
    return harness.run("linger", harness.parse(parser, arguments, few), measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    """Every setting at every number of streams, in turns."""
    given = bench.given
    common = {
        "--listen": "127.0.0.1:0", "--device": "cpu", "--threads": 1, "--model": given.target,
        "--max-sequences": max(given.streams),
    }  # fmt: skip
    flags = [str(part) for flag in common.items() for part in flag]
    with terminated_as_interrupted(), ExitStack() as stack:
        verifiers = {
            ms: stack.enter_context(
                ServiceProcess.start(["verifier_service", "--max-linger", str(ms), *flags], env=service_environment(1))
            )
            for ms in dict.fromkeys((0.0, *given.linger))
        }
        for verifier in verifiers.values():
            verifier.wait_healthy(300)
        await_(_turns(bench, {ms: verifier.address for ms, verifier in verifiers.items()}))


async def _turns(bench: Bench, addresses: dict[float, str]) -> None:
    async with AsyncExitStack() as stack:
        stubs = {
            ms: VerifierServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(at)))
            for ms, at in addresses.items()
        }
        for repetition in range(-1, bench.given.repetitions):  # the first warms up
            for streams in bench.given.streams:
                for ms, stub in harness.rotated(stubs.items(), repetition):
                    keys = {"streams": streams, "linger_ms": ms, "repetition": repetition}
                    if not bench.has(**keys):
                        found = await _turn(stub, streams, bench.given)
                        if repetition >= 0:
                            bench.add({**keys, **found})
            tell(f"turn {repetition + 1} of {bench.given.repetitions}")


async def _turn(stub: Any, streams: int, given: Any) -> Json:
    """All streams at once."""
    rule = sampling_pb2.ACCEPTANCE_RULE_COUPLED
    opened = [
        await VerifyStream.open(stub, "linger", PROMPT, MAX_NEW_TOKENS, temperature=1, seed=nth, rule=rule)
        for nth in range(streams)
    ]
    verdicts: list[Any] = []
    begin = time.perf_counter()
    until = begin + given.seconds
    await asyncio.gather(*(_play(each, random.Random(nth), given, until, verdicts) for nth, each in enumerate(opened)))
    return {
        "rounds_per_second": len(verdicts) / (time.perf_counter() - begin),
        "passes": sum(1 / verdict.timings.pass_sequences for verdict in verdicts),
        "rounds": len(verdicts),
        "pass_fixed_us": verdicts[-1].load.pass_fixed_us,
    }


async def _play(stream: VerifyStream, chance: random.Random, given: Any, until: float, verdicts: list[Any]) -> None:
    """One sequence, proposal by proposal, until the time is up. Under `coupled` a proposal is tokens alone."""
    while stream.length - len(PROMPT) < MAX_NEW_TOKENS - given.gamma - 1:
        await stream.propose([7] * given.gamma, coupled=True)
        verdict = await stream.verdict()
        stream.commit(verdict.token_ids)
        verdicts.append(verdict)
        if time.perf_counter() > until:
            break
        await asyncio.sleep(given.turnaround / 1e3 * (1 + chance.uniform(-0.2, 0.2)))
    stream.cancel()


def summarise(bench: Bench) -> Json:
    """One row for each number of streams and setting; ratios are to no linger in the same repetition."""
    rows = []
    for streams, runs in harness.grouped(bench.runs, "streams").items():
        by_setting = harness.grouped(runs, "linger_ms")
        rates = {
            ms: {run["repetition"]: run["rounds_per_second"] for run in own} for ms, own in sorted(by_setting.items())
        }
        for ms, own in rates.items():
            some = by_setting[ms]
            rows.append(
                {
                    "streams": streams,
                    "linger_ms": ms,
                    "rounds_per_second": median(own.values()),
                    **harness.ratio(own, rates[0.0]),
                    "sequences_per_pass": harness.total(some, "rounds") / harness.total(some, "passes"),
                    "pass_fixed_ms": median(run["pass_fixed_us"] for run in some) / 1e3,
                }
            )
    return {"rows": rows}


def table(document: Json) -> str:
    """The rows."""
    rows = [
        [
            row["streams"],
            f"{row['linger_ms']:g}",
            number(row["rounds_per_second"], 0),
            harness.between(row),
            number(row["sequences_per_pass"], 1),
            number(row["pass_fixed_ms"], 1),
        ]
        for row in document["rows"]
    ]
    return harness.table(["streams", "linger, ms", "rounds/s", "to none", "sequences/pass", "fixed cost, ms"], rows)


def draw(document: Json, path: Path) -> None:
    """Rounds a second to those without linger, and sequences a pass, by streams."""
    by_setting = harness.grouped(document["rows"], "linger_ms")
    with plots.picture(path, 1, 2, size=(4.2, 3.4), note=plots.caption(document)) as panels:
        for panel, name in zip(panels[0], ("ratio", "sequences_per_pass"), strict=True):
            for colour, (ms, rows) in zip(plots.COLOURS, by_setting.items(), strict=False):
                points = [(row["streams"], row[name]) for row in rows]
                plots.line(panel, points, marker="o", color=colour, label=f"linger {ms:g} ms")
            plots.powers_of_two(panel, sorted({row["streams"] for row in document["rows"]}))
            panel.set_ylim(0, 1.1 * max(row[name] for row in document["rows"]))
            panel.set_xlabel("streams", fontsize=8)
        panels[0][0].set_ylabel("rounds/s, to no linger")
        panels[0][1].set_ylabel("sequences a pass")


if __name__ == "__main__":
    sys.exit(main())
