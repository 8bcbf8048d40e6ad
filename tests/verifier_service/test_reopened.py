"""A sequence that was in progress elsewhere, at a verifier that is full: over sockets, one place and a queue of one."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from outrider.rpc.errors import from_rpc_error
from protos.outrider.v1 import verifier_service_pb2
from tests.cluster import Cluster
from tests.verifier_service.streams import PROMPT, Stream, opening

IDLE_S = 8.0
"""Also four times the interval at which who waits is told so, and an idle stream looked at."""


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    limits = f"--max-sequences 1 --max-waiting 1 --idle-timeout {IDLE_S} --contended-idle-timeout 3"
    with Cluster(limits) as cluster:
        verifier = cluster.verifier()
        verifier.wait_healthy()
        with grpc.insecure_channel(verifier.address) as channel:
            yield channel


def test_it_is_let_in_and_goes_first_and_who_waits_hears_of_it(channel: grpc.Channel) -> None:
    with Stream(channel, "running") as running, Stream(channel, "fresh") as fresh, Stream(channel, "again") as again:
        running.open()
        running.decode(1, PROMPT)
        alone = list(running.verdict().token_ids)
        fresh.open()
        fresh.decode(1, PROMPT)
        assert fresh.take().WhichOneof("kind") == "opened"
        with Stream(channel, "refused") as refused:
            refused.open()
            with pytest.raises(grpc.RpcError) as caught:
                refused.take()
            assert from_rpc_error(caught.value).reason == "OVERLOADED"
        resumed = opening()
        resumed.reopened = True  # the queue is full, and it comes in all the same
        again.open(resumed)
        again.decode(1, PROMPT)
        assert again.take().WhichOneof("kind") == "opened"
        positions: list[int] = []
        while len(positions) < 2:  # once at first, and then again and again
            notice = fresh.take().notice
            assert notice.kind == verifier_service_pb2.NOTICE_KIND_QUEUED
            positions.append(notice.queue_position)
        assert positions[0] == 0
        running.call.cancel()
        verdict = again.verdict()
        assert list(verdict.token_ids) == alone
        assert verdict.load.waiting == 2, "the load is that before the step: this sequence and the other one waited"
        again.call.cancel()
        assert list(fresh.verdict().token_ids) == alone


def test_an_idle_stream_gives_its_place_to_a_sequence_that_waits(channel: grpc.Channel) -> None:
    with Stream(channel, "idle") as idle, Stream(channel, "waits") as waits:
        idle.open()
        idle.decode(1, PROMPT)
        alone = list(idle.verdict().token_ids)
        waits.open()
        waits.decode(1, PROMPT)
        assert list(waits.verdict().token_ids) == alone
        with pytest.raises(grpc.RpcError) as caught:
            idle.take()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDLE")
    assert "others wait in the queue" in error.message
    assert error.retry_after is not None
