"""Invariant 7: what a request writes does not depend on who else is served, or on what was served before.

A seed, a prompt and a γ give the same text alone and among others. Under `coupled` γ is not needed for it, nor the
draft: `test_coupled`. The same crowd in too small a pool, where sequences lose their keys and values on the way, is in
`tests/verifier_service/test_kv_cache.py`.
"""

from __future__ import annotations

import pytest

from outrider.client import Options
from tests.exactness import mixed_requests
from tests.exactness.mixed_requests import Asked
from tests.exactness.worlds import World


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_tokens_are_the_same_alone_and_in_company(rule: str, attentive: World) -> None:
    """At temperature 1 one text of the five may differ: a pass of another width rounds otherwise, and where a uniform
    lies within 1e-7 of a cell's edge the neighbour is drawn (one text in some thousands). Noise or a cache that knew
    its neighbours would change nearly all of them.
    """
    options = Options(max_new_tokens=32, ignore_eos=True, temperature=1.0, top_k=20, top_p=0.9, gamma=4, rule=rule)
    asked = [
        Asked([(7 * number + place) % 21 for place in range(1 + number % 5)], options | Options(seed=1000 + number))
        for number in range(16)
    ]
    address = attentive.service("uniform").address
    alone = mixed_requests.texts(address, asked[:5], together=False, salt="alone")
    together = mixed_requests.texts(address, asked, together=True, salt="in company")
    assert len(set(together)) > len(asked) / 2
    assert sum(a == b for a, b in zip(alone, together, strict=False)) >= len(alone) - 1


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
