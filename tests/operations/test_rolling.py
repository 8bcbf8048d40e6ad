"""Services that are told to go in the middle of requests: those finish or go on elsewhere, with the text they had, and
the exit is clean.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from outrider.cli.processes import ServiceProcess
from outrider.client import Client, Completion
from outrider.client.events import Chunk
from outrider.client.results import Collector
from tests.operations.house import House, house, logged, metrics_of, until

REQUESTS, TOKENS = 6, 400
PROMPT = "def area(radius):\n"


def write(client: Client, seed: int, begun: threading.Event | None = None) -> Completion:
    """One text; a seed is the same text whoever writes it. `begun` is set at its first chunk."""
    collector = Collector()
    for event in client.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=TOKENS, ignore_eos=True):
        collector.add(event)
        if begun is not None and isinstance(event, Chunk):
            begun.set()
    return collector.completion()


@contextmanager
def writing(client: Client) -> Iterator[list[Future[Completion]]]:
    """All texts at once, each begun."""
    begun = [threading.Event() for _ in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        texts = [pool.submit(write, client, seed, each) for seed, each in enumerate(begun)]
        assert all(each.wait(60) for each in begun)
        yield texts


@pytest.fixture(scope="module")
def watched() -> Iterator[House]:
    """Of this file's own: none of it is left whole."""
    with house() as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(watched: House) -> Sequence[str]:
    """The texts, by seed."""
    with Client(watched.draft_addresses, timeout=120) as client, writing(client) as texts:
        return [text.result().text for text in texts]


def sequences_at(house: House, verifier: ServiceProcess) -> float:
    """How many the draft services have there."""
    key = (("verifier", verifier.address),)
    return sum(metrics_of(draft)["outrider_verifier_sequences"].get(key, 0.0) for draft in house.drafts)


def test_a_verifier_that_is_told_to_go_hands_its_sequences_over(watched: House, undisturbed: Sequence[str]) -> None:
    leaving, staying = watched.verifiers
    with Client(watched.draft_addresses, timeout=120) as client, writing(client) as texts:
        until(lambda: sequences_at(watched, leaving))
        leaving.process.send_signal(signal.SIGTERM)
        found = [text.result() for text in texts]
    assert leaving.process.wait(60) == 0
    assert [each.text for each in found] == undisturbed
    assert sum(each.samples[0].statistics.num_drain_moves for each in found) > 0
    assert not any(each.samples[0].num_resumes for each in found), "no client was bothered"
    assert not any("are cut" in line["event"] for line in logged(leaving))
    switches = [metrics_of(draft)["outrider_verifier_switches_total"] for draft in watched.drafts]
    assert sum(each[("reason", "draining"),] for each in switches) > 0
    assert sum(value for each in switches for value in each.values()) == sum(
        each.samples[0].statistics.num_failovers for each in found
    )
    for draft in watched.drafts:
        assert draft.is_healthy(within=20), "with a verifier less it is as ready as before"
    assert staying.returncode is None


def test_a_draft_service_that_is_told_to_go_is_left_for_another(watched: House, undisturbed: Sequence[str]) -> None:
    """The verifier stands still from when all texts have begun until the draft service has gone: so the texts outlast
    its grace, however fast this machine is.
    """
    leaving, _ = watched.drafts
    (verifier,) = [each for each in watched.verifiers if each.returncode is None]
    with Client(watched.draft_addresses, timeout=120) as client, writing(client) as texts:
        verifier.process.send_signal(signal.SIGSTOP)
        try:
            leaving.process.send_signal(signal.SIGTERM)
            assert leaving.process.wait(60) == 0
        finally:
            verifier.process.send_signal(signal.SIGCONT)
        found = [text.result() for text in texts]
    assert [each.text for each in found] == undisturbed
    assert sum(each.samples[0].num_resumes for each in found) > 0
    assert any("are cut" in line["event"] for line in logged(leaving))
