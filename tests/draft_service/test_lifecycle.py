"""A draft service without a verifier, with one, and draining; and a pair that does not match."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1 import draft_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, free_address, wait_healthy, wait_until
from tests.draft_service.calls import PROMPT, generate, request, write
from tests.draft_service.oracle import encode
from tests.draft_service.pairs import write_foreign_draft
from tests.proxy import Proxy, Way


@pytest.fixture(scope="module")
def mismatched(target_process: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A draft service that cannot serve. It starts while the other test runs."""
    folder = write_foreign_draft(tmp_path_factory.mktemp("foreign") / "draft")
    with Cluster() as cluster:
        yield cluster.draft(target_process, model=folder)


def test_a_service_waits_for_its_verifier_serves_and_drains(target_process: Service, mismatched: Service) -> None:
    """One process for all states: each start costs seconds."""
    with Proxy(target_process.address, is_open=False) as verifier, Cluster() as cluster:
        service = cluster.draft(verifier.address, flags="--grace 20 --failover-timeout 2 --request-timeout inf")
        service.wait_listening()
        assert service.stop_timeout == 20 + 5
        channel = grpc.insecure_channel(service.address)

        def is_serving() -> bool:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            return bool(check.status == health_pb2.HealthCheckResponse.SERVING)

        def refusal() -> tuple[grpc.StatusCode, str, str]:
            with pytest.raises(grpc.RpcError) as caught:
                write(channel)
            error = from_rpc_error(caught.value)
            return error.code, error.reason, error.message

        code, reason, message = refusal()
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
        assert verifier.address in message
        assert not is_serving()
        wait_until(lambda: service.logged("waiting for the verifier"))

        verifier.open()
        service.wait_healthy()
        assert is_serving()
        (short,) = generate(channel, request(max_new_tokens=8, ignore_eos=True), timeout=None).samples
        assert short.reason == "LENGTH"

        verifier.close_after(5_000, Way.DOWN)
        losing = request(temperature=1.0, gamma=4, max_new_tokens=900, ignore_eos=True, joined_responses=True)
        tokens, error = tokens_before_error(DraftServiceStub(channel).Generate(losing, timeout=90))
        assert error.reason == "NO_VERIFIER"
        (lost,) = service.logged("verifier lost")
        assert tokens == lost["tokens"] - len(encode(PROMPT)) > 10, "those that waited to be joined come, too"
        verifier.heal()
        wait_until(lambda: service.count("outrider_verifiers", status="failing") == 0)

        long = request(temperature=1.0, max_new_tokens=120, ignore_eos=True)
        call = DraftServiceStub(channel).Generate(long, timeout=90)
        next(call)
        verifier.stall()  # so that the request is in progress during the drain
        service.end()
        wait_until(lambda: not is_serving())
        assert refusal()[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        verifier.flow()
        *_, last = call
        assert last.finished.usage.completion_tokens == 120
        assert service.process.wait(90) == 0
        channel.close()


def tokens_before_error(responses: Iterator[draft_service_pb2.GenerateResponse]) -> tuple[int, RequestError]:
    tokens = 0
    try:
        for response in responses:
            tokens += sum(len(each.chunk.token_ids) for each in response.joined or [response])
    except grpc.RpcError as error:
        return tokens, from_rpc_error(error)
    raise AssertionError(f"the call ended well, with {tokens} tokens")


def test_a_request_without_a_deadline_ends_after_the_services_own(target_process: Service) -> None:
    with Proxy(target_process.address) as verifier, Cluster() as cluster:
        service = cluster.draft(verifier.address, flags="--request-timeout 2")
        wait_healthy(service)
        verifier.stall()
        with grpc.insecure_channel(service.address) as channel, pytest.raises(grpc.RpcError) as caught:
            generate(channel, request(max_new_tokens=9), timeout=None)
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.message.startswith("the request took longer than 2 s (--request-timeout)")


def test_a_mismatched_pair_exits_with_one_line(mismatched: Service, pair_process: Service) -> None:
    assert mismatched.process.wait(60) == 1
    (line,) = wait_until(mismatched.plain_lines)
    assert line.startswith("draft_service: ")
    assert "vocabularies" in line
    assert "2048 tokens" in line


def test_a_service_ends_once_no_verifier_has_its_target() -> None:
    """A new process finds the new target; this one would refuse every request."""
    address = free_address()
    with Cluster() as cluster:
        before = cluster.verifier(flags=f"--listen {address}")
        service = cluster.draft(address, flags="--failover-timeout 1")
        wait_healthy(before, service)
        assert before.stop() == 0
        after = cluster.verifier(flags=f"--listen {address} --max-gamma 8")
        wait_healthy(after)
        with grpc.insecure_channel(service.address) as channel, pytest.raises(grpc.RpcError) as caught:
            write(channel)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
        assert "max_gamma" in error.message
        assert service.process.wait(30) == 1
        (line,) = wait_until(service.plain_lines)
        assert line.startswith(f"draft_service: no verifier at {address} runs the target of this pair any more: ")
