"""Services as processes on this machine, one or a pair: start them, read their addresses, wait until they are healthy,
stop them. Synchronous; needs the standard library and `outrider.rpc` only.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self

from outrider.environment import ENV_PREFIX
from outrider.rpc.channel import wait_for_health

DRAFT_SPINS, TARGET_SPINS = 2_000, 100_000
"""How long a thread of an OpenMP pool spins before it sleeps: GOMP_SPINCOUNT. A thousand take some 0.06 ms."""


def service_environment(threads: int | None = None, *, spins: int = DRAFT_SPINS) -> dict[str, str]:
    """The environment of a service that shares its machine with one other.

    `threads` are its CPU threads; None: those of a draft. Threads that sleep after each of the hundreds of operations
    of a forward pass make two threads slower than one. Two pools of full size that spin slow each other down. So the
    draft's threads spin for the gap between two operations. The target's spin for longer: also while the system stops
    another thread of the pool for a moment, and until the next pass.
    """
    environment = {
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", str(spins)),
        "OMP_NUM_THREADS": str(threads_of_pair(threads)[1]),
    }
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():  # a source tree, perhaps not installed
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def threads_of_pair(threads: int | None = None) -> tuple[int, int]:
    """CPU threads of a target and of a draft that share a machine.

    Each has `threads`, else OMP_NUM_THREADS, else half of the processors. Where half is one processor, the target has
    as many threads as there are processors. Measured on two processors, with 1 to 16 streams: 1.0 to 1.5 times as fast
    as one thread and one processor each.
    """
    # The variable may be a list: the first number is that of threads that are not nested.
    by_variable = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given := threads or (int(by_variable) if by_variable.isdecimal() else 0):
        return given, given
    count = len(processors())
    half = max(1, count // 2)
    return (count if half == 1 else half), half


def halves(threads: int) -> tuple[frozenset[int], frozenset[int]] | None:
    """Half of the processors for each of two services with so many threads; None if there are too few.

    A round alternates between the services. Without pinning, a service often wakes on a processor whose caches hold the
    weights of the other one (measured on two processors: a third of the wake-ups in a round).
    """
    ours = sorted(processors())
    half = len(ours) // 2
    if threads > half:
        return None
    return frozenset(ours[:half]), frozenset(ours[half:])


def processors() -> frozenset[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def busy_processors() -> float:
    """How many of the processors that this process may run on are busy, measured over a fifth of a second.

    Without /proc/stat it is the load average of the last minute.
    """

    def ticks() -> tuple[int, int]:
        names = {f"cpu{number}" for number in processors()}
        busy = total = 0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *times = line.split()
            if name in names:
                spent = [int(time) for time in times[:8]]  # user, nice, system, idle, iowait, irq, softirq, steal
                total += sum(spent)
                busy += sum(spent) - spent[3] - spent[4]
        return busy, total

    try:
        busy, total = ticks()
        time.sleep(0.2)
        busy_later, total_later = ticks()
    except OSError:
        return os.getloadavg()[0]
    return len(processors()) * (busy_later - busy) / max(1, total_later - total)


def keep_on(process_id: int, cores: Collection[int]) -> None:
    """Pins a new process, with all its threads, to these processors.

    Does nothing if the system does not support or allow it, or if the process has ended.
    """
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process_id, cores)


# Log lines kept of one process.
_KEPT_LINES = 1_000
# Importing torch on a cold disk takes tens of seconds; nothing listens before that.
START_TIMEOUT_S = 120.0
# A process hangs if it runs longer than its --grace and this margin. The grace of a process that has not logged it.
_STOP_MARGIN_S, _GRACE_S = 5.0, 30.0
# Between two checks that processes still run; timeout of one health check.
_CHECK_S = 0.2


# Variables of a service that is deployed alone, which both services of a pair would read. Here only flags say how a
# service listens, which clients it admits, and how it calls the other one.
_BY_FLAGS_ONLY = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in (
        *("ALLOW_CLIENT_SAN", "AUTH_TOKEN_FILE", "HEALTH_LISTEN", "METRICS_LISTEN"),
        *("CLIENT_BURST", "CLIENT_RATE", "MAX_CLIENT_SEQUENCES"),
        *("TLS_CERT", "TLS_CLIENT_CA", "TLS_KEY"),
        *("VERIFIER_TLS_CA", "VERIFIER_TLS_CERT", "VERIFIER_TLS_KEY", "VERIFIER_TLS_NAME", "VERIFIER_TOKEN_FILE"),
    )
)


class ServiceError(Exception):
    """A service did not start, is not healthy or died. The text is one line; `log_lines` are its last ones."""

    def __init__(self, message: str, log_lines: Sequence[str] = ()):
        super().__init__(message)
        self.log_lines = tuple(log_lines)


class ServiceProcess:
    """A running service, from `launch`. As a context manager it stops the process at the end."""

    def __init__(self, name: str, process: subprocess.Popen[str], on_line: Callable[[str], None] | None = None):
        self.name = name
        self.process = process
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._address = ""
        self._health_address = ""
        self._grace = _GRACE_S
        self._settled = threading.Event()  # the address is known, or the process has ended
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    @classmethod
    def launch(
        cls,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        cores: Collection[int] | None = None,
    ) -> Self:
        """Runs `python -m ARGUMENTS...` and returns at once.

        Args:
            arguments: the module, then its flags: `["verifier_service", "--model", DIR, "--listen", "127.0.0.1:0"]`.
            env: variables on top of `service_environment()` and of this process's own, but for those that only flags
                set.
            on_line: called with each log line, from a thread.
            cores: the processors it may run on, if the system supports that.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _BY_FLAGS_ONLY}
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**inherited, **service_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            # A terminal sends Ctrl-C to its whole process group: the services are stopped in order instead.
            start_new_session=True,
        )
        if cores:
            keep_on(process.pid, cores)
        return cls(arguments[0], process, on_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Its `HOST:PORT`; empty before it listens."""
        return self._address

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    @property
    def stop_timeout(self) -> float:
        """Seconds from SIGTERM to SIGKILL in `stop`."""
        return self._grace + _STOP_MARGIN_S

    def log_lines(self) -> list[str]:
        """Its last thousand log lines, oldest first."""
        return list(self._lines)

    def wait_listening(self, timeout: float = START_TIMEOUT_S) -> str:
        """Waits for the address and returns it.

        Raises:
            ServiceError: it ended, or logged no address in time.
        """
        if not self._settled.wait(timeout):
            raise self._error(f"did not listen within {timeout:g} s")
        if not self._address:
            raise self._ended()
        return self._address

    def wait_healthy(self, timeout: float = START_TIMEOUT_S) -> None:
        """Waits until it serves.

        Raises:
            ServiceError: it ended, or does not serve in time.
        """
        _wait_healthy([self], timeout)

    def is_healthy(self, *, within: float) -> bool:
        """Whether it serves within so many seconds."""
        if not self._settled.wait(within) or not self._address:
            return False
        try:
            wait_for_health(self._health_address or self._address, "", within)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raises `ServiceError` if it has ended."""
        if self.process.poll() is not None:
            raise self._ended()

    def stop(self, timeout: float | None = None) -> int:
        """Sends SIGTERM, waits up to `timeout` seconds, then sends SIGKILL. Returns the exit code; may be called twice.

        Without `timeout` that is `stop_timeout`. An interrupt during the wait kills the process at once, and is raised
        again.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self.stop_timeout if timeout is None else timeout)
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
                self._health_address = self._health_address or str(_entry_in(line, "health").get("address", ""))
                if not self._address and (entry := _entry_in(line, "listening")):
                    self._grace = float(entry.get("grace", _GRACE_S))
                    self._address = str(entry.get("address", ""))
                    self._settled.set()
                if self._on_line is not None:
                    self._on_line(line)
        self._settled.set()

    def _ended(self) -> ServiceError:
        self.process.wait()
        self._reader.join(timeout=5.0)
        code = self.process.returncode
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        return self._error(how + self._reason())

    def _reason(self) -> str:
        """Its last line that is not JSON: services end with the reason in one."""
        words = [line for line in self._lines if line and not line.startswith("{")]
        return f": {words[-1].removeprefix(f'{self.name}: ')}" if words else ""

    def _error(self, what: str) -> ServiceError:
        return ServiceError(f"{self.name} {what}", self.log_lines())


def _entry_in(line: str, event: str) -> dict[str, Any]:
    """The fields of a log line of this `event`; else none."""
    if not line.startswith("{") or f'"{event}"' not in line:
        return {}
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return entry if entry.get("event") == event else {}


def _wait_healthy(services: Sequence[ServiceProcess], timeout: float) -> None:
    end = time.monotonic() + timeout
    for service in services:
        while not service.is_healthy(within=_CHECK_S):
            for each in services:
                each.check()
            if time.monotonic() > end:
                raise service._error(f"is not healthy after {timeout:g} s")


@dataclass(frozen=True, slots=True)
class Pair:
    """The processes of a verifier and its draft service."""

    verifier: ServiceProcess
    draft: ServiceProcess

    @property
    def address(self) -> str:
        """`HOST:PORT` of the draft service."""
        return self.draft.address

    def check(self, within: float = 0.0) -> None:
        """Raises `ServiceError` if one has ended, or ends within so many seconds."""
        end = time.monotonic() + within
        while True:
            for service in (self.verifier, self.draft):
                service.check()
            if time.monotonic() >= end:
                return
            time.sleep(_CHECK_S)

    def wait_healthy(self, timeout: float) -> None:
        """Waits until both serve.

        Raises:
            ServiceError: one of them ended, or does not serve in time.
        """
        _wait_healthy([self.verifier, self.draft], timeout)

    def watch(self, also: Callable[[], None] = lambda: None) -> None:
        """Raises `ServiceError` when one ends, or what `also` raises; never returns."""
        while True:
            self.check()
            also()
            time.sleep(_CHECK_S)


@contextmanager
def running_pair(
    verifier_flags: Sequence[str],
    draft_flags: Sequence[str],
    *,
    verifier_listen: str = "127.0.0.1:0",
    threads: int | None = None,
    on_line: Callable[[str, str], None] | None = None,
) -> Iterator[Pair]:
    """Starts a verifier and its draft service, and stops both at the end of the block: SIGTERM, a wait, then SIGKILL.

    Both start at the same time, because their imports take long; use the pair after `Pair.wait_healthy`.

    Args:
        verifier_flags: of the verifier service, all but `--listen`.
        draft_flags: of the draft service, all but `--verifier`.
        verifier_listen: address of the verifier.
        threads: CPU threads of each; None: see `threads_of_pair`.
        on_line: called with a service's name and each line it logs, from threads.

    Raises:
        ServiceError: torch is not installed.
    """
    if find_spec("torch") is None:
        raise ServiceError(
            "torch is not installed, and services need it: pip install -e '.[service]' in a clone of Outrider"
        )
    verifier_address = fixed(verifier_listen)
    of_target, of_draft = threads_of_pair(threads)
    first, second = halves(max(of_target, of_draft)) or (None, None)

    def launch(module: str, cores: Collection[int] | None, env: dict[str, str], *flags: str) -> ServiceProcess:
        return ServiceProcess.launch(
            # Health on a port of its own is in plaintext, also with TLS on the other. The caller's flag, later, wins.
            [module, "--health-listen", "127.0.0.1:0", *flags],
            env=env,
            cores=cores,
            on_line=None if on_line is None else lambda line: on_line(module, line),
        )

    target_env = service_environment(of_target, spins=TARGET_SPINS)
    draft_env = service_environment(of_draft)
    with (
        launch("verifier_service", first, target_env, "--listen", verifier_address, *verifier_flags) as verifier,
        launch("draft_service", second, draft_env, "--verifier", verifier_address, *draft_flags) as draft,
    ):
        yield Pair(verifier, draft)


def fixed(address: str) -> str:
    """The address with a free port in place of 0: the draft service needs it before the verifier listens."""
    host, _, port = address.rpartition(":")
    if port != "0":
        return address
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return f"{host}:{probe.getsockname()[1]}"


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM interrupt as Ctrl-C does, so that context managers close. For the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        on_interrupt = signal.getsignal(signal.SIGINT)
        if callable(on_interrupt):  # asyncio ends its tasks first
            on_interrupt(number, frame)
        else:  # background jobs of a shell ignore SIGINT
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
