"""The demo pair as two real processes, shared by every test of a session that asks for it."""

from collections.abc import Iterator

import pytest

from outrider.cli.processes import ServiceProcess
from tests.house.project import ROOT

MODELS = ROOT / "models" / "demo"
# Both load a small model; the rest is importing torch.
HEALTHY_WITHIN_S = 60.0


@pytest.fixture(scope="session")
def verifier_process() -> Iterator[ServiceProcess]:
    """The verifier service with the demo target, on a free port."""
    arguments = ["verifier_service", "--model", str(MODELS / "target"), "--listen", "127.0.0.1:0", "--threads", "1"]
    with ServiceProcess.start(arguments) as process:
        yield process


@pytest.fixture(scope="session")
def draft_process(verifier_process: ServiceProcess) -> Iterator[ServiceProcess]:
    """The draft service with the demo draft, on a free port, beside the verifier; both are healthy."""
    arguments = ["draft_service", "--model", str(MODELS / "draft"), "--verifier", verifier_process.address]
    with ServiceProcess.start([*arguments, "--listen", "127.0.0.1:0", "--threads", "1"]) as process:
        verifier_process.wait_healthy(HEALTHY_WITHIN_S)
        process.wait_healthy(HEALTHY_WITHIN_S)
        yield process


@pytest.fixture(scope="session")
def verifier_address(draft_process: ServiceProcess, verifier_process: ServiceProcess) -> str:
    """`HOST:PORT` of a healthy verifier service."""
    return verifier_process.address


@pytest.fixture(scope="session")
def draft_address(draft_process: ServiceProcess) -> str:
    """`HOST:PORT` of a healthy draft service."""
    return draft_process.address
