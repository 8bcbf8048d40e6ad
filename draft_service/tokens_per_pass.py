"""Chooses s, the tokens of one pass of the draft model, for each request with the drafter `parallel`.

The tokens after the first of a pass cost next to nothing, and are accepted less often. Which is faster, s = 1 or the
given s, depends on temperature, load and times. So both are measured, in tokens a second of judged rounds: the faster
one is taken, and the other one by a request now and then, twice as rarely after each.

Invariant 4: s is chosen before a request drafts anything, from rounds of other requests that share no draws with it.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

# Rounds with each s before they are compared, and that the measurements remember.
KNOWN_ROUNDS, REMEMBERED_ROUNDS = 24, 512
# A longer round counts as this many mean ones: one pause of the verifier would outweigh all others.
LONGEST_ROUND = 4.0
# The other s is tried after so many requests at first, and at most.
FIRST_WAIT, MOST_WAIT = 4, 128
# The other s is taken if it is this much faster.
GAIN = 1.03


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds of the last rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        kept = 1 - 1 / REMEMBERED_ROUNDS
        if self.is_known:
            mean = self.seconds / (REMEMBERED_ROUNDS * (1 - kept**self.rounds))
            seconds = min(seconds, LONGEST_ROUND * mean)
        self.tokens, self.seconds = kept * self.tokens + tokens, kept * self.seconds + seconds
        self.rounds += 1

    @property
    def is_known(self) -> bool:
        return self.rounds >= KNOWN_ROUNDS and self.seconds > 0


@dataclass(slots=True)
class _Arms:
    """s = 1 and the given s, of requests of one kind at one load."""

    is_parallel: bool = False  # the given s is the better one
    wait: int = FIRST_WAIT  # requests between two that try the other s
    left: int = FIRST_WAIT  # requests until the next one
    rates: dict[bool, _Rate] = field(default_factory=lambda: {False: _Rate(), True: _Rate()})

    def choose(self) -> bool:
        """Whether the next request takes the given s."""
        best, other = self.rates[self.is_parallel], self.rates[not self.is_parallel]
        if best.is_known and other.is_known and other.tokens * best.seconds > GAIN * best.tokens * other.seconds:
            self.is_parallel = not self.is_parallel
            self.wait = self.left = FIRST_WAIT
        self.left -= 1
        if self.left:
            return self.is_parallel
        if other.is_known:
            self.wait = min(2 * self.wait, MOST_WAIT)
        self.left = self.wait
        return not self.is_parallel


class PassChoices:
    """The choices of all kinds of requests. Used on the event loop only."""

    def __init__(self) -> None:
        self._arms: defaultdict[Hashable, _Arms] = defaultdict(_Arms)  # by kind and load
        self._load = 0

    def choose(self, kind: Hashable, s: int) -> int:
        """Return 1 or `s` for a request of this kind."""
        return s if s > 1 and self._arms[kind, self._load].choose() else 1

    def add(self, kind: Hashable, s: int, *, tokens: int, seconds: float, active: int) -> None:
        """Record a round: its tokens, its time from verdict to verdict, and how many sequences were active."""
        self._load = (max(1, active) - 1).bit_length()
        self._arms[kind, self._load].rates[s > 1].add(tokens, seconds)
