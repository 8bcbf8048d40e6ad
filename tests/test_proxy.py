"""The proxy between a server and a client of plain sockets: each fault has its effect, and in its direction alone."""

import contextlib
import random
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster import wait_until
from tests.proxy import BOTH, Proxy, Way


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(1 << 16):
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Before a server that echoes."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Proxy("{}:{}".format(*server.server_address)) as proxy:
            yield proxy
        server.shutdown()


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60.0)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def echoes(connection: socket.socket, data: bytes) -> bool:
    connection.sendall(data)
    return read(connection, len(data)) == data


def test_more_bytes_pass_than_buffers_hold(proxy: Proxy) -> None:
    sent = bytes(range(256)) * (1 << 14)
    with connect(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
        assert read(connection, len(sent)) == sent


def test_a_delay_adds_to_the_round_trip_and_keeps_order_and_throughput(proxy: Proxy) -> None:
    """Two hundred messages under way at once take one delay, not two hundred."""
    proxy.delay(0.1)
    messages = [number.to_bytes(4, "little") for number in range(200)]
    with connect(proxy) as connection:
        begun = time.monotonic()
        for message in messages:
            connection.sendall(message)
        assert read(connection, 800) == b"".join(messages)
    assert 0.2 <= time.monotonic() - begun < 20.0


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_ends_all_connections_and_lets_new_ones_in(proxy: Proxy, reset: bool) -> None:
    with connect(proxy) as one, connect(proxy) as two:
        assert all(echoes(connection, b"x") for connection in (one, two))
        proxy.cut(reset=reset)
        for connection in (one, two):
            with pytest.raises(ConnectionResetError) if reset else contextlib.nullcontext():
                assert connection.recv(1) == b""
        with connect(proxy) as third:
            assert echoes(third, b"y")


def test_a_cut_after_a_count_lets_just_so_many_bytes_through(proxy: Proxy) -> None:
    proxy.cut_after(1000, Way.DOWN)
    with connect(proxy) as connection:
        assert echoes(connection, bytes(600))
        connection.sendall(bytes(600))
        assert len(read(connection, 600)) == 400
    with connect(proxy) as another:
        assert echoes(another, bytes(2000)), "it cuts once"


def test_a_stall_after_a_count_holds_the_rest_for_later(proxy: Proxy) -> None:
    proxy.stall_after(1000, Way.DOWN)
    with connect(proxy) as connection:
        sent = random.randbytes(1500)
        connection.sendall(sent)
        assert read(connection, 1000) == sent[:1000]
        assert not select.select([connection], [], [], 0.2)[0], "nothing passes"
        proxy.flow(Way.DOWN)
        assert read(connection, 500) == sent[1000:]
        assert echoes(connection, bytes(2000)), "it stalls once"


@pytest.mark.parametrize("way", BOTH)
def test_half_open_is_a_stall_in_one_direction(proxy: Proxy, way: Way) -> None:
    with connect(proxy) as connection, proxy.recording() as seen:
        proxy.stall(way)
        connection.sendall(b"half")
        received = [Way.UP] if way is Way.UP else [Way.UP, Way.DOWN]
        wait_until(lambda: [segment.way for segment in seen] == received)
        assert not select.select([connection], [], [], 0.2)[0], "nothing passes"
        proxy.flow(way)
        assert read(connection, 4) == b"half"
    assert [(segment.way, segment.data) for segment in seen] == [(Way.UP, b"half"), (Way.DOWN, b"half")]


def test_refusing_turns_away_new_connections_and_keeps_the_old(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert echoes(connection, b"still here")
        proxy.close()
        assert connection.recv(1) == b""
    proxy.open()
    with connect(proxy) as connection:
        assert echoes(connection, b"back")
