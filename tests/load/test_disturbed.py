"""Short texts by two verifiers and two draft services that are killed, frozen and restarted all the while: none fails.

    OUTRIDER_SHORT_TEXTS=100000 python -m pytest -m slow tests/load/test_disturbed.py

One service at a time is disturbed, and the next one when the draft services have all verifiers back: a round that ends
two verifiers is refused, by design. Progress and a summary are printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from tests.chaos.cluster import Watched, until
from tests.exactness import pairs
from tests.fork_server import ForkedService
from tests.load.short_texts import DRAFT_FLAGS, FLAGS, Alone, Tally, held, load, texts, write_alone
from tests.services import HEALTHY_WITHIN_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

COUNT = int(os.environ.get("OUTRIDER_SHORT_TEXTS", "100000"))
SEED = int(os.environ.get("OUTRIDER_SHORT_TEXTS_SEED", "1"))
PROGRESS_S = 10.0
GRACE_S = 5.0

SILENCE_S = {"verifier_service": 3.0, "draft_service": 8.0}
"""After so long a frozen verifier is given up by draft services, and a frozen draft service by clients."""

FROZEN_S = {module: (0.2, 1.5 * seconds) for module, seconds in SILENCE_S.items()}
"""For so long they are frozen: some are given up, some are not."""

PAUSE_S = (0.0, 1.0)
"""From a kill to the new start, and between two disturbances."""

PORTS = (20_000, 30_000)
"""Below those that systems give to outgoing connections."""


class Slot:
    """A service at an address that stays, while its processes come and go."""

    def __init__(self, module: str, *flags: str) -> None:
        self.module = module
        self.address, metrics = _address(), _address()
        self._metrics_url = f"http://{metrics}/metrics"
        self._arguments = (module, "--listen", self.address, "--metrics-listen", metrics, *FLAGS, *flags)

    def start(self) -> None:
        """Start a process here."""
        lines: list[str] = []
        process = ForkedService.launch(self._arguments, on_line=lines.append)
        self.watched = Watched(process, self._metrics_url, lines)

    def wait_healthy(self) -> None:
        """Return when it serves."""
        self.watched.process.wait_healthy(HEALTHY_WITHIN_S)

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        self.watched.process.process.send_signal(number)


@dataclass
class Disturber:
    """Kills, freezes and restarts the services, one after the other, on a thread of its own."""

    verifiers: list[Slot]
    drafts: list[Slot]
    counts: Counter[str] = field(default_factory=Counter)
    last: str = "nothing yet"
    error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    @property
    def slots(self) -> list[Slot]:
        """Return all services."""
        return [*self.verifiers, *self.drafts]

    @contextmanager
    def disturbing(self) -> Iterator[None]:
        """Disturb until the block ends, and leave all services at work.

        Raises:
            ServiceError: one ended by itself, or did not come back.
        """
        thread = threading.Thread(target=self._run, name="disturber")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        acts: dict[str, Callable[[Slot], None]] = {"kill": self._kill, "freeze": self._freeze, "restart": self._restart}
        try:
            while not self._over.is_set():
                turns = list(product(acts, self.slots))
                self._chance.shuffle(turns)
                for name, slot in turns:
                    if self._over.is_set():
                        return
                    self.last = f"{name} {slot.module} {slot.address}"
                    acts[name](slot)
                    self.counts[name] += 1
                    self._wait_all_back()
                    self._over.wait(self._chance.uniform(*PAUSE_S))
        except BaseException as error:
            self.error = error

    def _kill(self, slot: Slot) -> None:
        slot.send(signal.SIGKILL)
        slot.watched.process.process.wait()
        self._over.wait(self._chance.uniform(*PAUSE_S))
        slot.start()

    def _freeze(self, slot: Slot) -> None:
        slot.send(signal.SIGSTOP)
        self._over.wait(self._chance.uniform(*FROZEN_S[slot.module]))
        slot.send(signal.SIGCONT)

    def _restart(self, slot: Slot) -> None:
        assert slot.watched.process.stop(GRACE_S + HEALTHY_WITHIN_S) == 0, slot.watched.lines[-20:]
        slot.start()

    def _wait_all_back(self) -> None:
        for slot in self.slots:
            slot.watched.process.check()
            slot.wait_healthy()
        for draft in self.drafts:
            assert until(lambda draft=draft: _sees_all(draft, len(self.verifiers)), HEALTHY_WITHIN_S), self.last  # type: ignore[misc]


def _address() -> str:
    """Return one whose port is free and that no outgoing connection gets while nobody listens there."""
    while True:
        port = random.randrange(*PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def _sees_all(draft: Slot, count: int) -> bool:
    found = draft.watched.samples().get("outrider_verifiers", {})
    return sum(found.get((("status", status),), 0) for status in ("closed", "half_open")) == count


@pytest.fixture
def disturber(tmp_path: Path) -> Iterator[Disturber]:
    target = pairs.write_target(tmp_path / "target", seed=1)
    draft = pairs.write_draft(tmp_path / "draft", target, "flattened")
    grace = ("--grace", str(GRACE_S))
    verifiers = [Slot("verifier_service", "--model", str(target), *grace) for _ in range(2)]
    known = ("--verifier", ",".join(slot.address for slot in verifiers))
    silence = ("--verifier-timeout", str(SILENCE_S["verifier_service"]))
    drafts = [Slot("draft_service", "--model", str(draft), *known, *silence, *grace, *DRAFT_FLAGS) for _ in range(2)]
    with ExitStack() as stack:
        for slot in (*verifiers, *drafts):
            slot.start()
            stack.callback(lambda slot=slot: slot.watched.process.stop())  # type: ignore[misc]
        for slot in (*verifiers, *drafts):
            slot.wait_healthy()
        yield Disturber(verifiers, drafts)


def test_no_short_text_fails_while_services_are_killed_frozen_and_restarted(
    disturber: Disturber, capsys: pytest.CaptureFixture[str]
) -> None:
    tally, began = Tally(circumstances=lambda: f"({disturber.last})"), time.monotonic()

    def told(what: str) -> None:
        with capsys.disabled():
            done = f"{tally.whole:,} of {COUNT:,} texts whole, {tally.failures.total()} failed"
            print(f"\n{what}: {done}; {dict(disturber.counts)}; {time.monotonic() - began:.0f} s", end="", flush=True)

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            told(disturber.last)

    async def write() -> None:
        async with AsyncClient(
            [slot.address for slot in disturber.drafts], silence=SILENCE_S["draft_service"]
        ) as client:
            alone: Alone = await write_alone(client)
            shown = asyncio.create_task(progress())
            with disturber.disturbing():
                await load(client, texts(COUNT, alone, seed=SEED), tally)
            shown.cancel()

    asyncio.run(write())
    told("done")
    for failure, count in tally.failures.most_common(20):
        with capsys.disabled():
            print(f"\n  {count} x {failure}", end="")
    assert not tally.failures
    assert tally.whole == COUNT
    for slot in disturber.slots:
        assert until(lambda slot=slot: not held(slot.watched), 60.0), f"{slot.module}: {held(slot.watched)}"  # type: ignore[misc]
