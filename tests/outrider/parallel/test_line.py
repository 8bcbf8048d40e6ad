"""A line tells its frames in order, and that the other side is gone: at once where it ended, soon where it is still."""

import queue
import socket

import pytest

from outrider.parallel.line import Line, LineBroken, receive

SOON_S = 20.0
NEVER_S = 300.0


class End:
    """One end of a line, and what it has heard."""

    def __init__(self, connection: socket.socket, *, silence: float = NEVER_S) -> None:
        self.frames: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self.broken: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.line = Line(
            connection,
            silence=silence,
            on_frame=lambda kind, data: self.frames.put((kind, data)),
            on_broken=self.broken.put,
        )
        self.line.start()


def test_frames_come_in_order_whatever_their_size() -> None:
    ours, theirs = map(End, socket.socketpair())
    large = bytes(range(256)) * 20_000
    ours.line.send(1, b"a", b"", b"bc")
    ours.line.send(2)
    ours.line.send(3, large)
    assert [theirs.frames.get(timeout=SOON_S) for _ in range(3)] == [(1, b"abc"), (2, b""), (3, large)]
    theirs.line.send(4, b"back")
    assert ours.frames.get(timeout=SOON_S) == (4, b"back")
    for each in (ours, theirs):
        each.line.close()


def test_an_end_is_noticed_at_once_and_by_the_other_side_alone() -> None:
    ours, theirs = map(End, socket.socketpair())
    ours.line.close()
    assert theirs.broken.get(timeout=SOON_S) == "it closed its connection"
    assert theirs.line.wait_ended(SOON_S)
    assert ours.line.wait_ended(SOON_S)
    assert ours.broken.empty()
    with pytest.raises(LineBroken):
        ours.line.send(1)


def test_who_ends_without_having_read_all_has_closed_its_connection_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dying = socket.create_connection(listener.getsockname())
        ours = End(listener.accept()[0])
    ours.line.send(1, b"unread")
    dying.close()
    assert ours.broken.get(timeout=SOON_S) == "it closed its connection"


def test_silence_is_an_end() -> None:
    ours, silent = socket.socketpair()
    listening = End(ours, silence=0.5)
    assert listening.broken.get(timeout=SOON_S) == "it has been silent for 0.5 s"
    silent.close()


def test_who_has_nothing_to_say_beats_and_beats_are_no_frames() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(SOON_S)
    idle = End(ours)
    beats = receive(theirs, 10)
    assert beats == bytes(10), "kind 0, no bytes; twice"
    theirs.sendall(beats + bytes((7, 0, 0, 0, 1)) + b"x")
    assert idle.frames.get(timeout=SOON_S) == (7, b"x")
    idle.line.close()
    theirs.close()


def test_who_takes_nothing_in_is_gone_too() -> None:
    ours, full = socket.socketpair()
    line = Line(ours, silence=0.5, on_frame=lambda kind, data: None, on_broken=lambda how: None)
    with pytest.raises(LineBroken, match="silent for"):
        line.send(1, bytes(64 << 20))
    full.close()
    line.close()
