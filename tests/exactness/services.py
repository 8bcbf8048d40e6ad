"""Services for the tests of this folder: forked, faulty where asked, reached over gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.rpc.channel import wait_for_health
from tests.fork_server import fork_server

START_TIMEOUT_S = 110.0

TINY_FLAGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--listen", "127.0.0.1:0")
"""What every service of this folder is told: number format, place, and any free port."""


class StartError(Exception):
    """A service did not start; the text holds its log."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service. Who kills it by its process id asks for nothing more of it than that."""

    name: str
    pid: int
    log: Path
    address: str

    def stop(self) -> None:
        """Asks it to end; whoever started it takes care that it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class Nursery:
    """Starts services. Made once for all tests; logs go into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Service] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self._started:
            service.stop()

    def verifier(self, model: Path, *, fault: str | None = None, flags: Sequence[str] = ()) -> Service:
        """Starts a verifier service and waits until it listens; it goes on loading."""
        return self._start("verifier_service", ["--model", str(model), *TINY_FLAGS, *flags], fault)

    def draft(
        self, model: Path, verifier: Service | None, *, fault: str | None = None, flags: Sequence[str] = ()
    ) -> Service:
        """Starts a draft service for a verifier, or for those that `flags` name alone, and waits until it listens; it
        goes on loading.
        """
        named = () if verifier is None else ("--verifier", verifier.address)
        return self._start("draft_service", ["--model", str(model), *named, *TINY_FLAGS, *flags], fault)

    def _start(self, service: str, arguments: Sequence[str], fault: str | None) -> Service:
        log = self._folder / f"{len(self._started):02}-{service}-{fault or 'sound'}.log"
        with log.open("ab") as output:
            pid = fork_server().start(service, arguments, output.fileno(), fault=fault)
        self._started.append(Service(service, pid, log, ""))
        return Service(service, pid, log, _address(service, log))


def wait_healthy(*services: Service) -> None:
    """Waits until they serve.

    Raises:
        StartError: one does not.
    """
    for service in services:
        try:
            wait_for_health(service.address, "", START_TIMEOUT_S)
        except TimeoutError:
            raise StartError(f"{service.name} does not serve:\n{service.log.read_text()}") from None


def _address(service: str, log: Path) -> str:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        for line in log.read_text().splitlines():
            if '"listening"' in line and line.startswith("{"):
                return str(json.loads(line)["address"])
            if line.startswith((f"{service}: ", "Traceback")):
                raise StartError(f"{service} did not start:\n{log.read_text()}")
        time.sleep(0.01)
    raise StartError(f"{service} did not listen within {START_TIMEOUT_S:g} s:\n{log.read_text()}")
