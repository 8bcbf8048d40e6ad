"""What the verifier's engine itself costs: the share of its time that is neither forward nor verify.

A share of the engine's time means something only while the engine always has work: time that it waits for a draft is
not its own. So the rounds of real texts are played again, straight at the verifier. First the pair writes one text for
each stream at temperature 0 and reports its rounds; then the same proposals go out once more over as many `Verify`
streams, each several ahead of its verdicts: at temperature 0 they are known beforehand. One more sequence writes by
`Decode` in the same passes. Its verdicts tell, by the verifier's own clock, how long forward and verify of each pass
took, and how long it had been owed its next token when the pass began: all that the engine did in between. Of the
target alone each stream is such a sequence.

What no verdict tells is the time from the end of `verify` to the commit of the sequence that is told; of the target
alone it is one commit, as the figures are those of the stream that is committed first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import grpc

from benchmarks.contenders import Task
from benchmarks.loops import run
from benchmarks.services import RunningPair
from outrider.client import AsyncClient, Chunk, Round
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_TIMEOUT_S = 600.0
LEAST_PASSES = 5
"""With all sequences in them, for a share to count."""
_DECODED = 60  # in one go: a sequence 64 verdicts ahead of its reader is paused

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass, as a verdict of `Decode` tells it, in seconds: `outside` lies between it and the one before."""

    outside: float
    forward: float
    verify: float
    sequences: int
    tokens: int


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
        ValueError: there were too few passes with all sequences in them; longer texts help.
    """
    return run(_measured(pair, tasks, gamma))


async def _measured(pair: RunningPair, tasks: Sequence[Task], gamma: int | None) -> Json:
    async with grpc.aio.insecure_channel(pair.verifier.address) as channel:
        stub = VerifierServiceStub(channel)
        if gamma == 0:
            streams = [await _Stream.open(stub, f"decode-{number}", task) for number, task in enumerate(tasks)]
            told = await asyncio.gather(*(_decode(stream, min(_DECODED, stream.task.new_tokens)) for stream in streams))
            for stream in streams:
                stream.cancel()
            return max((figures(passes, len(tasks)) for passes in told), key=lambda found: found["share"])
        async with AsyncClient(pair.draft.address, timeout=_TIMEOUT_S) as client:
            scripts = await asyncio.gather(*(_written(client, task, gamma) for task in tasks))
        found = await stub.GetModel(verifier_service_pb2.VerifierServiceGetModelRequest())
        return figures(await _replayed(stub, scripts, found.model.limits.max_outstanding), len(tasks) + 1)


def figures(passes: Sequence[Pass], sequences: int) -> Json:
    """The engine's share, from the passes that held so many sequences.

    Raises:
        ValueError: there were fewer than `LEAST_PASSES` of them.
    """
    # The first says how long its Decode took to arrive at a pass.
    counted = [each for each in passes[1:] if each.sequences == sequences]
    if len(counted) < LEAST_PASSES:
        raise ValueError(f"{len(counted)} passes held all {sequences} sequences; at least {LEAST_PASSES} must")
    outside = sum(each.outside for each in counted)
    inside = sum(each.forward + each.verify for each in counted)
    return {
        "share": outside / (outside + inside),
        "sequences": sequences,
        "passes": len(counted),
        "tokens_per_pass": mean(each.tokens for each in counted),
        "forward_us": 1e6 * mean(each.forward for each in counted),
        "verify_us": 1e6 * mean(each.verify for each in counted),
        "outside_us": 1e6 * outside / len(counted),
        "median_outside_us": 1e6 * median(each.outside for each in counted),
    }


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


async def _replayed(stub: Any, scripts: Sequence[Script], ahead: int) -> list[Pass]:
    """What a sequence that decodes saw of the passes in which the scripts were played."""
    # Opened first and then left idle for a moment, it is the first of those that the engine serves afterwards.
    observer = await _Stream.open(stub, "observer", scripts[0].task)
    streams = [await _Stream.open(stub, f"replay-{number}", each.task) for number, each in enumerate(scripts)]
    begun = [asyncio.Event() for _ in scripts]
    playing = [
        asyncio.create_task(_play(stream, script, ahead, event))
        for stream, script, event in zip(streams, scripts, begun, strict=True)
    ]
    try:
        await asyncio.gather(*(event.wait() for event in begun))
        return await _decode(observer, min(_DECODED, observer.task.new_tokens))
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        for stream in (observer, *streams):
            stream.cancel()


async def _play(stream: _Stream, script: Script, ahead: int, begun: asyncio.Event) -> None:
    """Asks for the rounds of a script, at most `ahead` before their verdicts, until one is not as foreseen."""
    room = asyncio.Semaphore(ahead)

    async def ask() -> None:
        hash_, hashed = PrefixHash(script.task.token_ids), 0
        for index, (base, drafted) in enumerate(zip(script.bases, script.drafted, strict=True)):
            await room.acquire()
            hash_.extend(script.text[hashed:base])
            hashed = base
            await stream.propose(index + 1, base, hash_.digest(), drafted)

    asking = asyncio.create_task(ask())
    try:
        for index, base in enumerate(script.bases):
            verdict = await stream.verdict()
            begun.set()
            room.release()
            end = script.bases[index + 1] if index + 1 < len(script.bases) else len(script.text)
            if tuple(verdict.token_ids) != script.text[base:end]:  # a near-tie that fell the other way
                return
    finally:
        begun.set()
        asking.cancel()


async def _decode(stream: _Stream, tokens: int) -> list[Pass]:
    """The passes in which the target alone wrote so many tokens of a sequence that holds nothing but its prompt."""
    await stream.decode(tokens)
    passes = []
    for _ in range(tokens):
        told = (await stream.verdict()).timings
        passes.append(
            Pass(
                outside=told.queue_us / 1e6,
                forward=told.forward_us / 1e6,
                verify=told.verify_us / 1e6,
                sequences=told.pass_sequences,
                tokens=told.pass_tokens,
            )
        )
    return passes


class _Stream:
    """One call of `Verify`."""

    def __init__(self, call: Any, name: str, task: Task) -> None:
        self.task = task
        self._call = call
        self._name = name

    @classmethod
    async def open(cls, stub: Any, name: str, task: Task) -> _Stream:
        """An open sequence with the task's prompt."""
        stream = cls(stub.Verify(timeout=_TIMEOUT_S), name, task)
        await stream._send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=task.token_ids,
                sampling=sampling_pb2.SamplingParams(
                    temperature=task.temperature, seed=task.seed, rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
                ),
                max_new_tokens=task.new_tokens,
                ignore_eos=True,
            )
        )
        await stream._call.read()
        return stream

    async def propose(self, round_: int, base: int, prefix_hash: bytes, drafted: Sequence[int]) -> None:
        """Asks for a round after `base` output tokens."""
        if not drafted:
            await self._send(decode=self._asked(round_, base, prefix_hash, 1))
            return
        point = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
        await self._send(
            proposal=speculation_pb2.Proposal(
                round=round_,
                base_length=len(self.task.token_ids) + base,
                prefix_hash=prefix_hash,
                token_ids=drafted,
                distributions=[point for _ in drafted],
            )
        )

    async def decode(self, tokens: int) -> None:
        """Asks for so many tokens of the target alone, after the prompt."""
        await self._send(decode=self._asked(1, 0, PrefixHash(self.task.token_ids).digest(), tokens))

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict."""
        while True:
            reply: verifier_service_pb2.VerifyResponse = await self._call.read()
            if reply.WhichOneof("kind") == "verdict":
                return reply.verdict

    def cancel(self) -> None:
        """The sequence is done with."""
        self._call.cancel()

    def _asked(self, round_: int, base: int, prefix_hash: bytes, tokens: int) -> verifier_service_pb2.Decode:
        return verifier_service_pb2.Decode(
            round=round_,
            base_length=len(self.task.token_ids) + base,
            prefix_hash=prefix_hash,
            num_tokens=tokens,
        )

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id=self._name, **kind))
