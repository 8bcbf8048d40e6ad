"""How much one client may ask for: sequences at once, and sequences a second by a token bucket.

A call begins as one sequence, before its request is decoded; `count_sequences` adds those of its other samples. A
client is known by a name. Used on the event loop alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from outrider.rpc.errors import RequestError, invalid_field, overloaded

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
        max_sequences: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            rate: sequences a second in the long run; None: any.
            burst: sequences that may come at once after a pause; None: those of one second, at least one.
            max_sequences: sequences in progress; None: any.
            clock: seconds.
        """
        self._rate = rate
        self._burst = max(1, round(rate or 0)) if burst is None else burst
        self._max_sequences = max_sequences
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Counts a call of a client as one sequence for as long as it is open, and what it adds by `count_sequences`.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, where the client has too many sequences in progress, or they come too
                fast, with the time to wait.
        """
        client = self._client(name)
        self._check_room(client, 1)
        if self._rate is not None:
            self._take(client, self._rate)
        call = _Call(self, client)
        _call.set(call)  # each call is a task of its own, and so has a context of its own
        try:
            yield
        finally:
            client.sequences -= call.sequences

    def add(self, call: _Call, field: str, count: int) -> None:
        """See `count_sequences`."""
        most = self._max_sequences
        if most is not None and count > most:
            raise invalid_field(
                field, f"{field} is {count}; a client has at most {most} sequences", given=count, maximum=most
            )
        more = max(0, count - call.sequences)
        self._check_room(call.client, more)
        if self._rate is not None:
            call.client.level -= more  # below 0 it is a debt: calls of more samples than a burst come in all the same
        call.client.sequences += more
        call.sequences += more

    def _check_room(self, client: _Client, more: int) -> None:
        most = self._max_sequences
        if most is not None and client.sequences + more > most:
            raise overloaded(
                f"this client has {client.sequences} sequences in progress and asks for {more} more; at most {most}",
                limit="max-client-sequences",
                given=client.sequences + more,
                maximum=most,
            )

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
        """Drops those that have no sequence in progress and a full bucket."""
        now = self._clock()
        for client in self._clients.values():
            client.refill(now, self._rate or 1.0, self._burst)
        self._clients = {
            name: each for name, each in self._clients.items() if each.sequences or each.level < self._burst
        }


class _Client:
    """One client: its bucket, its sequences in progress, and how many calls were refused lately."""

    def __init__(self, level: float, now: float) -> None:
        self.level = level
        self.sequences = 0
        self.refused = 0.0
        self._now = now

    def refill(self, now: float, rate: float, burst: int) -> None:
        more = (now - self._now) * rate
        self.level = min(self.level + more, burst)
        self.refused = max(0.0, self.refused - more)
        self._now = now


class _Call:
    """One call of a client, and how many sequences it counts as."""

    def __init__(self, limits: ClientLimits, client: _Client) -> None:
        self.limits = limits
        self.client = client
        self.sequences = 1
        client.sequences += 1


_call: ContextVar[_Call | None] = ContextVar("call", default=None)


def count_sequences(field: str, count: int) -> None:
    """Counts the call in progress as `count` sequences of its client until it ends, where the server limits those.

    Raises:
        RequestError: INVALID_ARGUMENT with `field`, where a client never has as many; RESOURCE_EXHAUSTED, where this
            one has too many others in progress.
    """
    if (call := _call.get()) is not None:
        call.limits.add(call, field, count)


def _too_fast(rate: float, burst: int, seconds: float) -> RequestError:
    return overloaded(
        f"this client's sequences come faster than {rate:g} a second, and {burst} at once; try again in about "
        f"{seconds:.2g} s",
        retry_after=seconds,
        limit="client-rate",
        rate=f"{rate:g}",
        burst=burst,
    )
