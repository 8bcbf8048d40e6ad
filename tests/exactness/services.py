"""Services for the tests of this folder: forked from one nursery, faulty where asked, reached over gRPC.

It knows processes, addresses and health; nothing of what is asked of a service.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.cli.sharing import service_environment
from outrider.rpc.channel import wait_for_health_blocking

START_TIMEOUT_S = 60.0

TINY_FLAGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--listen", "127.0.0.1:0")
"""What every service of this folder is told: number format, place, and any free port."""


class StartError(Exception):
    """A service did not start; the text holds its log."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    name: str
    pid: int
    log: Path
    address: str

    def stop(self) -> None:
        """Asks it to end; the nursery takes care that it does."""
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return


class Nursery:
    """Starts services. Made once for all tests; logs go into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.exactness.mutants.nursery"],
            # macOS refuses to fork a process that has loaded certain frameworks, unless told not to.
            env={**os.environ, **service_environment(1), "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # upon which it stops what it has started
        self._process.wait(START_TIMEOUT_S)
        self._process.stdout.close()

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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._started += 1
        log = self._folder / f"{self._started:02}-{service}-{fault or 'sound'}.log"
        log.touch()
        order = {"service": service, "arguments": [*arguments], "fault": fault, "log": str(log)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise StartError(f"the nursery ended with exit code {self._process.wait()}")
        return Service(service, json.loads(answer)["pid"], log, _address(service, log))


def wait_healthy(*services: Service) -> None:
    """Waits until they serve.

    Raises:
        StartError: one does not.
    """
    for service in services:
        try:
            wait_for_health_blocking(service.address, "", START_TIMEOUT_S)
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
