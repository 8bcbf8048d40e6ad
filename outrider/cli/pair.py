"""Two services as one thing: a verifier and a draft that knows its address, on this machine."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType

from outrider.cli.processes import ServiceError, ServiceProcess
from outrider.cli.sharing import halves, service_environment

# Between two looks at processes that should go on running.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What to run, and where; a model's own device goes before that of both. All from `drafter` on is for the draft
    service alone; `security` is flags and all.
    """

    target: str
    draft: str
    verifier_listen: str = "127.0.0.1:0"
    draft_listen: str = "127.0.0.1:0"
    device: str | None = None
    target_device: str | None = None
    draft_device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    drafter: str | None = None
    staged_by: str | None = None
    ngram_corpus: str | None = None
    speculation: str | None = None
    security: tuple[str, ...] = ()

    def flags(self, device: str | None = None) -> list[str]:
        """The flags that both services share, and `device` where one has its own."""
        return _given({"--device": device or self.device, "--dtype": self.dtype, "--threads": self.threads})

    def drafting(self) -> list[str]:
        """The flags of the draft service alone that say what proposes, and how much."""
        return _given(
            {
                "--drafter": self.drafter,
                "--staged-by": self.staged_by,
                "--ngram-corpus": self.ngram_corpus,
                "--speculation": self.speculation,
            }
        )


def _given(flags: Mapping[str, object]) -> list[str]:
    return [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both processes."""

    verifier: ServiceProcess
    draft: ServiceProcess

    @property
    def address(self) -> str:
        """`HOST:PORT` of the draft service."""
        return self.draft.address

    def check(self, within: float = 0.0) -> None:
        """Raises `ServiceError` where either has ended, or ends within so many seconds."""
        end = time.monotonic() + within
        while True:
            for service in (self.verifier, self.draft):
                service.check()
            if time.monotonic() >= end:
                return
            time.sleep(_LOOK_S)

    def wait_healthy(self, timeout: float) -> None:
        """Waits until both serve.

        Raises:
            ServiceError: one of them ended, or does not serve in time.
        """
        end = time.monotonic() + timeout
        for service in (self.verifier, self.draft):
            while not service.is_healthy(within=_LOOK_S):
                self.check()
                if time.monotonic() > end:
                    raise ServiceError(f"{service.name} is not healthy after {timeout:g} s", service.log_lines())

    def watch(self) -> None:
        """Returns never; raises `ServiceError` when either ends."""
        while True:
            self.check(within=3600.0)


OnLine = Callable[[str, str], None]


@contextmanager
def running_pair(settings: PairSettings, *, on_line: OnLine | None = None) -> Iterator[Pair]:
    """Starts both, and stops both however the block ends: SIGTERM, a wait, and SIGKILL where that did not do.

    Both start at once, since what takes long is each one's imports; the pair is of use after `Pair.wait_healthy`.

    Args:
        settings: what to run.
        on_line: called with a service's name and each line it logs, from threads.

    Raises:
        ServiceError: what services need is not installed here.
    """
    if find_spec("torch") is None:
        raise ServiceError("a client's installation runs no models: pip install 'outrider[service]'")
    verifier_address = fixed(settings.verifier_listen)
    plaintext = ["--plaintext"] if "--plaintext" in settings.security else []
    environment = service_environment(settings.threads)
    first, second = halves(int(environment["OMP_NUM_THREADS"])) or (None, None)

    def launch(module: str, cores: Collection[int] | None, device: str | None, *arguments: str) -> ServiceProcess:
        return ServiceProcess.launch(
            # Health on a port of its own is there in plaintext whatever the other one speaks.
            [module, *arguments, "--health-listen", "127.0.0.1:0", *settings.flags(device)],
            env=environment,
            cores=cores,
            on_line=None if on_line is None else lambda line: on_line(module, line),
        )

    with (
        launch(
            "verifier_service",
            first,
            settings.target_device,
            *("--model", settings.target, "--listen", verifier_address),
            *plaintext,
        ) as verifier,
        launch(
            "draft_service",
            second,
            settings.draft_device,
            *("--model", settings.draft, "--verifier", verifier_address, "--listen", settings.draft_listen),
            *settings.drafting(),
            *settings.security,
        ) as draft,
    ):
        yield Pair(verifier, draft)


def fixed(address: str) -> str:
    """The address with a free port in place of 0, so that the draft can be told it before the verifier is up."""
    host, _, port = address.rpartition(":")
    if port != "0":
        return address
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return f"{host}:{probe.getsockname()[1]}"


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Inside it SIGTERM does what Ctrl-C does, so that whatever is open is closed. For a main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        on_interrupt = signal.getsignal(signal.SIGINT)
        if callable(on_interrupt):  # where asyncio runs, it ends its tasks first
            on_interrupt(number, frame)
        else:  # a job in the background of a shell is deaf to Ctrl-C
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
