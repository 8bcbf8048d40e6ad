"""A pair of services of this folder's own: float32, few places, and a draft that is awkward on purpose."""

from collections.abc import Iterator

import grpc
import pytest

from outrider.cli.processes import ServiceProcess
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from tests.draft_service.pairs import DEMO, write_awkward_draft
from tests.fork_server import ForkedService

PLACES, VERIFIER_PLACES = 6, 4
CLIENT_SEQUENCES = 15  # of one client at once: more than there are places, and fewer than a request may have samples
HEALTHY_WITHIN_S = 110.0
IDLE_S = 3.0
"""How long it bears with a client that says nothing, or does not read: what a test has to act in, and one has to wait.
"""

FLAGS = ("--listen", "127.0.0.1:0", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The demo's draft, in this process."""
    return load_model(ModelSource(str(DEMO / "draft"), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def target_process() -> Iterator[ServiceProcess]:
    """A verifier with the demo target, few places and no queue to speak of; a place that is held idly stays held."""
    places = ("--max-sequences", str(VERIFIER_PLACES), "--max-waiting", "1", "--contended-idle-timeout", "60")
    with ForkedService.start(["verifier_service", "--model", str(DEMO / "target"), *places, *FLAGS]) as process:
        yield process


@pytest.fixture(scope="session")
def pair_process(target_process: ServiceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A draft service beside it."""
    draft = write_awkward_draft(tmp_path_factory.mktemp("pair") / "draft")
    limits = ("--max-sequences", str(PLACES), "--max-message-bytes", str(1 << 16))
    of_client = ("--max-client-sequences", str(CLIENT_SEQUENCES))
    patience = ("--idle-timeout", str(IDLE_S), "--slow-client-timeout", "2", "--contended-idle-timeout", "1.5")
    model = ("--model", str(draft), "--verifier", target_process.address)
    arguments = ["draft_service", *model, *limits, *of_client, *patience]
    with ForkedService.start([*arguments, *FLAGS]) as process:
        target_process.wait_healthy(HEALTHY_WITHIN_S)
        process.wait_healthy(HEALTHY_WITHIN_S)
        yield process


@pytest.fixture(scope="session")
def draft(pair_process: ServiceProcess) -> Iterator[grpc.Channel]:
    """A channel to the draft service."""
    with grpc.insecure_channel(pair_process.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def verifier(pair_process: ServiceProcess, target_process: ServiceProcess) -> Iterator[grpc.Channel]:
    """A channel to the verifier."""
    with grpc.insecure_channel(target_process.address) as channel:
        yield channel
