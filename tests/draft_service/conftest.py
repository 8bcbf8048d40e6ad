"""A pair of services: float32, few sequences, and a draft with unusual shapes."""

from collections.abc import Iterator

import grpc
import pytest

from outrider.cli.processes import Pair
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from tests.cluster import Cluster, Service, wait_healthy
from tests.draft_service.pairs import DEMO, write_awkward_draft
from tests.draft_service.vllm_calls import started_vllm_pair

MAX_SEQUENCES, VERIFIER_MAX_SEQUENCES = 6, 4
CLIENT_SEQUENCES = 15  # of one client; above --max-sequences
IDLE_S = 3.0  # of silence until a stream ends; tests act within it, and one waits for it


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The demo's draft, in this process."""
    return load_model(ModelSource(str(DEMO / "draft"), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def target_process() -> Iterator[Service]:
    """A verifier with the demo target, few sequences and a short queue. Idle sequences are not preempted."""
    with Cluster(f"--max-sequences {VERIFIER_MAX_SEQUENCES} --max-waiting 1 --contended-idle-timeout 60") as cluster:
        yield cluster.verifier()


@pytest.fixture(scope="session")
def pair_process(target_process: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A draft service beside it."""
    draft = write_awkward_draft(tmp_path_factory.mktemp("pair") / "draft")
    flags = f"--max-sequences {MAX_SEQUENCES} --max-message-bytes {1 << 16} --max-client-sequences {CLIENT_SEQUENCES}"
    timeouts = f"--idle-timeout {IDLE_S} --slow-client-timeout 2 --contended-idle-timeout 1.5"
    with Cluster(f"{flags} {timeouts}") as cluster:
        service = cluster.draft(target_process, model=draft)
        wait_healthy(target_process, service)
        yield service


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The demo pair with vLLM's contract and metrics."""
    with started_vllm_pair(tmp_path_factory.mktemp("vllm")) as pair:
        yield pair


@pytest.fixture(scope="session")
def draft(pair_process: Service) -> Iterator[grpc.Channel]:
    """A channel to the draft service."""
    with grpc.insecure_channel(pair_process.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def verifier(pair_process: Service, target_process: Service) -> Iterator[grpc.Channel]:
    """A channel to the verifier."""
    with grpc.insecure_channel(target_process.address) as channel:
        yield channel
