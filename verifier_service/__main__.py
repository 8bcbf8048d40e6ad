"""`python -m verifier_service --model DIR_OR_ID --listen HOST:PORT`."""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    gc.disable()  # imports make no garbage, and looking for it takes a seventh of their time
    if os.getpid() == 1:  # in a container, where the kernel drops signals without a handler
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the service serves

import structlog

from outrider.runtime.tensor_parallel import is_worker
from outrider.service.lifecycle import run
from outrider.service.logs import leave
from verifier_service.app import VerifierApp
from verifier_service.settings import VerifierSettings
from verifier_service.worker import run_worker

_PROGRAM = "verifier_service"


def main() -> int:
    """Runs the service or a tensor-parallel worker; returns the exit code."""
    gc.freeze()  # modules stay: later collections leave them out
    gc.enable()
    settings = VerifierSettings.from_command_line(program=_PROGRAM)
    if is_worker(settings.tensor_parallel_size):
        run_worker(_PROGRAM, settings)

    if settings.tensor_parallel_size == 1:
        return _serve(settings)
    code = 1
    try:
        code = _serve(settings)
    except Exception:
        structlog.get_logger().exception("service failed")
    leave(code)


def _serve(settings: VerifierSettings) -> int:
    return run(_PROGRAM, settings, lambda: VerifierApp(settings))


if __name__ == "__main__":
    sys.exit(main())
