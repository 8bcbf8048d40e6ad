"""What files say together is never of two moments, and is looked at from many threads."""

import threading
from pathlib import Path

import pytest

from outrider.rpc.tls import FileProblem, Watched
from tests.certificates import write


def test_what_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        write(path, b"old")
    reads = 0

    def read() -> tuple[bytes, bytes]:
        nonlocal reads
        reads += 1
        one = first.read_bytes()
        if reads in (1, 3):  # at the start, and at the change
            for path in (first, second):
                write(path, b"%d" % reads)
        return one, second.read_bytes()

    watched = Watched([first, second], read)
    assert watched.look() == (0, (b"1", b"1"))
    write(first, b"new")
    assert watched.look() == (1, (b"3", b"3"))
    assert watched.look() == (1, (b"3", b"3"))
    assert reads == 4


def test_files_that_never_rest_are_given_up(tmp_path: Path) -> None:
    path = tmp_path / "restless"
    write(path, b"")

    def read() -> None:
        write(path, path.read_bytes() + b"x")

    with pytest.raises(FileProblem, match="changed while being read"):
        Watched([path], read)


def test_a_change_counts_once_however_many_look(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    watched = Watched([path], path.read_bytes)
    seen: list[tuple[int, bytes]] = []
    write(path, b"new")
    threads = [threading.Thread(target=lambda: seen.append(watched.look())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(1, b"new")] * 16
    path.touch()  # another face, and the same content: whoever asks may take it for a change
    assert watched.look()[1] == b"new"


def test_the_folder_of_a_kubernetes_secret_is_followed(tmp_path: Path) -> None:
    """Its files are links through a link, which is what changes."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "tls.key", name.encode())
    (tmp_path / "..data").symlink_to("one")
    path = tmp_path / "tls.key"
    path.symlink_to("..data/tls.key")
    watched = Watched([path], path.read_bytes)
    assert watched.look() == (0, b"one")
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert watched.look() == (1, b"two")
