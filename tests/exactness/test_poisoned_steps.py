"""A request that breaks the target's step, or its process, takes no other request with it.

Verifiers are real processes with one deliberate fault each; texts are compared with those that nothing befell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from outrider.client import Client, OutriderError
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness.mutants.conditions import POISON

PROMPTS = [[number, 40, 50 + number] for number in range(10, 18)]
TOKENS = 24


@contextmanager
def service(faults: list[str | None]) -> Iterator[tuple[Client, list[Service]]]:
    """A client of a draft service with one verifier for each fault."""
    with Cluster() as cluster:
        verifiers = [cluster.verifier(fault=fault) for fault in faults]
        front = cluster.draft(*verifiers)
        wait_healthy(*verifiers, front)
        with Client(front.address, plaintext=True, timeout=120.0) as client:
            yield client, verifiers


def texts(client: Client, prompts: list[list[int]]) -> list[list[int] | OutriderError]:
    """What each prompt is continued with, all at once; or how its request ended."""

    def write(prompt: list[int]) -> list[int] | OutriderError:
        try:
            done = client.complete(prompt, max_new_tokens=TOKENS, temperature=0, ignore_eos=True, gamma=3)
        except OutriderError as error:
            return error
        return list(done.token_ids)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(write, prompts))


@pytest.fixture(scope="module")
def right(draft_address: str) -> list[list[int] | OutriderError]:
    with Client(draft_address, plaintext=True, timeout=120.0) as client:
        return texts(client, PROMPTS)


@pytest.mark.parametrize(("fault", "ended"), [("poisoned_step", 0), ("deadly_step", 2)])
def test_a_poisoned_request_ends_alone(fault: str, ended: int, right: list[list[int] | OutriderError]) -> None:
    """It is tried at two verifiers, and refused with a reason of its own; the third is left alone."""
    with service([fault] * 3) as (client, verifiers):
        *others, poisoned = texts(client, [*PROMPTS, [10, POISON, 12]])
        assert others == right
        assert isinstance(poisoned, OutriderError)
        assert (poisoned.code, poisoned.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
        assert [verifier.returncode for verifier in verifiers].count(9) == ended
        assert texts(client, PROMPTS[:1]) == right[:1]


def test_a_verifier_whose_engine_breaks_exits_and_its_texts_go_on_elsewhere(
    right: list[list[int] | OutriderError],
) -> None:
    with service(["scheduler_breaks", None]) as (client, (broken, _)):
        assert texts(client, PROMPTS) == right
        end = time.monotonic() + 60.0
        while broken.returncode is None and time.monotonic() < end:
            time.sleep(0.05)
        assert broken.returncode == 1
        assert any("RuntimeError: injected" in line and "broken" in line for line in broken.log_lines())
