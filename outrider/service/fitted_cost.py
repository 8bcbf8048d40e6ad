"""The cost of a step, fitted online: t(tokens) = fixed + slope · tokens. Also used for the cost of drafting."""

from collections.abc import Sequence
from dataclasses import dataclass

# Weight of one new step: a change of the machine is followed within some fifty steps.
FORGETTING = 0.05
# Squared distance from the mean width, in tokens², from which on a step has its full weight for the slope.
REFERENCE_SPREAD = 64.0
# Residuals are clipped at this many mean deviations.
CREDIBLE_DEVIATIONS = 4.0
# Least mean deviation, as a share of the expected time: the precision of a clock.
LEAST_DEVIATION = 0.01
# Mean deviation of a new line.
FIRST_DEVIATION = 0.1
# Longer times, in seconds, are not the cost of a step.
LONGEST_STEP = 3600.0


@dataclass(frozen=True, slots=True)
class CostLine:
    """A line of cost, in seconds; neither part is negative."""

    fixed: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        """Seconds of a step of this many tokens."""
        return self.fixed + self.per_token * tokens


class FittedCost:
    """The line through the last steps. One thread updates it; any thread may read `line`.

    Means of width and time follow the steps with exponential forgetting. The slope changes only with steps of different
    widths: steps of one width, however many, leave it as it was.

    A step that took far longer than the line expects moves it by a bounded amount. If steps stay slower, the bound
    grows, and the line follows.
    """

    def __init__(self, trials: Sequence[tuple[int, float]], *, forgetting: float = FORGETTING) -> None:
        """`trials` are earlier steps, as (tokens, seconds), at least one; of each width the fastest counts.
        `forgetting` is the weight of one step in the means.
        """
        fastest: dict[int, float] = {}
        for tokens, seconds in trials:
            fastest[tokens] = min(seconds, fastest.get(tokens, seconds))
        self._forgetting = forgetting
        self._tokens = sum(fastest) / len(fastest)
        self._seconds = sum(fastest.values()) / len(fastest)
        self._spread = sum((tokens - self._tokens) ** 2 for tokens in fastest)  # Σ (tokens - mean)²
        self._shared = sum((n - self._tokens) * (t - self._seconds) for n, t in fastest.items())
        self.line = self._fit()
        self._deviation = FIRST_DEVIATION * self._seconds

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a step of `tokens` tokens that took `seconds`; impossible times are ignored."""
        if tokens < 1 or not 0 <= seconds <= LONGEST_STEP:
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
        """The line through the means, its slope limited so that neither part is negative."""
        slope = self._shared / self._spread if self._spread > 0 else 0.0
        slope = min(max(slope, 0.0), self._seconds / self._tokens)
        return CostLine(fixed=max(0.0, self._seconds - slope * self._tokens), per_token=slope)
