"""A request that breaks the target's step, or its process, takes no other request with it.

Verifiers are real processes with one deliberate fault each; texts are compared with those that nothing befell.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from outrider.client import Client, OutriderError
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.exactness.mutants.conditions import POISON

PROMPTS = [[number, 40, 50 + number] for number in range(10, 18)]
TOKENS = 24

Ended = list[int] | OutriderError


@contextmanager
def running(*faults: str | None) -> Iterator[tuple[Client, list[Service]]]:
    """A client of a draft service with one verifier for each fault."""
    with Cluster() as cluster:
        verifiers = [cluster.verifier(fault=fault) for fault in faults]
        front = cluster.draft(*verifiers)
        wait_healthy(*verifiers, front)
        with Client(front.address, plaintext=True, timeout=120.0) as client:
            yield client, verifiers


def texts(client: Client, prompts: list[list[int]]) -> list[Ended]:
    """What each prompt is continued with, all at once; or how its request ended."""

    def write(prompt: list[int]) -> Ended:
        try:
            done = client.complete(prompt, max_new_tokens=TOKENS, temperature=0, ignore_eos=True, gamma=3)
        except OutriderError as error:
            return error
        return list(done.token_ids)

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(write, prompts))


@pytest.fixture(scope="module")
def right(draft_address: str) -> list[Ended]:
    with Client(draft_address, plaintext=True, timeout=120.0) as client:
        return texts(client, PROMPTS)


@pytest.mark.parametrize(("fault", "ended"), [("poisoned_step", 0), ("deadly_step", 2)])
def test_a_poisoned_request_ends_alone(fault: str, ended: int, right: list[Ended]) -> None:
    """It is tried at two verifiers, and refused with a reason of its own; the third is left alone."""
    with running(fault, fault, fault) as (client, verifiers):
        *others, poisoned = texts(client, [*PROMPTS, [10, POISON, 12]])
        assert others == right
        assert isinstance(poisoned, OutriderError)
        assert (poisoned.code, poisoned.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
        wait_until(lambda: [verifier.returncode for verifier in verifiers].count(9) == ended)


def test_a_verifier_whose_engine_breaks_exits_and_its_texts_go_on_elsewhere(right: list[Ended]) -> None:
    with running("scheduler_breaks", None) as (client, (broken, _)):
        assert texts(client, PROMPTS) == right
        assert wait_until(lambda: broken.returncode) == 1
        assert any("RuntimeError: injected" in line for line in broken.log_lines())
