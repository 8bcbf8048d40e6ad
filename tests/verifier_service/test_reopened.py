"""A sequence that was in progress elsewhere, at a verifier that is full: over sockets, one place and a queue of one."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from outrider.rpc.errors import from_rpc_error
from protos.outrider.v1 import verifier_service_pb2
from tests.forked import ForkedService
from tests.services import HEALTHY_WITHIN_S, MODELS
from tests.verifier_service.streams import PROMPT, Stream, opening

IDLE_S = 8.0
"""Also four times the interval at which who waits is told so."""


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    arguments = ["--model", str(MODELS / "target"), "--listen", "127.0.0.1:0", "--threads", "1", "--dtype", "float32"]
    limits = ("--max-sequences", "1", "--max-waiting", "1", "--idle-timeout", str(IDLE_S))
    with ForkedService.start(["verifier_service", *arguments, *limits]) as process:
        process.wait_healthy(HEALTHY_WITHIN_S)
        with grpc.insecure_channel(process.address) as channel:
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
        assert verdict.load.waiting == 1, "the other one, which came before it, waits still"
        again.call.cancel()
        assert list(fresh.verdict().token_ids) == alone
