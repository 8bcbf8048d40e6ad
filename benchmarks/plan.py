"""What is written: which prompts, how many tokens, how often, and with which seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import Task

TEMPERATURES = (0.0, 1.0)
CALIBRATION_PROMPTS = 6
_CALIBRATION_SEED = 1_000_000
_WARM_UP_TOKENS = 16

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is written.

    Attributes:
        prompts: how many prompts are measured.
        new_tokens: tokens of each text.
        repetitions: how often each text is written by each contender, with other seeds.
        calibration_tokens: tokens of each text that settings are tuned on; 0: they are not tuned.
        factor: how many times as deep the deepened target is; 1: there is none.
    """

    prompts: int
    new_tokens: int
    repetitions: int
    calibration_tokens: int
    factor: int

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


FULL = Plan(prompts=12, new_tokens=96, repetitions=3, calibration_tokens=48, factor=12)
QUICK = Plan(prompts=2, new_tokens=16, repetitions=1, calibration_tokens=0, factor=1)


@dataclass(frozen=True, slots=True)
class Part:
    """One text that every contender writes, one after another."""

    repetition: int
    turn: int  # which contender begins
    task: Task


class Texts:
    """The prompts of a plan, as tokens.

    Raises:
        ValueError: there is no prompt.
    """

    def __init__(self, prompts: Sequence[str], plan: Plan, encode: Encode) -> None:
        if not prompts:
            raise ValueError("there is no prompt to write after")
        measured = spread(prompts, plan.prompts)
        others = [text for text in prompts if text not in measured] or measured
        self._plan = plan
        self._measured = [tuple(encode(text)) for text in measured]
        self._calibration = [tuple(encode(text)) for text in spread(others, CALIBRATION_PROMPTS)]

    def parts(self) -> Iterator[Part]:
        """All that is measured, in order; temperatures alternate, so that they too meet the same machine."""
        turn = 0
        for repetition in range(self._plan.repetitions):
            for number, prompt in enumerate(self._measured):
                for temperature in TEMPERATURES:
                    seed = 1 + repetition * len(self._measured) + number
                    yield Part(repetition, turn, Task(number, prompt, self._plan.new_tokens, temperature, seed))
                    turn += 1

    def calibration(self) -> dict[float, list[Task]]:
        """What settings are tuned on: other prompts than those measured, where there are enough."""
        return {
            temperature: [
                Task(number, prompt, self._plan.calibration_tokens, temperature, _CALIBRATION_SEED + number)
                for number, prompt in enumerate(self._calibration)
            ]
            for temperature in TEMPERATURES
        }

    def warm_up(self, temperature: float) -> Task:
        """A short text that is not measured."""
        return Task(0, self._calibration[0], min(_WARM_UP_TOKENS, self._plan.new_tokens), temperature, 0)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file with one JSON object a line, each with its `text`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no such object; names it.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ValueError(f"line {number} of {path.name} has no text")
        prompts.append(entry["text"])
    return prompts


def spread(items: Sequence[str], count: int) -> list[str]:
    """`count` of the items, or all if there are fewer, at equal distances."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]
