"""Texts of 1 to 4 tokens, by every drafter and exact rule, through real services, with the expected text of each.

At temperature 0, and under `coupled`, it is the text of the target alone. The others are drawn anew each time:
their length and ids are checked here, their distribution in `tests/exactness`. `sigmoid` is left out: it is lossy.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from outrider.client import AsyncClient, Drafter, Options
from tests.cluster import Service, wait_until
from tests.exactness import pairs

LONGEST = 4
AT_ONCE, STEADY = 32, 4
"""Texts at once at the most and at the least: all but a few come in waves, so that their number rises and falls."""

DRAFTERS = tuple(drafter for drafter in Drafter if drafter is not Drafter.UNSPECIFIED)
RULES = ("tokenwise", "block", "coupled")
SEEDS = (1, 2, 3)
PROMPTS = tuple(tuple(random.Random(length).choices(range(pairs.END_ID), k=length)) for length in (1, 2, 3, 7, 17, 40))
TIMEOUT_S = 120.0
"""Of one text, failovers included."""

DRAFT_FLAGS = ("--ngram-learn",)
"""Without it `ngram` has nothing to count."""

Ids = tuple[int, ...]
Alone = dict[tuple[Ids, int | None], Ids]
"""The texts of the target alone, by prompt and seed: with one under `coupled`, without one at temperature 0."""


@dataclass(frozen=True, slots=True)
class ShortText:
    """A request. `expected` is None where its text is drawn anew each time."""

    prompt: Ids
    options: Options
    expected: Ids | None

    def is_right(self, written: Ids) -> bool:
        length = self.options["max_new_tokens"]
        whole = len(written) == length and all(0 <= token < pairs.VOCABULARY for token in written)
        return whole if self.expected is None else written == self.expected[:length]


def texts(count: int, alone: Alone, *, seed: int = 0) -> Iterator[ShortText]:
    """Yield `count` requests: drafters in turn, each with all rules, temperatures and lengths; the rest by chance."""
    chance = random.Random(seed)
    kinds: dict[Drafter, list[tuple[str, float, int]]] = {drafter: [] for drafter in DRAFTERS}
    for number in range(count):
        drafter = DRAFTERS[number % len(DRAFTERS)]
        if not kinds[drafter]:
            kinds[drafter] = list(product(RULES, (0.0, 1.0), range(1, LONGEST + 1)))
            chance.shuffle(kinds[drafter])
        rule, temperature, length = kinds[drafter].pop()
        prompt = chance.choice(PROMPTS)
        options = Options(drafter=drafter, rule=rule, temperature=temperature, max_new_tokens=length, ignore_eos=True)
        text_seed = chance.choice(SEEDS) if rule == "coupled" and temperature else None
        if text_seed is not None:
            options["seed"] = text_seed
        if chance.random() < 0.5:  # otherwise `adaptive`
            options["gamma"] = chance.choice((0, 1, 2, 4, 8))
            options["speculation"] = chance.choice(("fixed", "heuristic", "adaptive"))
        is_exact = rule == "coupled" or not temperature
        yield ShortText(prompt, options, alone[prompt, text_seed] if is_exact else None)


async def write_alone(client: AsyncClient) -> Alone:
    """Have the target write every exact text without a draft, one after another."""
    alone: Alone = {}
    for prompt, seed in product(PROMPTS, (None, *SEEDS)):
        options = Options(drafter="none", gamma=0, max_new_tokens=LONGEST, ignore_eos=True)
        sampling = Options(temperature=0.0) if seed is None else Options(temperature=1.0, rule="coupled", seed=seed)
        done = await client.complete(prompt, **(options | sampling))
        alone[prompt, seed] = done.token_ids
    assert all(len(ids) == LONGEST for ids in alone.values())
    assert len(set(alone.values())) > len(alone) / 2, "prompts and seeds make a difference"
    return alone


async def load(client: AsyncClient, requests: Iterable[ShortText]) -> Counter[str]:
    """Write them, `AT_ONCE` at the most, and count the failures."""
    left = iter(requests)
    failures = Counter[str]()

    async def write(text: ShortText) -> None:
        kind = f"{text.options['drafter']}, {text.options['rule']}"
        try:
            done = await client.complete(text.prompt, timeout=TIMEOUT_S, **text.options)
        except Exception as error:
            failures[f"{kind}: {type(error).__name__}: {error}"] += 1
        else:
            if not text.is_right(done.token_ids):
                failures[f"{kind}: wrote {done.token_ids}, expected {text.expected}"] += 1

    async def one_by_one() -> None:
        for text in left:
            await write(text)

    async def in_waves() -> None:
        while wave := list(islice(left, AT_ONCE - STEADY)):
            await asyncio.gather(*map(write, wave))

    await asyncio.gather(in_waves(), *(one_by_one() for _ in range(STEADY)))
    return failures


def write_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target, and a draft that is right half of the time; both cost little beside the work of the services.

    The draft has a mask token, so that the service offers `parallel` too.
    """
    target = pairs.write_target(folder / "target", seed=1)
    return target, pairs.write_parallel_draft(folder / "draft", target, "flattened")


def wait_idle(*services: Service) -> None:
    for service in services:
        wait_until(service.is_idle, 60.0, f"{service.name} is idle")
