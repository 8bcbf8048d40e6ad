"""Which verdicts are likely, before they come: what the outcome cache drafts for.

An outcome is how many drafted tokens are accepted, and which token follows them. Where tokens are chosen by scores
(log q plus the noise that the target shares, or plain logits at temperature 0), the target chooses by scores of its own
that lie near: its choice is j with a chance of about softmax(scores / τ)_j. So it is known which places of *this*
proposal are risky and which token would stand there instead, where a mean acceptance rate knows neither. Which τ
explains the verdicts best is learned from them. Where tokens are drawn from laws, scores say nothing about what the
verifier's own draw accepts: there each place has the mean acceptance rate, and what follows a rejection goes by q.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TEMPERATURES = np.array([0.15, 0.3, 0.45, 0.7, 1.0, 1.5, 2.5])
"""Of scores, what is chosen among. The demo pair's is 0.45, under `coupled` and at temperature 0 alike."""

# Of what a verdict said, this much is left after the next.
_MEMORY = 0.99
# Chance of a token that is not among those looked at, where it came all the same.
_UNSEEN = 0.02
# A score that is so far below the best has no chance.
_LEAST = -1e3
# Verdicts that the first guesses of τ and α count as.
_PRIOR = 8.0


@dataclass(frozen=True, slots=True)
class Place:
    """What may stand at a place of a proposal, or behind it.

    Attributes:
        tokens: the likeliest, in falling order of `scores`; where tokens are chosen by scores the drafted one is the
            first.
        scores: one for each; a difference of 1 is a factor of e in chance, at τ = 1.
    """

    tokens: Sequence[int]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class Guess:
    """An outcome.

    Attributes:
        chance: that it comes.
        accepted: drafted tokens that stand.
        token: what follows them.
    """

    chance: float
    accepted: int
    token: int


class Forecast:
    """Learns from verdicts how near target and draft are, for proposals of one kind."""

    def __init__(self, *, by_scores: bool) -> None:
        """`by_scores` says whether both sides choose by scores, and not by draws of their own."""
        self._by_scores = by_scores
        self._evidence = np.where(TEMPERATURES == 0.45, _PRIOR * 0.1, 0.0)  # log-likelihoods, forgotten slowly
        self._accepted, self._judged = 0.7 * _PRIOR, _PRIOR

    @property
    def temperature(self) -> float:
        """The τ that has explained recent verdicts best."""
        return float(TEMPERATURES[int(self._evidence.argmax())])

    @property
    def acceptance_rate(self) -> float:
        """The mean acceptance rate of recent proposals."""
        return self._accepted / self._judged

    def stands(self, place: Place) -> float:
        """The chance that the token drafted at a place is accepted, those before it being so."""
        if not self._by_scores:
            return self.acceptance_rate
        return float(_softmax(np.array(place.scores), self.temperature)[0])

    def guesses(self, places: Sequence[Place], drafted: Sequence[int]) -> tuple[list[Guess], float]:
        """The outcomes that begin with a rejection, and the chance that there is none; `places` are of `drafted`."""
        found, chance = list[Guess](), 1.0
        for accepted, (place, token) in enumerate(zip(places, drafted, strict=True)):
            stands = self.stands(place)
            found += self._followers(place, accepted, chance * (1 - stands), without=token)
            chance *= stands
        return found, chance

    def after_all(self, place: Place, accepted: int, chance: float) -> list[Guess]:
        """The outcomes where all `accepted` tokens of a proposal stand, which has that chance; `place` is behind it."""
        return self._followers(place, accepted, chance, without=None)

    def learn(self, places: Sequence[Place], drafted: Sequence[int], accepted: int, token: int | None) -> None:
        """Takes in a verdict: so many were accepted, and this came next; None where nothing did."""
        judged = min(accepted + 1, len(drafted))
        if not judged:
            return
        self._accepted = _MEMORY * self._accepted + min(accepted, judged)
        self._judged = _MEMORY * self._judged + judged
        if not self._by_scores:
            return
        self._evidence *= _MEMORY
        for i in range(judged):
            chosen = drafted[i] if i < accepted else token
            if chosen is None:
                return
            place = places[i]
            if chosen in place.tokens and math.isfinite(best := max(place.scores)):
                scaled = np.maximum(np.array(place.scores) - best, _LEAST)[None, :] / TEMPERATURES[:, None]
                logs = scaled[:, list(place.tokens).index(chosen)] - np.log(np.exp(scaled).sum(axis=1))
                self._evidence += np.fmax(logs, math.log(_UNSEEN))

    def _followers(self, place: Place, accepted: int, chance: float, *, without: int | None) -> list[Guess]:
        kept = [
            i
            for i, (token, score) in enumerate(zip(place.tokens, place.scores, strict=True))
            if token != without and score > -math.inf
        ]
        if not kept:
            return []
        temperature = self.temperature if self._by_scores else 1.0
        shares = _softmax(np.array([place.scores[i] for i in kept]), temperature)
        return [Guess(chance * float(share), accepted, place.tokens[i]) for share, i in zip(shares, kept, strict=True)]


def _softmax(scores: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    best = scores.max()
    if not math.isfinite(best):  # no numbers, or one that is above all numbers
        return np.where(scores == best, 1.0, 0.0) / max(1, np.count_nonzero(scores == best))
    weights: NDArray[np.float64] = np.exp(np.maximum(scores - best, _LEAST) / temperature)
    return weights / weights.sum()
