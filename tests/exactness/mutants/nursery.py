"""A process that has imported both services and forks them: real services at a tenth of the start-up time.

Each child is a process of its own that runs the service's own `main` with flags as on any command line, after at most
one deliberate fault (`faults`). Orders come as lines of JSON on standard input, process ids go out on standard output;
when the input ends, all children are stopped. It knows nothing of tests.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import NoReturn

from tests.exactness.mutants import faults

SERVICES = ("verifier_service", "draft_service")
GRACE_S = 5.0


def main() -> int:
    """Serves orders until standard input ends."""
    for service in SERVICES:
        importlib.import_module(f"{service}.__main__")
    children: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            _become(order["service"], order["arguments"], order["fault"], order["log"])
        children.append(child)
        print(json.dumps({"pid": child}), flush=True)
    _stop(children)
    return 0


def _become(service: str, arguments: list[str], fault: str | None, log: str) -> NoReturn:
    # Into a session of its own, so that a terminal's Ctrl-C goes to the tests alone.
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [service, *arguments]
    code = 1
    try:
        if fault is not None:
            faults.FAULTS[fault]()
        code = importlib.import_module(f"{service}.__main__").main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is ours to clean up


def _stop(children: list[int]) -> None:
    """Ends what is left: SIGTERM, a moment of grace, SIGKILL."""
    for number, until in ((signal.SIGTERM, time.monotonic() + GRACE_S), (signal.SIGKILL, None)):
        left = []
        for child in children:
            try:
                os.kill(child, number)
                left.append(child)
            except ProcessLookupError:
                continue
        while left and (until is None or time.monotonic() < until):
            left = [child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)]
            time.sleep(0.02)
        children = left


if __name__ == "__main__":
    sys.exit(main())
