"""`python -m verifier_service --model DIR_OR_ID --listen HOST:PORT`."""

import sys

from outrider.lifecycle import run
from outrider.runtime.tensor_parallel import is_worker
from verifier_service.app import VerifierApp
from verifier_service.ranks import leave_after, run_worker
from verifier_service.settings import VerifierSettings

_PROGRAM = "verifier_service"


def main() -> int:
    """Runs the service, or one rank of its model; returns the exit code."""
    settings = VerifierSettings.from_command_line(program=_PROGRAM)
    if is_worker(settings.tensor_parallel_size):
        run_worker(_PROGRAM, settings)

    def serve() -> int:
        return run(_PROGRAM, settings, lambda: VerifierApp(settings))

    return serve() if settings.tensor_parallel_size == 1 else leave_after(serve)


if __name__ == "__main__":
    sys.exit(main())
