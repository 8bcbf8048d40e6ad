"""Short texts are what a classifier, a router or a tool call asks for: none fails, and none leaves anything behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from outrider.client import AsyncClient
from tests.load.short_texts import Tally, TinyPair, load, running_tiny_pair, texts, write_alone

COUNT = 1_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyPair]:
    with running_tiny_pair(tmp_path_factory.mktemp("short")) as pair:
        yield pair


def test_no_short_text_fails_whatever_drafts_and_judges_it(pair: TinyPair) -> None:
    async def write() -> Tally:
        async with AsyncClient(pair.draft.address, retry=False) as client:
            return await load(client, texts(COUNT, await write_alone(client)), Tally())

    tally = asyncio.run(write())
    assert not tally.failures, tally.failures.most_common(10)
    assert tally.whole == COUNT
    pair.wait_idle()
    assert not +pair.errors()
