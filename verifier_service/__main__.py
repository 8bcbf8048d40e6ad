"""`python -m verifier_service --model DIR_OR_ID --listen HOST:PORT`."""

import sys
from functools import partial

from outrider.lifecycle import run
from outrider.parallel.ending import leave_after
from outrider.parallel.follower import follow
from outrider.parallel.ranks import is_follower
from verifier_service.app import VerifierApp, longest_pass
from verifier_service.settings import VerifierSettings

_PROGRAM = "verifier_service"


def main() -> int:
    """Runs the service, or a part of its model; returns the exit code."""
    settings = VerifierSettings.from_command_line(program=_PROGRAM)
    if is_follower(settings.tensor_parallel_size):
        follow(_PROGRAM, settings, pass_tokens=longest_pass(settings))
    serve = partial(run, _PROGRAM, settings, lambda: VerifierApp(settings))
    return serve() if settings.tensor_parallel_size == 1 else leave_after(serve)


if __name__ == "__main__":
    sys.exit(main())
