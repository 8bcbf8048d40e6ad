"""What rounds have taught: how likely each place of a proposal is to stand, and where the time of a round goes.

A sample begins with what earlier ones have taught, so that a short text is written well from its first round.
"""

import math
from collections import deque
from statistics import median

from draft_service.speculation import Round
from outrider.service.cost_model import CostLine

# Chance of acceptance before anything is known, and how many judged tokens that counts for.
PRIOR_CHANCE, PRIOR_WEIGHT = 0.8, 6.0
# Judged tokens of a place that are remembered, of all samples and of one; and how many of its own tokens a sample gives
# as much as what all have taught.
REMEMBERED, REMEMBERED_OF_ONE, SHARED_WEIGHT = 512, 64, 24.0
# Values whose median is believed, and how many there must be before anything is. A median, since single rounds take
# many times what others do, and so do the first of a service.
RECENT, FEWEST = 32, 5
# Rounds that the share of tokens drafted afresh is a mean over.
SHARED_ROUNDS = 32


class Chances:
    """The chance of each place of a proposal, given that all before it went well.

    What is known of a place is its own mean, drawn to what is known of it elsewhere (`parent`), and else to the place
    before it: so a place that was never tried is as good as the last one that was.
    """

    def __init__(self, parent: "Chances | None" = None, *, prior: float = PRIOR_CHANCE) -> None:
        self._parent = parent
        self._prior = prior
        self._remembered = REMEMBERED if parent is None else REMEMBERED_OF_ONE
        self._weight = PRIOR_WEIGHT if parent is None else SHARED_WEIGHT
        self._sums: list[float] = []
        self._counts: list[float] = []

    def add(self, place: int, value: float) -> None:
        """Takes in what became of a place, from 0: 1 where it went well, 0 where not, or the chance it had."""
        if math.isnan(value):
            return
        value = min(max(value, 0.0), 1.0)
        while len(self._sums) <= place:
            self._sums.append(0.0)
            self._counts.append(0.0)
        kept = 1 - 1 / self._remembered
        self._sums[place] = kept * self._sums[place] + value
        self._counts[place] = kept * self._counts[place] + 1
        if self._parent is not None:
            self._parent.add(place, value)

    def forget(self, kept: float) -> None:
        """Lets what is known count for so many tokens of a place at the most; the prior is what is known so far."""
        (self._prior,) = self.of(1)
        for place, count in enumerate(self._counts):
            share = min(1.0, kept / count) if count else 1.0
            self._sums[place] *= share
            self._counts[place] *= share
        if self._parent is not None:
            self._parent.forget(kept)

    def of(self, places: int) -> list[float]:
        """The chances of the first so many places."""
        known = None if self._parent is None else self._parent.of(places)
        chances: list[float] = []
        before = self._prior
        for place in range(places):
            likely = before if known is None else known[place]
            seen = place < len(self._sums)
            total = self._weight * likely + (self._sums[place] if seen else 0.0)
            before = min(1.0, total / (self._weight + (self._counts[place] if seen else 0.0)))
            chances.append(before)
        return chances


class Recent:
    """The median of the last values."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)
        self._median: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def value(self) -> float | None:
        """None before the first."""
        if self._median is None and self._values:
            self._median = median(self._values)
        return self._median

    def add(self, value: float) -> None:
        """Takes in one more, where it is a number."""
        if not math.isfinite(value):
            return
        self._values.append(value)
        self._median = None

    def doubt(self) -> None:
        """What was known is old: it stands until there is a next value, and counts no more then."""
        self._median = self.value
        self._values.clear()


class DraftCost:
    """What drafting takes: something for each token that was not there already, and something else."""

    def __init__(self) -> None:
        self._token = Recent()
        self._rest = Recent()  # where all tokens were there
        self._fresh = 1.0

    @property
    def known(self) -> bool:
        """Whether `seconds` can be told."""
        return len(self._token) > 0 and len(self._token) + len(self._rest) >= FEWEST

    def add(self, drafted: int, foreseen: int, seconds: float) -> None:
        """So many tokens, of which some were there already, took so long."""
        fresh = max(0, drafted - foreseen)
        self._fresh += (fresh / drafted - self._fresh) / SHARED_ROUNDS
        if fresh:
            self._token.add(max(0.0, seconds - (self._rest.value or 0.0)) / fresh)
        else:
            self._rest.add(seconds)

    def seconds(self, drafted: float) -> float:
        """What so many tokens take, of which as many will be there as were of late."""
        return (self._rest.value or 0.0) + (self._token.value or 0.0) * self._fresh * drafted


class Times:
    """Where the seconds of a round go: drafting, the target's pass, and what is left: the way, the queue.

    A round of γ tokens takes draft(γ) + pass(others + γ + 1) + rest. The target alone takes pass(others + 1) for each
    token and a rest of its own, which is little: the next step needs no message.
    """

    def __init__(self) -> None:
        self._draft = DraftCost()
        self._pass: CostLine | None = None  # where the verifier tells none, what a pass takes is in the rest
        self._rest = Recent()
        self._rest_alone = Recent()
        self._others = Recent()

    @property
    def known(self) -> bool:
        """Whether `round` can be told."""
        return self._draft.known and self._rest.value is not None

    def add(self, round_: Round) -> None:
        """Takes in what a round took."""
        if round_.pass_cost is not None:
            self._pass = round_.pass_cost
        self._others.add(max(0, round_.pass_tokens - round_.drafted - 1))
        if round_.drafting is not None and round_.drafted:
            self._draft.add(round_.drafted, round_.foreseen, round_.drafting)
        if round_.waited is not None:
            explained = self._pass.seconds(round_.pass_tokens) if self._pass is not None else 0.0
            (self._rest if round_.asked else self._rest_alone).add(round_.waited - explained)

    def doubt(self) -> None:
        """What rounds took is not believed any more, but for what drafting takes; the next few tell."""
        self._rest.doubt()

    def round(self, drafted: float) -> float:
        """What a round takes of which so many tokens come, in seconds."""
        drafting = self._draft.seconds(drafted) if drafted else 0.0
        return max(1e-6, drafting + self._pass_of(drafted + 1) + (self._rest.value or 0.0))

    def alone(self) -> float:
        """What a token takes that the target writes alone. Until it has, it is taken for the pass alone."""
        rest = self._rest_alone.value
        if self._pass is None and rest is None:  # nothing tells what a pass takes: as long as a round, at the most
            rest = self._rest.value
        return max(1e-6, self._pass_of(1) + (rest or 0.0))

    def _pass_of(self, tokens: float) -> float:
        return 0.0 if self._pass is None else self._pass.seconds((self._others.value or 0.0) + tokens)


class Experience:
    """What is known for one kind of requests.

    Attributes:
        accepted: the chance of each place to stand, where it was drafted.
        drafted: the chance of each place to be drafted, where it was asked for: a draft may end early.
        pause: tokens that targets write alone before speculation is tried again, where it does not pay.
        silent: those that they have written since it was last tried, or did pay.
        pays: speculation, as far as is known.
        comes_short: whether a proposal has been shorter than it was asked for; until then none of `drafted` counts.
        rounds: how many have been taken in.
    """

    def __init__(self, *, first_pause: int) -> None:
        self.accepted = Chances()
        self.drafted = Chances(prior=1.0)
        self.pause = first_pause
        self.silent = 0
        self.pays = True
        self.comes_short = False
        self.rounds = 0

    def of_one(self) -> "tuple[Chances, Chances]":
        """`accepted` and `drafted` of one sample, which begin with these and teach them."""
        return Chances(self.accepted), Chances(self.drafted)
