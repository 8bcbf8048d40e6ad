"""How a rank leaves. It knows nothing of why."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import structlog

from outrider.log_queue import flush_all

_log = structlog.get_logger()


def fail(program: str, reason: str, *, rank: int | None = None, code: int = 1) -> NoReturn:
    """Ends the process with the one line that an operator looks for."""
    _log.error("cannot serve", reason=reason, rank=rank)
    print(f"{program}: {reason}", file=sys.stderr)  # noqa: T201
    leave(code)


def leave(code: int) -> NoReturn:
    """Ends the process without what Python and torch would do at the end: that waits for ranks that may be gone, and
    for threads that wait for them.
    """
    flush_all()
    os._exit(code)


def leave_after(main: Callable[[], int]) -> NoReturn:
    """Ends the process so after `main`, with the code that it returns, or with 1 where it breaks."""
    code = 1
    try:
        code = main()
    except Exception:
        _log.exception("the service broke")
    leave(code)
