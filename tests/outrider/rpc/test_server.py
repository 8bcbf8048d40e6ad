"""A server says NOT_SERVING until it serves, takes its port alone, and goes away in order."""

import asyncio
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc import errors
from outrider.rpc.channel import open_channel, wait_for_health
from outrider.rpc.health import HealthState
from outrider.rpc.server import StartupError, bind, create_server
from tests.outrider.rpc.probe import NAME, Probe, both, many, once, serving
from tests.project.tree import ROOT

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SOON_S = 45.0
LATE = "DEADLINE_EXCEEDED"  # the last question may have had no time left


def _health(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)  # its stubs forget its methods


async def test_a_port_belongs_to_one_server() -> None:
    first, second = create_server(max_message_bytes=1 << 20), create_server(max_message_bytes=1 << 20)
    address = bind(first, "127.0.0.1:0")
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", address)
    with pytest.raises(StartupError, match=f"cannot listen at {address}: the port is taken"):
        bind(second, address)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "localhost:", ":50051", "127.0.0.1:http", "127.0.0.1:70000", "unix:x.sock"]
)
async def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(StartupError, match="is not HOST:PORT"):
        bind(create_server(max_message_bytes=1 << 20), address)


async def test_a_socket_in_the_file_system_will_do(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/probe.sock"
    async with serving(Probe(), address=address) as bound, open_channel(address) as channel:
        assert bound == address
        assert await once(channel)(b"x") == b"x"
    with pytest.raises(StartupError, match="no socket can be made there"):
        bind(create_server(max_message_bytes=1 << 20), f"unix:{tmp_path}/nowhere/probe.sock")


async def test_a_message_over_the_limit_is_refused_and_the_server_lives() -> None:
    async with serving(Probe(), max_message_bytes=1_000) as address, open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await once(channel)(b"x" * 2_000)
        assert errors.from_rpc_error(caught.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await once(channel)(b"x" * 500) == b"x" * 500


async def test_calls_above_the_limit_of_a_connection_wait_for_those_before_them() -> None:
    async with serving(Probe(), max_concurrent_streams=1) as address, open_channel(address) as channel:
        first = both(channel)(timeout=60)
        await first.write(b"x")
        assert await first.read() == b"x"
        second = asyncio.ensure_future(once(channel)(b"y", timeout=60))
        for _ in range(10):
            await first.write(b"z")
            assert await first.read() == b"z"
            assert not second.done()
        await first.done_writing()
        assert await second == b"y"


async def test_a_connection_that_is_old_takes_no_new_calls_and_ends_none() -> None:
    peers: list[str] = []

    class Naming(Probe):
        async def Once(self, request: bytes, context: Any) -> bytes:
            peers.append(context.peer())
            return request

    async with (
        serving(Naming(), max_connection_age_s=0.3) as address,
        open_channel(address) as channel,
        asyncio.timeout(60),
    ):
        running = both(channel)(timeout=60)
        while len(set(peers)) < 3:
            assert await once(channel)(b"x", timeout=60) == b"x"
            await running.write(b"y")
            assert await running.read() == b"y"
            await asyncio.sleep(0.02)
        running.cancel()


class Process:
    """The probe as a process of its own."""

    def __init__(self, grace_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.outrider.rpc.probe", str(grace_s)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.address = self.stdout.readline().strip()
        wait_for_health(self.address, NAME, 60)

    def peak_memory(self) -> int:
        """In bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, within: float = SOON_S) -> tuple[int, list[str]]:
        code = self.process.wait(within)
        return code, self.stdout.read().split()


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    """The probe as a process; its parameter is the grace in seconds."""
    made = Process(request.param)
    yield made
    made.process.kill()
    made.process.wait()
    made.stdout.close()


def _until_not_serving(channel: grpc.Channel) -> None:
    stub = _health(channel)
    end = time.monotonic() + SOON_S
    while stub.Check(health_pb2.HealthCheckRequest(service=NAME)).status != NOT_SERVING:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("process", [5.0], indirect=True)
@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_unfolds_to_no_more_than_the_limit(process: Process, algorithm: grpc.Compression) -> None:
    """The probe takes 1 MiB. 64 MiB of zeros travel in 64 KiB, and are refused without being held anywhere."""
    with grpc.insecure_channel(process.address, [("grpc.max_send_message_length", -1)], algorithm) as channel:
        assert len(once(channel)(bytes(1 << 19), timeout=60)) == 1 << 19
        before = process.peak_memory()
        with pytest.raises(grpc.RpcError) as caught:
            once(channel)(bytes(1 << 26), timeout=60)
        assert errors.from_rpc_error(caught.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert process.peak_memory() - before < 1 << 24
        assert len(once(channel)(bytes(1 << 19), timeout=60)) == 1 << 19


@pytest.mark.parametrize("process", [90.0], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_lets_running_calls_finish_and_no_new_ones_in(process: Process, number: int) -> None:
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with grpc.insecure_channel(process.address) as channel:
        running = both(channel)(iter(requests.get, b""))  # it runs until it is sent nothing
        requests.put(b"first")
        assert next(running) == b"first"
        process.signal(number)
        _until_not_serving(channel)
        with pytest.raises(grpc.RpcError) as caught:
            once(channel)(b"")
        refused = errors.from_rpc_error(caught.value)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        for request in (b"last", b""):
            requests.put(request)
        assert list(running) == [b"last"]
        assert process.ended() == (0, ["told", "stopped"])


@pytest.mark.parametrize("process", [90.0], indirect=True)
def test_a_watch_of_health_is_told_and_holds_nothing_up(process: Process) -> None:
    with grpc.insecure_channel(process.address) as channel:
        watch = _health(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert next(watch).status == SERVING
        process.signal()
        assert next(watch).status == NOT_SERVING
        assert process.ended()[0] == 0


@pytest.mark.parametrize("process", [0.3], indirect=True)
def test_calls_that_outlast_the_grace_are_cut(process: Process) -> None:
    with grpc.insecure_channel(process.address) as channel:
        running = many(channel)(b"180")
        assert next(running) == b"first"
        process.signal()
        with pytest.raises(grpc.RpcError) as caught:
            next(running)
        cut = errors.from_rpc_error(caught.value)
        assert (cut.code, cut.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING"), (
            "so that its client goes on elsewhere"
        )
        assert process.ended() == (0, ["told", "stopped"])


@pytest.mark.parametrize("process", [90.0], indirect=True)
def test_a_second_signal_stops_at_once(process: Process) -> None:
    with grpc.insecure_channel(process.address) as channel:
        running = many(channel)(b"180")
        assert next(running) == b"first"
        process.signal()
        _until_not_serving(channel)
        process.signal()
        assert process.ended() == (0, ["told", "stopped"])


@pytest.mark.parametrize("process", [1.0], indirect=True)
def test_reflection_lists_the_services(process: Process) -> None:
    with grpc.insecure_channel(process.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


async def test_waiting_for_health_outlasts_a_server_that_is_not_there_yet() -> None:
    server = create_server(max_message_bytes=1 << 20)
    health = HealthState(server, [NAME])
    address = bind(server, "127.0.0.1:0")
    waiting = asyncio.create_task(asyncio.to_thread(wait_for_health, address, NAME, 60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await server.start()
    await health.serving()
    await waiting
    await server.stop(None)


def test_waiting_for_health_ends_and_says_what_was_answered() -> None:
    says = rf"the server at 127\.0\.0\.1:1 is not serving after 0\.5 s: (UNAVAILABLE|{LATE})"
    with pytest.raises(TimeoutError, match=says):
        wait_for_health("127.0.0.1:1", "", 0.5)
