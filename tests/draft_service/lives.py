"""Lives of sequences at verifiers: opened, sent the same rounds whatever befalls them, and read to the end.

The rounds (proposals with their laws, or tokens of the target's own) follow from the base length alone, so what an
undisturbed sequence commits is what every other one must.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from draft_service.failover import FailoverBudget, FailoverStream, Verifiers
from draft_service.metrics import FailoverMetrics
from draft_service.replicas import Replicas
from draft_service.sequence import Sequence
from kernels.verify import Rule
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.draft_service.records import record

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 36
SILENCE_S = 1.5
PATIENT_S = 20.0
"""Silence that no verifier keeps but one that is stalled on purpose."""

TIMEOUT_S = 60.0
LIVES = 2  # under each rule, and as many more as it takes to lose that many verifiers
MAX_BYTES = 1 << 20


@dataclass
class Switches(FailoverMetrics):
    """Keeps what failover would show."""

    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def switched(self, reason: str) -> None:
        self.reasons.append(reason)

    def paused(self, seconds: float) -> None:
        self.seconds += seconds


@asynccontextmanager
async def matched(
    names: list[str],
    switches: Switches | None = None,
    *,
    patience: float = 10.0,
    burst: int = 64,
    silence: float = SILENCE_S,
) -> AsyncIterator[Verifiers]:
    """The verifiers at these addresses, once each of them is known."""
    replicas = Replicas(names, max_message_bytes=MAX_BYTES, silence=silence, look_again=60.0)
    async with grpc.aio.insecure_channel(names[0]) as channel:
        stub: Any = VerifierServiceStub(channel)
        model = (await stub.GetModel(verifier_service_pb2.VerifierServiceGetModelRequest())).model
    await replicas.match(model)  # a model is its own draft
    try:
        while not all(replica.has_target for replica in replicas.all()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)
        yield Verifiers(replicas, FailoverBudget(burst), patience, switches or Switches())
        assert all(replica.num_open == 0 for replica in replicas.all()), "every lease has ended"
    finally:
        replicas.close()


def text(rule: Rule = Rule.COUPLED, temperature: float = 1.0, tokens: int = TOKENS, **fields: Any) -> Sequence:
    return record(rule, temperature=temperature, seed=77, prompt=PROMPT, max_new_tokens=tokens, **fields)


def proposal(base: int, rule: Rule) -> tuple[list[int], list[speculation_pb2.TokenDistribution]]:
    """Tokens and laws that follow from the base: uniform over a few frequent tokens."""
    chance = random.Random(base)
    tokens = [chance.randrange(10, 26) for _ in range(chance.randint(1, 4))]
    if rule is Rule.COUPLED:
        return tokens, []
    ids = b"".join(token.to_bytes(4, "little") for token in range(10, 26))
    law = speculation_pb2.SparseDistribution(token_ids=ids, weights=(1).to_bytes(2, "little") * 16)
    return tokens, [speculation_pb2.TokenDistribution(sparse=law)] * len(tokens)


Disturb = Callable[[int], Awaitable[None]]


async def write(
    verifiers: Verifiers, sequence: Sequence, disturb: Disturb | None = None, *, timeout: float = TIMEOUT_S
) -> list[int]:
    """Writes a text; `disturb` is called with the number of each step before it."""
    stream = FailoverStream(verifiers, sequence, timeout=timeout)
    steps = 0

    async def step() -> None:
        nonlocal steps
        if disturb is not None:
            await disturb(steps)
        steps += 1

    try:
        await step()
        await stream.open()
        while sequence.left:
            await step()
            base = len(sequence.tokens)
            if base % 5 == 0:
                sequence.decode(min(4, sequence.left))
            else:
                sequence.propose(*proposal(base, sequence.request.sampling.rule))
            await stream.send()
            while sequence.round.owed:
                await step()
                verdict = await stream.verdict()
                assert verdict.round == sequence.round.number, "rounds count on, whoever judges them"
                assert verdict.base_length == len(sequence.tokens)
                sequence.commit(verdict)
        assert sequence.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        await stream.close()
    finally:
        stream.cancel()
    return sequence.tokens[sequence.prompt_length :]
