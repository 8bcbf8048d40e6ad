"""Invariant 7: the text of a request does not depend on other requests, at the same time or before.

A seed, a prompt and a γ give the same text alone and among others; under `coupled` a seed and a prompt do:
`test_coupled`. `tests/verifier_service/test_kv_cache.py` has the same requests and too small a KV cache, where
sequences are preempted.
"""

import pytest

from outrider.client import Options
from tests.exactness import mixed_requests
from tests.exactness.mixed_requests import Request
from tests.exactness.services import PairServices


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_tokens_are_the_same_alone_and_among_others(rule: str, attentive: PairServices) -> None:
    """At temperature 1 one text of the sixteen may differ: a pass of another width rounds otherwise, and where a
    uniform lies within 1e-7 of a cell's edge the neighbour is drawn (one text in some thousands). Noise or a cache
    that depended on the batch would change nearly all of them.
    """
    options = Options(max_new_tokens=32, ignore_eos=True, temperature=1.0, top_k=20, top_p=0.9, gamma=4, rule=rule)
    requests = [
        Request([(7 * number + i) % 21 for i in range(1 + number % 5)], options | Options(seed=1000 + number))
        for number in range(16)
    ]
    address = attentive.draft("uniform").address
    alone = mixed_requests.texts(address, requests, together=False, salt="alone")
    together = mixed_requests.texts(address, requests, together=True, salt="together")
    assert len(set(together)) > len(requests) / 2
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= len(alone) - 1


@pytest.mark.parametrize("compared", [12, pytest.param(mixed_requests.REQUESTS, marks=pytest.mark.slow)])
def test_tokens_are_the_same_alone_and_among_thirty_one_others(compared: int, draft_address: str) -> None:
    """Greedy and `coupled`, prompts of 1 to 140 tokens, γ from 0 to 7, with and without penalties.

    The two runs share no cached prefix, so that prompts are prefilled together too.
    """
    requests = mixed_requests.requests()
    alone = mixed_requests.texts(draft_address, requests[:compared], together=False, salt=f"{compared} alone")
    together = mixed_requests.texts(draft_address, requests, together=True, salt=f"{compared} together")
    assert len(set(together)) == mixed_requests.REQUESTS
    assert together[:compared] == alone
