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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.exactness import pairs
from tests.load.short_texts import DRAFT_FLAGS, Alone, Tally, load, texts, wait_idle, write_alone

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


@dataclass
class Disturber:
    """Kills, freezes and restarts the services, one after the other, on a thread of its own."""

    verifiers: list[Service]
    drafts: list[Service]
    counts: Counter[str] = field(default_factory=Counter)
    last: str = "nothing yet"
    error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    @property
    def services(self) -> list[Service]:
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
        acts: dict[str, Callable[[Service], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "restart": self._restart,
        }
        try:
            while not self._over.is_set():
                turns = list(product(acts, self.services))
                self._chance.shuffle(turns)
                for name, service in turns:
                    if self._over.is_set():
                        return
                    self.last = f"{name} {service.name} {service.address}"
                    acts[name](service)
                    self.counts[name] += 1
                    self._wait_all_back()
                    self._over.wait(self._chance.uniform(*PAUSE_S))
        except BaseException as error:
            self.error = error

    def _kill(self, service: Service) -> None:
        service.kill()
        self._over.wait(self._chance.uniform(*PAUSE_S))
        service.start_again()

    def _freeze(self, service: Service) -> None:
        service.send(signal.SIGSTOP)
        self._over.wait(self._chance.uniform(*FROZEN_S[service.name]))
        service.send(signal.SIGCONT)

    def _restart(self, service: Service) -> None:
        assert service.stop() == 0, service.lines[-20:]
        service.start_again()

    def _wait_all_back(self) -> None:
        for service in self.services:
            service.check()
            service.wait_healthy()
        for draft in self.drafts:
            wait_until(lambda draft=draft: _sees_all(draft, len(self.verifiers)), 110.0, self.last)  # type: ignore[misc]


def _sees_all(draft: Service, count: int) -> bool:
    return sum(draft.count("outrider_verifiers", status=status) for status in ("closed", "half_open")) == count


@pytest.fixture
def disturber(tmp_path: Path) -> Iterator[Disturber]:
    target = pairs.write_target(tmp_path / "target", seed=1)
    draft = pairs.write_draft(tmp_path / "draft", target, "flattened")
    with Cluster(f"--grace {GRACE_S}") as cluster:
        verifiers = [cluster.verifier(model=target) for _ in range(2)]
        flags = (*DRAFT_FLAGS, "--verifier-timeout", str(SILENCE_S["verifier_service"]))
        drafts = [cluster.draft(*verifiers, model=draft, flags=flags) for _ in range(2)]
        wait_healthy(*verifiers, *drafts)
        yield Disturber(verifiers, drafts)


def test_no_short_text_fails_while_services_are_killed_frozen_and_restarted(
    disturber: Disturber, capsys: pytest.CaptureFixture[str]
) -> None:
    tally, began = Tally(circumstances=lambda: f"({disturber.last})"), time.monotonic()

    def report(what: str) -> None:
        with capsys.disabled():
            done = f"{tally.whole:,} of {COUNT:,} texts whole, {tally.failures.total()} failed"
            print(f"\n{what}: {done}; {dict(disturber.counts)}; {time.monotonic() - began:.0f} s", end="", flush=True)

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            report(disturber.last)

    async def write() -> None:
        async with AsyncClient(
            [service.address for service in disturber.drafts], silence=SILENCE_S["draft_service"]
        ) as client:
            alone: Alone = await write_alone(client)
            shown = asyncio.create_task(progress())
            with disturber.disturbing():
                await load(client, texts(COUNT, alone, seed=SEED), tally)
            shown.cancel()

    asyncio.run(write())
    report("done")
    for failure, count in tally.failures.most_common(20):
        with capsys.disabled():
            print(f"\n  {count} x {failure}", end="")
    assert not tally.failures
    assert tally.whole == COUNT
    for service in disturber.services:
        wait_idle(service)
