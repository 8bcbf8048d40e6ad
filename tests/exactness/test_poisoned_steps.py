"""A request that breaks the target's step, or its process, ends no other request.

Verifiers are real processes with one deliberate fault each; texts are compared with those of sound verifiers.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import grpc
import pytest

from outrider.client import Client, OutriderError
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.exactness.mutants.conditions import POISON
from tests.exactness.pairs import write_demo_like

PROMPTS = [[number, 40, 50 + number] for number in range(10, 18)]
TOKENS = 24

Result = tuple[int, ...] | OutriderError
Running = Callable[..., AbstractContextManager[tuple[Client, list[Service]]]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A client of a draft service with one verifier for each fault."""
    target, draft = write_demo_like(tmp_path_factory.mktemp("pair"))

    @contextmanager
    def run(*faults: str | None) -> Iterator[tuple[Client, list[Service]]]:
        with Cluster() as cluster:
            verifiers = [cluster.verifier(model=target, fault=fault) for fault in faults]
            front = cluster.draft(*verifiers, model=draft)
            wait_healthy(*verifiers, front)
            with Client(front.address, plaintext=True, timeout=120.0) as client:
                yield client, verifiers

    return run


def results(client: Client, prompts: list[list[int]], gamma: int = 3) -> list[Result]:
    """Return the tokens after each prompt, or the error; all requests run at once."""

    def write(prompt: list[int]) -> Result:
        try:
            return client.complete(prompt, max_new_tokens=TOKENS, temperature=0, ignore_eos=True, gamma=gamma).token_ids
        except OutriderError as error:
            return error

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(write, prompts))


@pytest.fixture(scope="module")
def right(running: Running) -> list[Result]:
    with running(None) as (client, _):
        return results(client, PROMPTS)


@pytest.mark.parametrize(
    ("fault", "gamma", "ended"), [("poisoned_step", 3, 0), ("deadly_step", 3, 2), ("deadly_step", 0, 2)]
)
def test_a_poisoned_request_ends_alone(
    fault: str, gamma: int, ended: int, running: Running, right: list[Result]
) -> None:
    """It is tried at two verifiers, and refused with a reason of its own; the third never gets it."""
    with running(fault, fault, fault) as (client, verifiers):
        *others, poisoned = results(client, [*PROMPTS, [10, POISON, 12]], gamma)
        assert others == right
        assert isinstance(poisoned, OutriderError)
        assert (poisoned.code, poisoned.reason) == (grpc.StatusCode.INTERNAL, "STEP_FAILED")
        wait_until(lambda: [verifier.returncode for verifier in verifiers].count(9) == ended)


def test_a_verifier_with_a_broken_engine_exits_and_its_texts_go_on_elsewhere(
    running: Running, right: list[Result]
) -> None:
    with running("scheduler_breaks", None) as (client, (broken, _)):

        def has_ended() -> bool:
            assert results(client, PROMPTS) == right
            return broken.returncode is not None

        wait_until(has_ended)  # the first texts may all be at the other one
        assert broken.returncode == 1
        assert any("RuntimeError: injected" in line for line in broken.log_lines())
