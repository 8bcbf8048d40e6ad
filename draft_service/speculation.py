"""How long to speculate: a policy says how many tokens the next proposal holds, and is told what became of each.

Invariant 4. A policy knows rounds that have been judged: their lengths, how many tokens were accepted and with what
chance, and how long they took. It is asked before anything of the next round is drafted, and what it says is drafted
and sent. So it cannot look at a token that it could discard, nor at a draw to come: those are keyed by the length of a
text that the round before has only just brought about (invariant 2). That leaves the law of the text alone under every
exact rule, and under `coupled` and greedy the text itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from outrider.service.cost_model import CostLine


class PolicyKind(StrEnum):
    """The policies there are."""

    FIXED = "fixed"
    HEURISTIC = "heuristic"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Round:
    """A round that has been judged.

    Attributes:
        asked: γ, as the policy chose it; 0 where the target wrote alone, which makes a round of each token.
        drafted: tokens that came; fewer than asked where the draft was unsure, or knew of no more.
        judged: those that were looked at: the accepted ones and the first rejected one.
        accepted: those that stood.
        chances: that of each judged token to be accepted, where the rule tells; empty where it does not.
        drafting: seconds from the verdict before until the proposal left; None where something else fell into them.
        waited: seconds until the verdict was there: from the proposal, or within a `Decode` from the verdict before.
            None where something else than a round fell into them.
        pass_tokens: tokens in the target's pass, of all its sequences.
        pass_cost: what the target's passes cost; None where it does not tell.
        foreseen: of the drafted tokens, those that were there already when they were asked for.
    """

    asked: int
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    chances: Sequence[float] = ()
    drafting: float | None = None
    waited: float | None = None
    pass_tokens: int = 1
    pass_cost: CostLine | None = None
    foreseen: int = 0


class Policy(ABC):
    """The length of one sample's proposals, round by round.

    Attributes:
        pause: after `next` said 0 of its own accord: how many tokens the target should write before it is asked again.
    """

    pause: int = 0

    @abstractmethod
    def next(self, most: int) -> int:
        """Return the length of the next proposal, in 0..most; 0 lets the target write alone.

        `most` is what can be drafted, judged and written now. Called once a round, before anything is drafted.
        """

    @abstractmethod
    def observe(self, round_: Round) -> None:
        """Takes in what became of the last one."""


class Fixed(Policy):
    """γ as asked for, in every round."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def next(self, most: int) -> int:
        return max(0, min(self._gamma, most))

    def observe(self, round_: Round) -> None:
        """Nothing follows from it."""


class Heuristic(Policy):
    """Two more where all that was drafted was accepted, one less otherwise [W 4.1]; at least 1."""

    def __init__(self, gamma: int, *, ceiling: int) -> None:
        """`gamma` is that of the first proposal."""
        self._ceiling = ceiling
        self._gamma = max(1, min(gamma, ceiling))

    def next(self, most: int) -> int:
        return max(0, min(self._gamma, most))

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            return
        step = 2 if round_.accepted == round_.drafted else -1
        self._gamma = max(1, min(self._gamma + step, self._ceiling))
