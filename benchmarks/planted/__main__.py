"""A service of ours on a planted model: its own application and engine over gRPC; only the weights come otherwise.

    python -m benchmarks.planted verifier_service --model FOLDER --listen 127.0.0.1:0
    python -m benchmarks.planted draft_service --model FOLDER --verifier HOST:PORT --listen 127.0.0.1:0

FOLDER is one that `benchmarks.planted.save` wrote; the other flags are the service's.
"""

import sys

from benchmarks.planted import load
from draft_service.app import DraftApp
from draft_service.settings import DraftSettings
from outrider.service.lifecycle import run
from verifier_service.app import VerifierApp
from verifier_service.settings import VerifierSettings


def main() -> int:
    """Runs the service that the first argument names; returns the exit code."""
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name == "verifier_service":
        target = VerifierSettings.from_command_line(arguments, program=name)
        return run(name, target, lambda: VerifierApp(target, load))
    if name == "draft_service":
        draft = DraftSettings.from_command_line(arguments, program=name)
        return run(name, draft, lambda: DraftApp(draft, load))
    print(f"benchmarks.planted: there is no service '{name}'; verifier_service or draft_service", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
