"""Verifiers and draft services for tests: real processes over real sockets, forked from one that has imported them."""

import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from outrider.cli.processes import ServiceProcess
from tests.fork_server import ForkServer, fork_server
from tests.metrics import Samples, scrape
from tests.project.tree import ROOT

MODELS = ROOT / "models" / "demo"
FLAGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1")
"""Of every service. In float32 the text of a seed does not depend on the batch."""

_PORTS = (20_000, 30_000)
"""Below the ports of outgoing connections: a port stays free while its service is restarted."""
_MOST_RESERVATIONS = 200  # a process may open some thousand files; a service listens long before as many are chosen
_reservations: list[socket.socket] = []

HELD = ("outrider_kv_blocks_used", "outrider_num_requests_running", "outrider_num_requests_waiting")

Flags = str | Sequence[str]
"""As on a command line: a sequence of words, or one string."""

Found = TypeVar("Found")


class Service(ServiceProcess):
    """A service that keeps its address while its processes are killed, frozen and started again."""

    def __init__(self, name: str, arguments: Sequence[str], server: ForkServer, **start: Any) -> None:
        """`start` are further arguments of `ForkServer.fork`."""
        self.lines: list[str] = []
        self._is_ending = False
        self._listen, self._metrics = free_address(), free_address()
        addresses = ("--listen", self._listen, "--metrics-listen", self._metrics)
        self._fork = lambda: server.fork(name, [*addresses, *arguments], **start)
        super().__init__(name, self._fork(), self.lines.append)
        if start.get("output") is not None:
            self._address = self._listen  # it says so in its log, which is not ours to read

    @property
    def address(self) -> str:
        """`HOST:PORT`, also before it listens there."""
        return self._address or self._listen

    @property
    def metrics_url(self) -> str:
        return f"http://{self._metrics}/metrics"

    def start_again(self) -> None:
        """Start a new process once the last one has ended."""
        self.process.wait()
        self._reader.join()
        self.lines.clear()
        self._is_ending = False
        super().__init__(self.name, self._fork(), self.lines.append)

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal, unless it has ended."""
        self._is_ending = self._is_ending or number == signal.SIGTERM
        self.process.send_signal(number)

    def end(self) -> None:
        """Send SIGTERM, once: a second one would skip the grace. Its cluster waits for the end."""
        if not self._is_ending:
            self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)

    def stop(self, timeout: float | None = None) -> int:
        """End it, and kill it after `timeout` or `stop_timeout` seconds. Return its exit code."""
        self.end()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self.stop_timeout if timeout is None else timeout)
        self.kill()
        self._reader.join(timeout=5.0)
        return self.process.returncode

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()

    def samples(self, *names: str) -> Samples:
        """Return all metrics' samples, or those with these names."""
        return scrape(self.metrics_url, *names)

    def count(self, metric: str, **labels: str) -> float:
        """Return a metric's sum over its samples with these labels."""
        found = self.samples(metric).get(metric, {})
        return sum(value for key, value in found.items() if labels.items() <= dict(key).items())

    def is_idle(self) -> bool:
        """Return whether it holds no request, and no block of its KV cache."""
        return not any(any(samples.values()) for samples in self.samples(*HELD).values())

    def plain_lines(self) -> list[str]:
        """Return the lines of libraries and tracebacks, which are no log entries."""
        return [line for line in self.lines if line.strip() and not line.startswith("{")]

    def logged(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return its log entries, or those of this event."""
        entries = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [entry for entry in entries if event in (None, entry["event"])]


class Cluster:
    """Starts services without waiting for them, and stops all that run at the end of its block."""

    def __init__(self, flags: Flags = (), *, fault: str | None = None) -> None:
        """`fault`, of `tests.exactness.mutants.faults`, is for services without one of their own."""
        self.services: list[Service] = []
        self._flags = flags
        self._fault = fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        running = [service for service in self.services if service.returncode is None]
        for service in running:
            service.end()  # all at once: each may take seconds
        for service in running:
            service.stop()
        codes = {service.name: service.returncode for service in running if service.returncode}
        assert error[0] is not None or not codes, f"exit codes {codes}"

    def verifier(
        self, *, model: Path = MODELS / "target", flags: Flags = (), fault: str | None = None, **start: Any
    ) -> Service:
        """Start a verifier. `flags` follow those of all services; `start` goes to `ForkServer.fork`."""
        return self._start("verifier_service", ["--model", str(model)], flags, fault, start)

    def draft(
        self,
        *verifiers: ServiceProcess | str,
        model: Path = MODELS / "draft",
        flags: Flags = (),
        fault: str | None = None,
        **start: Any,
    ) -> Service:
        """Start a draft service with these verifiers, by service or address."""
        addresses = [each if isinstance(each, str) else each.address for each in verifiers]
        known = ["--verifier", ",".join(addresses)] if addresses else []
        return self._start("draft_service", ["--model", str(model), *known], flags, fault, start)

    def _start(
        self, name: str, arguments: Sequence[str], flags: Flags, fault: str | None, start: Mapping[str, Any]
    ) -> Service:
        arguments = [*arguments, *FLAGS, *_words(self._flags), *_words(flags)]
        service = Service(name, arguments, fork_server(), fault=fault or self._fault, **start)
        self.services.append(service)
        return service


def wait_healthy(*services: Service) -> None:
    """Wait until they serve.

    Raises:
        ServiceError: one ended, or does not serve in time.
    """
    for service in services:
        service.wait_healthy()


def _words(flags: Flags) -> Sequence[str]:
    return flags.split() if isinstance(flags, str) else flags


def free_address() -> str:
    """Return an address that no process listens at, no outgoing connection gets, and no other test chooses."""
    while True:
        # Not from the seeded generator: workers that run tests side by side would choose the same ports.
        address = ("127.0.0.1", random.SystemRandom().randrange(*_PORTS))
        with suppress(OSError), socket.socket() as probe:
            probe.bind(address)
            _reserve(address)
            return "{}:{}".format(*address)


def _reserve(address: tuple[str, int]) -> None:
    """Hold the UDP port of that number, as other workers do: a service listens seconds after its port was chosen.

    Raises:
        OSError: another process holds it.
    """
    reservation = socket.socket(type=socket.SOCK_DGRAM)
    try:
        reservation.bind(address)
    except OSError:
        reservation.close()
        raise
    _reservations.append(reservation)
    if len(_reservations) > _MOST_RESERVATIONS:
        _reservations.pop(0).close()


def wait_until(holds: Callable[[], Found], seconds: float = 60.0, what: str = "") -> Found:
    """Return the result of `holds` once it is true; `what` describes it in an error."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return found
