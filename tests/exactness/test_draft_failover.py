"""Draft services that die in the middle of texts: no token is lost, repeated or drawn otherwise.

Real services; those that die end a call after a round (`conditions`), so that each text moves from one to the other.
Stop strings hold back the text of tokens that begin one, and a draft service may die just then. The client's tokens
must depend on the time of a death alone, not on the held text: else a resume would draw held tokens again, and tokens
that are not held would be too frequent.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.client import AsyncClient, Completion, Options
from outrider.evaluation import chisquare
from tests.cluster import Service, wait_healthy
from tests.exactness import pairs
from tests.exactness.distributions import PARAMS, joint_distribution
from tests.exactness.services import PairServices

PROMPT = (15, 12, 14)
HELD = (1, 3, 5, 7, 9, 10, 11, 13, 15, 16, 17, 19, 20, 21)
"""Tokens that begin a stop string, each a letter; the rest of the string is no token. They have half of the mass."""
STOPS = [pairs.LETTERS[token] + "#" for token in HELD]
CALLS = 32

LENGTH = 24
KINDS = [(1.0, "coupled", 4), (0.0, "tokenwise", 3), (1.0, "tokenwise", 3), (1.0, "block", 4), (1.0, "coupled", 0)]
REQUESTS = [
    Options(temperature=temperature, rule=rule, gamma=gamma, seed=seed, max_new_tokens=LENGTH, ignore_eos=True)
    for temperature, rule, gamma in KINDS
    for seed in range(3)
]


def complete(services: Sequence[Service], requests: list[Options]) -> list[Completion]:
    async def run() -> list[Completion]:
        gate = asyncio.Semaphore(CALLS)
        async with AsyncClient([service.address for service in services], timeout=120) as client:

            async def text(options: Options) -> Completion:
                async with gate:
                    return await client.complete(PROMPT, **options)

            return await asyncio.gather(*map(text, requests))

    wait_healthy(*services)
    return asyncio.run(run())


def test_tokens_are_the_same_with_and_without_deaths(attentive: PairServices) -> None:
    """Under every exact rule, with a death after each round: both services draft alike, and γ is fixed. A third of the
    texts report log-probabilities, and another third ends at a stop string.
    """
    fault = "dies_after_every_round"
    mortal = [attentive.start_draft("uniform", "--no-outcome-cache", fault) for _ in range(2)]
    alive = [attentive.draft("uniform")]
    requests = [
        options | [Options(stop=STOPS), Options(stop=STOPS, logprobs=1), Options(stop=[*STOPS, free.text[9:11]])][i % 3]
        for i, (options, free) in enumerate(zip(REQUESTS, complete(alive, REQUESTS), strict=True))
    ]
    broken = complete(mortal, requests)
    for options, found, wanted in zip(requests, broken, complete(alive, requests), strict=True):
        assert (found.text, found.token_ids, found.finish_reason) == (
            wanted.text,
            wanted.token_ids,
            wanted.finish_reason,
        )
        assert found.samples[0].stop == wanted.samples[0].stop
        assert found.usage.completion_tokens == wanted.usage.completion_tokens == len(found.token_ids)
        assert [each.token.token_id for each in found.logprobs] == [each.token.token_id for each in wanted.logprobs]
        # The first token of a `Decode` is a round of its own; all others may be one.
        gamma, tokens = options["gamma"], len(found.token_ids)
        assert found.samples[0].num_resumes >= (tokens / 5 - 1 if gamma else min(1, tokens - 1))
    assert [text.finish_reason.value for text in broken].count("stop_string") == len(KINDS)
    for service in mortal:
        service.end()


def test_a_resumed_text_keeps_its_tokens_per_pass(attentive: PairServices) -> None:
    """Where draws decide, a seed's text depends on them, and the services that a text moves between differ in them."""
    fault = "dies_after_every_round"
    mortal = [attentive.start_draft("parallel", f"--tokens-per-pass {s}", fault) for s in (2, 3)]
    requests = [each | Options(gamma=5) for each in REQUESTS if each["rule"] != "coupled" and each["temperature"]]
    broken = complete(mortal, requests)
    named = [
        each | Options(tokens_per_pass=text.started.tokens_per_pass)
        for each, text in zip(requests, broken, strict=True)
    ]
    assert {each["tokens_per_pass"] for each in named} <= {2, 3}
    for found, wanted in zip(broken, complete([attentive.draft("parallel")], named), strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.samples[0].num_resumes >= 2
    for service in mortal:
        service.end()


@pytest.mark.slow
def test_the_distribution_is_the_targets_after_deaths_with_held_text(attentive: PairServices) -> None:
    """By χ², with services of different drafts: the target usually accepts one's drafts, and rejects the other's. Half
    of the texts by each rule, three deaths each.

    Power (`chisquare` has the derivation): 1,000 texts in eight classes, by which of three tokens are held, detect a
    total variation of 0.12 at a level of 0.01 % with 95 %. A service that held back tokens with their text has 0.15.
    """
    services = [attentive.start_draft(kind, fault="dies_thrice") for kind in ("flattened", "uniform")]
    common = Options(temperature=PARAMS.temperature, top_k=PARAMS.top_k, top_p=PARAMS.top_p, gamma=1)
    common |= Options(max_new_tokens=5, ignore_eos=True, stop=STOPS)
    rules = ("tokenwise", "block")
    texts = complete(services, [common | Options(rule=rules[seed % 2], seed=seed) for seed in range(1000)])
    held = np.isin(np.arange(pairs.VOCABULARY), HELD)
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
    for service in services:
        service.end()
