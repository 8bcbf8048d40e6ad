"""The time that a draft has while verdicts are under way: how much of it is left.

It knows clocks and counts: no model, no sequence's tokens, and not what the time is used for.
"""

from collections.abc import Hashable

# Weight of the newest of what is measured again and again.
_NEWEST = 0.2

# A wait of so many times the mean is another kind of wait: a slow client, a pause of the machine.
_OUTLIER = 4.0


class _Mean:
    """A mean that forgets, and the mean distance from it."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.spread = 0.0

    def add(self, value: float) -> None:
        if self.value is None:
            self.value, self.spread = value, value / 2
            return
        self.spread += _NEWEST * (abs(value - self.value) - self.spread)
        self.value += _NEWEST * (value - self.value)


class SpareTime:
    """Says how many tokens can be drafted before somebody is likely to ask for a proposal.

    Whoever asks while something else is drafted has to wait for it, so what is begun has to be done by then.
    """

    def __init__(self) -> None:
        self._wait = _Mean()  # from a proposal's leaving to the next asking
        self._token = _Mean()  # seconds that one token takes, in a call of several
        self._left: dict[Hashable, float] = {}  # who is expected to ask, and since when

    @property
    def seconds_per_token(self) -> float:
        """What a drafted token takes; 0 before the first."""
        return self._token.value or 0.0

    def spent(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        if tokens:
            self._token.add(seconds / tokens)

    def left(self, who: Hashable, now: float) -> None:
        """A proposal has left; its sequence will ask for another."""
        self._left[who] = now

    def asked(self, who: Hashable, now: float) -> None:
        """It asks."""
        since = self._left.pop(who, None)
        if since is not None and (self._wait.value is None or now - since < _OUTLIER * self._wait.value):
            self._wait.add(now - since)

    def gone(self, who: Hashable) -> None:
        """It will ask no more."""
        self._left.pop(who, None)

    def tokens(self, now: float) -> int:
        """How many tokens are done before the first is likely to ask; 0 while nothing is known."""
        if self._wait.value is None or not self._token.value:
            return 0
        wait = self._wait.value - self._wait.spread / 2
        rest = min((since + wait - now for since in self._left.values() if now - since < _OUTLIER * wait), default=0.0)
        return max(0, int(rest / self._token.value))
