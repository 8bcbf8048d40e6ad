"""What is compared: a contender writes one text and says what it took. The clock runs where the text is asked for."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

PHASES = ("draft", "wire", "queue", "forward", "verify", "other")
"""Where the time of a run goes. They add up to the wall clock; what does not occur is 0."""


class WrongLength(RuntimeError):
    """A contender wrote another number of tokens than it was asked for: its speed means nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """One text to write: exactly `new_tokens` tokens, whatever they say."""

    prompt: int
    token_ids: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one text took.

    Attributes:
        seconds: wall clock at the caller.
        tokens: written.
        rounds: passes of the target.
        drafted: tokens proposed in all of them.
        accepted: tokens of those that stood.
        alpha: mean chance of acceptance over judged positions; None where the contender does not tell.
        phases: seconds by `PHASES`.
        digest: of the tokens, to tell equal texts.
    """

    seconds: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    alpha: float | None
    digest: str
    phases: dict[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """The run that `document` was made of, or a larger document that holds its fields."""
        return cls(**{name: document[name] for name in cls.__slots__})


class Contender(ABC):
    """A way to write texts."""

    @abstractmethod
    def write(self, task: Task) -> Run:
        """Writes one text.

        Raises:
            WrongLength: it came out shorter or longer than asked for.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it runs: number format, threads, tokens per proposal."""


def digest(token_ids: Sequence[int]) -> str:
    """A short name of a text."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def check_length(name: str, written: int, task: Task) -> None:
    """Raises `WrongLength` where a text has not the length it was asked for."""
    if written != task.new_tokens:
        raise WrongLength(f"{name} wrote {written} tokens of prompt {task.prompt}, not {task.new_tokens}")
