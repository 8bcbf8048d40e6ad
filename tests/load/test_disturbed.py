"""Short texts by two verifiers and two draft services that are killed, frozen and restarted all the while: none fails.

    OUTRIDER_SHORT_TEXTS=100000 python -m pytest -m slow -s tests/load/test_disturbed.py

One service at a time is disturbed, and the next one when the draft services have all verifiers back: a round that ends
two verifiers is refused, by design.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.load.short_texts import DRAFT_FLAGS, load, texts, wait_idle, write_alone, write_tiny_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

COUNT = int(os.environ.get("OUTRIDER_SHORT_TEXTS", "100000"))
SEED = int(os.environ.get("OUTRIDER_SHORT_TEXTS_SEED", "1"))
GRACE_S = 5.0

SILENCE_S = {"verifier_service": 3.0, "draft_service": 8.0}
"""After so long a frozen verifier is given up by draft services, and a frozen draft service by clients."""

FROZEN_S = {module: (0.2, 1.5 * seconds) for module, seconds in SILENCE_S.items()}
"""For so long they are frozen: some are given up, some are not."""

PAUSE_S = (0.0, 1.0)
"""From a kill to the new start, and between two disturbances."""


class Disturber:
    """Kills, freezes and restarts the services, one after the other, on a thread of its own."""

    def __init__(self, verifiers: list[Service], drafts: list[Service]) -> None:
        self.services = [*verifiers, *drafts]
        self.drafts = drafts
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._chance = random.Random(SEED)

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
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                turns = list(product(("kill", "freeze", "restart"), self.services))
                self._chance.shuffle(turns)
                for act, service in turns:
                    if self._over.is_set():
                        return
                    print(f"{act} {service.name} {service.address}", flush=True)
                    self._disturb(act, service)
                    for each in self.services:
                        each.check()
                        each.wait_healthy()
                    for draft in self.drafts:
                        wait_until(lambda draft=draft: _sees_both(draft), 110.0, act)  # type: ignore[misc]
                    self._over.wait(self._chance.uniform(*PAUSE_S))
        except BaseException as error:
            self._error = error

    def _disturb(self, act: str, service: Service) -> None:
        match act:
            case "kill":
                service.kill()
                self._over.wait(self._chance.uniform(*PAUSE_S))
                service.start_again()
            case "freeze":
                service.send(signal.SIGSTOP)
                self._over.wait(self._chance.uniform(*FROZEN_S[service.name]))
                service.send(signal.SIGCONT)
            case "restart":
                assert service.stop() == 0, service.lines[-20:]
                service.start_again()


def _sees_both(draft: Service) -> bool:
    return sum(draft.count("outrider_verifiers", status=status) for status in ("ready", "recovering")) == 2


def test_no_short_text_fails_while_services_are_killed_frozen_and_restarted(tmp_path: Path) -> None:
    target, model = write_tiny_pair(tmp_path)
    with Cluster(f"--grace {GRACE_S}") as cluster:
        verifiers = [cluster.verifier(model=target) for _ in range(2)]
        flags = (*DRAFT_FLAGS, "--verifier-timeout", str(SILENCE_S["verifier_service"]))
        drafts = [cluster.draft(*verifiers, model=model, flags=flags) for _ in range(2)]
        wait_healthy(*verifiers, *drafts)
        disturber = Disturber(verifiers, drafts)

        async def write() -> Counter[str]:
            addresses = [service.address for service in drafts]
            async with AsyncClient(addresses, silence=SILENCE_S["draft_service"]) as client:
                alone = await write_alone(client)
                with disturber.disturbing():
                    return await load(client, texts(COUNT, alone, seed=SEED))

        failures = asyncio.run(write())
        assert not failures, failures.most_common(20)
        wait_idle(*disturber.services)
