"""The demo pair as two real processes, shared by every test of a session that asks for it."""

from collections.abc import Iterator

import pytest

from outrider.cli.pair import Pair, PairSettings, running_pair
from outrider.cli.processes import ServiceProcess
from tests.house.project import ROOT

MODELS = ROOT / "models" / "demo"
# Both load a small model; the rest is importing torch, on a machine that may be busy.
HEALTHY_WITHIN_S = 110.0


@pytest.fixture(scope="session")
def demo_pair() -> Iterator[Pair]:
    """The verifier service with the demo target and the draft service with the demo draft, both healthy.

    In float32: a seed then gives the same text whoever shares a pass.
    """
    settings = PairSettings(str(MODELS / "target"), str(MODELS / "draft"), dtype="float32", threads=1)
    with running_pair(settings) as pair:
        pair.wait_healthy(HEALTHY_WITHIN_S)
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
