"""What holding passes back is worth at a verifier: rounds per second and sequences per pass, by streams at once.

    python -m benchmarks.linger [--linger MS ...] [--streams N ...] [--turnaround MS] [--target DIR] [--out FILE]

One verifier for each setting of `--max-linger`, all up together; they take turns, so that whatever else the machine
does falls on all. The drafts are elsewhere, as they should be: each stream is a `Verify` stream whose next proposal
comes a set time after the verdict, give or take a fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from outrider.cli.processes import ServiceProcess, service_environment, terminated_as_interrupted
from outrider.rpc.channel import open_channel
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

TARGET = Path(__file__).resolve().parent.parent / "models" / "demo" / "target"
PROMPT = [5, 6, 7, 8]
MAX_NEW_TOKENS = 900
START_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Turn:
    """What one setting did in one turn: `shares` are one over the sequences of each round's pass."""

    seconds: float = 0.0
    shares: list[float] = field(default_factory=list)
    fixed_us: float = 0.0

    @property
    def rate(self) -> float:
        """Rounds per second."""
        return len(self.shares) / self.seconds


async def stream(stub: Any, number: int, arguments: argparse.Namespace, until: float, turn: Turn) -> None:
    """One sequence, proposal by proposal, until the time is up. Under `coupled` a proposal is tokens alone."""
    chance, prefix, length, rounds = random.Random(number), PrefixHash(PROMPT), len(PROMPT), 0
    call = stub.Verify()
    sampling = sampling_pb2.SamplingParams(temperature=1, seed=number, rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=PROMPT, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, sampling=sampling
    )
    await call.write(verifier_service_pb2.VerifyRequest(sequence_id="s", open=opening))
    await call.read()
    while time.perf_counter() < until and length - len(PROMPT) < MAX_NEW_TOKENS - arguments.gamma - 1:
        proposal = speculation_pb2.Proposal(
            round=rounds + 1,
            base_length=length,
            prefix_hash=prefix.digest(),
            token_ids=[7] * arguments.gamma,
            seen_round=rounds,
        )
        await call.write(verifier_service_pb2.VerifyRequest(sequence_id="s", proposal=proposal))
        verdict = (await call.read()).verdict
        rounds += 1
        prefix.extend(verdict.token_ids)
        length += len(verdict.token_ids)
        turn.shares.append(1 / verdict.timings.pass_sequences)
        turn.fixed_us = verdict.load.pass_fixed_us
        await asyncio.sleep(arguments.turnaround / 1e3 * (1 + chance.uniform(-0.2, 0.2)))
    call.cancel()


async def one_turn(stub: Any, streams: int, arguments: argparse.Namespace) -> Turn:
    """All streams at once."""
    turn, begin = Turn(), time.perf_counter()
    until = begin + arguments.seconds
    await asyncio.gather(*(stream(stub, number, arguments, until, turn) for number in range(streams)))
    turn.seconds = time.perf_counter() - begin
    return turn


async def measure(addresses: dict[float, str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of streams and setting."""
    turns: dict[int, dict[float, list[Turn]]] = {streams: {ms: [] for ms in addresses} for streams in arguments.streams}
    async with AsyncExitStack() as stack:
        stubs = {
            ms: VerifierServiceStub(await stack.enter_async_context(open_channel(at))) for ms, at in addresses.items()
        }
        for repetition in range(-1, arguments.repetitions):  # the first warms up
            for streams, ms in _order(arguments.streams, list(stubs), repetition):
                turn = await one_turn(stubs[ms], streams, arguments)
                if repetition >= 0:
                    turns[streams][ms].append(turn)
    return [row(streams, ms, of[ms], of[0.0]) for streams, of in turns.items() for ms in of]


def _order(streams: list[int], settings: list[float], repetition: int) -> Iterable[tuple[int, float]]:
    first = repetition % len(settings)  # each setting begins in turn
    return [(number, ms) for number in streams for ms in settings[first:] + settings[:first]]


def row(streams: int, ms: float, turns: list[Turn], none: list[Turn]) -> dict[str, Any]:
    """The figures of one setting; ratios are to no linger in the same repetition."""
    return {
        "streams": streams,
        "linger_ms": ms,
        "rounds_per_second": [round(turn.rate, 1) for turn in turns],
        "ratio_to_none": [round(turn.rate / other.rate, 3) for turn, other in zip(turns, none, strict=True)],
        "sequences_per_pass": round(
            sum(len(turn.shares) for turn in turns) / sum(share for turn in turns for share in turn.shares), 2
        ),
        "pass_fixed_ms": round(statistics.median(turn.fixed_us for turn in turns) / 1e3, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [
        "| streams | linger, ms | rounds/s | to none | least | most | sequences/pass | fixed cost, ms |",
        "|---" * 8,
    ]
    for each in rows:
        rate, ratios = statistics.median(each["rounds_per_second"]), each["ratio_to_none"]
        lines.append(
            f"| {each['streams']} | {each['linger_ms']:g} | {rate:.0f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} | {max(ratios):.2f} | {each['sequences_per_pass']} | {each['pass_fixed_ms']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--linger", type=float, nargs="+", default=[20.0], help="milliseconds to compare with none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16], help="streams at once")
    parser.add_argument(
        "--turnaround", type=float, default=2.0, help="milliseconds from a verdict to the next proposal"
    )
    parser.add_argument(
        "--target", type=Path, default=TARGET, help="the target; see benchmarks.deepen for a deeper one"
    )
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file for the JSON document; default: standard output alone")
    arguments = parser.parse_args()
    common = ["--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--no-gamma-cap"]
    common += ["--model", str(arguments.target), "--max-sequences", str(max(arguments.streams))]
    with terminated_as_interrupted(), ExitStack() as stack:
        verifiers = {
            ms: stack.enter_context(
                ServiceProcess.start(["verifier_service", "--max-linger", str(ms), *common], env=service_environment(1))
            )
            for ms in dict.fromkeys((0.0, *arguments.linger))
        }
        for verifier in verifiers.values():
            verifier.wait_healthy(START_TIMEOUT_S)
        loads = [machine.load_average()]
        rows = asyncio.run(measure({ms: verifier.address for ms, verifier in verifiers.items()}, arguments))
        loads.append(machine.load_average())
    document = {
        "command": machine.command("benchmarks.linger", sys.argv[1:]),
        "machine": machine.describe(),
        "load_average": loads,
        "turnaround_ms": arguments.turnaround,
        "gamma": arguments.gamma,
        "results": rows,
    }
    print(table(rows), json.dumps(document), sep="\n\n")
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
