"""The arithmetic of `benchmarks.gpu`: limits, shares, and what Theorem 3.8 foretells. Plain numbers in and out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.theory import expected_tokens, tokens_per_second

_STEPS = 60  # of a bisection: more than a double has digits


def weight_bound(weight_bytes: float, bandwidth: float) -> float:
    """Tokens a second of one stream that only ever reads the weights, at `bandwidth` bytes a second.

    Raises:
        ValueError: either is not above 0.
    """
    if weight_bytes <= 0 or bandwidth <= 0:
        raise ValueError(f"{weight_bytes} bytes at {bandwidth} bytes a second; both must be above 0")
    return bandwidth / weight_bytes


def overall(rates: Sequence[float]) -> float:
    """The rate of several texts of one length together: all their tokens over all their seconds.

    Raises:
        ValueError: there is none.
    """
    if not rates:
        raise ValueError("no text was written")
    return len(rates) / sum(1 / rate for rate in rates)


def foretold(alpha: float, gamma: int, times: dict[str, float]) -> float:
    """Tokens a second by [L Thm 3.8] with the network, from `draft_step`, `verify_pass` and `round_trip` in seconds."""
    return tokens_per_second(alpha, gamma, times["draft_step"], times["verify_pass"], times["round_trip"])


def alpha_of(tokens_per_round: float, gamma: int) -> float:
    """The α at which a round of γ drafts gives so many tokens in expectation: `expected_tokens` the other way round.

    Raises:
        ValueError: γ is 0, or no α in [0, 1] gives so many.
    """
    if gamma < 1 or not 1 <= tokens_per_round <= gamma + 1:
        raise ValueError(f"{tokens_per_round} tokens a round of {gamma} drafts; 1 to γ + 1, with γ of 1 at the least")
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens_per_round else (low, middle)
    return (low + high) / 2


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as intervals that do not touch, in order. An interval is (begin, end)."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def shares(busy: Sequence[tuple[float, float]], begin: float, end: float, bins: int) -> list[float]:
    """How much of each of so many equal parts of the time from `begin` to `end` lies in the intervals of `union`."""
    width = (end - begin) / bins
    found = [0.0] * bins
    for start, stop in busy:
        first, last = max(start, begin), min(stop, end)
        place = int((first - begin) / width)
        while first < last and place < bins:
            until = min(last, begin + (place + 1) * width)
            found[place] += (until - first) / width
            first, place = until, place + 1
    return found


def busy_share(busy: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first begin to the last end that lies in one of the intervals of `union`.

    Raises:
        ValueError: there is none, or they take no time.
    """
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    if span <= 0:
        raise ValueError("nothing ran on the device while it was watched")
    return sum(end - begin for begin, end in busy) / span
