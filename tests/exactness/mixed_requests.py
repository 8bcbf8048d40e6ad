"""Thirty-two requests that have little in common, and what a service writes for them one by one or all at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.client import AsyncClient, Options
from tests.cluster import MODELS

REQUESTS = 32
PROMPT_CHARS = (3, 24, 90, 260)
"""The last is some 120 tokens: with others of its kind it takes several passes to read."""

KINDS: tuple[Options, ...] = (
    Options(temperature=0.0),
    Options(temperature=1.0),
    Options(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2),
    Options(temperature=1.0, top_p=0.9),
    Options(temperature=0.0, rule="tokenwise"),
    Options(temperature=1.0, repetition_penalty=1.2, banned_token_ids=[5, 17]),
)
"""Those that name no rule are judged by `coupled`: they have a seed."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    prompt: str | list[int]
    options: Options


def requests() -> list[Asked]:
    """Return the same ones whenever it is called; a quarter of the prompts is no text at all."""
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chance = random.Random(7)
    asked = []
    for number in range(REQUESTS):
        chars = PROMPT_CHARS[number % len(PROMPT_CHARS)]
        prompt: str | list[int] = json.loads(lines[number])["text"][:chars]
        if number % 4 == 1:
            prompt = [chance.randrange(1, 1000) for _ in range(chars)]
        length, seed = chance.randint(16, 40), chance.getrandbits(64)
        options = Options(max_new_tokens=length, ignore_eos=True, seed=seed, gamma=number % 8)
        asked.append(Asked(prompt, options | KINDS[number % len(KINDS)]))
    return asked


def texts(address: str, asked: Sequence[Asked], *, together: bool, salt: str) -> list[Ids]:
    """Return what each writes, alone one after another, or all at once. Nothing of another salt is in any cache."""

    async def write() -> list[Ids]:
        async with AsyncClient(address, timeout=90.0) as client:
            calls = [client.complete(each.prompt, **(each.options | Options(cache_salt=salt))) for each in asked]
            done = await asyncio.gather(*calls) if together else [await call for call in calls]
        return [completion.token_ids for completion in done]

    return asyncio.run(write())
