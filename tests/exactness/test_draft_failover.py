"""Draft services that die under their texts after a round: no token is lost or repeated, and the law is the target's.

Real services; those that die end a call as soon as they have told of a round (`faults`), so that each text goes from
one to the other in the middle. Stop strings hold back the text of tokens that begin one, and a draft service may die
just then. What was told depends on the time of a death alone, not on what was held; else tokens that are not held would
be drawn too often: in the place of one that is, another would be drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from outrider.client import AsyncClient, Completion, Options
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, laws, pairs, sampling
from tests.exactness.chisquare import Array, Fit
from tests.exactness.worlds import FILTERS, World

PROMPT = (15, 12, 14)
HELD = frozenset({1, 3, 5, 7, 9, 10, 11, 13, 15, 16, 17, 19, 20, 21})
"""Tokens, a letter each, that may begin a stop string, which never goes on: what follows is no token's text. About half
of the mass is theirs.
"""
STOPS = [pairs.LETTERS[token] + "#" for token in sorted(HELD)]
SIDE_BY_SIDE = 32

LEVEL, POWER = 0.0001, 0.95


def _texts(addresses: list[str], requests: list[Options]) -> list[Completion]:
    async def run() -> list[Completion]:
        gate = asyncio.Semaphore(SIDE_BY_SIDE)
        async with AsyncClient(addresses, timeout=120) as client:

            async def one(options: Options) -> Completion:
                async with gate:
                    return await client.complete(PROMPT, **options)

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------- token for token


@pytest.fixture(scope="module")
def mortal(cluster: Cluster, attentive: World) -> Iterator[list[Service]]:
    """Two draft services of one kind that die after every round."""
    services = [
        cluster.draft(
            attentive.verifier,
            model=attentive.drafts["uniform"],
            fault="dies_after_every_round",
            flags=(*sampling.DRAFT_FLAGS, "--no-outcome-cache"),
        )
        for _ in range(2)
    ]
    wait_healthy(*services)
    yield services
    for service in services:
        service.end()


LENGTH = 24
LAWS = [(1.0, "coupled", 4), (0.0, "tokenwise", 3), (1.0, "tokenwise", 3), (1.0, "block", 4), (1.0, "coupled", 0)]
REQUESTS = [
    Options(temperature=temperature, rule=rule, gamma=gamma, seed=seed, max_new_tokens=LENGTH, ignore_eos=True)
    for temperature, rule, gamma in LAWS
    for seed in range(3)
]


def test_tokens_are_those_of_texts_that_nothing_befell(mortal: list[Service], attentive: World) -> None:
    """Of every exact rule, with a death after each round. Under `tokenwise` and `block` as well: both services draft
    alike, and γ is fixed. A third of the texts report log-probabilities, and another one ends at a stop string.
    """
    alive = [attentive.services["uniform"].address]
    requests = [
        options | [Options(stop=STOPS), Options(stop=STOPS, logprobs=1), Options(stop=[*STOPS, free.text[9:11]])][i % 3]
        for i, (options, free) in enumerate(zip(REQUESTS, _texts(alive, REQUESTS), strict=True))
    ]
    broken = _texts([service.address for service in mortal], requests)
    for one, other in zip(broken, _texts(alive, requests), strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert one.samples[0].stop == other.samples[0].stop
        assert one.usage.completion_tokens == other.usage.completion_tokens == len(one.token_ids)
        assert [entry.token.token_id for entry in one.logprobs] == [entry.token.token_id for entry in other.logprobs]
        assert one.samples[0].num_resumes >= len(one.token_ids) / 5 - 1
    assert [one.finish_reason.value for one in broken].count("stop_string") == len(LAWS)


# --------------------------------------------------------------------------------------------------------- the law


@pytest.fixture(scope="module")
def unlike(cluster: Cluster, attentive: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two draft services, each of which dies three times under each text. What one drafts is accepted as a rule, and
    what the other does is not: where a round is drawn anew other numbers decide.
    """
    good = pairs.write_draft(tmp_path_factory.mktemp("flattened"), attentive.target, "flattened")
    services = [
        cluster.draft(attentive.verifier, model=draft, fault="dies_thrice", flags=sampling.DRAFT_FLAGS)
        for draft in (good, attentive.drafts["uniform"])
    ]
    wait_healthy(*services)
    yield services
    for service in services:
        service.end()


def _by_held(law: Array, tokens: Array) -> Fit:
    """Which of the first three tokens, `[N, 3]`, are among those that are held: eight classes of all there are."""
    held = np.isin(np.arange(pairs.VOCABULARY), sorted(HELD))
    first, second, third = np.meshgrid(held, held, held, indexing="ij")
    classes = 4 * first + 2 * second + third
    expected = np.bincount(classes.ravel(), law.ravel(), minlength=8)
    return chisquare.goodness_of_fit(np.bincount(classes[tuple(tokens.T)], minlength=8), expected)


@pytest.mark.slow
def test_the_law_is_the_targets_though_text_was_held(unlike: list[Service], attentive: World) -> None:
    """By χ², where the next draft service draws otherwise, half of the texts by each rule.

    Power (`chisquare` has the derivation): 1,000 texts over eight classes, 7 degrees of freedom, at a level of 0.01 %,
    notice a total variation of 0.12 with 95 %; along these classes less: where tokens are told together with their text
    it is 0.15, and χ² about 110, where 30 is enough.
    """
    requests = [
        Options(
            temperature=FILTERS.temperature,
            top_k=FILTERS.top_k,
            top_p=FILTERS.top_p,
            rule=("tokenwise", "block")[seed % 2],
            gamma=1,
            seed=seed,  # of one seed they would share their draws
            max_new_tokens=5,
            ignore_eos=True,
            stop=STOPS,
        )
        for seed in range(1000)
    ]
    texts = _texts([service.address for service in unlike], requests)
    tokens = np.array([text.token_ids[:3] for text in texts])
    deaths = np.mean([text.samples[0].num_resumes for text in texts])
    fit = _by_held(laws.joint_law(laws.load(attentive.target), PROMPT, 3, FILTERS), tokens)
    print(f"{deaths:.2f} deaths a text; {fit}")
    assert deaths > 1.5
    assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=POWER) <= 0.12
    assert fit.p_value > LEVEL
