"""Real services at a tenth of the start-up time: forked from a process that has imported both of them.

Each is a process of its own that runs the service's own `main`, with flags as on any command line. Run as a program,
this file is the fork server: it accepts connections at the socket whose descriptor is its argument, until its standard
input ends. The workers of a run share one, and are its children too: imports are half a minute of processor time in a
new environment.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Client, Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any, NoReturn, Self, TypeAlias, cast

from outrider.cli.processes import ServiceProcess, keep_on, service_environment
from tests.project.tree import ROOT
from tests.triton_interpreter import patch_language_once

SERVICES = ("verifier_service", "draft_service")
GRACE_S = 5.0
_LOOK_S = 0.01

ADDRESS = "TESTS_FORK_SERVER"
"""The environment variable with the socket of the fork server, for the workers of pytest-xdist."""

Channel: TypeAlias = "Connection[Any, Any]"
Request = tuple[str, list[str], dict[str, str], str | None, tuple[str, ...]]
"""Service, arguments, environment, fault, and the files of its namespaces. Its three standard streams follow."""


class ForkedService(ServiceProcess):
    """A `ServiceProcess` that is forked, for tests in place of the other."""

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
    """Return a class that adds each of its services to `started`."""

    class Noted(ForkedService):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    return Noted


class Child:
    """The part of `Popen` that `ServiceProcess` and tests use, for a child of a fork server."""

    def __init__(self, pid: int, stdout: IO[str], parent: "ForkServer") -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._parent = parent
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._parent.poll(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(["a forked service"], cast(float, timeout))
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A connection to the process that forks services. Any thread may call it.

    When it closes, the services end that it has started.
    """

    def __init__(self, address: str) -> None:
        self._channel = Client(address)
        self._lock = threading.Lock()

    def fork(
        self,
        service: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        fault: str | None = None,
        namespaces: Sequence[str] = (),
        output: int | None = None,
    ) -> subprocess.Popen[str]:
        """Fork a service, after one of the `faults` if given, in the namespaces of these files, entered in turn.

        Its output can be read from the result, unless it goes to the descriptor `output`.
        """
        reading, writing = os.pipe()
        environment = {**os.environ, **service_environment(), **(env or {})}
        shown = writing if output is None else output
        try:
            with open(os.devnull, "rb") as nothing:
                request = service, [*arguments], environment, fault, (*namespaces,)
                child: int = self._call(request, (nothing.fileno(), shown, shown))
        finally:
            os.close(writing)
        lines = open(reading, encoding="utf-8", errors="replace")  # noqa: SIM115  # its reader closes it
        return cast("subprocess.Popen[str]", Child(child, lines, self))

    def poll(self, child: int) -> int | None:
        """Return the exit code of a child, once; None while it runs."""
        code: int | None = self._call(child)
        return code

    def _call(self, request: Request | int, streams: Sequence[int] = ()) -> Any:
        try:
            with self._lock:
                self._channel.send(request)
                for descriptor in streams:
                    send_handle(self._channel, descriptor, 0)  # only Windows needs the process
                return self._channel.recv()
        except (EOFError, BrokenPipeError):
            raise RuntimeError("the fork server has ended; see its output") from None


@functools.cache
def fork_server() -> ForkServer:
    """Return the one that all tests of this process share."""
    if ADDRESS not in os.environ:
        start_fork_server()
    return ForkServer(os.environ[ADDRESS])


def start_fork_server() -> None:
    """Start the fork server of this process and its workers. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="fork-server-")
    os.environ[ADDRESS] = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen()  # clients may connect while it imports
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(listener.fileno())],
            # macOS refuses to fork a process that has loaded certain frameworks unless this is set.
            env={**os.environ, **service_environment(1), "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"},
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )
    atexit.register(folder.cleanup)
    atexit.register(process.communicate)


# --------------------------------------------------------------------------------------------------------- the program


def main() -> int:
    """Serve requests until the standard input ends."""
    gc.disable()  # as the services do while they import
    import torch

    from outrider.runtime.loader import ModelSource, load_model
    from outrider.runtime.model_runner import Chunk
    from outrider.runtime.torch_runner import TorchRunner

    for service in SERVICES:
        importlib.import_module(f"{service}.__main__")
    patch_language_once()
    # The first model of a process takes half of the time that a child needs to start; its first passes compile.
    loaded = load_model(ModelSource(str(ROOT / "models" / "demo" / "draft"), dtype="float32", device="cpu"))
    runner = TorchRunner.build(loaded, 1, 64)
    with torch.inference_mode():
        for _ in range(3):
            slot = runner.pool.allocate()
            runner.forward([Chunk(slot, [1, 2, 3], 0, 0)])
            runner.pool.free(slot)
    del loaded, runner
    torch.manual_seed(torch.initial_seed())  # as in a new process
    gc.freeze()  # a child that looked for garbage among these objects would copy their pages
    gc.enable()
    listener = socket.socket(fileno=int(sys.argv[1]))
    children: dict[Channel, set[int]] = {}
    standard_input = sys.stdin.fileno()
    while standard_input not in (ready := wait([standard_input, listener, *children])):
        for channel in ready:
            if channel is listener:
                children[Connection(listener.accept()[0].detach())] = set()
            elif isinstance(channel, Connection):
                try:
                    _answer(channel, children[channel], [listener, *children])
                except (EOFError, ConnectionError):
                    channel.close()
                    _stop(children.pop(channel))
    _stop(set().union(*children.values()))
    return 0


def _answer(channel: Channel, children: set[int], inherited: "Sequence[Channel | socket.socket]") -> None:
    """Read one request and answer it. A child closes what it has inherited."""
    request = channel.recv()
    if isinstance(request, int):
        channel.send(_poll(request, children))
        return
    streams = [recv_handle(channel) for _ in range(3)]
    child = os.fork()
    if not child:
        for each in inherited:
            each.close()
        _become(request, streams)
    for descriptor in streams:
        os.close(descriptor)
    children.add(child)
    channel.send(child)


def _poll(child: int, children: set[int]) -> int | None:
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        return None
    children.discard(child)
    return os.waitstatus_to_exitcode(status)


def _become(request: Request, streams: Sequence[int]) -> NoReturn:
    from huggingface_hub import constants as hub

    from outrider.service.logs import flush_all

    service, arguments, environment, fault, namespaces = request
    # Into a session of its own, so that a terminal's Ctrl-C goes to the tests alone.
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    # The package of the hub has read its variables when it was imported.
    hub.HF_HUB_CACHE = environment.get("HF_HUB_CACHE", hub.HF_HUB_CACHE)
    sys.argv = [service, *arguments]
    code = 1

    try:
        for name in namespaces:
            # This process has one thread so far. `os.setns` came with Python 3.12.
            with open(name, "rb") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
        if fault is not None:
            importlib.import_module("tests.exactness.mutants.faults").FAULTS[fault]()
        program = f"{service}.__main__" if service in SERVICES else service
        code = importlib.import_module(program).main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        flush_all()
        os._exit(code)  # the parent's open files are not ours to close


def _stop(children: set[int]) -> None:
    """End the children that are left: SIGTERM, a grace, SIGKILL."""
    for number, until in ((signal.SIGTERM, time.monotonic() + GRACE_S), (signal.SIGKILL, None)):
        for child in children:
            os.kill(child, number)
        while children and (until is None or time.monotonic() < until):
            for child in list(children):
                _poll(child, children)
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
