"""A request that breaks the target's step, or its process, takes no other request with it.

Verifiers are real processes with one deliberate fault each; texts are compared with those that nothing befell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from outrider.cli.processes import ServiceProcess, fixed
from outrider.client import Client, OutriderError
from tests.exactness.mutants.conditions import POISON
from tests.fork_server import ForkedService
from tests.services import HEALTHY_WITHIN_S, MODELS

FLAGS = ("--dtype", "float32", "--threads", "1")
PROMPTS = [[number, 40, 50 + number] for number in range(10, 18)]
TOKENS = 24


@contextmanager
def service(faults: list[str | None]) -> Iterator[tuple[Client, list[ServiceProcess]]]:
    """A client of a draft service with one verifier for each fault."""
    with ExitStack() as running:
        addresses = [fixed("127.0.0.1:0") for _ in faults]
        verifiers: list[ServiceProcess] = []
        for address, fault in zip(addresses, faults, strict=True):
            arguments = ["verifier_service", "--model", str(MODELS / "target"), "--listen", address, *FLAGS]
            verifiers.append(running.enter_context(ForkedService.launch(arguments, fault=fault)))
        names = [part for address in addresses for part in ("--verifier", address)]
        draft = ["draft_service", "--model", str(MODELS / "draft"), "--listen", "127.0.0.1:0", *names, *FLAGS]
        front = running.enter_context(ForkedService.launch(draft))
        for each in (*verifiers, front):
            each.wait_healthy(HEALTHY_WITHIN_S)
        yield running.enter_context(Client(front.address, plaintext=True, timeout=120.0)), verifiers


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
