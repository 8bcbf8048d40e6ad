"""An engine that does not come back from a pass, in a real process: what each probe says, and that it still can go."""

import threading
from collections.abc import Iterator
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
from tests.verifier_service.streams import Stream, opening

READY = {"", READINESS, "outrider.v1.VerifierService"}
FOREVER = "inf"
NOBODY = "http://127.0.0.1:1"  # traces that nobody takes hold nothing up


def serving(channel: grpc.Channel) -> set[str]:
    """The names that are SERVING."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return {
        name
        for name in (*READY, LIVENESS, STARTUP)
        if stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20).status
        == health_pb2.HealthCheckResponse.SERVING
    }


class Tokens:
    """A sequence at the verifier that asks for one token after the other."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.tokens = [7, 8, 9]
        self.stream = Stream(channel)
        self.stream.open(opening(self.tokens, max_new_tokens=50))
        self._round = 0

    def ask(self) -> None:
        self._round += 1
        self.stream.decode(self._round, self.tokens, seen=self._round - 1)

    def take(self) -> None:
        self.tokens += self.stream.verdict().token_ids


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """The file that holds passes up; it is there."""
    path = tmp_path / "hold"
    path.write_text(FOREVER)
    return path


@pytest.fixture
def service(hold: Path) -> Iterator[Service]:
    """A verifier whose first pass is held up. A grace of seconds, and of a pass no more than one."""
    with Cluster(f"--grace 3 --liveness-timeout 1 --otlp-endpoint {NOBODY} --trace-sample 1") as cluster:
        verifier = cluster.verifier(fault="slow_steps", env={STEP_SECONDS: str(hold)})
        verifier.wait_listening()
        yield verifier


def test_a_life_with_a_stuck_engine(service: Service, hold: Path) -> None:
    """One process through all of it: a start costs seconds."""
    with grpc.insecure_channel(service.address) as channel:
        not_ready_until_a_pass_has_run(service, channel, hold)
        stuck_in_the_middle_of_requests(service, channel, hold)
        told_to_go_while_stuck(service, channel, hold)


def not_ready_until_a_pass_has_run(service: Service, channel: grpc.Channel, hold: Path) -> None:
    wait_until(lambda: service.logged(SLOW_STEP))
    assert serving(channel) <= {LIVENESS}
    with pytest.raises(grpc.RpcError) as caught:
        VerifierServiceStub(channel).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest(), timeout=20)
    assert from_rpc_error(caught.value).reason == "NO_VERIFIER"
    assert not service.logged("serving")
    hold.unlink()
    wait_until(lambda: serving(channel) == {*READY, LIVENESS, STARTUP})
    shown = service.samples()
    assert shown["outrider_pass_seconds_count"] == {(): 0}, "what it was warmed up with is nobody's request"
    assert shown["outrider_health"] == {(("probe", probe),): 1 for probe in (READINESS, LIVENESS, STARTUP)}


def stuck_in_the_middle_of_requests(service: Service, channel: grpc.Channel, hold: Path) -> None:
    sequence = Tokens(channel)
    sequence.ask()
    sequence.take()
    hold.write_text(FOREVER)
    sequence.ask()
    wait_until(lambda: serving(channel) == {STARTUP})
    wait_until(lambda: service.logged("not alive"))
    shown = service.samples()
    assert shown["outrider_health"][("probe", LIVENESS),] == 0
    assert shown["outrider_engine_step_seconds"][()] > 1
    hold.unlink()
    sequence.take()
    assert len(sequence.tokens) == 3 + 2
    wait_until(lambda: serving(channel) == {*READY, LIVENESS, STARTUP})
    sequence.stream.call.cancel()


def told_to_go_while_stuck(service: Service, channel: grpc.Channel, hold: Path) -> None:
    """Its streams are told to go on elsewhere, and it exits well, with the pass still under way."""
    held = len(service.logged(SLOW_STEP))
    hold.write_text(FOREVER)
    sequence = Tokens(channel)
    sequence.ask()
    wait_until(lambda: len(service.logged(SLOW_STEP)) > held)
    ended = threading.Event()
    errors: list[grpc.RpcError] = []

    def read() -> None:
        try:
            for _ in sequence.stream.call:
                pass
        except grpc.RpcError as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    service.end()
    assert ended.wait(60)
    (error,) = errors
    ended_with = from_rpc_error(error)
    assert (ended_with.code, ended_with.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert service.process.wait(60) == 0
    assert hold.exists()
