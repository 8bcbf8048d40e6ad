"""A draft service from its start to its end: without a verifier, with one, without it again, and told to go."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.processes import ServiceProcess
from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service.calls import generate, request
from tests.draft_service.conftest import FLAGS, HEALTHY_WITHIN_S
from tests.draft_service.pairs import DEMO, write_foreign_draft
from tests.fork_server import ForkedService
from tests.proxy import Proxy

LONG: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def mismatched(target_process: ServiceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A draft service that cannot serve; started early, so that it need not be waited for."""
    folder = write_foreign_draft(tmp_path_factory.mktemp("foreign") / "draft")
    arguments = ["draft_service", "--model", str(folder), "--verifier", target_process.address, *FLAGS]
    with ForkedService.launch(arguments) as process:
        yield process


def refusal(channel: grpc.Channel, timeout: float = 90.0, **fields: Any) -> tuple[RequestError, float]:
    """The error that a call ends with, and how long that took."""
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, request(**fields), timeout=timeout)
    return from_rpc_error(caught.value), time.monotonic() - started


def health(channel: grpc.Channel) -> int:
    return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status)


def test_a_life(target_process: ServiceProcess, mismatched: ServiceProcess) -> None:
    """One process through all of it: each start costs seconds."""
    arguments = ["draft_service", "--model", str(DEMO / "draft"), "--grace", "20", "--failover-patience", "2", *FLAGS]
    with (
        Proxy(target_process.address, is_open=False) as verifier,
        ForkedService.start([*arguments, "--verifier", verifier.address]) as service,
        grpc.insecure_channel(service.address) as channel,
    ):
        no_verifier_yet(service, channel, verifier)
        verifier.open()
        service.wait_healthy(HEALTHY_WITHIN_S)
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert generate(channel, request(max_new_tokens=8, ignore_eos=True)).samples[0].reason == "LENGTH"
        verifier_goes_away(channel, verifier)
        verifier.open()
        comes_back(channel)
        drains(service, channel, verifier)


def no_verifier_yet(service: ServiceProcess, channel: grpc.Channel, verifier: Proxy) -> None:
    error, _ = refusal(channel)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert verifier.address in error.message
    assert health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    until(lambda: any("waiting for the verifier" in line for line in service.log_lines()))
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

    until(works)


def drains(service: ServiceProcess, channel: grpc.Channel, verifier: Proxy) -> None:
    """A request in progress finishes, a new one is sent elsewhere, and the exit is clean."""
    call = DraftServiceStub(channel).Generate(request(temperature=1.0, max_new_tokens=120, ignore_eos=True), timeout=90)
    next(call)
    verifier.stall()  # it is in progress until this ends
    service.process.send_signal(signal.SIGTERM)
    until(lambda: health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
    error, _ = refusal(channel)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    verifier.flow()
    *_, last = call
    assert last.finished.usage.completion_tokens == 120
    assert service.process.wait(90) == 0


def test_a_mismatched_pair_exits_with_one_line(mismatched: ServiceProcess, pair_process: ServiceProcess) -> None:
    assert mismatched.process.wait(HEALTHY_WITHIN_S) == 1
    until(lambda: bool(plain(mismatched)))
    (line,) = plain(mismatched)
    assert line.startswith("draft_service: ")
    assert "vocabularies" in line
    assert "2048 tokens" in line


def plain(service: ServiceProcess) -> list[str]:
    return [line for line in service.log_lines() if not line.startswith("{")]


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
