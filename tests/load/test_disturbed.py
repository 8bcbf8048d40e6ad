"""Short texts by two verifiers and two draft services that are killed, frozen and restarted all the while: none fails.

    SHORT_TEXTS=100000 python -m pytest -m slow -s tests/load/test_disturbed.py

One service at a time is disturbed, and the next one when the draft services have all verifiers back: a round that ends
two verifiers is refused, by design.
"""

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.load.short_texts import DRAFT_FLAGS, load, texts, wait_idle, write_alone, write_tiny_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

COUNT = int(os.environ.get("SHORT_TEXTS", "100000"))
SEED = int(os.environ.get("SHORT_TEXTS_SEED", "1"))
GRACE_S = 5.0

SILENCE_S = {"verifier_service": 3.0, "draft_service": 8.0}
"""After so long draft services give up a frozen verifier, and clients a frozen draft service."""

FROZEN_S = {module: (0.2, 1.5 * seconds) for module, seconds in SILENCE_S.items()}
"""For so long they are frozen: some are given up, some are not."""

PAUSE_S = (0.0, 1.0)
"""From a kill to the new start, and between two disturbances."""


def _disturb(services: list[Service], over: threading.Event) -> None:
    """Kill, freeze and restart services, one after the other, and leave all at work.

    Raises:
        ServiceError: one ended by itself, or did not come back.
    """
    chance = random.Random(SEED)
    while not over.is_set():
        turns = list(product(("kill", "freeze", "restart"), services))
        chance.shuffle(turns)
        for action, service in turns:
            if over.is_set():
                return
            print(f"{action} {service.name} {service.address}", flush=True)
            match action:
                case "kill":
                    service.kill()
                    over.wait(chance.uniform(*PAUSE_S))
                    service.start_again()
                case "freeze":
                    service.send(signal.SIGSTOP)
                    over.wait(chance.uniform(*FROZEN_S[service.name]))
                    service.send(signal.SIGCONT)
                case "restart":
                    assert service.stop() == 0, service.lines[-20:]
                    service.start_again()
            for each in services:
                each.check()
                each.wait_healthy()
            wait_until(lambda: all(map(_sees_both, services)), 110.0, action)
            over.wait(chance.uniform(*PAUSE_S))


def _sees_both(service: Service) -> bool:
    if service.name == "verifier_service":
        return True
    return sum(service.count("outrider_verifiers", status=status) for status in ("ready", "recovering")) == 2


def test_no_short_text_fails_while_services_are_killed_frozen_and_restarted(tmp_path: Path) -> None:
    target, model = write_tiny_pair(tmp_path)
    with Cluster(f"--grace {GRACE_S}") as cluster:
        verifiers = [cluster.verifier(model=target) for _ in range(2)]
        flags = (*DRAFT_FLAGS, "--verifier-timeout", str(SILENCE_S["verifier_service"]))
        drafts = [cluster.draft(*verifiers, model=model, flags=flags) for _ in range(2)]
        wait_healthy(*cluster.services)

        async def write() -> Counter[str]:
            addresses = [service.address for service in drafts]
            async with AsyncClient(addresses, silence=SILENCE_S["draft_service"]) as client:
                alone = await write_alone(client)
                over = threading.Event()
                disturbing = asyncio.create_task(asyncio.to_thread(_disturb, cluster.services, over))
                try:
                    return await load(client, texts(COUNT, alone, seed=SEED))
                finally:
                    over.set()
                    await disturbing

        failures = asyncio.run(write())
        assert not failures, failures.most_common(20)
        wait_idle(*cluster.services)
