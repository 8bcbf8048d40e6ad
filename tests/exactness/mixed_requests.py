"""Thirty-two different requests, and the texts of a service for them one by one or all at once."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.client import AsyncClient, Options
from tests.cluster import MODELS

REQUESTS = 32
PROMPT_CHARS = (3, 24, 90, 260)
"""The last is some 120 tokens: among others of its kind it takes several steps to prefill."""

KINDS: tuple[Options, ...] = (
    Options(temperature=0.0),
    Options(temperature=1.0),
    Options(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.2),
    Options(temperature=1.0, top_p=0.9),
    Options(temperature=0.0, rule="tokenwise"),
    Options(temperature=1.0, repetition_penalty=1.2, banned_token_ids=[5, 17]),
)
"""Without a rule they are `coupled`: they have a seed."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str | list[int]
    options: Options


def requests() -> list[Request]:
    """Return the same requests at each call; a quarter of the prompts are random tokens."""
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chance = random.Random(7)
    made = []
    for number in range(REQUESTS):
        chars = PROMPT_CHARS[number % len(PROMPT_CHARS)]
        prompt: str | list[int] = json.loads(lines[number])["text"][:chars]
        if number % 4 == 1:
            prompt = [chance.randrange(1, 1000) for _ in range(chars)]
        length, seed = chance.randint(16, 40), chance.getrandbits(64)
        options = Options(max_new_tokens=length, ignore_eos=True, seed=seed, gamma=number % 8)
        made.append(Request(prompt, options | KINDS[number % len(KINDS)]))
    return made


def texts(address: str, requests: Sequence[Request], *, together: bool, salt: str) -> list[tuple[int, ...]]:
    """Return the tokens of each request, one after another or all at once. Another salt shares no cached prefix."""

    async def write() -> list[tuple[int, ...]]:
        async with AsyncClient(address, timeout=90.0) as client:
            calls = [client.complete(each.prompt, **(each.options | Options(cache_salt=salt))) for each in requests]
            done = await asyncio.gather(*calls) if together else [await call for call in calls]
        return [completion.token_ids for completion in done]

    return asyncio.run(write())
