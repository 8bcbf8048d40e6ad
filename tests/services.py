"""The demo pair as two real processes, shared by every test of a session that asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider.cli.processes import Pair, ServiceProcess, fixed
from tests.fork_server import ForkedService
from tests.project.tree import ROOT

MODELS = ROOT / "models" / "demo"
# Both load a small model; the rest is importing torch, on a machine that may be busy.
HEALTHY_WITHIN_S = 110.0


@contextmanager
def running_demo(fault: str | None = None) -> Iterator[Pair]:
    """The verifier service with the demo target and the draft service with the demo draft, both healthy, and both after
    the fault that is named.

    In float32: a seed then gives the same text whoever shares a pass.
    """
    address = fixed("127.0.0.1:0")
    flags = ("--dtype", "float32", "--threads", "1")
    target = ["--model", str(MODELS / "target"), "--listen", address]
    draft = ["--model", str(MODELS / "draft"), "--listen", "127.0.0.1:0", "--verifier", address]
    with (
        ForkedService.launch(["verifier_service", *target, *flags], fault=fault) as verifier,
        ForkedService.launch(["draft_service", *draft, *flags], fault=fault) as front,
    ):
        pair = Pair(verifier, front)
        pair.wait_healthy(HEALTHY_WITHIN_S)
        yield pair


@pytest.fixture(scope="session")
def demo_pair() -> Iterator[Pair]:
    """One that all share."""
    with running_demo() as pair:
        yield pair


@pytest.fixture(scope="session")
def verifier_process(demo_pair: Pair) -> ServiceProcess:
    """The verifier's process."""
    return demo_pair.verifier


@pytest.fixture(scope="session")
def draft_process(demo_pair: Pair) -> ServiceProcess:
    """The draft service's process."""
    return demo_pair.draft


@pytest.fixture(scope="session")
def verifier_address(demo_pair: Pair) -> str:
    """`HOST:PORT` of a healthy verifier service."""
    return demo_pair.verifier.address


@pytest.fixture(scope="session")
def draft_address(demo_pair: Pair) -> str:
    """`HOST:PORT` of a healthy draft service."""
    return demo_pair.draft.address
