"""A service as a process: start it, learn its address, wait until it is healthy, stop it. Synchronous.

It does not know what the service does. The standard library and `outrider.rpc` are all it needs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

from outrider.cli.sharing import keep_on, service_environment
from outrider.rpc.channel import wait_for_health_blocking

# Log lines kept of one process.
_KEPT_LINES = 1_000
# Importing torch on a cold disk takes tens of seconds; nothing listens before that.
START_TIMEOUT_S = 120.0
# The services' own grace is thirty seconds; who is still there after that hangs.
STOP_TIMEOUT_S = 35.0
# How long one look at health takes before the process itself is looked at again.
_LOOK_S = 0.5


class ServiceError(Exception):
    """A service did not start, is not healthy or died. Its text is one line; `log_lines` are the service's last."""

    def __init__(self, message: str, log_lines: Sequence[str] = ()):
        super().__init__(message)
        self.log_lines = tuple(log_lines)


class ServiceProcess:
    """A running service. Made by `start`; stops the process when left as a context manager."""

    def __init__(self, name: str, process: subprocess.Popen[str], on_line: Callable[[str], None] | None = None):
        self.name = name
        self.process = process
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._address = ""
        self._health_address = ""
        self._told = threading.Event()  # the address is known, or never will be
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        cores: Collection[int] | None = None,
        timeout: float = START_TIMEOUT_S,
    ) -> Self:
        """Runs `python -m ARGUMENTS...` and returns once it listens.

        Args:
            arguments: the module, then its flags: `["verifier_service", "--model", DIR, "--listen", "127.0.0.1:0"]`.
            env: variables on top of this process's own and of `service_environment()`.
            on_line: called with each log line, from a thread.
            cores: the processors it may run on, where this system can say so.
            timeout: seconds until it must listen.

        Raises:
            ServiceError: it ended, or said nothing of an address in time.
        """
        service = cls.launch(arguments, env=env, on_line=on_line, cores=cores)
        try:
            service.wait_listening(timeout)
        except BaseException:
            service.stop()
            raise
        return service

    @classmethod
    def launch(
        cls,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        cores: Collection[int] | None = None,
    ) -> Self:
        """As `start`, but returns at once."""
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **service_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            # A terminal's Ctrl-C goes to every process of its group: services of ours are stopped by us, in order.
            start_new_session=True,
        )
        if cores:
            keep_on(process.pid, cores)
        return cls(arguments[0], process, on_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """`HOST:PORT` where it listens; empty before it does."""
        return self._address

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.process.poll()

    def log_lines(self) -> list[str]:
        """What it has logged, oldest first; the last thousand lines."""
        return list(self._lines)

    def wait_listening(self, timeout: float = START_TIMEOUT_S) -> str:
        """Waits for the address and returns it.

        Raises:
            ServiceError: it ended, or said nothing of an address in time.
        """
        if not self._told.wait(timeout):
            raise self._error(f"did not listen within {timeout:g} s")
        if not self._address:
            raise self._ended()
        return self._address

    def wait_healthy(self, timeout: float = START_TIMEOUT_S) -> None:
        """Waits until it serves.

        Raises:
            ServiceError: it ended, or does not serve in time.
        """
        end = time.monotonic() + timeout
        self.wait_listening(timeout)
        while not self.is_healthy(within=max(0.01, min(_LOOK_S, end - time.monotonic()))):
            self.check()
            if time.monotonic() > end:
                raise self._error(f"is not healthy after {timeout:g} s")

    def is_healthy(self, *, within: float) -> bool:
        """Whether it serves, or begins to within so many seconds."""
        if not self._told.wait(within) or not self._address:
            return False
        try:
            wait_for_health_blocking(self._health_address or self._address, "", within)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raises `ServiceError` where it has ended."""
        if self.process.poll() is not None:
            raise self._ended()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, then up to `timeout` seconds, then SIGKILL. Returns the exit code; may be called twice.

        An interrupt while it waits kills at once, and goes on to the caller.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
        self._reader.join(timeout=5.0)
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for raw in lines:
                line = raw.rstrip("\n")
                self._lines.append(line)
                self._health_address = self._health_address or _address_in(line, "health")
                if not self._address and (address := _address_in(line, "listening")):
                    self._address = address
                    self._told.set()
                if self._on_line is not None:
                    self._on_line(line)
        self._told.set()

    def _ended(self) -> ServiceError:
        self.process.wait()
        self._reader.join(timeout=5.0)
        code = self.process.returncode
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        return self._error(how + self._reason())

    def _reason(self) -> str:
        """What it said last in words of its own: services end with one such line."""
        words = [line for line in self._lines if line and not line.startswith("{")]
        return f": {words[-1].removeprefix(f'{self.name}: ')}" if words else ""

    def _error(self, what: str) -> ServiceError:
        return ServiceError(f"{self.name} {what}", self.log_lines())


def _address_in(line: str, event: str) -> str:
    """The address, where the line is the log's `event`; else empty."""
    if not line.startswith("{") or f'"{event}"' not in line:
        return ""
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    return str(entry.get("address", "")) if entry.get("event") == event else ""
