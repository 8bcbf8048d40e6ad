"""How much one client may ask for: calls at once, and calls a second by a token bucket.

It knows a client by a name, and nothing of how it got that. Used on the event loop alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.rpc.errors import RequestError, overloaded

LONGEST_WAIT = 60.0
# So many clients are remembered before those that would be as if they were new are forgotten.
_KEPT = 1024


class ClientLimits:
    """Bounds that hold for each client by itself."""

    def __init__(
        self,
        *,
        rate: float | None = None,
        burst: int | None = None,
        max_calls: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            rate: calls a second in the long run; None: any.
            burst: calls that may come at once after a pause; None: those of one second, at least one.
            max_calls: calls in progress; None: any.
            clock: seconds.
        """
        self._rate = rate
        self._burst = max(1, round(rate or 0)) if burst is None else burst
        self._max_calls = max_calls
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Counts a call of a client for as long as it is open.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, where it has too many calls in progress, or they come too fast, with the
                time to wait.
        """
        client = self._client(name)
        if self._max_calls is not None and client.calls >= self._max_calls:
            raise overloaded(
                f"this client has {client.calls} calls in progress; at most {self._max_calls}",
                limit="max-client-calls",
                given=client.calls,
                maximum=self._max_calls,
            )
        if self._rate is not None:
            self._take(client, self._rate)
        client.calls += 1
        try:
            yield
        finally:
            client.calls -= 1

    def _take(self, client: _Client, rate: float) -> None:
        client.refill(self._clock(), rate, self._burst)
        if client.level >= 1:
            client.level -= 1
            return
        # Each that is turned away is told one interval more, so that not all come back for the same place.
        seconds = min((1 - client.level + client.refused) / rate, LONGEST_WAIT)
        client.refused += 1
        raise _too_fast(rate, self._burst, seconds)

    def _client(self, name: str) -> _Client:
        if name not in self._clients:
            if len(self._clients) >= _KEPT:
                self._forget()
            self._clients[name] = _Client(self._burst, self._clock())
        return self._clients[name]

    def _forget(self) -> None:
        """Drops those that have no call in progress and all their calls left."""
        now = self._clock()
        for client in self._clients.values():
            client.refill(now, self._rate or 1.0, self._burst)
        self._clients = {name: each for name, each in self._clients.items() if each.calls or each.level < self._burst}


class _Client:
    """One client: its bucket, its calls in progress, and how many were turned away lately."""

    def __init__(self, level: float, now: float) -> None:
        self.level = level
        self.calls = 0
        self.refused = 0.0
        self._now = now

    def refill(self, now: float, rate: float, burst: int) -> None:
        more = (now - self._now) * rate
        self.level = min(self.level + more, burst)
        self.refused = max(0.0, self.refused - more)
        self._now = now


def _too_fast(rate: float, burst: int, seconds: float) -> RequestError:
    return overloaded(
        f"this client's calls come faster than {rate:g} a second, and {burst} at once; try again in about "
        f"{seconds:.2g} s",
        retry_after=seconds,
        limit="client-rate",
        rate=f"{rate:g}",
        burst=burst,
    )
