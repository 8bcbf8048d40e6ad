"""Logs are one JSON object a line, or text on a terminal. They never block or fail a process: lost lines are counted,
and errors are lost last.
"""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from outrider.service.logs import LineQueue, text_renderer
from tests.commands import full_pipe
from tests.project.tree import ROOT

SECONDS = 60.0
INFO = '{"event": "round %d", "level": "info"}'
ERROR = '{"event": "failure %d", "level": "error"}'


def test_a_full_queue_drops_new_lines_and_errors_last() -> None:
    with full_pipe() as (reading, writing):
        queue = LineQueue(writing, lambda lines: f"dropped {lines}", limit=2_000)
        for number in range(200):
            queue.write(f"{INFO % number}\n")
        kept = 200 - queue.dropped
        assert 0 < kept < 200
        for line in (ERROR % 1, INFO % 200, ERROR % 2):
            queue.write(f"{line}\n")
        assert queue.dropped == 201 - kept
        with open(reading, encoding="utf-8", closefd=False) as file:
            lines = (line.rstrip() for line in file if line != "\n")  # empty lines filled the pipe
            for number in range(kept):
                assert next(lines) == INFO % number
            assert [next(lines) for _ in range(3)] == [ERROR % 1, ERROR % 2, f"dropped {201 - kept}"]
            queue.write("more\n")
            assert next(lines) == "more"
        assert queue.dropped == 201 - kept


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


def test_a_process_continues_and_ends_whatever_its_output(tmp_path: Path) -> None:
    """Output without a reader, a closed pipe, a full disk, closed descriptors."""
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


LINES = """
import logging, structlog, threading
library = logging.getLogger("a.library")
library.addHandler(logging.StreamHandler())
from outrider.service.logs import configure_logging
configure_logging("some_service")
structlog.get_logger().info("request", tokens=3)
structlog.get_logger().debug("too fine")
library.warning("once")
thread = threading.Thread(target=structlog.get_logger().info, args=("in a thread",))
thread.start()
thread.join()
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("outrider.rpc.errors").exception("it broke")
"""


def test_every_line_is_json_with_service_level_and_time() -> None:
    done = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("request", "info"),
        ("once", "warning"),
        ("in a thread", "info"),
        ("it broke", "error"),
    ]
    assert lines[0]["tokens"] == 3
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert all(line["service"] == "some_service" and line["timestamp"].endswith("Z") for line in lines)
    assert done.stderr == ""


def test_on_a_terminal_lines_are_text() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LINES], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(SECONDS) == 0
    text = re.sub("\x1b\\[[0-9;]*m", "", shown.decode())
    first, second, _, fourth = text.splitlines()[:4]
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info\s*\] request\s+tokens=3", first)
    assert second.endswith("once [a.library]")
    assert "it broke" in fourth
    assert "ZeroDivisionError" in text
    assert "{" not in text


def test_a_terminal_gets_no_control_characters_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    line = text_renderer()({"event": "generate", "level": "info", "request_id": "a\x1b]0;title\x07\u202e", "n": 3})
    assert line.isprintable()
    assert "a\\x1b]0;title\\x07\\u202e" in line
