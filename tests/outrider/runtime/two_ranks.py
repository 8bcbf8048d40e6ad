"""Two ranks as torchrun would have them, without its seconds: forked services with the variables that it sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from outrider.cli.processes import ServiceProcess, fixed
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.tensor_parallel import Ranks, TensorParallel
from outrider.service.loading import build_model_runner, load_share, sequence_tokens
from tests.fork_server import ForkedService
from verifier_service.app import longest_pass
from verifier_service.settings import VerifierSettings

FLAGS = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-cache-mb", "1")
TWO = ("--tensor-parallel-size", "2")


def told(rank: int, address: str, *, size: int = 2) -> dict[str, str]:
    """What torchrun tells a rank, where rank 0 is to be met at `address`."""
    host, _, port = address.rpartition(":")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def launch_rank(rank: int, address: str, model: Path, *flags: str) -> ServiceProcess:
    """One of two ranks of a verifier service."""
    arguments = ["verifier_service", "--model", str(model), *FLAGS, *TWO, *flags]
    return ForkedService.launch(arguments, env=told(rank, address))


@contextmanager
def two_ranks(model: Path, *flags: str) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier service on two ranks, which end with it."""
    address = fixed("127.0.0.1:0")
    with (
        launch_rank(0, address, model, "--listen", "127.0.0.1:0", *flags) as first,
        launch_rank(1, address, model, "--listen", "127.0.0.1:0", *flags) as worker,
    ):
        try:
            yield first, worker
        finally:
            first.stop()
            worker.process.kill()  # it has ended with rank 0, unless it stands still


@contextmanager
def as_rank_0(model: Path, *flags: str, theirs: Sequence[str] = (), ends_with: int = 0) -> Iterator[ModelRunner]:
    """The model on two ranks: this process is rank 0, the worker is a service's own, with the flags `theirs` too, and
    ends with that code.
    """
    address = fixed("127.0.0.1:0")
    settings = VerifierSettings.from_command_line(["--model", str(model), *FLAGS, *TWO, *flags], program="test")
    parallel = TensorParallel(Ranks(0, 2, 0, 2), timeout=settings.rank_timeout)
    with pytest.MonkeyPatch.context() as patch, launch_rank(1, address, model, *flags, *theirs) as worker:
        for name, value in told(0, address).items():
            patch.setenv(name, value)
        try:
            loaded = load_share(settings, parallel)
            tokens = sequence_tokens(settings, loaded)
            packed = build_model_runner(
                settings, loaded, tokens, pass_tokens=longest_pass(settings), parallel=parallel
            ).model_runner
            parallel.command_workers(packed)
            yield packed
            parallel.end(None)
            assert worker.process.wait(20) == ends_with, "\n".join(worker.log_lines())
        finally:
            worker.process.kill()
            dist.destroy_process_group()


def reason(service: ServiceProcess) -> str:
    """The one line that an operator looks for, of a service that has ended."""
    service.stop()
    words = [line for line in service.log_lines() if line.startswith("verifier_service: ")]
    return words[-1] if words else ""


def ended_within(seconds: float, services: Sequence[ServiceProcess]) -> list[int]:
    """The exit codes of services that end by themselves."""
    return [service.process.wait(seconds) for service in services]
