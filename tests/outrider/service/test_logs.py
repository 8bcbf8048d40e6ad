"""Logs are one JSON object a line, and never block or fail a process: lines that are lost are counted, errors last."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from outrider.service.logs import LineQueue
from tests.commands import full_pipe
from tests.project.tree import ROOT

SECONDS = 60.0
INFO = '{"event": "round %d", "level": "info"}\n'
ERROR = '{"event": "failure %d", "level": "error"}\n'


def _notice(lines: int) -> str:
    return f"dropped {lines}"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    with full_pipe() as ends:
        yield ends


class Reader:
    """Reads lines of a pipe, past the empty ones that filled it."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, encoding="utf-8", closefd=False)  # noqa: SIM115  # the pipe's fixture closes it

    def line(self) -> str:
        return next(line for line in self._file if line != "\n").rstrip("\n")


def test_a_full_queue_drops_new_lines_and_says_how_many_once_they_flow(pipe: tuple[int, int]) -> None:
    queue = LineQueue(pipe[1], _notice, limit=2_000)
    for number in range(200):
        queue.write(INFO % number)
    assert queue.dropped > 0
    reader = Reader(pipe[0])
    for number in range(200 - queue.dropped):
        assert reader.line() == (INFO % number).rstrip()
    assert reader.line() == f"dropped {queue.dropped}"
    before = queue.dropped
    queue.write("more\n")
    assert (reader.line(), queue.dropped) == ("more", before)


def test_errors_find_room_where_other_lines_do_not(pipe: tuple[int, int]) -> None:
    queue = LineQueue(pipe[1], _notice, limit=2_000)
    for number in range(200):
        queue.write(INFO % number)
    before = queue.dropped
    queue.write(ERROR % 1)
    queue.write(INFO % 200)
    queue.write(ERROR % 2)
    assert queue.dropped == before + 1
    reader = Reader(pipe[0])
    lines = [reader.line() for _ in range(200 - before + 3)]
    assert lines[-3:] == [(ERROR % 1).rstrip(), (ERROR % 2).rstrip(), f"dropped {before + 1}"]


def test_memory_is_bounded_for_errors_too(pipe: tuple[int, int]) -> None:
    queue = LineQueue(pipe[1], _notice, limit=2_000)
    for number in range(200):
        queue.write(ERROR % number)
    assert 200 - queue.dropped <= 1 + 2_000 / len(ERROR % 0) * 2  # those in the queue, and those being written


def test_what_cannot_be_written_is_counted() -> None:
    reading, closed_pipe = os.pipe()
    os.close(reading)
    full_disk = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (closed_pipe, full_disk, -1):
        queue = LineQueue(descriptor, _notice)
        for number in range(10):
            queue.write(INFO % number)
        assert queue.drain(SECONDS)
        assert queue.dropped == 10
    os.close(closed_pipe)
    os.close(full_disk)


def test_lines_flow_again_when_a_reader_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)
    queue = LineQueue(writing, _notice)
    os.close(reading)
    for number in range(3):
        queue.write(INFO % number)
    assert queue.drain(SECONDS)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    queue.write(INFO % 3)
    assert queue.drain(SECONDS)
    assert os.read(reading, 1_000).decode() == INFO % 3 + "dropped 3\n"
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    queue = LineQueue(pipe[1], _notice)
    queue.write("a line\n")
    assert not queue.drain(0.05)
    assert Reader(pipe[0]).line() == "a line"
    assert (queue.drain(SECONDS), queue.dropped) == (True, 0)


def test_it_is_a_text_stream() -> None:
    reading, writing = os.pipe()
    queue = LineQueue(writing, _notice)
    print("two", "words", file=queue)
    print("no end of line", end="", file=queue)
    print(", until now", file=queue)
    print("\r10 %\r20 %\r", end="", file=queue)
    print("\ud800 is no text", end="", file=queue)
    with pytest.raises(TypeError):
        queue.write(b"bytes")  # type: ignore[arg-type]
    assert queue.drain(SECONDS)
    expected = "two words\nno end of line, until now\n\r10 %\r20 %\r\\ud800 is no text"
    assert os.read(reading, 1_000).decode() == expected
    for descriptor in (reading, writing):
        os.close(descriptor)


# Lines of every kind, far more of them than the pipe and the queue hold.
PROGRAM = """
import ctypes, logging, sys, warnings
early = logging.getLogger("a.library")
early.addHandler(logging.StreamHandler())
early.propagate = False
import structlog
from outrider.service.logs import dropped_lines
from outrider.service.logs import configure_logging
configure_logging("some_service")
assert early.handlers[0].stream in (None, sys.stderr)
text, libc = b"from C\\n" * 10_000, ctypes.PyDLL(None)
for number in range(400):
    structlog.get_logger().info("request", text="x" * 1_000)
    logging.getLogger("outrider").info("request " + "y" * 1_000)
    early.error("from a library's own handler " + "z" * 1_000)
    warnings.warn(f"beware {number} " + "w" * 1_000)
    print("on standard error " + "s" * 1_000, file=sys.stderr, flush=True)
libc.write(2, text, len(text))
open(sys.argv[1], "w").write(str(dropped_lines()))
"""


def test_a_process_goes_on_and_ends_whatever_becomes_of_its_output(tmp_path: Path) -> None:
    """Output that nobody reads, a closed pipe, a full disk, nothing at all."""
    with ExitStack() as open_now:
        _, unread = open_now.enter_context(full_pipe())
        reading, closed_pipe = os.pipe()
        os.close(reading)
        full_disk = os.open("/dev/full", os.O_WRONLY)
        open_now.callback(os.close, closed_pipe)
        open_now.callback(os.close, full_disk)
        started = []
        for name, output in {"unread": unread, "closed": closed_pipe, "full": full_disk, "none": None}.items():
            command = [sys.executable, "-c", PROGRAM, str(tmp_path / name)]
            if output is None:
                command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
            started.append((tmp_path / name, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)))
        for file, process in started:
            open_now.callback(process.kill)
            assert (file.name, process.wait(SECONDS)) == (file.name, 0)
            assert int(file.read_text()) > 0


LAST_WORDS = """
import logging, sys, structlog
from outrider.service.logs import configure_logging
configure_logging("some_service")
for number in range(1_000):
    structlog.get_logger().info("request", number=number)
print("the last line of standard output")
raise RuntimeError("the last line of standard error")
"""


def test_all_of_it_is_out_when_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LAST_WORDS], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines), lines[-1]) == (1, 1_001, "the last line of standard output")
    assert re.search(r'"number": 999\b', lines[-2])
    assert done.stderr.splitlines()[-1] == "RuntimeError: the last line of standard error"


SERVE = """
import time
from contextlib import contextmanager
from types import SimpleNamespace
from outrider.cli import main, serve
from outrider.cli.processes import ServiceProcess

@contextmanager
def running_pair(*flags, on_line, **_):
    told = lambda line: on_line("verifier_service", line)
    with ServiceProcess.launch(["tests.outrider.cli.stand_in", "chatter=5000"], on_line=told) as service:
        wait = lambda timeout: service.process.wait()
        watch = lambda: [time.sleep(0.1) for _ in range(600)]
        yield SimpleNamespace(address="somewhere", wait_healthy=wait, watch=watch)

serve.running_pair = running_pair
main(["serve", "--target", "a", "--draft", "b"])
"""


def test_serve_reads_what_its_services_log_while_nobody_reads_it(pipe: tuple[int, int]) -> None:
    """Once the stand-in for a service has written all of its lines it ends, and `serve` says that it serves."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=ROOT, stdout=pipe[1], stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Serving.")
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
            assert process.stderr.read() == "Stopped.\n"
        finally:
            with suppress(OSError):
                process.kill()


def test_grpc_writes_nothing_to_standard_error_of_a_client() -> None:
    program = "import outrider.client, grpc; grpc.server(None).add_insecure_port('192.0.2.1:1')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "RuntimeError: Failed to bind" in done.stderr
    assert "add_port.cc" not in done.stderr


LINES = """
import logging, structlog
from outrider.service.logs import configure_logging
configure_logging("some_service")
structlog.get_logger().info("request", tokens=3)
structlog.get_logger().debug("too fine")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("outrider.rpc.errors").exception("it broke")
"""


def test_every_line_is_json_with_service_level_and_time() -> None:
    done = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [("request", "info"), ("it broke", "error")]
    assert lines[0]["tokens"] == 3
    assert "ZeroDivisionError" in lines[1]["exception"]
    assert all(line["service"] == "some_service" and line["timestamp"].endswith("Z") for line in lines)
    assert done.stderr == ""
