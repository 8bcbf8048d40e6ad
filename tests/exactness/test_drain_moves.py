"""A verifier drains, and the one that its sequences would move to says nothing: they stay where they are, and go on.

Real verifiers; the silent one is behind a proxy that holds back what it says.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from draft_service.losses import Loss
from draft_service.replica import ReplicaSeat
from draft_service.statistics import Failovers
from draft_service.verifier_link import VerifierLink
from protos.outrider.v1 import model_pb2, sampling_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.exactness import sampling
from tests.exactness.services import Nursery, wait_healthy
from tests.exactness.worlds import World
from tests.proxy import Proxy, Way

PROMPT = (15, 12, 14)
MOST_TOKENS = 1500
DRAINS_AFTER, MORE = 4, 12
SECONDS_PER_TOKEN = 0.01
SOON_S = 60.0


class Told:
    """Counts the tries to go elsewhere."""

    def __init__(self) -> None:
        self.tries = 0

    def switched(self, loss: Loss) -> None:
        pass

    def paused(self, seconds: float) -> None:
        self.tries += 1


async def _model(address: str) -> model_pb2.ModelInfo:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = VerifierServiceStub(channel)
        return (await stub.GetModel(verifier_service_pb2.VerifierServiceGetModelRequest())).model


async def _text(link: VerifierLink, go_on: Callable[[int], bool]) -> list[int]:
    """Writes a text, a token at a time, for as long as it is to; `go_on` is told how many there are."""
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=PROMPT,
        max_new_tokens=MOST_TOKENS,
        ignore_eos=True,
        sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=5, rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED),
        required_features=["decode"],
    )
    sequence = link.open(opening, sequence_id="s", timeout=SOON_S, tally=Failovers())
    written = list[int]()
    try:
        await sequence.begin()
        while go_on(len(written)):
            await sequence.decode(1)
            written += (await sequence.verdict()).token_ids
            await asyncio.sleep(SECONDS_PER_TOKEN)
    finally:
        sequence.cancel()
    return written


@pytest.mark.parametrize("answers", [True, False], ids=["the next one answers", "the next one is silent"])
async def test_a_sequence_leaves_in_good_time_or_stays(nursery: Nursery, attentive: World, answers: bool) -> None:
    """Where the next one is silent it is tried now and then, and not before each verdict."""
    leaving = nursery.verifier(attentive.target, flags=(*sampling.VERIFIER_FLAGS, "--grace", str(SOON_S)))
    wait_healthy(leaving)
    told = Told()
    with Proxy(attentive.verifier.address) as way:
        link = VerifierLink(
            [leaving.address, way.address],
            observer=told,
            max_message_bytes=1 << 20,
            silence=SOON_S,
            patience=SOON_S,
            burst=64,
            look_again=SOON_S,
        )
        await link.match(await _model(leaving.address))  # a model is its own draft
        while not all(replica.has_target for replica in link.replicas.all()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.02)
        other = next(replica for replica in link.replicas.all() if replica.address == way.address)
        seat = ReplicaSeat(other)  # so that the sequence begins at the one that has none
        end = MOST_TOKENS

        def go_on(written: int) -> bool:
            nonlocal end
            if written == DRAINS_AFTER:
                if not answers:
                    way.stall(Way.DOWN)
                os.kill(leaving.pid, signal.SIGTERM)
            if told.tries and end == MOST_TOKENS:
                end = written + MORE
            return written < end

        written = await _text(link, go_on)
        tries = told.tries
        way.flow(Way.DOWN)
        whole = await _text(link, lambda count: count < len(written))
        seat.ended()
        link.close()
    assert written == whole, "the same as at the other one alone"
    assert tries == 1 if answers else 1 <= tries <= MORE / 2
