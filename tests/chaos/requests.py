"""What is asked for in the chaos, what is expected of it, and what came: each text is known before it is disturbed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.client import Options
from tests.cluster import MODELS

SHORTEST, LONGEST = 12, 32
"""Tokens of a text, but for one."""

VERY_LONG = 96
"""Of that one: more verdicts than a client may leave unread, where the target writes it alone."""

PROMPT_CHARS = (8, 60, 140, 500)

LAWS: tuple[Options, ...] = (
    Options(temperature=0.0, rule="tokenwise"),
    Options(temperature=1.0, rule="coupled"),
    Options(temperature=0.0, rule="coupled"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One of a few requests that are made again and again. `length` is the number of its tokens."""

    number: int
    prompt: str
    length: int
    law: Options

    def options(self) -> Options:
        """Return what a client of the draft service says beside the prompt."""
        return Options(max_new_tokens=self.length, ignore_eos=True, seed=self.number) | self.law


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request writes where nobody disturbs it, and nobody else is there."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str


def requests(count: int) -> list[Request]:
    """Return the same ones whenever it is called; the first is the long one."""
    texts = [json.loads(line)["text"] for line in (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chance = random.Random(5)
    return [
        Request(
            number,
            texts[number][: PROMPT_CHARS[number % len(PROMPT_CHARS)]],
            chance.randint(SHORTEST, LONGEST) if number else VERY_LONG,
            LAWS[number % len(LAWS)],
        )
        for number in range(count)
    ]


class Behaviour(StrEnum):
    """What a client does to its stream."""

    PLAIN = "plain"  # reads to the end
    CANCEL = "cancel"  # cancels the call after some tokens
    SLOW = "slow"  # stops reading for a while
    DEADLINE = "deadline"  # has set a deadline that may be too short
    TIME_LIMIT = "time_limit"  # asks for what can be written in a short time
    HALF_CLOSE = "half_close"  # sends no more rounds, in the middle of the text
    CUT = "cut"  # its connection ends without a word of HTTP/2
    VANISH = "vanish"  # its connection says nothing more, and does not end


class Door(StrEnum):
    """Where a stream goes in."""

    DRAFT = "draft"
    FRAIL = "frail"  # a draft service whose own connection to the verifier is cut now and then
    VERIFIER = "verifier"


@dataclass(slots=True)
class Outcome:
    """What came of one stream.

    Attributes:
        status: the name of its gRPC status; CANCELLED where the client left, OK where it read to the end.
        reason: of the error, as the contract names it; empty without one.
        retry_after: seconds, where the error said so.
        whole: whether it was said that the text ends here because it has its full length.
    """

    door: Door
    behaviour: Behaviour
    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    status: str = "OK"
    reason: str = ""
    message: str = ""
    retry_after: float | None = None
    whole: bool = False

    def __str__(self) -> str:
        return (
            f"{self.behaviour} at {self.door}, request {self.request.number}: {self.status} {self.reason} "
            f"after {len(self.token_ids)} of {self.request.length} tokens{': ' if self.message else ''}{self.message}"
        )
