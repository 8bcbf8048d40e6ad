"""A verifier's engine whose passes can be held up, to see who notices.

No pass ends while there is a file where `OUTRIDER_TEST_HOLD` says; a line in the log says when one is held up.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from verifier_service import app
from verifier_service.engine import VerifierEngine
from verifier_service.scheduler import TargetWork
from verifier_service.target_runner import PassResult

HOLD = "OUTRIDER_TEST_HOLD"
HELD = "a pass is held up"

_log = structlog.get_logger()


class HeldEngine(VerifierEngine):
    """The engine, but for that."""

    def forward(self, work: Sequence[TargetWork]) -> PassResult:
        output = super().forward(work)
        hold = Path(os.environ[HOLD])
        if hold.exists():
            _log.info(HELD)
            while hold.exists():
                time.sleep(0.01)
        return output


def install() -> None:
    """Have the service that this process is about to become take it."""
    vars(app)["VerifierEngine"] = HeldEngine
