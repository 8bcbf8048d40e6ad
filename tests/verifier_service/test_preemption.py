"""Too little room for all: sequences give their keys and values back, are run again later, and write the same.

A pool of 1 MiB holds 160 positions of the demo target in float32, and seven requests ask for some 600. What each
writes is compared with what it writes where it is alone, and has all the room it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.client import Options
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import mixed_requests

POOL = ("--kv-cache-mb", "1", "--max-sequence-tokens", "160")
REQUESTS, TOKENS, PROMPT_CHARS = 7, 64, 90
"""Prompts so short that some may begin together, and texts so long that they cannot go on so."""

PREEMPTIONS = "outrider_preemptions_total"
CHECKS = "outrider_kv_integrity_checks_total"
ENOUGH = 3
"""Preemptions without which the comparison is worth little."""


@pytest.fixture(scope="module")
def cramped() -> Iterator[tuple[Service, Service]]:
    """A pair whose verifier has too little room."""
    with Cluster() as cluster:
        verifier = cluster.verifier(flags=POOL)
        draft = cluster.draft(verifier)
        wait_healthy(verifier, draft)
        yield verifier, draft


def test_tokens_are_the_same_after_preemption(cramped: tuple[Service, Service]) -> None:
    verifier, draft = cramped
    short = [each for each in mixed_requests.requests() if len(each.prompt) <= PROMPT_CHARS][:REQUESTS]
    asked = [replace(each, options=each.options | Options(max_new_tokens=TOKENS)) for each in short]
    alone = mixed_requests.texts(draft.address, asked, together=False, salt="alone")
    assert verifier.count(PREEMPTIONS) == 0, "whoever is alone has room"
    for attempt in range(5):  # as often as it takes: how many are there at once is the machine's affair too
        assert mixed_requests.texts(draft.address, asked, together=True, salt=f"in company, {attempt}") == alone
        preempted = verifier.count(PREEMPTIONS)
        print(f"{preempted:.0f} preemptions")
        if preempted >= ENOUGH:
            break
    assert preempted >= ENOUGH
    assert verifier.count(CHECKS, outcome="corrupted") == 0
