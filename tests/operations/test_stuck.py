"""An engine that is stuck in a step, in a real process: the status of each probe, and an orderly end."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.errors import from_rpc_error
from outrider.rpc.health import LIVENESS, READINESS, STARTUP
from protos.outrider.v1 import verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.cluster import Cluster, Service, wait_until
from tests.slow_steps import SLOW_STEP, STEP_SECONDS
from tests.verifier_service.streams import PROMPT, Stream, error_of, opening

READY = {"", READINESS, "outrider.v1.VerifierService"}
FOREVER = "inf"


def serving(channel: grpc.Channel) -> set[str]:
    """The names that are SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return {
        name
        for name in (*READY, LIVENESS, STARTUP)
        if stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status
        == health_pb2.HealthCheckResponse.SERVING
    }


def test_a_life_with_a_stuck_engine(tmp_path: Path) -> None:
    """One process through all of it: a start costs seconds. Its traces have no collector, and hold nothing up."""
    hold = tmp_path / "hold"  # while it exists, steps wait
    hold.write_text(FOREVER)
    flags = "--grace 3 --liveness-timeout 1 --otlp-endpoint http://127.0.0.1:1 --trace-sample 1"
    with Cluster(flags) as cluster:
        service = cluster.verifier(fault="slow_steps", env={STEP_SECONDS: str(hold)})
        service.wait_listening()
        with grpc.insecure_channel(service.address) as channel:
            not_ready_before_the_first_step(service, channel, hold)
            stuck_in_the_middle_of_a_sequence(service, channel, hold)
            drains_while_stuck(service, channel, hold)


def not_ready_before_the_first_step(service: Service, channel: grpc.Channel, hold: Path) -> None:
    wait_until(lambda: service.logged(SLOW_STEP))
    assert serving(channel) <= {LIVENESS}
    with pytest.raises(grpc.RpcError) as caught:
        VerifierServiceStub(channel).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest(), timeout=20)
    assert from_rpc_error(caught.value).reason == "NO_VERIFIER"
    assert not service.logged("serving")
    hold.unlink()
    wait_until(lambda: serving(channel) == {*READY, LIVENESS, STARTUP})
    shown = service.samples()
    assert shown["outrider_step_forward_seconds_count"] == {(): 0}, "steps of the warm-up are not counted"
    assert shown["outrider_health"] == {(("probe", probe),): 1 for probe in (READINESS, LIVENESS, STARTUP)}


def stuck_in_the_middle_of_a_sequence(service: Service, channel: grpc.Channel, hold: Path) -> None:
    with Stream(channel) as sequence:
        sequence.open(opening(max_new_tokens=50))
        sequence.decode(1, PROMPT)
        prefix = [*PROMPT, *sequence.verdict().token_ids]
        hold.write_text(FOREVER)
        sequence.decode(2, prefix, seen=1)
        wait_until(lambda: serving(channel) == {STARTUP})
        wait_until(lambda: service.logged("engine is not alive"))
        shown = service.samples()
        assert shown["outrider_health"][("probe", LIVENESS),] == 0
        assert shown["outrider_engine_step_seconds"][()] > 1
        refuses_rounds_beyond_the_limit(channel)
        hold.unlink()
        assert len(sequence.verdict().token_ids) == 1
        wait_until(lambda: serving(channel) == {*READY, LIVENESS, STARTUP})


def refuses_rounds_beyond_the_limit(channel: grpc.Channel) -> None:
    """The engine takes none of them, so they are counted before it does."""
    with Stream(channel) as sequence:
        sequence.open()
        most = sequence.take().opened.limits.max_outstanding
        for number in range(1, most + 2):
            sequence.decode(number, PROMPT)
        error = error_of(sequence.call)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert f"{most} rounds without a verdict" in error.message


def drains_while_stuck(service: Service, channel: grpc.Channel, hold: Path) -> None:
    """Its streams end with DRAINING, and it exits with 0, during the step."""
    held = len(service.logged(SLOW_STEP))
    hold.write_text(FOREVER)
    with Stream(channel) as sequence:
        sequence.open(opening(max_new_tokens=50))
        sequence.decode(1, PROMPT)
        wait_until(lambda: len(service.logged(SLOW_STEP)) > held)
        service.end()
        with pytest.raises(grpc.RpcError) as caught:
            list(sequence.call)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert service.process.wait(60) == 0
    assert hold.exists()
    assert service.stop() == 0, "its log is read to the end"
    assert service.logged("sequence")[-1]["status"] == "UNAVAILABLE"
