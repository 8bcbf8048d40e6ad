"""A process that has imported both services and forks them: real services at a tenth of the start-up time.

Each child is a process of its own that runs the service's own `main` with flags as on any command line, in the network
that it is told, after at most one deliberate fault (`tests.exactness.mutants.faults`). Orders come as lines of JSON
through the socket whose descriptor is this program's argument, one answer for each; what a child says goes where the
descriptor that came with its order leads. When the socket ends, all children are stopped. It knows nothing of tests.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from outrider.runtime.loader import ModelSource, load_model
from outrider.service.logs import flush_all
from tests.house.project import ROOT

MODELS = ROOT / "models" / "demo"
SERVICES = ("verifier_service", "draft_service")
GRACE_S = 5.0
_MOST_BYTES = 1 << 20
_CLONE_NEWNET = 0x40000000


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
    load_model(ModelSource(str(MODELS / "draft"), dtype="float32", device="cpu"))


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
