"""The proxy against a server and a client of plain sockets: each fault does what it says, and one way alone."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster import wait_until
from tests.proxy import BOTH, Proxy, Way

PATIENCE_S = 60.0
SILENCE_S = 0.2
"""How long a side is listened to before it counts as silent."""


def _echo(listener: socket.socket) -> None:
    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of a server that says what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        yield "{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo: str) -> Iterator[Proxy]:
    with Proxy(echo) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
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


def is_silent(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], SILENCE_S)[0]


def test_bytes_pass_both_ways(proxy: Proxy) -> None:
    """Four megabytes, more than either side's buffers hold."""
    sent = bytes(range(256)) * (1 << 14)
    with connect(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
        assert read(connection, len(sent)) == sent
        assert proxy.connections == 1
    wait_until(lambda: proxy.connections == 0)


def test_a_delay_adds_to_the_round_trip_and_keeps_order_and_throughput(proxy: Proxy) -> None:
    """Two hundred messages under way at once take one delay, not two hundred."""
    proxy.delay(0.1)
    with connect(proxy) as connection:
        begun = time.monotonic()
        for number in range(200):
            connection.sendall(number.to_bytes(4, "little"))
        answer = read(connection, 800)
        took = time.monotonic() - begun
    assert answer == b"".join(number.to_bytes(4, "little") for number in range(200))
    assert 0.2 <= took < 20.0


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_ends_all_connections_and_lets_new_ones_in(proxy: Proxy, reset: bool) -> None:
    with connect(proxy) as one, connect(proxy) as two:
        for connection in (one, two):
            assert echoes(connection, b"x")
        proxy.cut(reset=reset)
        for connection in (one, two):
            if reset:
                with pytest.raises(ConnectionResetError):
                    connection.recv(1)
            else:
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


@pytest.mark.parametrize("way", BOTH)
def test_half_open_is_a_stall_one_way(proxy: Proxy, way: Way) -> None:
    with connect(proxy) as connection, proxy.recording() as seen:
        proxy.stall(way)
        connection.sendall(b"half")
        arrived = {Way.UP} if way is Way.DOWN else set()
        wait_until(lambda: {segment.way for segment in seen} == arrived)
        assert is_silent(connection)
        assert {segment.way for segment in seen} == arrived
        proxy.flow(way)
        assert read(connection, 4) == b"half"


def test_a_stall_hides_the_end_of_a_side(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        assert echoes(connection, b"x")
        proxy.stall()
    time.sleep(SILENCE_S)
    assert proxy.connections == 1
    proxy.flow()
    wait_until(lambda: proxy.connections == 0)


def test_garbage_has_the_length_of_what_it_overwrites(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        proxy.garble(Way.DOWN)
        connection.sendall(bytes(4096))
        noise = read(connection, 4096)
        assert len(noise) == 4096
        assert len(set(noise)) > 200
        proxy.heal()
        assert echoes(connection, bytes(8))


def test_refusing_turns_away_new_connections_and_leaves_the_old(proxy: Proxy) -> None:
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


def test_the_record_holds_what_came_each_way(proxy: Proxy) -> None:
    with connect(proxy) as first, connect(proxy) as second, proxy.recording() as record:
        for connection, size in ((first, 10), (second, 20), (first, 30)):
            assert echoes(connection, bytes(size))
    for way in BOTH:
        segments = [segment for segment in record if segment.way is way]
        assert [len(segment.data) for segment in segments] == [10, 20, 30]
        assert segments[0].connection == segments[2].connection != segments[1].connection
    with connect(proxy) as connection:
        assert echoes(connection, b"unseen")
    assert len(record) == 6
