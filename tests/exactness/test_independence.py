"""Invariant 7: what a request writes does not depend on who else is served, on what was served before, or on γ.

γ is compared in `test_first_tokens`, by law. Here the tokens themselves are: a seed, a prompt and a γ give the same
text alone and among fifteen others. Under `coupled` γ is not needed for it, nor the draft: `test_coupled`. Under it,
and at temperature 0, 16 of a crowd of 32 are compared (all of them under `-m slow`), without exception. The same crowd
in too small a pool, where sequences lose their keys and values on the way, is in
`tests/verifier_service/test_preemption.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from outrider.client import AsyncClient, Options
from tests.exactness import mixed_requests
from tests.exactness.worlds import World

REQUESTS = 16
ALONE = 5
LENGTH = 32


def _options(number: int, rule: str) -> Options:
    return Options(
        max_new_tokens=LENGTH,
        ignore_eos=True,
        temperature=1.0,
        top_k=20,
        top_p=0.9,
        seed=1000 + number,
        gamma=4,
        rule=rule,
    )


def _prompt(number: int) -> list[int]:
    return [(7 * number + place) % 21 for place in range(1 + number % 5)]


async def _texts(address: str, rule: str, numbers: range, *, together: bool) -> list[tuple[int, ...]]:
    async with AsyncClient(address) as client:
        asked = [client.complete(_prompt(number), **_options(number, rule)) for number in numbers]
        done = await asyncio.gather(*asked) if together else [await each for each in asked]
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_tokens_are_the_same_alone_and_in_company(rule: str, attentive: World) -> None:
    """At temperature 1 one text of the five may differ: a pass of another width rounds otherwise, and where a uniform
    lies within 1e-7 of a cell's edge the neighbour is drawn (one text in some thousands). Noise or a cache that knew
    its neighbours would change nearly all of them.
    """
    address = attentive.services["uniform"].address
    alone = asyncio.run(_texts(address, rule, range(ALONE), together=False))
    together = asyncio.run(_texts(address, rule, range(REQUESTS), together=True))
    equal = sum(a == b for a, b in zip(alone, together[:ALONE], strict=True))
    print(f"{equal} of {ALONE} texts equal")
    assert all(len(text) == LENGTH for text in together)
    assert len(set(together)) > REQUESTS / 2
    assert equal >= ALONE - 1


@pytest.mark.parametrize("compared", [16, pytest.param(mixed_requests.REQUESTS, marks=pytest.mark.slow)])
def test_tokens_are_the_same_alone_and_among_thirty_one_others(compared: int, draft_address: str) -> None:
    """Greedy and `coupled`, prompts of 1 to 140 tokens, γ from 0 to 7, with and without penalties.

    Neither run finds anything of the other in a cache, so that in company the prompts are read in company too.
    """
    asked = mixed_requests.requests()
    alone = mixed_requests.texts(draft_address, asked[:compared], together=False, salt=f"{compared} alone")
    together = mixed_requests.texts(draft_address, asked, together=True, salt=f"{compared} in company")
    assert len(set(together)) == mixed_requests.REQUESTS
    assert together[:compared] == alone
