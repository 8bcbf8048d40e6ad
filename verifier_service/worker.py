"""A tensor-parallel worker: a rank other than 0, as a process."""

import sys
import threading
from concurrent.futures import Future
from functools import partial
from typing import NoReturn

import structlog
import torch

from outrider.runtime.device import check_environment
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.tensor_parallel import TensorParallel, read_ranks
from outrider.service.loading import build_model_runner, load_share, sequence_tokens
from outrider.service.logs import configure_logging, leave
from outrider.service.settings import SettingsError
from verifier_service.app import largest_batch
from verifier_service.settings import VerifierSettings

_log = structlog.get_logger()


def run_worker(program: str, settings: VerifierSettings) -> NoReturn:
    """Runs a worker. Exit code 0: rank 0 ended in order; 2: an invalid setting; 1: any other error."""
    configure_logging(program, settings.log_level)
    parallel: TensorParallel | None = None
    failing = threading.Lock()  # taken once: the first reason counts

    def fail(reason: str, code: int = 1) -> NoReturn:
        if parallel is not None:
            parallel.end(reason)
        _log.error("cannot serve", reason=reason, rank=None if parallel is None else parallel.ranks.rank)
        print(f"{program}: {reason}", file=sys.stderr)  # noqa: T201  # the one line an operator looks for
        leave(code)

    def fail_when_lost(lost: Future[str]) -> None:
        if failing.acquire(blocking=False):
            fail(lost.result())

    try:
        check_environment()
        ranks = read_ranks(settings.tensor_parallel_size, program)
        assert ranks is not None
        structlog.contextvars.bind_contextvars(rank=ranks.rank)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        parallel = TensorParallel(ranks, timeout=settings.rank_timeout, on_end=partial(leave, 0))
        parallel.lost.add_done_callback(fail_when_lost)
        loaded = load_share(settings, parallel)
        tokens = sequence_tokens(settings, loaded)
        model_runner = build_model_runner(
            settings, loaded, tokens, max_batch_tokens=largest_batch(settings), parallel=parallel
        ).model_runner
        _log.info("worker ready", heads=loaded.layers[0].heads, device=str(loaded.device))
        parallel.work(model_runner)
    except Exception as error:
        is_known = isinstance(error, (CheckpointError, ModelLost, SettingsError))
        reason = str(error) if is_known else f"{type(error).__name__}: {error}"
        failing.acquire()
        fail(reason, code=2 if isinstance(error, SettingsError) else 1)
