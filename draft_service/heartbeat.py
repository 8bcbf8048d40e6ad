"""Signs of life: whoever reads a call's responses hears something now and then, also while there is nothing to tell.

So a client can tell a service that hangs from one whose request waits for its turn.
"""

import asyncio
from types import TracebackType
from typing import Self

from draft_service.responses import Responses
from outrider.best_effort import Component
from protos.outrider.v1.draft_service_pb2 import GenerateResponse

HEARTBEAT_SECONDS = 5.0
"""The contract names it (`GenerateResponse`)."""

HEARTBEAT = Component("heartbeat")


class Heartbeat:
    """Sends a response with nothing in it whenever no other was sent for so long. On the event loop."""

    def __init__(self, responses: Responses, seconds: float = HEARTBEAT_SECONDS) -> None:
        self._responses = responses
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._sent = self._responses.sent
        self._timer = self._loop.call_later(self._seconds, self._beat)

    def _beat(self) -> None:
        HEARTBEAT.run(self._send, None)
        self._wait()

    def _send(self) -> None:
        if self._responses.sent == self._sent and self._responses.are_read:
            self._responses.send(GenerateResponse())
