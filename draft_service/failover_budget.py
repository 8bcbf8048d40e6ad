"""How many sequences may be opened again, and when: work that is done twice must not become a storm.

A sequence that is opened at another verifier has its whole text run there once more. Where a verifier dies because it
has too much to do, those that it leaves are too much for the next, and so on. So a service has a bucket of tokens, one
for each such opening. It holds as many as the service has sequences, and is full at the start: one death is survived
by all at once. It fills by a tenth of a token with each verdict, so that in the long run no more than a tenth of the
rounds are followed by a new opening; and by one token a second, since where all wait there are no rounds, and nobody
would ever get on. Who finds it empty waits, in order.

Used on one event loop.
"""

import asyncio
import time
from collections.abc import Callable

PER_ROUND = 0.1
PER_SECOND = 1.0


class FailoverBudget:
    """The bucket."""

    def __init__(self, burst: int, clock: Callable[[], float] | None = None) -> None:
        """`burst` is what it holds at most, and at the start; at least 1."""
        if burst < 1:
            raise ValueError(f"burst is {burst}; at least 1")
        self._burst = float(burst)
        self._clock = clock or time.monotonic
        self._tokens = self._burst
        self._looked = self._clock()
        self._turn = asyncio.Lock()  # first come, first served
        self._more = asyncio.Event()

    @property
    def tokens(self) -> float:
        """What is in it. Any thread may ask."""
        return min(self._burst, self._tokens + PER_SECOND * max(0.0, self._clock() - self._looked))

    def earn(self) -> None:
        """A round was judged."""
        self._add(PER_ROUND)

    def give_back(self) -> None:
        """What was taken was not needed: no verifier has run anything for it."""
        self._add(1.0)

    def take_now(self) -> bool:
        """Takes a token if there is one and nobody waits for it."""
        if self.tokens < 1.0 or self._turn.locked():
            return False
        self._add(-1.0)
        return True

    async def take(self, until: float) -> bool:
        """Takes a token, waiting for one until the clock shows `until`; says whether it did."""
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())), self._turn:
                while self.tokens < 1.0:
                    self._more.clear()
                    await self._wait((1.0 - self.tokens) / PER_SECOND)
                self._add(-1.0)
                return True
        except TimeoutError:
            return False

    async def _wait(self, seconds: float) -> None:
        """Until one may be full by time, or something was earned."""
        try:
            async with asyncio.timeout(seconds):
                await self._more.wait()
        except TimeoutError:
            pass

    def _add(self, tokens: float) -> None:
        self._tokens, self._looked = min(self._burst, self.tokens + tokens), self._clock()
        if tokens > 0:
            self._more.set()
