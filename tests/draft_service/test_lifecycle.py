"""A draft service from its start to its end: without a verifier, with one, without it again, and told to go."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, wait_until
from tests.draft_service.calls import generate, request
from tests.draft_service.pairs import write_foreign_draft
from tests.proxy import Proxy

LONG: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def mismatched(target_process: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A draft service that cannot serve; started early, so that it need not be waited for."""
    folder = write_foreign_draft(tmp_path_factory.mktemp("foreign") / "draft")
    with Cluster() as cluster:
        yield cluster.draft(target_process, model=folder)


def refusal(channel: grpc.Channel, timeout: float = 90.0, **fields: Any) -> tuple[RequestError, float]:
    """The error that a call ends with, and how long that took."""
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, request(**fields), timeout=timeout)
    return from_rpc_error(caught.value), time.monotonic() - started


def health(channel: grpc.Channel) -> int:
    return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status)


def test_a_life(target_process: Service, mismatched: Service) -> None:
    """One process through all of it: each start costs seconds."""
    with Proxy(target_process.address, is_open=False) as verifier, Cluster() as cluster:
        service = cluster.draft(verifier.address, flags="--grace 20 --failover-patience 2")
        service.wait_listening()
        channel = grpc.insecure_channel(service.address)
        no_verifier_yet(service, channel, verifier)
        verifier.open()
        service.wait_healthy()
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert generate(channel, request(max_new_tokens=8, ignore_eos=True)).samples[0].reason == "LENGTH"
        verifier_goes_away(channel, verifier)
        verifier.open()
        comes_back(channel)
        drains(service, channel, verifier)
        channel.close()


def no_verifier_yet(service: Service, channel: grpc.Channel, verifier: Proxy) -> None:
    error, _ = refusal(channel)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert verifier.address in error.message
    assert health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    wait_until(lambda: any("waiting for the verifier" in line for line in service.log_lines()))
    assert health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING


def verifier_goes_away(channel: grpc.Channel, verifier: Proxy) -> None:
    call = DraftServiceStub(channel).Generate(request(**LONG), timeout=90)
    next(call)
    verifier.delay(0.05)  # so that it does not end before the verifier does
    next(call)
    verifier.close()
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    error, seconds = refusal(channel, timeout=90.0)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert verifier.address in error.message
    assert seconds < 45.0, "well within the deadline"
    verifier.delay(0.0)


def comes_back(channel: grpc.Channel) -> None:
    def works() -> bool:
        try:
            return bool(generate(channel, request(max_new_tokens=4)).samples)
        except grpc.RpcError:  # until the channel has tried again
            return False

    wait_until(works)


def drains(service: Service, channel: grpc.Channel, verifier: Proxy) -> None:
    """A request in progress finishes, a new one is sent elsewhere, and the exit is clean."""
    call = DraftServiceStub(channel).Generate(request(temperature=1.0, max_new_tokens=120, ignore_eos=True), timeout=90)
    next(call)
    verifier.stall()  # it is in progress until this ends
    service.end()
    wait_until(lambda: health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
    error, _ = refusal(channel)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    verifier.flow()
    *_, last = call
    assert last.finished.usage.completion_tokens == 120
    assert service.process.wait(90) == 0


def test_a_mismatched_pair_exits_with_one_line(mismatched: Service, pair_process: Service) -> None:
    assert mismatched.process.wait(60) == 1
    wait_until(lambda: bool(plain(mismatched)))
    (line,) = plain(mismatched)
    assert line.startswith("draft_service: ")
    assert "vocabularies" in line
    assert "2048 tokens" in line


def plain(service: Service) -> list[str]:
    return [line for line in service.log_lines() if not line.startswith("{")]
