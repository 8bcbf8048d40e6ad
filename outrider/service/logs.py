"""Logs of the services, on standard output: text on a terminal, one JSON object a line elsewhere. They never block or
fail a process.

Python's own logging and warnings are written in the same form. A full pipe without a reader blocks its writers; a
closed pipe or a full disk makes them fail. `take_over` replaces `sys.stdout` and `sys.stderr` by a `LineQueue`:
logging, warnings, tracebacks and progress bars go through it. C libraries write to the descriptor, which `take_over`
makes non-blocking: they lose lines while the pipe is full.
"""

import atexit
import io
import json
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

LIMIT_BYTES = 1 << 20
"""Capacity of a queue: some 3,000 log lines. Its second half is for errors."""
FLUSH_SECONDS = 1.0
"""Timeout of `flush_all`."""

_ERRORS = ('"level": "error"', '"level": "critical"')
_LONGEST_PART = 1 << 13

_queues: "list[LineQueue]" = []


class LineQueue(io.TextIOBase):
    """A text stream whose `write` never waits and never fails; a thread of its own writes to the descriptor.

    When the queue is full new lines are dropped, so the first ones of a process are kept; errors (JSON log lines of
    that level) are dropped last. As soon as lines flow again, `notice(dropped)` is written after the gap.

    Attributes:
        dropped: lines lost so far.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, notice: Callable[[int], str], limit: int = LIMIT_BYTES) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        try:
            self._target = os.dup(descriptor)
        except OSError:  # closed: all lines are dropped
            self._target = -1
        self._notice = notice
        self._limit = limit
        # Reentrant: the garbage collector may run a destructor that logs, at any point.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._part = ""
        self._lines: list[bytes] = []
        self._queued_bytes = 0
        self._unreported = 0
        self._is_writing = False
        threading.Thread(target=self._run, name=f"output-{descriptor}", daemon=True).start()

    def write(self, text: str) -> int:
        """Queues complete lines. An incomplete line is kept until it is complete, or until `flush`."""
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes str, not {type(text).__name__}")
        with self._lock:
            self._part += text
            end = max(self._part.rfind("\n"), self._part.rfind("\r")) + 1  # progress bars end in a carriage return
            if len(self._part) - end > _LONGEST_PART:
                end = len(self._part)
            whole, self._part = self._part[:end], self._part[end:]
            self._put(whole)
        return len(text)

    def flush(self) -> None:
        """Queues an unfinished line too. Does not wait for it to be written: `drain` does."""
        with self._lock:
            part, self._part = self._part, ""
            self._put(part)

    def drain(self, timeout: float) -> bool:
        """Waits until all is written; returns whether it is."""
        self.flush()
        with self._lock:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, timeout)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def _put(self, text: str) -> None:
        if not text:
            return
        data = text.encode(self.encoding, self.errors)
        limit = self._limit if any(mark in text for mark in _ERRORS) else self._limit // 2
        if self._queued_bytes + len(data) > limit:
            self._drop(data.count(b"\n"))
            return
        self._lines.append(data)
        self._queued_bytes += len(data)
        self._changed.notify_all()

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._unreported += lines

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                # All at once: the notice about dropped lines belongs after them.
                data, missing = b"".join(self._lines), self._unreported
                self._lines.clear()
                self._queued_bytes = 0
                self._is_writing = True
            failed = self._write(data)
            with self._lock:
                self._drop(failed)
            if missing and not failed and not self._write(self._notice(missing).encode() + b"\n"):
                with self._lock:
                    self._unreported -= missing

    def _write(self, data: bytes) -> int:
        """Writes to the descriptor. Returns the number of lines that could not be written."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._target, select.POLLOUT)
                poll.poll()
            except OSError:
                return bytes(rest).count(b"\n")
        return 0


def take_over(service: str) -> None:
    """Replaces `sys.stdout` and `sys.stderr` for the rest of the process; does nothing for one that is replaced
    already. Lines that say how many were dropped name the service.
    """
    for descriptor, name, make in (
        (1, "stdout", partial(_dropped_notice, service)),
        (2, "stderr", lambda lines: f"{service}: {lines} lines dropped here"),
    ):
        original = getattr(sys, f"__{name}__")
        if getattr(sys, name) is not original:
            continue
        queue = LineQueue(descriptor if original is not None else -1, make)
        _queues.append(queue)
        setattr(sys, name, queue)
        if original is not None:
            original.flush()
            _move_handlers(original, queue)
            _never_block(descriptor)
    logging.raiseExceptions = False
    atexit.register(_give_back)


def flush_all() -> None:
    """Waits until all queued lines are written, for `FLUSH_SECONDS` at most."""
    end = time.monotonic() + FLUSH_SECONDS
    for queue in _queues:
        queue.drain(max(0.0, end - time.monotonic()))


def leave(code: int) -> NoReturn:
    """Ends the process without the exit handlers of Python and torch, which wait for ranks that may be lost, and end
    other threads amid C++ code.
    """
    flush_all()
    os._exit(code)


def dropped_lines() -> int:
    """Lines that this process has dropped so far."""
    return sum(queue.dropped for queue in _queues)


def _give_back() -> None:
    """At exit the queue's thread ends; later output goes to the real streams."""
    flush_all()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _move_handlers(original: object, queue: LineQueue) -> None:
    """Moves the handlers that exist already, also those of libraries, from the original stream to the queue."""
    for logger in (logging.root, *logging.Logger.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is original:
                handler.setStream(queue)


def _remove_second_handlers() -> None:
    """A library with a handler of its own that also propagates to the root logger would write each line twice."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.propagate:
            logger.handlers.clear()


def _never_block(descriptor: int) -> None:
    """Makes writes of C libraries fail instead of block.

    O_NONBLOCK belongs to the open file, which other processes may share: a pipe is opened again first. A socket cannot
    be. Regular files do not block, and a terminal is left as it is.
    """
    if stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        return
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        os.set_blocking(descriptor, False)
    else:
        os.dup2(own, descriptor)
        os.close(own)


def _dropped_notice(service: str, lines: int) -> str:
    """The JSON log line of a service that has dropped so many lines."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    event = {"event": "log lines dropped", "lines": lines, "level": "warning", "service": service, "timestamp": now}
    return json.dumps(event)


def text_renderer() -> Callable[[dict[str, Any]], str]:
    """Returns a function that makes a line for a terminal of a log event: without the service's name, in colour unless
    NO_COLOR is set or the terminal is dumb.
    """
    import structlog

    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    render = structlog.dev.ConsoleRenderer(colors=colours, pad_event_to=0, pad_level=False)

    def line(event: dict[str, Any]) -> str:
        shown = {key: _printable(key, value) for key, value in event.items() if key != "service"}
        shown["timestamp"] = str(event.get("timestamp", ""))[11:19]
        return str(render(None, "", shown))

    return line


def _printable(key: str, value: Any) -> Any:
    """A value without control characters, which a client's text may have for the operator's terminal."""
    if not isinstance(value, str) or value.isprintable() or key in ("exception", "stack"):
        return value
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in value)


def configure_logging(service: str, level: str = "info") -> bool:
    """Sets logging up for the process, and returns whether lines are text for a terminal. Every line carries a level
    and a time in UTC, JSON lines the service's name too, and lines of a traced call the ids of its trace.
    """
    # Imported here: the command line also uses this module, and its installation may lack structlog.
    import structlog

    from outrider.service.tracing import add_trace_ids

    is_readable = os.isatty(1)
    render: Any = structlog.processors.JSONRenderer()
    if is_readable:
        text = text_renderer()

        def render(logger: Any, method: str, event: dict[str, Any]) -> str:
            return text(event)

    def name_service(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "service": service}

    take_over(service)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        name_service,
        structlog.contextvars.merge_contextvars,
        add_trace_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    # Of libraries only warnings and errors are logged.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _remove_second_handlers()
    logging.getLogger("outrider").setLevel(threshold)
    logging.captureWarnings(True)
    return is_readable
