"""What only speeds up or watches a text may fail: each `Component` in turn, then all at once; no text fails with it.

The components are those that the services themselves register, so a new one is among them at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from tests.cluster import wait_until
from tests.load.broken import AFTER, EVERY, FILE, INSTEAD, Switch
from tests.load.short_texts import ShortText, Tally, TinyPair, load, running_tiny_pair, texts, write_alone

COUNTS = (16, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]))
"""Texts at a time while a component fails, for each way in which it does."""
MOST_BATCHES = 8
"""Until a component is called: which texts reach it is a matter of chance, and of what runs at once."""
IDLE_CALL_WITHIN_S = 10.0
COUNT_TOGETHER = 200
"""Texts while all fail, for each way."""

UNREACHED = {
    "failover_metrics": "no verifier is lost",
    "heartbeat": "no text lasts for the 5 s after which one is sent",
}
"""Components that this load does not call, and why."""


@pytest.mark.parametrize("count", COUNTS)
def test_no_text_fails_with_a_component(count: int, tmp_path: Path) -> None:
    switch = Switch(tmp_path / "broken")
    env = {FILE: str(tmp_path / "broken")}

    async def break_each(pair: TinyPair) -> set[str]:
        """Return the components that were never called."""
        idle = set[str]()
        async with AsyncClient(pair.draft.address, retry=False) as client:
            alone = await write_alone(client)
            assert not +pair.errors(), "nothing is broken yet"
            for component, how in product(pair.errors(), (INSTEAD, AFTER)):
                before = pair.errors()[component]
                switch.set(component, how)
                for batch in range(1 if component in UNREACHED else MOST_BATCHES):
                    await _write(client, texts(count, alone, seed=batch), (component, how))
                    pair.wait_idle()
                    if pair.errors()[component] > before:
                        break
                else:  # the last chance is that of a component that is called when all is idle
                    if component in UNREACHED or not _is_called(pair, component, before):
                        idle.add(component)
            for how in (INSTEAD, AFTER):
                switch.set(EVERY, how)
                await _write(client, texts(COUNT_TOGETHER, alone), (EVERY, how))
                pair.wait_idle()
        return idle

    with running_tiny_pair(tmp_path, fault="broken_components", env=env, max_sequences=4) as pair:
        assert asyncio.run(break_each(pair)) == set(UNREACHED)


def _is_called(pair: TinyPair, component: str, before: int) -> bool:
    with suppress(AssertionError):
        return wait_until(lambda: pair.errors()[component] > before, IDLE_CALL_WITHIN_S)
    return False


async def _write(client: AsyncClient, batch: Iterator[ShortText], broken: tuple[str, str]) -> None:
    tally = await load(client, batch, Tally())
    assert not tally.failures, (broken, tally.failures.most_common(3))
