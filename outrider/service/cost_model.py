"""The cost of a pass, fitted while it serves: t(tokens) = fixed + slope · tokens. It also fits the cost of drafting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Share of what is known that one pass replaces: a change of the machine is taken in within some fifty passes.
FORGETTING = 0.05
# Squared distance from the mean width, in tokens², at which a pass says as much of the slope as it may put out of mind.
REFERENCE_SPREAD = 64.0
# A pass is believed as far as this many mean deviations from the line; what lies beyond counts as if it lay there.
CREDIBLE_DEVIATIONS = 4.0
# The least mean deviation, as a share of what the line expects: a clock is never better.
LEAST_DEVIATION = 0.01
# The mean deviation that is assumed of a line nothing has been held against yet.
FIRST_DEVIATION = 0.1
# Seconds beyond which it was not the pass that took them.
LONGEST_PASS = 3600.0


@dataclass(frozen=True, slots=True)
class CostLine:
    """A line of cost, in seconds; neither part is negative."""

    fixed: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        """What a pass of so many tokens takes."""
        return self.fixed + self.per_token * tokens


class FittedCost:
    """The line through the last passes. One thread feeds it; any thread may read `line`.

    Means of width and time follow the passes with exponential forgetting. What is known of the slope is forgotten only
    as fast as passes of other widths renew it, so that passes of one width, however many, leave it as it was.

    A pass that took far longer than the line expects moves it by a bounded step; where passes go on being slower, what
    is believed widens, and the line follows.
    """

    def __init__(self, trials: Sequence[tuple[int, float]], *, forgetting: float = FORGETTING) -> None:
        """`trials` are passes run before, as (tokens, seconds); of each width the fastest counts. `forgetting` is the
        share of the means that one pass replaces.

        Raises:
            ValueError: there is none, or one has no tokens, or no time.
        """
        fastest: dict[int, float] = {}
        for tokens, seconds in trials:
            if tokens < 1 or not 0 < seconds < math.inf:
                raise ValueError(f"a trial of {tokens} tokens took {seconds} s; at least 1 token, and more than 0 s")
            fastest[tokens] = min(seconds, fastest.get(tokens, seconds))
        if not fastest:
            raise ValueError("no trial passes; at least 1 is needed")
        self._forgetting = forgetting
        self._tokens = sum(fastest) / len(fastest)
        self._seconds = sum(fastest.values()) / len(fastest)
        self._spread = sum((tokens - self._tokens) ** 2 for tokens in fastest)  # Σ (tokens - mean)²
        self._shared = sum((n - self._tokens) * (t - self._seconds) for n, t in fastest.items())
        self.line = self._fit()
        self._deviation = FIRST_DEVIATION * self._seconds

    def add(self, tokens: int, seconds: float) -> None:
        """Takes in a pass of `tokens` that took `seconds`; one that cannot have is left out."""
        if tokens < 1 or not 0 <= seconds <= LONGEST_PASS:
            return
        expected = self.line.seconds(tokens)
        least = LEAST_DEVIATION * max(expected, self._seconds)
        credible = CREDIBLE_DEVIATIONS * max(self._deviation, least)
        residual = min(max(seconds - expected, -credible), credible)
        self._deviation += self._forgetting * (abs(residual) - self._deviation)

        width, time = tokens - self._tokens, expected + residual - self._seconds  # from the means
        forgotten = self._forgetting * width**2 / (width**2 + REFERENCE_SPREAD)
        self._spread += width**2 - forgotten * self._spread
        self._shared += width * time - forgotten * self._shared
        self._tokens += self._forgetting * width
        self._seconds += self._forgetting * time
        self.line = self._fit()

    def _fit(self) -> CostLine:
        """The line through the means. Its slope lies where both parts are costs: no pass and no token gives time."""
        slope = self._shared / self._spread if self._spread > 0 else 0.0
        slope = min(max(slope, 0.0), self._seconds / self._tokens)
        return CostLine(fixed=max(0.0, self._seconds - slope * self._tokens), per_token=slope)
