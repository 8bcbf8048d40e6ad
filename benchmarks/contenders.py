"""What is compared: who writes texts, one after another or many at once, and what one text or request took.

A text of another length than asked for is no result, so each contender checks it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Json

PHASES = ("draft", "wire", "queue", "forward", "verify", "other")
"""Where the seconds of a text go. They add up to the wall clock; what does not occur is 0."""


class WrongLength(RuntimeError):
    """A contender wrote another number of tokens, or another text, than it was to: its speed means nothing."""


class Unavailable(RuntimeError):
    """A contender cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One text to write: exactly `new_tokens` tokens, whatever they say."""

    prompt: int
    token_ids: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int


class Writer(ABC):
    """Writes one text after another."""

    @abstractmethod
    def write(self, task: Task) -> Json:
        """Writes one text; returns what it took, as `text_run` has it."""

    @abstractmethod
    def settings(self) -> Json:
        """How it runs: number format, threads, tokens per proposal."""


def text_run(
    name: str,
    task: Task,
    token_ids: Sequence[int],
    phases: dict[str, float],
    *,
    seconds: float,
    rounds: int,
    drafted: int = 0,
    accepted: int = 0,
    alpha: float | None = None,
) -> Json:
    """What one text took, by the clock of the caller.

    Raises:
        WrongLength: it came out shorter or longer than asked for.
    """
    if len(token_ids) != task.new_tokens:
        raise WrongLength(f"{name} wrote {len(token_ids)} tokens of prompt {task.prompt}, not {task.new_tokens}")
    known = {**dict.fromkeys(PHASES, 0.0), **phases}
    return {
        "seconds": seconds,
        "tokens": len(token_ids),
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "alpha": alpha,
        "digest": hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16],
        "phases": known | {"other": seconds - sum(known.values())},
    }


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request among many. Times are seconds since the run began.

    Attributes:
        due: when it was asked for; in the open loop, when it was to be.
        stamps: when each piece came, and how many tokens it held. Tokens of one piece come at once.
        refused: whether it was turned away for want of room; then nothing came.
        rounds: passes of the target over it, where the contender tells.
        proposals: rounds that held a drafted token.
        drafted: tokens proposed in them.
        accepted: tokens of those that were accepted.
        alpha: mean chance of acceptance over the positions that were tested; None where nothing was drafted.
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


Outcome = tuple[list[Served], dict[str, float]]
"""All requests of a run, and what the contender itself tells of it: KV use, passes, processor time."""


class Server(ABC):
    """Serves many requests at once."""

    @abstractmethod
    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        """Writes all texts, `streams` of them at a time: where one ends, the next begins.

        Raises:
            WrongLength: a text came out shorter or longer than asked for.
            Unavailable: it cannot.
        """

    @abstractmethod
    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        """Writes all texts, each asked for at its time, whatever became of those before. Raises as `closed` does."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it runs."""


def checked(name: str, tasks: Sequence[Task], served: list[Served]) -> list[Served]:
    """The same, where none is missing and each that was not refused has its length; else raises `WrongLength`."""
    if len(served) != len(tasks):
        raise WrongLength(f"{name} served {len(served)} requests of {len(tasks)}")
    for task, each in zip(tasks, served, strict=True):
        if not each.refused and each.tokens != task.new_tokens:
            raise WrongLength(f"{name} wrote {each.tokens} tokens of text {task.prompt}, not {task.new_tokens}")
    return served
