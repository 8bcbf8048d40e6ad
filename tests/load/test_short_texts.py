"""Classifiers, routers and tool calls request short texts: none fails, and none leaves anything behind.

Code that only speeds up or observes a text may fail: each `Component` in turn, then all at once; no text fails with it.
The services themselves register the components, so the test includes a new one at once.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.load.broken import AFTER, EVERY, FILE, INSTEAD, break_component
from tests.load.short_texts import DRAFT_FLAGS, Alone, load, texts, wait_idle, write_alone, write_tiny_pair

COUNT = 672
"""Each drafter with each rule, temperature and length four times: finds a fault of 0.5 % of texts with 96 %."""
COUNTS = (7, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]))
"""Texts at a time while a component fails, for each way in which it does: one of each drafter at the least."""
COUNT_TOGETHER = 168
"""Texts while all fail, for each way: each drafter with each rule, temperature and length."""
MOST_BATCHES = 18
"""Until a component is called: chance and the load decide which texts reach it."""
AT_REST = {"kv_check"}
"""Components that are called only while all is idle."""
IDLE_CALL_WITHIN_S = 10.0
ERRORS = "outrider_internal_errors_total"
UNREACHED = {"failover_metrics": "no verifier is lost", "draft_input": "no model has an encoder"}
"""Components that this load does not call, and why."""


@contextmanager
def running(folder: Path, fault: str, *, max_sequences: int, **start: Any) -> Iterator[tuple[Service, Service]]:
    """A verifier and a draft service. The verifier takes fewer sequences at once than there are, so that some wait."""
    target, draft = write_tiny_pair(folder)
    with Cluster(fault=fault) as cluster:
        verifier = cluster.verifier(model=target, flags=f"--max-sequences {max_sequences}", **start)
        front = cluster.draft(verifier, model=draft, flags=DRAFT_FLAGS, **start)
        wait_healthy(verifier, front)
        yield verifier, front


def errors(services: tuple[Service, Service]) -> Counter[str]:
    """Return how often each component failed, at both services together."""
    counts = Counter[str]()
    for service in services:
        for labels, count in service.samples(ERRORS).get(ERRORS, {}).items():
            counts[dict(labels)["component"]] += int(count)
    return counts


def test_no_short_text_fails_with_any_drafter_and_rule(tmp_path: Path) -> None:
    async def write(address: str) -> Counter[str]:
        async with AsyncClient(address, retry=False) as client:
            return await load(client, texts(COUNT, await write_alone(client)))

    # Steps of a tiny model are over before a second text is there; many texts share those of a real one.
    with running(tmp_path, "crowded", max_sequences=28) as services:
        failures = asyncio.run(write(services[1].address))
        assert not failures, failures.most_common(10)
        wait_idle(*services)
        assert not +errors(services)


@pytest.mark.parametrize("count", COUNTS)
def test_no_text_fails_with_a_component(count: int, tmp_path: Path) -> None:
    file = tmp_path / "broken"
    break_component(file, "", INSTEAD)
    with running(tmp_path, "broken_components", max_sequences=2, env={FILE: str(file)}) as services:
        assert asyncio.run(_break_each(services, file, count)) == set(UNREACHED)


async def _break_each(services: tuple[Service, Service], file: Path, count: int) -> set[str]:
    """Return the components that were never called."""
    idle = set[str]()
    async with AsyncClient(services[1].address, retry=False) as client:
        alone = await write_alone(client)
        assert not +errors(services), "nothing is broken yet"

        async def write(count: int, alone: Alone, seed: int = 0) -> None:
            failures = await load(client, texts(count, alone, seed=seed))
            assert not failures, failures.most_common(3)
            wait_idle(*services)

        for component, when in product(errors(services), (INSTEAD, AFTER)):
            before = errors(services)[component]
            break_component(file, component, when)
            for batch in range(1 if component in AT_REST | UNREACHED.keys() else MOST_BATCHES):
                await write(count, alone, batch)
                if errors(services)[component] > before:
                    break
            else:  # perhaps it is called only while all is idle
                with suppress(AssertionError):
                    wait = 0.0 if component in UNREACHED else IDLE_CALL_WITHIN_S
                    wait_until(lambda: errors(services)[component] > before, wait)  # noqa: B023
                    continue
                idle.add(component)
        for when in (INSTEAD, AFTER):
            break_component(file, EVERY, when)
            await write(COUNT_TOGETHER, alone)
    return idle
