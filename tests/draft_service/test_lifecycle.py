"""A draft service from its start to its end: without a verifier, with one, without it again, and its SIGTERM."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, wait_until
from tests.draft_service.calls import generate, request
from tests.draft_service.pairs import write_foreign_draft
from tests.proxy import Proxy


@pytest.fixture(scope="module")
def mismatched(target_process: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A draft service that cannot serve; started early, so that it need not be waited for."""
    folder = write_foreign_draft(tmp_path_factory.mktemp("foreign") / "draft")
    with Cluster() as cluster:
        yield cluster.draft(target_process, model=folder)


def refusal(channel: grpc.Channel) -> RequestError:
    with pytest.raises(grpc.RpcError) as caught:
        generate(channel, request(), timeout=90.0)
    return from_rpc_error(caught.value)


def health(channel: grpc.Channel) -> int:
    return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status)


def test_a_life(target_process: Service, mismatched: Service) -> None:
    """One process through all of it: each start costs seconds."""
    with Proxy(target_process.address, is_open=False) as verifier, Cluster() as cluster:
        service = cluster.draft(verifier.address, flags="--grace 20 --failover-timeout 2")
        service.wait_listening()
        channel = grpc.insecure_channel(service.address)
        no_verifier_yet(service, channel, verifier)
        verifier.open()
        service.wait_healthy()
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert generate(channel, request(max_new_tokens=8, ignore_eos=True)).samples[0].reason == "LENGTH"
        drains(service, channel, verifier)
        channel.close()


def no_verifier_yet(service: Service, channel: grpc.Channel, verifier: Proxy) -> None:
    error = refusal(channel)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert verifier.address in error.message
    assert health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
    wait_until(lambda: service.logged("waiting for the verifier"))


def drains(service: Service, channel: grpc.Channel, verifier: Proxy) -> None:
    """A request in progress finishes, a new one is sent elsewhere, and the exit is clean."""
    call = DraftServiceStub(channel).Generate(request(temperature=1.0, max_new_tokens=120, ignore_eos=True), timeout=90)
    next(call)
    verifier.stall()  # it is in progress until this ends
    service.end()
    wait_until(lambda: health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
    error = refusal(channel)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    verifier.flow()
    *_, last = call
    assert last.finished.usage.completion_tokens == 120
    assert service.process.wait(90) == 0


def test_a_mismatched_pair_exits_with_one_line(mismatched: Service, pair_process: Service) -> None:
    assert mismatched.process.wait(60) == 1
    (line,) = wait_until(mismatched.plain_lines)
    assert line.startswith("draft_service: ")
    assert "vocabularies" in line
    assert "2048 tokens" in line
