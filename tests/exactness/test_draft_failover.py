"""Draft services that die under their texts after a round: no token is lost, repeated or drawn otherwise.

Real services; those that die end a call as soon as they have told of a round (`conditions`), so that each text goes
from one to the other in the middle. Stop strings hold back the text of tokens that begin one, and a draft service may
die just then. What was told depends on the time of a death alone, not on what was held; else tokens that are not held
would be drawn too often: in the place of one that is, another would be drawn.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from outrider.client import AsyncClient, Completion, Options
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, pairs, sampling
from tests.exactness.worlds import FILTERS, World, joint_distribution

PROMPT = (15, 12, 14)
HELD = frozenset({1, 3, 5, 7, 9, 10, 11, 13, 15, 16, 17, 19, 20, 21})
"""Tokens, a letter each, that may begin a stop string, which never goes on: what follows is no token's text. About half
of the mass is theirs.
"""
STOPS = [pairs.LETTERS[token] + "#" for token in sorted(HELD)]
SIDE_BY_SIDE = 32


def _texts(services: list[Service], requests: list[Options]) -> list[Completion]:
    async def run() -> list[Completion]:
        gate = asyncio.Semaphore(SIDE_BY_SIDE)
        async with AsyncClient([service.address for service in services], timeout=120) as client:

            async def one(options: Options) -> Completion:
                async with gate:
                    return await client.complete(PROMPT, **options)

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())


LENGTH = 24
KINDS = [(1.0, "coupled", 4), (0.0, "tokenwise", 3), (1.0, "tokenwise", 3), (1.0, "block", 4), (1.0, "coupled", 0)]
REQUESTS = [
    Options(temperature=temperature, rule=rule, gamma=gamma, seed=seed, max_new_tokens=LENGTH, ignore_eos=True)
    for temperature, rule, gamma in KINDS
    for seed in range(3)
]


def test_tokens_are_those_of_texts_that_nothing_befell(cluster: Cluster, attentive: World) -> None:
    """Of every exact rule, with a death after each round. Under `tokenwise` and `block` as well: both services draft
    alike, and γ is fixed. A third of the texts report log-probabilities, and another one ends at a stop string.
    """
    flags = (*sampling.DRAFT_FLAGS, "--no-outcome-cache")
    model, fault = attentive.drafts["uniform"], "dies_after_every_round"
    mortal = [cluster.draft(attentive.verifier, model=model, fault=fault, flags=flags) for _ in range(2)]
    wait_healthy(*mortal)
    alive = [attentive.service("uniform")]
    requests = [
        options | [Options(stop=STOPS), Options(stop=STOPS, logprobs=1), Options(stop=[*STOPS, free.text[9:11]])][i % 3]
        for i, (options, free) in enumerate(zip(REQUESTS, _texts(alive, REQUESTS), strict=True))
    ]
    broken = _texts(mortal, requests)
    for one, other in zip(broken, _texts(alive, requests), strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert one.samples[0].stop == other.samples[0].stop
        assert one.usage.completion_tokens == other.usage.completion_tokens == len(one.token_ids)
        assert [entry.token.token_id for entry in one.logprobs] == [entry.token.token_id for entry in other.logprobs]
        assert one.samples[0].num_resumes >= len(one.token_ids) / 5 - 1
    assert [one.finish_reason.value for one in broken].count("stop_string") == len(KINDS)
    for service in mortal:
        service.end()


@pytest.mark.slow
def test_the_distribution_is_the_targets_though_text_was_held(
    cluster: Cluster, attentive: World, tmp_path: Path
) -> None:
    """By χ², where the next draft service draws otherwise: what one drafts is accepted as a rule, and what the other
    does is not. Half of the texts by each rule, three deaths each.

    Power (`chisquare` has the derivation): 1,000 texts over which of three tokens are held, eight classes, at a level
    of 0.01 %, notice a total variation of 0.12 with 95 %. Where tokens are told together with their text it is 0.15.
    """
    good = pairs.write_draft(tmp_path / "flattened", attentive.target, "flattened")
    unlike = [
        cluster.draft(attentive.verifier, model=draft, fault="dies_thrice", flags=sampling.DRAFT_FLAGS)
        for draft in (good, attentive.drafts["uniform"])
    ]
    wait_healthy(*unlike)
    common = Options(temperature=FILTERS.temperature, top_k=FILTERS.top_k, top_p=FILTERS.top_p, gamma=1)
    common |= Options(max_new_tokens=5, ignore_eos=True, stop=STOPS)
    rules = ("tokenwise", "block")
    texts = _texts(unlike, [common | Options(rule=rules[seed % 2], seed=seed) for seed in range(1000)])
    held = np.isin(np.arange(pairs.VOCABULARY), sorted(HELD))
    classes = np.tensordot([4, 2, 1], np.meshgrid(held, held, held, indexing="ij"), 1)
    tokens = np.array([text.token_ids[:3] for text in texts])
    joint = joint_distribution(attentive.target, PROMPT)
    expected = np.bincount(classes.ravel(), joint.ravel(), minlength=8)
    fit = chisquare.goodness_of_fit(np.bincount(classes[tuple(tokens.T)], minlength=8), expected)
    deaths = np.mean([text.samples[0].num_resumes for text in texts])
    print(f"{deaths:.2f} deaths a text; {fit}")
    assert deaths > 1.5
    assert chisquare.detectable(fit.df, fit.n, level=1e-4, power=0.95) <= 0.12
    assert fit.p_value > 1e-4
    for service in unlike:
        service.end()
