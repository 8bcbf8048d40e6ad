"""What the verifier's engine itself costs: the share of its wall time that is neither forward nor verify.

A share of the engine's time means something only while it always has work: time that it waits for a draft is not its
own. So the rounds of real texts are played again, straight at the verifier. First the pair writes one text for each
stream at temperature 0 and reports its rounds; then the same proposals go out once more over as many `Verify` streams,
each several ahead of its verdicts, so that after every pass the next round of every sequence is there. At temperature 0
the verdicts are known beforehand. The target alone needs no such care: a `Decode` is always owed its next token.

Each verdict tells how long the forward and the verify of its pass took. Between two verdicts of one stream lie the
passes of those in between, so what is left of the wall clock is the engine's: receiving, scheduling, packing,
committing, and whatever the service's other threads take from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import grpc

from benchmarks.contenders import Task
from benchmarks.services import RunningPair
from outrider.client import AsyncClient, Chunk, Round
from outrider.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_TIMEOUT_S = 600.0
LEAST_PASSES = 5
"""Of a stream, for its share to count."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict: when it came, what its pass took, how many were in the pass, and whether it was as foreseen."""

    at: float
    queue: float
    forward: float
    verify: float
    sequences: int
    tokens: int
    as_foreseen: bool


@dataclass(frozen=True, slots=True)
class Script:
    """What one stream will ask: rounds at known places of a known text; a round without drafts is a Decode."""

    task: Task
    text: tuple[int, ...]
    bases: tuple[int, ...]  # output tokens before each round, `[rounds]`
    drafted: tuple[tuple[int, ...], ...]  # in each, `[rounds]`


def engine_share(pair: RunningPair, tasks: Sequence[Task], gamma: int | None) -> Json:
    """The share, with γ as given, the service's own (None), or the target alone (0).

    Raises:
        ValueError: the streams had too few passes in common; longer texts help.
    """
    return asyncio.run(_measured(pair, tasks, gamma))


async def _measured(pair: RunningPair, tasks: Sequence[Task], gamma: int | None) -> Json:
    async with grpc.aio.insecure_channel(pair.verifier.address) as channel:
        stub = VerifierServiceStub(channel)
        if gamma == 0:
            verdicts = await asyncio.gather(*(_decode(stub, number, task) for number, task in enumerate(tasks)))
        else:
            async with AsyncClient(pair.draft.address, timeout=_TIMEOUT_S) as client:
                scripts = await asyncio.gather(*(_written(client, task, gamma) for task in tasks))
            limit = await stub.GetModel(verifier_service_pb2.VerifierServiceGetModelRequest())
            ahead = limit.model.limits.max_outstanding
            verdicts = await asyncio.gather(
                *(_replay(stub, number, script, ahead) for number, script in enumerate(scripts))
            )
    return figures(verdicts)


def figures(verdicts: Sequence[Sequence[Judged]]) -> Json:
    """The engine's share from the verdicts of each stream, in order of arrival.

    What counts is the time in which all streams were served: from the last first verdict to the first last one. A
    stream ends, too, where a verdict was not as foreseen.

    Raises:
        ValueError: fewer than `LEAST_PASSES` of a stream lie in that time.
    """
    foreseen = [_foreseen(stream) for stream in verdicts]
    begin = max(stream[0].at if stream else 0.0 for stream in foreseen)
    end = min(stream[-1].at if stream else 0.0 for stream in foreseen)
    shares, passes = [], []
    for stream in foreseen:
        within = [verdict for verdict in stream if begin <= verdict.at <= end]
        if len(within) < LEAST_PASSES + 1:
            raise ValueError(
                f"a stream had {max(0, len(within) - 1)} passes in common with the others; at least {LEAST_PASSES}"
            )
        counted = within[1:]
        wall = within[-1].at - within[0].at
        shares.append(1.0 - sum(verdict.forward + verdict.verify for verdict in counted) / wall)
        passes.append((counted, wall))
    counted = [verdict for stream, _ in passes for verdict in stream]
    return {
        "share": mean(shares),
        "share_range": [min(shares), max(shares)],
        "streams": len(verdicts),
        "passes": min(len(stream) for stream, _ in passes),
        "sequences_per_pass": mean(verdict.sequences for verdict in counted),
        "tokens_per_pass": mean(verdict.tokens for verdict in counted),
        "pass_us": 1e6 * mean(wall / len(stream) for stream, wall in passes),
        "forward_us": 1e6 * mean(verdict.forward for verdict in counted),
        "verify_us": 1e6 * mean(verdict.verify for verdict in counted),
        "outside_us": 1e6 * mean(wall / len(stream) * share for (stream, wall), share in zip(passes, shares, strict=True)),
        "median_forward_us": 1e6 * median(verdict.forward for verdict in counted),
    }


def _foreseen(verdicts: Sequence[Judged]) -> list[Judged]:
    kept: list[Judged] = []
    for verdict in verdicts:
        if not verdict.as_foreseen:
            break
        kept.append(verdict)
    return kept


async def _written(client: AsyncClient, task: Task, gamma: int | None) -> Script:
    """A text of the pair, with its rounds."""
    text: list[int] = []
    rounds: list[Round] = []
    options: dict[str, Any] = {} if gamma is None else {"gamma": gamma}
    async for event in client.generate(
        list(task.token_ids),
        max_new_tokens=task.new_tokens,
        ignore_eos=True,
        temperature=task.temperature,
        seed=task.seed,
        rule="tokenwise",
        report_rounds=True,
        **options,
    ):
        if isinstance(event, Chunk):
            text += event.token_ids
            rounds += event.rounds
    return Script(
        task=task,
        text=tuple(text),
        bases=tuple(each.output_length for each in rounds),
        drafted=tuple(each.drafted_token_ids for each in rounds),
    )


async def _replay(stub: Any, number: int, script: Script, ahead: int) -> list[Judged]:
    """Asks for the rounds of a script, at most `ahead` before their verdicts."""
    task = script.task
    stream = await _Stream.open(stub, f"engine-{number}", task)
    room = asyncio.Semaphore(ahead)
    hash_, hashed = PrefixHash(task.token_ids), 0

    async def ask() -> None:
        nonlocal hashed
        for index, (base, drafted) in enumerate(zip(script.bases, script.drafted, strict=True)):
            await room.acquire()
            hash_.extend(script.text[hashed:base])
            hashed = base
            head: Json = {
                "round": index + 1,
                "base_length": len(task.token_ids) + base,
                "prefix_hash": hash_.digest(),
            }
            if drafted:
                point = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
                await stream.send(
                    proposal=speculation_pb2.Proposal(
                        **head, token_ids=drafted, distributions=[point for _ in drafted]
                    )
                )
            else:
                await stream.send(decode=verifier_service_pb2.Decode(**head, num_tokens=1))

    asking = asyncio.create_task(ask())
    judged: list[Judged] = []
    try:
        for index, base in enumerate(script.bases):
            verdict = await stream.verdict()
            room.release()
            end = script.bases[index + 1] if index + 1 < len(script.bases) else len(script.text)
            judged.append(_judged(verdict, tuple(verdict.token_ids) == script.text[base:end]))
            if not judged[-1].as_foreseen:
                break
    finally:
        asking.cancel()
        stream.cancel()
    return judged


async def _decode(stub: Any, number: int, task: Task) -> list[Judged]:
    """The target alone."""
    stream = await _Stream.open(stub, f"engine-{number}", task)
    await stream.send(
        decode=verifier_service_pb2.Decode(
            round=1,
            base_length=len(task.token_ids),
            prefix_hash=PrefixHash(task.token_ids).digest(),
            num_tokens=task.new_tokens,
        )
    )
    judged = [_judged(await stream.verdict(), as_foreseen=True) for _ in range(task.new_tokens)]
    stream.cancel()
    return judged


def _judged(verdict: speculation_pb2.Verdict, as_foreseen: bool) -> Judged:
    told = verdict.timings
    return Judged(
        at=time.perf_counter(),
        queue=told.queue_us / 1e6,
        forward=told.forward_us / 1e6,
        verify=told.verify_us / 1e6,
        sequences=told.pass_sequences,
        tokens=told.pass_tokens,
        as_foreseen=as_foreseen,
    )


class _Stream:
    """One call of `Verify`."""

    def __init__(self, call: Any, name: str) -> None:
        self._call = call
        self._name = name

    @classmethod
    async def open(cls, stub: Any, name: str, task: Task) -> _Stream:
        """An open sequence with the task's prompt."""
        stream = cls(stub.Verify(timeout=_TIMEOUT_S), name)
        await stream.send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=task.token_ids,
                sampling=sampling_pb2.SamplingParams(
                    temperature=task.temperature, seed=task.seed, rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
                ),
                max_new_tokens=task.new_tokens,
                ignore_eos=True,
            )
        )
        return stream

    async def send(self, **kind: Any) -> None:
        """Sends one message."""
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id=self._name, **kind))

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict."""
        while True:
            reply: verifier_service_pb2.VerifyResponse = await self._call.read()
            if reply.WhichOneof("kind") == "verdict":
                return reply.verdict

    def cancel(self) -> None:
        """The sequence is done with."""
        self._call.cancel()
