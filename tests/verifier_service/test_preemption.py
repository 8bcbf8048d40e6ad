"""Too little room for all: sequences give their keys and values back, are run again later, and write the same.

A pool of 1 MiB holds 160 positions of the demo target in float32, and seven requests ask for some 600. What each
writes is compared with what it writes where it is alone, and has all the room it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from outrider.cli.processes import fixed
from outrider.client import Options
from tests.exactness import mixed_requests
from tests.fork_server import ForkedService
from tests.metrics import scrape
from tests.services import HEALTHY_WITHIN_S, MODELS

POOL = ("--kv-cache-mb", "1", "--max-sequence-tokens", "160")
REQUESTS, TOKENS, PROMPT_CHARS = 7, 64, 90
"""Prompts so short that some may begin together, and texts so long that they cannot go on so."""

FLAGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1")
PREEMPTIONS = "outrider_preemptions_total"
CHECKS = "outrider_kv_integrity_checks_total"
ENOUGH = 3
"""Preemptions without which the comparison is worth little."""


@dataclass(frozen=True)
class Cramped:
    """A pair whose verifier has too little room."""

    address: str
    metrics: str

    def count(self, name: str) -> float:
        return sum(scrape(self.metrics)[name].values())


@pytest.fixture(scope="module")
def cramped() -> Iterator[Cramped]:
    verifier_address, metrics = fixed("127.0.0.1:0"), fixed("127.0.0.1:0")
    target = ["--model", str(MODELS / "target"), "--listen", verifier_address, "--metrics-listen", metrics, *POOL]
    draft = ["--model", str(MODELS / "draft"), "--listen", "127.0.0.1:0", "--verifier", verifier_address]
    with (
        ForkedService.launch(["verifier_service", *target, *FLAGS]) as verifier,
        ForkedService.launch(["draft_service", *draft, *FLAGS]) as front,
    ):
        verifier.wait_healthy(HEALTHY_WITHIN_S)
        front.wait_healthy(HEALTHY_WITHIN_S)
        yield Cramped(front.address, f"http://{metrics}/metrics")


def test_tokens_are_the_same_after_preemption(cramped: Cramped) -> None:
    short = [each for each in mixed_requests.requests() if len(each.prompt) <= PROMPT_CHARS][:REQUESTS]
    asked = [replace(each, options=each.options | Options(max_new_tokens=TOKENS)) for each in short]
    alone = mixed_requests.texts(cramped.address, asked, together=False, salt="alone")
    assert cramped.count(PREEMPTIONS) == 0, "whoever is alone has room"
    for attempt in range(5):  # as often as it takes: how many are there at once is the machine's affair too
        assert mixed_requests.texts(cramped.address, asked, together=True, salt=f"in company, {attempt}") == alone
        preempted = cramped.count(PREEMPTIONS)
        print(f"{preempted:.0f} preemptions")
        if preempted >= ENOUGH:
            break
    assert preempted >= ENOUGH
    corrupted = scrape(cramped.metrics)[CHECKS].get((("outcome", "corrupted"),), 0)
    assert corrupted == 0
