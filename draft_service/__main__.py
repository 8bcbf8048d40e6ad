"""`python -m draft_service --model DIR_OR_ID --verifier HOST:PORT --listen HOST:PORT`."""

import gc
import os
import signal
import sys

if __name__ == "__main__":
    gc.disable()  # imports make no garbage, and looking for it takes a seventh of their time
    if os.getpid() == 1:  # in a container, where the kernel drops signals without a handler
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the service serves

from draft_service.app import DraftApp
from draft_service.settings import DraftSettings
from outrider.service.lifecycle import run


def main() -> int:
    """Runs the service; returns the exit code."""
    gc.freeze()  # modules stay: later collections leave them out
    gc.enable()
    settings = DraftSettings.from_command_line(program="draft_service")
    return run("draft_service", settings, lambda: DraftApp(settings))


if __name__ == "__main__":
    sys.exit(main())
