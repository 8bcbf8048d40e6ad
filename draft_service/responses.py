"""The responses of a call, on their way from its samples to its stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from outrider.rpc.timeouts import InactivityTimer
from protos.outrider.v1.draft_service_pb2 import GenerateResponse

MAX_BACKLOG = 64
# Waiting samples continue below this many unread responses: waking all of them for each one would cost more than the
# response.
RESUME_BACKLOG = MAX_BACKLOG // 2
# Joined responses wait for so many seconds, unless they have so many bytes.
SECONDS_JOINED, BYTES_JOINED = 1.0, 64 * 1024
# After so many seconds without a response the reader gets an empty one. The contract names it (`GenerateResponse`).
HEARTBEAT_SECONDS = 5.0


class Responses:
    """A queue with many writers (the samples) and one reader (the stream).

    `send` never waits, so that released text is never lost. Writers call `wait_for_client` before they produce more.

    Attributes:
        are_joined: whether the reader gets those of `SECONDS_JOINED` in one.
    """

    def __init__(self) -> None:
        self.are_joined = False
        self._loop = asyncio.get_running_loop()
        self._read_at = self._loop.time()
        self._queue: deque[GenerateResponse] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._more = asyncio.Event()
        self._fewer = asyncio.Event()

    def send(self, response: GenerateResponse) -> None:
        self._queue.append(response)
        if len(self._queue) == 1 or not self.may_wait:
            self._more.set()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the queue. The reader gets the error after all earlier responses."""
        self._ended, self._error = True, error
        self._more.set()

    async def wait_for_client(self) -> bool:
        """Waits while `MAX_BACKLOG` or more responses are unread. Returns whether it waited."""
        waits = len(self._queue) >= MAX_BACKLOG
        while len(self._queue) >= MAX_BACKLOG:
            self._fewer.clear()
            await self._fewer.wait()
        return waits

    def take_now(self) -> GenerateResponse | None:
        """The next response; None if the queue is empty."""
        return self._take() if self._queue else None

    @property
    def may_wait(self) -> bool:
        """Whether the next response may wait, to be joined with later ones."""
        is_early = self.are_joined and self._loop.time() < self._read_at + SECONDS_JOINED
        return is_early and len(self._queue) < RESUME_BACKLOG

    def may_wait_since(self, sent: float) -> bool:
        """As `may_wait`, for one of several writers. `sent` is when it sent last, on the clock of `now`.

        Each read takes the responses of all writers, so by `may_wait` alone one writer might never send.
        """
        return self.may_wait and self.now < sent + SECONDS_JOINED

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def are_over(self) -> bool:
        """Whether the queue is empty and has ended. Reading on raises its error, if any."""
        return self._ended and not self._queue

    async def __aiter__(self) -> AsyncIterator[GenerateResponse]:
        timer = InactivityTimer(HEARTBEAT_SECONDS)
        try:
            while True:
                while self._queue and (self._ended or not self.may_wait):
                    yield self._join() if self.are_joined else self._take()
                if self._ended:
                    if self._error is not None:
                        raise self._error
                    return
                self._more.clear()
                if self._queue:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(self._read_at + SECONDS_JOINED):
                            await self._more.wait()
                    continue
                try:
                    await timer.wait_for(self._more.wait())
                except TimeoutError:
                    timer = InactivityTimer(HEARTBEAT_SECONDS)
                    yield GenerateResponse()
        finally:
            timer.close()

    def _join(self) -> GenerateResponse:
        """All responses in one, up to the one with which they have `BYTES_JOINED`."""
        self._read_at = self._loop.time()
        response = self._take()
        if self._queue:
            response = GenerateResponse(joined=[response])
        while self._queue and response.ByteSize() < BYTES_JOINED:
            response.joined.append(self._take())
        return response

    def _take(self) -> GenerateResponse:
        response = self._queue.popleft()
        if len(self._queue) <= RESUME_BACKLOG:
            self._fewer.set()
        return response
