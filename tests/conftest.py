"""The environment of all tests: one OpenMP thread, no network; and the pair of services that they share."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from outrider.cli.processes import Pair, ServiceProcess
from tests import forked_worker
from tests.cluster import Cluster, wait_healthy
from tests.fork_server import start_fork_server
from tests.triton_interpreter import patch_language_once

# Collection makes no garbage to speak of, but so many objects that looking for some takes a fifth of its time.
gc.disable()
# A job in the background ignores interrupts, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Services, commands and workers import the same modules in many processes: compile them once, also if the environment
# forbids bytecode. pytest keeps rewritten tests by the same flag.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before any test imports torch. Two OpenMP pools that spin on two cores make every timing a matter of luck.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where there is no GPU, Triton's kernels are interpreted; it must be known before anything imports triton.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Hypothesis would load trio's plugin, which looks for garbage among all that was imported.
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"
# All models are in the repository: a test that calls a hub is wrong, and fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Tracebacks without the values of locals: to print those of a model takes seconds.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

# Of the last in the alphabet: while one of two workers runs them, the other would have nothing left to do.
LONG = tuple(f"tests/verifier_service/test_{name}.py" for name in ("service", "tensor_parallel", "triton_service"))


def pytest_configure(config: pytest.Config) -> None:
    """The workers of a run share a fork server."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        start_fork_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers are forked too, where they can be."""
    for spec in specs:
        if spec.popen and not spec.python and forked_worker.is_possible():
            spec.python = forked_worker.command()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """Collects garbage from now on, but looks for none among what was collected and imported."""
    patch_language_once()
    # pytest adds handlers to each logger that does not propagate, and removes them, six times a test. Torch has fifty.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True
    gc.freeze()
    gc.enable()


@pytest.fixture
def layers_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch runs the layers, also where the decoder in C could."""
    monkeypatch.setattr("kernels.cpu_decoder.can_run", lambda *_, **__: False)


@pytest.fixture(scope="session")
def demo_pair() -> Iterator[Pair]:
    """The demo pair as two processes, for all tests that change nothing about them."""
    with Cluster() as cluster:
        verifier = cluster.verifier()
        draft = cluster.draft(verifier)
        wait_healthy(verifier, draft)
        yield Pair(verifier, draft)


@pytest.fixture(scope="session")
def draft_process(demo_pair: Pair) -> ServiceProcess:
    return demo_pair.draft


@pytest.fixture(scope="session")
def verifier_address(demo_pair: Pair) -> str:
    return demo_pair.verifier.address


@pytest.fixture(scope="session")
def draft_address(demo_pair: Pair) -> str:
    return demo_pair.draft.address
