"""Services for tests: processes of their own, forked from one that has imported them (`tests.nursery`).

What a service is, does and costs is as if it had been started from a command line, but for the seconds of imports.
It knows processes; nothing of what is asked of a service.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any, Self, cast

from outrider.cli.processes import ServiceProcess
from outrider.cli.sharing import keep_on, service_environment

_LOOK_S = 0.01


class ForkedService(ServiceProcess):
    """A `ServiceProcess` that is forked. Takes what that takes, for the two services alone; and what `Nursery.start`
    takes, of the nursery `of`: by default the one that all share.
    """

    @classmethod
    def launch(
        cls,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        cores: Collection[int] | None = None,
        fault: str | None = None,
        network: str | None = None,
        of: Nursery | None = None,
    ) -> Self:
        parent = nursery() if of is None else of
        reading, writing = os.pipe()
        try:
            child = parent.start(arguments[0], arguments[1:], writing, env=env, fault=fault, network=network)
        finally:
            os.close(writing)
        if cores:
            keep_on(child, cores)
        lines = open(reading, encoding="utf-8", errors="replace")  # noqa: SIM115  # its reader closes it
        return cls(arguments[0], cast("subprocess.Popen[str]", Child(child, lines, parent)), on_line)


def noting(started: list[ForkedService]) -> type[ForkedService]:
    """Return the class, but each service that is made of it is added to `started`."""

    class Noted(ForkedService):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    return Noted


class Child:
    """What `ServiceProcess` and tests use of a `Popen`, for a process whose parent is a nursery."""

    def __init__(self, pid: int, stdout: IO[str], parent: Nursery) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._parent = parent
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._parent.poll(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not in so many seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(["a forked service"], cast(float, timeout))
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks services. Any thread may ask it."""

    def __init__(self, entering: Sequence[str] = ()) -> None:
        """`entering` is what its command begins with, where it is to live in other namespaces."""
        self._channel, theirs = socket.socketpair()
        self._answers = self._channel.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [*entering, sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
                # macOS refuses to fork a process that has loaded certain frameworks, unless told not to.
                env={**os.environ, **service_environment(1), "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def start(
        self,
        service: str,
        arguments: Sequence[str],
        output: int,
        *,
        env: Mapping[str, str] | None = None,
        fault: str | None = None,
        network: str | None = None,
    ) -> int:
        """Forks a service, after one of the `faults` where that is given, in the network that the file `network` stands
        for; what it says goes to the descriptor `output`. Returns its process id.
        """
        environment = {**os.environ, **service_environment(), **(env or {})}
        order = {
            "service": service,
            "arguments": [*arguments],
            "fault": fault,
            "network": network,
            "environment": environment,
        }
        return int(self._ask(order, [output]))

    def poll(self, child: int) -> int | None:
        """The exit code of a child, which is given once; None while it runs."""
        code: int | None = self._ask({"poll": child}, [])
        return code

    def close(self) -> None:
        """Ends it, and whatever it has started that still runs."""
        self._answers.close()
        self._channel.close()
        self._process.wait()

    def _ask(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> Any:
        with self._lock:
            text = json.dumps(order).encode() + b"\n"
            sent = socket.send_fds(self._channel, [text], descriptors)
            self._channel.sendall(text[sent:])
            answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the nursery ended with exit code {self._process.wait()}")
        return json.loads(answer)


@functools.cache
def nursery() -> Nursery:
    """The one of this process."""
    made = Nursery()
    atexit.register(made.close)
    return made
