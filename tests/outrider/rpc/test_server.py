"""A server says NOT_SERVING until it serves, takes its port alone, and goes away in order."""

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

from outrider.rpc import errors
from outrider.rpc.channel import open_channel, wait_for_health
from outrider.rpc.server import StartupError, bind, create_server
from tests.outrider.rpc.probe import NAME, Probe, both, many, once, serving
from tests.project.tree import ROOT

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SOON_S = 45.0


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
    with pytest.raises(StartupError, match="no socket can be created there"):
        bind(create_server(max_message_bytes=1 << 20), f"unix:{tmp_path}/nowhere/probe.sock")


async def test_a_message_over_the_limit_is_refused_and_the_server_lives() -> None:
    async with serving(Probe(), max_message_bytes=1_000) as address, open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await once(channel)(b"x" * 2_000)
        assert errors.from_rpc_error(caught.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await once(channel)(b"x" * 500) == b"x" * 500


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
def test_a_compressed_message_unfolds_to_no_more_than_the_limit(process: Process) -> None:
    """The probe takes 1 MiB. 64 MiB of zeros travel in 64 KiB, and are refused without being held anywhere."""
    with grpc.insecure_channel(
        process.address, [("grpc.max_send_message_length", -1)], grpc.Compression.Gzip
    ) as channel:
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
