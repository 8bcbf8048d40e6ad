"""`python -m verifier_service --model DIR_OR_ID --listen HOST:PORT`."""

import sys

from outrider.lifecycle import run
from verifier_service.app import VerifierApp
from verifier_service.settings import VerifierSettings


def main() -> int:
    """Runs the service; returns the exit code."""
    settings = VerifierSettings.from_command_line(program="verifier_service")
    return run("verifier_service", settings, lambda: VerifierApp(settings))


if __name__ == "__main__":
    sys.exit(main())
