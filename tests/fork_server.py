"""Real services at a tenth of the start-up time: forked from a process that has imported both of them.

Each is a process of its own that runs the service's own `main`, with flags as on any command line. Run as a program,
this file is that process: it takes orders as lines of JSON from the socket whose descriptor is its argument.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any, NoReturn, Self, cast

from outrider.cli.processes import ServiceProcess, keep_on, service_environment
from tests.project.tree import ROOT

SERVICES = ("verifier_service", "draft_service")
GRACE_S = 5.0
_LOOK_S = 0.01
_MOST_BYTES = 1 << 20
_CLONE_NEWNET = 0x40000000


class ForkedService(ServiceProcess):
    """A `ServiceProcess` that is forked: what tests put in its place."""

    @classmethod
    def launch(
        cls,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        cores: Collection[int] | None = None,
    ) -> Self:
        process = fork_server().fork(arguments[0], arguments[1:], env=env)
        if cores:
            keep_on(process.pid, cores)
        return cls(arguments[0], process, on_line)


def noting(started: list[ForkedService]) -> type[ForkedService]:
    """Return the class, but each service that is made of it is added to `started`."""

    class Noted(ForkedService):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    return Noted


class Child:
    """What `ServiceProcess` and tests use of a `Popen`, for a process whose parent is a fork server."""

    def __init__(self, pid: int, stdout: IO[str], parent: ForkServer) -> None:
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


class ForkServer:
    """The process that forks services. Any thread may ask it."""

    def __init__(self, entering: Sequence[str] = ()) -> None:
        """`entering` is what its command begins with, where it is to live in other namespaces."""
        self._channel, theirs = socket.socketpair()
        self._answers = self._channel.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [*entering, sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                # macOS refuses to fork a process that has loaded certain frameworks, unless told not to.
                env={**os.environ, **service_environment(1), "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(
        self,
        service: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        fault: str | None = None,
        network: str | None = None,
        output: int | None = None,
    ) -> subprocess.Popen[str]:
        """Fork a service, after one of the `faults` where that is given, in the network namespace of the file
        `network`. Return what tests use of a `Popen`; its output is there to be read, unless it goes to the descriptor
        `output`.
        """
        reading, writing = os.pipe()
        order = {
            "service": service,
            "arguments": [*arguments],
            "fault": fault,
            "network": network,
            "environment": {**os.environ, **service_environment(), **(env or {})},
        }
        try:
            child = int(self._ask(order, [writing if output is None else output]))
        finally:
            os.close(writing)
        lines = open(reading, encoding="utf-8", errors="replace")  # noqa: SIM115  # its reader closes it
        return cast("subprocess.Popen[str]", Child(child, lines, self))

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
            raise RuntimeError(f"the fork server ended with exit code {self._process.wait()}")
        return json.loads(answer)


@functools.cache
def fork_server() -> ForkServer:
    """Return the one that all tests of this process share."""
    made = ForkServer()
    atexit.register(made.close)
    return made


# --------------------------------------------------------------------------------------------------------- the program


def main() -> int:
    """Serves orders until there are no more."""
    for service in SERVICES:
        importlib.import_module(f"{service}.__main__")
    _prepare_loading()
    channel = socket.socket(fileno=int(sys.argv[1]))
    children: set[int] = set()
    while (received := _receive(channel)) is not None:
        order, descriptors = received
        answer: int | None = None
        if "poll" in order:
            answer = _poll(order["poll"], children)
        else:
            (output,) = descriptors
            answer = os.fork()
            if not answer:
                channel.close()
                _become(order, output)
            children.add(answer)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.sendall(json.dumps(answer).encode() + b"\n")
    _stop(children)
    return 0


def _prepare_loading() -> None:
    """Loads a small model, for what the first one of a process costs: half of what a child needs to start."""
    from outrider.runtime.loader import ModelSource, load_model

    load_model(ModelSource(str(ROOT / "models" / "demo" / "draft"), dtype="float32", device="cpu"))


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """An order and the descriptors that came with it; None at the end."""
    text, descriptors = b"", list[int]()
    while not text.endswith(b"\n"):
        more, brought, _, _ = socket.recv_fds(channel, _MOST_BYTES, 1)
        if not more:
            return None
        text += more
        descriptors += brought
    order: dict[str, Any] = json.loads(text)
    return order, descriptors


def _poll(child: int, children: set[int]) -> int | None:
    """The exit code of a child, as `subprocess` has it; None while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        return None
    children.discard(child)
    return os.waitstatus_to_exitcode(status)


def _become(order: dict[str, Any], output: int) -> NoReturn:
    # Into a session of its own, so that a terminal's Ctrl-C goes to the tests alone.
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [order["service"], *order["arguments"]]
    code = 1
    from outrider.service.logs import flush_all

    try:
        if order["network"] is not None:
            _enter(order["network"])
        if order["fault"] is not None:
            fault: Callable[[], None] = importlib.import_module("tests.exactness.mutants.faults").FAULTS[order["fault"]]
            fault()
        code = importlib.import_module(f"{order['service']}.__main__").main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        flush_all()
        os._exit(code)  # nothing of the parent's is ours to clean up


def _enter(network: str) -> None:
    """Moves this process, which has one thread yet, to the network namespace that a file stands for."""
    with open(network, "rb") as file:
        # `os.setns` came with Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network {network}")


def _stop(children: set[int]) -> None:
    """Ends what is left: SIGTERM, a moment of grace, SIGKILL."""
    for number, until in ((signal.SIGTERM, time.monotonic() + GRACE_S), (signal.SIGKILL, None)):
        for child in children:
            os.kill(child, number)
        while children and (until is None or time.monotonic() < until):
            for child in list(children):
                _poll(child, children)
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
