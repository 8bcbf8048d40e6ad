"""Two ranks as torchrun starts them, but faster: forked services with its environment variables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from outrider.cli.processes import ServiceProcess
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.tensor_parallel import Ranks, TensorParallel
from outrider.service.loading import build_model_runner, load_share, sequence_tokens
from tests import cluster as clusters
from tests.cluster import Cluster, Service, free_address
from verifier_service.app import largest_batch
from verifier_service.settings import VerifierSettings

FLAGS = ("--kv-cache-mb", "1", "--tensor-parallel-size", "2")


def environment(rank: int, address: str, *, size: int = 2) -> dict[str, str]:
    """The variables of torchrun for a rank; `address` is that of rank 0."""
    host, _, port = address.rpartition(":")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def start_rank(cluster: Cluster, rank: int, address: str, model: Path, *flags: str) -> Service:
    """Start one of two ranks of a verifier service."""
    return cluster.verifier(model=model, flags=(*FLAGS, *flags), env=environment(rank, address))


@contextmanager
def two_ranks(model: Path, *flags: str, fault: str | None = None) -> Iterator[tuple[Service, Service]]:
    """A verifier service on two ranks, which end with it. `fault` is as in `Cluster`."""
    address = free_address()
    with Cluster(fault=fault) as cluster:
        first, worker = (start_rank(cluster, rank, address, model, *flags) for rank in range(2))
        yield first, worker
        first.stop()
        worker.kill()  # it has ended with rank 0, unless it hangs


@contextmanager
def as_rank_0(model: Path, *flags: str, theirs: Sequence[str] = (), ends_with: int = 0) -> Iterator[ModelRunner]:
    """The model on two ranks: this process is rank 0; the worker is a service, with the flags `theirs` too."""
    address = free_address()
    settings = VerifierSettings.from_command_line(
        ["--model", str(model), *clusters.FLAGS, *FLAGS, *flags], program="test"
    )
    parallel = TensorParallel(Ranks(0, 2, 0, 2), timeout=settings.rank_timeout)
    with pytest.MonkeyPatch.context() as patch, Cluster() as cluster:
        worker = start_rank(cluster, 1, address, model, *flags, *theirs)
        for name, value in environment(0, address).items():
            patch.setenv(name, value)
        try:
            loaded = load_share(settings, parallel)
            tokens = sequence_tokens(settings, loaded)
            packed = build_model_runner(
                settings, loaded, tokens, max_batch_tokens=largest_batch(settings), parallel=parallel
            ).model_runner
            parallel.command_workers(packed)
            yield packed
            parallel.end(None)
            assert worker.process.wait(20) == ends_with, "\n".join(worker.log_lines())
        finally:
            worker.kill()
            dist.destroy_process_group()


def reason(service: ServiceProcess) -> str:
    """The last error line of a service that has ended."""
    service.stop()
    words = [line for line in service.log_lines() if line.startswith("verifier_service: ")]
    return words[-1] if words else ""


def ended_within(seconds: float, services: Sequence[ServiceProcess]) -> list[int]:
    """The exit codes of services that end by themselves."""
    return [service.process.wait(seconds) for service in services]
