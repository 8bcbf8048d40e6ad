"""How well sampled tokens fit the target's distributions: the next token, and three tokens in a row.

`next_tokens` is Pearson's χ² over prefixes that many texts share: after each of them, counts of the next token against
the target's probabilities.

`three_tokens` needs no prefix twice. Lay a distribution's tokens side by side on [0, 1), each as wide as its
probability. The place of a token is a point of its own interval, drawn at random. If each token has the target's
distribution given all before it, places are uniform and independent, whatever the prefixes. So three consecutive places
fall into each of 27 equal cells with the same chance; 8 cells where there are few texts. Side by side by probability,
the cells show tokens that are too frequent because the draft favours them. By token id, as the services draw tokens,
they show random numbers that are used twice.

Each test has a bound on what rounding may add: a target in bfloat16 has slightly other probabilities in each batch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Array, Fit

LEAST_COUNTS = int(2 * chisquare.LEAST_EXPECTED)
"""A prefix met less often cannot have two cells."""
_LEAST_MASS = 1e-9

Name = TypeVar("Name")


@dataclass(frozen=True)
class Distribution:
    """A next-token distribution: the most probable tokens, and the rest as one cell.

    Attributes:
        ids: `[K]`, the most probable first.
        p: `[K]`, their probabilities.
        edge: the tokens of the rest; None: all others. A token in neither is impossible.
        is_sure: whether rounding cannot move the mass that top-p or min-p keeps.
    """

    ids: Array
    p: Array
    edge: frozenset[int] | None = None
    is_sure: bool = True

    @cached_property
    def rest(self) -> float:
        return max(1.0 - float(self.p.sum()), _LEAST_MASS)

    @cached_property
    def _cells(self) -> dict[int, int]:
        return {token: cell for cell, token in enumerate(self.ids.tolist())}

    @cached_property
    def _begins(self) -> tuple[list[float], list[float]]:
        """Where each cell begins, side by side by probability, and by token id."""
        by_probability, by_id = np.zeros(len(self.ids)), np.zeros(len(self.ids))
        order = np.argsort(self.ids)
        by_probability[1:] = self.p[:-1].cumsum()
        by_id[order[1:]] = self.p[order[:-1]].cumsum()
        return by_probability.tolist(), by_id.tolist()

    def cell(self, token: int) -> int:
        """Return the index of a token; K for the rest, K + 1 for an impossible one."""
        found = self._cells.get(token)
        if found is not None:
            return found
        return len(self.ids) + (self.edge is not None and token not in self.edge)

    def place(self, token: int, share: float, *, by_id: bool) -> float | None:
        """Return where a token lies: the mass before it, and `share` of its own; None if it is impossible.

        The rest comes last.
        """
        cell = self.cell(token)
        if cell > len(self.ids):
            return None
        if cell == len(self.ids):
            return 1.0 - self.rest * (1.0 - share)
        return self._begins[by_id][cell] + share * float(self.p[cell])


def next_tokens(
    counts: Mapping[Name, Counter[int]], distributions: Mapping[Name, Distribution], rounding: float
) -> Fit:
    """Test counts of the next token after each prefix; prefixes met less than `LEAST_COUNTS` times are left out.

    `rounding` is the χ² distance Σ (p' - p)²/p that is no bias.
    """
    names = [name for name, each in counts.items() if each.total() >= LEAST_COUNTS and distributions[name].is_sure]
    width = max((len(distributions[name].ids) for name in names), default=0) + 2
    seen, expected = np.zeros((len(names), width)), np.zeros((len(names), width))
    for row, name in enumerate(names):
        distribution = distributions[name]
        K = len(distribution.ids)
        expected[row, : K + 1] = [*distribution.p, distribution.rest]
        for token, count in counts[name].items():
            seen[row, distribution.cell(token)] += count
    return chisquare.table_fit(seen, expected, rounding)


def three_tokens(
    texts: Iterable[Sequence[tuple[Distribution, int]]], generator: np.random.Generator, rounding: float, *, by_id: bool
) -> Fit:
    """Test the places of consecutive tokens, three by three; a text is its tokens, each with its distribution.

    Tokens after an unsure distribution are skipped. Whether one is unsure depends on the tokens before it alone, so the
    places of the others stay uniform and independent. To drop a triple because of its last token would select its first
    ones; the last triple of a text is filled up with random numbers instead. `n` counts tokens, not these.
    """
    triples: list[list[float | None]] = []
    tokens = 0
    for text in texts:
        places = [each.place(token, generator.random(), by_id=by_id) for each, token in text if each.is_sure]
        tokens += len(places)
        places += generator.random(-len(places) % 3).tolist()
        triples += [places[at : at + 3] for at in range(0, len(places), 3)]
    classes = 3 if len(triples) >= LEAST_COUNTS * 3**3 else 2
    cells = [_cell(triple, classes) for triple in triples]
    expected = np.full(classes**3 + 1, classes**-3)
    expected[-1] = 0.0  # impossible tokens
    fit = chisquare.goodness_of_fit(np.bincount(cells, minlength=len(expected)), expected, 3 * rounding)
    return replace(fit, n=tokens // 3)


def _cell(places: Sequence[float | None], classes: int) -> int:
    cell = 0
    for place in places:
        if place is None:
            return int(classes**3)
        cell = cell * classes + min(int(place * classes), classes - 1)
    return cell


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Return which hypotheses Holm's method rejects; one false rejection or more has a chance of `level`."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
