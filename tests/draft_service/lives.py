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

from draft_service.losses import Loss
from draft_service.statistics import Failovers
from draft_service.verifier_link import VerifierLink
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.draft_service.calls import COUPLED

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 36
SILENCE_S = 1.5
PATIENT_S = 20.0
"""Silence that no verifier keeps but one that is stalled on purpose."""

TIMEOUT_S = 60.0
LIVES = 2  # under each rule, and as many more as it takes to lose that many verifiers
MAX_BYTES = 1 << 20


@dataclass
class Told:
    """What an observer hears."""

    losses: list[Loss] = field(default_factory=list)
    seconds: float = 0.0

    def switched(self, loss: Loss) -> None:
        self.losses.append(loss)

    def paused(self, seconds: float) -> None:
        self.seconds += seconds


@asynccontextmanager
async def linked(
    names: list[str], told: Told, *, patience: float = 10.0, burst: int = 64, silence: float = SILENCE_S
) -> AsyncIterator[VerifierLink]:
    link = VerifierLink(
        names,
        observer=told,
        max_message_bytes=MAX_BYTES,
        silence=silence,
        patience=patience,
        burst=burst,
        look_again=60.0,
    )
    async with grpc.aio.insecure_channel(names[0]) as channel:
        stub: Any = VerifierServiceStub(channel)
        model = (await stub.GetModel(verifier_service_pb2.VerifierServiceGetModelRequest())).model
    await link.match(model)  # a model is its own draft
    try:
        while not all(replica.has_target for replica in link.replicas.all()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)
        yield link
        assert all(replica.num_open == 0 for replica in link.replicas.all()), "every seat was given back"
    finally:
        link.close()


def opening(rule: sampling_pb2.AcceptanceRule, temperature: float, tokens: int = TOKENS) -> Any:
    return verifier_service_pb2.OpenSequence(
        prompt_token_ids=PROMPT,
        max_new_tokens=tokens,
        ignore_eos=True,
        sampling=sampling_pb2.SamplingParams(temperature=temperature, seed=77, rule=rule),
        required_features=["decode"],
    )


def proposal(base: int, rule: sampling_pb2.AcceptanceRule) -> tuple[list[int], list[speculation_pb2.TokenDistribution]]:
    """Tokens and laws that follow from the base: uniform over a few frequent tokens."""
    chance = random.Random(base)
    tokens = [chance.randrange(10, 26) for _ in range(chance.randint(1, 4))]
    if rule == COUPLED:
        return tokens, []
    ids = b"".join(token.to_bytes(4, "little") for token in range(10, 26))
    law = speculation_pb2.SparseDistribution(token_ids=ids, weights=(1).to_bytes(2, "little") * 16)
    return tokens, [speculation_pb2.TokenDistribution(sparse=law)] * len(tokens)


Disturb = Callable[[int], Awaitable[None]]


async def life(
    link: VerifierLink,
    rule: sampling_pb2.AcceptanceRule,
    temperature: float,
    disturb: Disturb | None = None,
    *,
    tally: Failovers | None = None,
    tokens: int = TOKENS,
    timeout: float = TIMEOUT_S,
) -> list[int]:
    """Writes a text; `disturb` is called with the number of each step before it."""
    tally = Failovers() if tally is None else tally
    sequence = link.open(opening(rule, temperature, tokens), sequence_id="s", timeout=timeout, tally=tally)
    written: list[int] = []
    rounds = steps = 0

    async def step() -> None:
        nonlocal steps
        if disturb is not None:
            await disturb(steps)
        steps += 1

    try:
        await step()
        await sequence.begin()
        while len(written) < tokens:
            base = len(PROMPT) + len(written)
            assert sequence.length == base
            rounds += 1
            await step()
            if base % 5 == 0:
                owed = min(4, tokens - len(written))
                await sequence.decode(owed)
            else:
                owed = 1
                await sequence.propose(*proposal(base, rule))
            for _ in range(owed):
                await step()
                verdict = await sequence.verdict()
                assert verdict.round == rounds, "rounds count on, whoever judges them"
                assert verdict.base_length == len(PROMPT) + len(written)
                written += verdict.token_ids
        assert verdict.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        await sequence.close()
    finally:
        sequence.cancel()
    return written
