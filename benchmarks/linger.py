"""The gain of delayed steps at a verifier: rounds per second and sequences per step, by streams at once.

One verifier without and one with `--max-linger`, in turns. Each stream is a `Verify` stream whose next proposal comes a
set time after the verdict, give or take a fifth. The demo target, and the same six times as deep.
"""

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
from benchmarks.harness import Bench, Json, number, progress
from benchmarks.services import VerifyStream, await_, models_of, verifier
from protos.outrider.v1 import sampling_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

PROMPT = [5, 6, 7, 8]
MAX_NEW_TOKENS = 900


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("linger", __doc__, quick="two streams, one short turn")
    harness.target_options(parser, factor=6)
    # Seconds of a turn; milliseconds of lingering, and between a verdict and the next proposal.
    parser.set_defaults(streams=[1, 8, 16], seconds=1.0, repetitions=5, linger=20.0, turnaround=2.0, gamma=2)
    few = {"only": "demo", "streams": [2], "seconds": 0.1, "repetitions": 1}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("target", "streams"), figures)
    return harness.run("linger", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    for models in models_of(bench):
        with ExitStack() as stack:
            addresses = {
                ms: stack.enter_context(
                    verifier(models.target, "--max-linger", str(ms), max_sequences=max(given.streams))
                )
                for ms in (0.0, given.linger)
            }
            await_(_turns(bench, models.name, addresses))


async def _turns(bench: Bench, target: str, addresses: dict[float, str]) -> None:
    async with AsyncExitStack() as stack:
        stubs = {
            ms: VerifierServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(at)))
            for ms, at in addresses.items()
        }
        for repetition in range(-1, bench.given.repetitions):  # the first warms up
            for streams in bench.given.streams:
                for ms, stub in harness.shuffled(stubs.items(), repetition, streams):
                    keys = {"target": target, "streams": streams, "linger_ms": ms, "repetition": repetition}
                    if not bench.has(**keys):
                        found = await _turn(stub, streams, bench.given)
                        if repetition >= 0:
                            bench.add({**keys, **found})
            progress(f"{target}: turn {repetition + 1} of {bench.given.repetitions}")


async def _turn(stub: Any, streams: int, given: Any) -> Json:
    rule = sampling_pb2.ACCEPTANCE_RULE_COUPLED
    opened = [
        await VerifyStream.open(stub, PROMPT, MAX_NEW_TOKENS, temperature=1, seed=nth, rule=rule)
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
    """One sequence, until the time is up. Under `coupled` a proposal is tokens alone."""
    while stream.length - len(PROMPT) < MAX_NEW_TOKENS - given.gamma - 1:
        await stream.propose([7] * given.gamma, coupled=True)
        verdict = await stream.verdict()
        stream.commit(verdict.token_ids)
        verdicts.append(verdict)
        if time.perf_counter() > until:
            break
        await asyncio.sleep(given.turnaround / 1e3 * (1 + chance.uniform(-0.2, 0.2)))
    stream.cancel()


def figures(runs: Sequence[Json]) -> Json:
    """Both settings at one number of streams; ratios are to no linger in the same repetition."""
    by_setting = dict(sorted(harness.grouped(runs, "linger_ms").items()))
    rates = {ms: harness.by_repetition(own, "rounds_per_second") for ms, own in by_setting.items()}
    return {
        f"{ms:g}": {
            "rounds_per_second": median(rates[ms].values()),
            **harness.ratio(rates[ms], rates[0.0]),
            "sequences_per_pass": harness.total(own, "rounds") / harness.total(own, "passes"),
            "pass_fixed_ms": median(run["pass_fixed_us"] for run in own) / 1e3,
        }
        for ms, own in by_setting.items()
    }


def table(document: Json) -> str:
    columns: harness.Columns = {
        "rounds/s": lambda found: number(found["rounds_per_second"], 0),
        "to none": harness.between,
        "sequences/pass": lambda found: number(found["sequences_per_pass"], 1),
        "fixed cost, ms": lambda found: number(found["pass_fixed_ms"], 1),
    }
    return harness.summary_table(document["summary"], ["target", "streams", "linger, ms"], columns)


def draw(document: Json, path: Path) -> None:
    plots.comparison(
        path,
        document,
        [
            (f"{target} target", f"{streams} streams", found)
            for (target, streams), found in harness.flat(document["summary"], 2)
        ],
        label="rounds/s, to no linger",
        note=". Bars: linger in ms. White: sequences a pass.",
        text=lambda found: f"{found['sequences_per_pass']:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
