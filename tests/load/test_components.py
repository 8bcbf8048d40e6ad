"""What only speeds up or watches a text may fail: each `Component` in turn, then all at once; no text fails with it.

The components are those that the services themselves register, so a new one is among them at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from outrider.client import AsyncClient
from tests.cluster import wait_until
from tests.load.broken import AFTER, EVERY, FILE, INSTEAD, Switch
from tests.load.short_texts import Tally, TinyPair, load, running_tiny_pair, texts, write_alone

COUNTS = (16, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]))
"""Texts while one component fails, for each way in which it does."""

COUNT_TOGETHER = 200
"""Texts while all fail, for each way."""

CALLED_WITHIN_S = 5.0
"""Some are called only when nothing else is to be done."""

UNREACHED = {
    "failover_metrics": "no verifier is lost",
    "heartbeat": "no text lasts for the 5 s after which one is sent",
}
"""Components that this load does not call, and why."""


@dataclass(frozen=True)
class Broken:
    """What came of the load, by component and how it failed; and the components that were never called."""

    count: int
    tallies: dict[tuple[str, str], Tally]
    idle: set[str]


@pytest.fixture(scope="module", params=COUNTS)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    folder = tmp_path_factory.mktemp("components")
    switch = Switch(folder / "broken")
    env = {FILE: str(folder / "broken")}
    with running_tiny_pair(folder, fault="broken_components", env=env, max_sequences=4) as pair:
        yield asyncio.run(_break_each(pair, switch, request.param))


async def _break_each(pair: TinyPair, switch: Switch, count: int) -> Broken:
    tallies, idle = dict[tuple[str, str], Tally](), set[str]()
    async with AsyncClient(pair.draft.address, retry=False) as client:
        alone = await write_alone(client)
        assert not +pair.errors(), "nothing is broken yet"
        for number, component in enumerate(pair.errors()):
            for how in (INSTEAD, AFTER):
                before = pair.errors()[component]
                switch.set(component, how)
                tallies[component, how] = await load(client, texts(count, alone, seed=number), Tally())
                patience = 0.0 if component in UNREACHED else CALLED_WITHIN_S
                try:
                    wait_until(lambda: pair.errors()[component] > before, patience)  # noqa: B023  # called here
                except AssertionError:
                    idle.add(component)
                pair.check_at_rest()
        for how in (INSTEAD, AFTER):
            switch.set(EVERY, how)
            tallies[EVERY, how] = await load(client, texts(COUNT_TOGETHER, alone), Tally())
            pair.check_at_rest()
    return Broken(count, tallies, idle)


def test_no_text_fails_with_a_component(broken: Broken) -> None:
    wrong = {key: tally.failures.most_common(3) for key, tally in broken.tallies.items() if tally.failures}
    assert not wrong, wrong
    for (component, _), tally in broken.tallies.items():
        assert tally.whole == (COUNT_TOGETHER if component == EVERY else broken.count)


def test_each_component_was_called(broken: Broken) -> None:
    assert len(broken.tallies) > 2
    assert broken.idle == set(UNREACHED)
