"""What serves load: a contender takes requests, many at once, and says when each token of each came.

Stamps are taken where the text is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contenders import Task, WrongLength


class Unavailable(RuntimeError):
    """A contender cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request. Times are seconds since the run began.

    Attributes:
        due: when it was asked for; in the open loop, when it was to be.
        stamps: of each piece that came: when, and how many tokens it held. Tokens of one piece come at once.
        refused: whether it was turned away for want of room; then nothing came.
        rounds: passes of the target over it, where the contender tells.
        proposals: rounds that held a drafted token.
        drafted: tokens proposed in them.
        accepted: tokens of those that stood.
        alpha: mean chance of acceptance over judged positions; None where nothing was drafted.
    """

    due: float
    stamps: tuple[tuple[float, int], ...] = ()
    refused: bool = False
    rounds: int = 0
    proposals: int = 0
    drafted: int = 0
    accepted: int = 0
    alpha: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.stamps)

    @property
    def end(self) -> float:
        """When the last of them came."""
        return self.stamps[-1][0] if self.stamps else self.due


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run; `told` is what the contender itself says of it: KV use, passes, processor time."""

    served: list[Served]
    told: dict[str, float] = field(default_factory=dict)


class LoadContender(ABC):
    """A way to serve many requests at once."""

    @abstractmethod
    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        """Writes all texts, `streams` of them at a time: where one ends, the next begins.

        Raises:
            WrongLength: a text came out shorter or longer than asked for.
            Unavailable: it cannot.
        """

    @abstractmethod
    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        """Writes all texts, each asked for at its time, whatever became of those before.

        Raises:
            WrongLength: a text came out shorter or longer than asked for.
            Unavailable: it cannot.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it runs."""


def check(name: str, tasks: Sequence[Task], outcome: Outcome) -> Outcome:
    """The outcome, where each text that was not refused has the length it was asked for, and none is missing.

    Raises:
        WrongLength: otherwise; a rate of fewer tokens means nothing.
    """
    if len(outcome.served) != len(tasks):
        raise WrongLength(f"{name} served {len(outcome.served)} requests of {len(tasks)}")
    for task, served in zip(tasks, outcome.served, strict=True):
        if not served.refused and served.tokens != task.new_tokens:
            raise WrongLength(f"{name} wrote {served.tokens} tokens of text {task.prompt}, not {task.new_tokens}")
    return outcome
