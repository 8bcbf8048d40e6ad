"""What a request has to say, on its way from several samples to one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from protos.outrider.v1.draft_service_pb2 import GenerateResponse

MAX_BACKLOG = 64
# Samples that wait for room go on once so few are left: waking all of them for each response would cost more than
# writing it.
ROOM_AGAIN = MAX_BACKLOG // 2


class Responses:
    """A queue that many samples write to and one stream reads from.

    Writing never waits, so that what was released is never lost; who writes asks for `room` before it makes more.

    Attributes:
        sent: how many were written.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._queue: deque[GenerateResponse] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._more = asyncio.Event()
        self._fewer = asyncio.Event()

    def send(self, response: GenerateResponse) -> None:
        """Puts a response at the end."""
        self.sent += 1
        self._queue.append(response)
        self._more.set()

    def end(self, error: BaseException | None = None) -> None:
        """No more comes. An error is raised to the reader after what came before it."""
        self._ended, self._error = True, error
        self._more.set()

    async def room(self) -> None:
        """Waits while the client is too far behind."""
        while len(self._queue) >= MAX_BACKLOG:
            self._fewer.clear()
            await self._fewer.wait()

    def take_now(self) -> GenerateResponse | None:
        """The next response; None where there is none now."""
        if not self._queue:
            return None
        return self._take()

    @property
    def are_read(self) -> bool:
        """Whether none waits for the reader."""
        return not self._queue

    @property
    def are_over(self) -> bool:
        """Whether none is left and none will come; reading on raises the error there is."""
        return self._ended and not self._queue

    async def __aiter__(self) -> AsyncIterator[GenerateResponse]:
        while True:
            while self._queue:
                yield self._take()
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            self._more.clear()
            await self._more.wait()

    def _take(self) -> GenerateResponse:
        response = self._queue.popleft()
        if len(self._queue) <= ROOM_AGAIN:
            self._fewer.set()
        return response
