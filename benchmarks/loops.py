"""One event loop for all that a benchmark asks over asyncio gRPC, whose completion queue does not outlive its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, run to its end."""
    return _runner().run(coroutine)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()
