"""A server binds its address alone, limits messages, and drains on a signal."""

import math
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.rpc import errors
from outrider.rpc.channel import open_channel, wait_for_health
from outrider.rpc.server import StartupError, bind, create_server
from tests.outrider.rpc.probe import NAME, Probe, many, once, serving
from tests.project.tree import ROOT


async def test_a_port_belongs_to_one_server() -> None:
    first, second = create_server(max_message_bytes=1 << 20), create_server(max_message_bytes=1 << 20)
    address = bind(first, "127.0.0.1:0")
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", address)
    for taken in (address, address.replace("127.0.0.1", "localhost")):  # that has ::1 too, where the port is free
        with pytest.raises(StartupError, match=f"cannot listen at {taken}: the port is taken"):
            bind(second, taken)


@pytest.mark.parametrize("age", [math.inf, 1e30])
async def test_a_connection_of_any_age_is_accepted(age: float) -> None:
    create_server(max_message_bytes=1 << 20, max_connection_age_s=age)


async def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(StartupError, match="cannot listen: the port of 'box:70000' is 70000"):
        bind(create_server(max_message_bytes=1 << 20), "box:70000")


async def test_an_address_may_be_a_unix_socket(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/probe.sock"
    async with serving(Probe(), address=address) as bound, open_channel(address) as channel:
        assert bound == address
        with pytest.raises(StartupError, match="another process listens there"):
            bind(create_server(max_message_bytes=1 << 20), address)
        assert await once(channel)(b"x") == b"x"
    with pytest.raises(StartupError, match="no socket can be created there"):
        bind(create_server(max_message_bytes=1 << 20), f"unix:{tmp_path}/nowhere/probe.sock")


async def test_a_socket_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/probe.sock")
    async with serving(Probe(), address=f"unix:{tmp_path}/probe.sock") as address, open_channel(address) as channel:
        assert await once(channel)(b"x") == b"x"


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The probe as a process with a grace of 0.3 s or as a test asks, and its address."""
    command = [sys.executable, "-m", "tests.outrider.rpc.probe", str(getattr(request, "param", 0.3))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            address = started.stdout.readline().strip()
            wait_for_health(address, NAME, 60)
            yield started, address
        finally:
            started.kill()


def test_a_compressed_message_is_limited_by_its_uncompressed_size(process: tuple[subprocess.Popen[str], str]) -> None:
    """The limit is 1 MiB. 64 MiB of zeros travel in 64 KiB, and are refused without being held anywhere."""

    def peak_memory() -> int:
        status = Path(f"/proc/{process[0].pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(process[1], options, grpc.Compression.Gzip) as channel:
        assert len(once(channel)(bytes(1 << 19), timeout=60)) == 1 << 19
        before = peak_memory()
        with pytest.raises(grpc.RpcError) as caught:
            once(channel)(bytes(1 << 26), timeout=60)
        assert errors.from_rpc_error(caught.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert peak_memory() - before < 1 << 24
        assert len(once(channel)(bytes(1 << 19), timeout=60)) == 1 << 19


def test_calls_that_outlast_the_grace_are_cut(process: tuple[subprocess.Popen[str], str]) -> None:
    """After SIGINT. `tests/draft_service/test_lifecycle.py` has SIGTERM, and calls that finish within the grace."""
    started, address = process
    with grpc.insecure_channel(address) as channel:
        running = many(channel)(b"180")
        assert next(running) == b"first"
        started.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as caught:
            next(running)
    cut = errors.from_rpc_error(caught.value)
    assert (cut.code, cut.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING"), "its client resumes elsewhere"
    assert started.wait(45.0) == 0
    assert started.stdout is not None
    assert started.stdout.read().split() == ["draining", "stopped"]


@pytest.mark.parametrize("process", [600.0], indirect=True)
def test_a_second_signal_cuts_the_calls_in_progress_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    started, address = process
    with grpc.insecure_channel(address) as channel:
        running = many(channel)(b"180")
        assert next(running) == b"first"
        once(channel)(b"x")  # after this the write of "first" is over: while one is under way, gRPC sends no status
        started.send_signal(signal.SIGTERM)
        assert started.stdout is not None
        assert started.stdout.readline() == "draining\n"
        started.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(running)
    cut = errors.from_rpc_error(caught.value)
    assert (cut.code, cut.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING"), "its client resumes elsewhere"
    assert started.wait(45.0) == 0
