"""The outcome cache through both services: it changes no law, and under `coupled` and at temperature 0 no token.

The draft service drafts for four outcomes whatever the time (`eager_outcome_cache`), so that half of all proposals come
from the cache, with a target as small as this one. It is the Markov one: each of the 1,600 tokens of 64 texts is a
sample of one table, and a total variation of 0.09 is noticed at a level of 1 % with a power of 95 % (`chisquare`); of
16,384 (`-m slow`) one of 0.03. That branches which tell other laws than they drew from (invariant 1) would be noticed
is shown by a mutant, under `-m slow` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.client import Client, Completion, Options
from tests.cluster import Cluster, Service
from tests.exactness import chisquare
from tests.exactness.laws import Filters
from tests.exactness.worlds import Chain, World

PROMPT = (14,)
GAMMA = 2
PLAIN = Filters(temperature=1.0, top_k=6)
LENGTH = 42
NOTICED_BY = 52  # tokens of a text, where a fault is to be seen
AT_ONCE = 32
TEXTS = 64
LEVEL, POWER = 0.01, 0.95
REFUTED = 1e-9


@pytest.fixture(scope="module")
def eager(cluster: Cluster, markov: World, sharpened: Path) -> Iterator[Service]:
    with markov.with_fault(cluster, sharpened, "draft_service", "eager_outcome_cache") as service:
        yield service


def _write(service: Service, **options: object) -> Completion:
    asked = Options(max_new_tokens=LENGTH, ignore_eos=True, gamma=GAMMA, top_k=PLAIN.top_k)
    asked.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **asked)


def _many(service: Service, rule: str, length: int) -> tuple[np.ndarray, float]:
    """Texts, and the share of their proposals that came from the cache."""
    done = [
        _write(service, n=AT_ONCE, seed=31 + request, rule=rule, max_new_tokens=length).samples
        for request in range(TEXTS // AT_ONCE)
    ]
    samples = [sample for samples in done for sample in samples]
    hits = sum(sample.statistics.num_outcome_cache_hits for sample in samples)
    return np.array([sample.token_ids for sample in samples]), hits / sum(
        sample.statistics.num_drafts for sample in samples
    )


@pytest.mark.parametrize(("length", "distance"), [(25, 0.092), pytest.param(256, 0.03, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_the_law_of_each_next_token_is_the_targets(
    rule: str, length: int, distance: float, eager: Service, markov: World
) -> None:
    tokens, share = _many(eager, rule, length)
    outcomes, classes = Chain.of(markov.target, PLAIN).fits(PROMPT, tokens)
    print(f"{share:.0%} of the proposals came from the cache")
    assert share > 0.35
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
def test_laws_that_are_not_the_ones_drawn_from_are_noticed(cluster: Cluster, markov: World, sharpened: Path) -> None:
    with markov.with_fault(cluster, sharpened, "draft_service", "branches_take_the_likeliest") as service:
        tokens, share = _many(service, "tokenwise", NOTICED_BY)
    print(f"{share:.0%} of the proposals came from the cache")
    assert min(fit.p_value for fit in Chain.of(markov.target, PLAIN).fits(PROMPT, tokens)) < REFUTED


@pytest.mark.parametrize(
    ("options", "gamma"),
    [
        ({"seed": 5}, 1),
        ({"seed": 5}, 8),
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.0}, 3),
        ({"seed": 6, "presence_penalty": 0.5}, 3),
        ({"seed": 6, "presence_penalty": 0.5}, 8),
    ],
    ids=str,
)
def test_the_tokens_are_the_same_with_and_without(options: dict[str, object], gamma: int, eager: Service) -> None:
    alone = _write(eager, gamma=0, **options)
    ahead, plain = (_write(eager, gamma=gamma, outcome_cache=on, **options) for on in (True, False))
    assert ahead.token_ids == plain.token_ids == alone.token_ids
    assert ahead.statistics.num_outcome_cache_hits > 0
    assert plain.statistics.num_outcome_cache_queries == plain.statistics.num_predrafted_tokens == 0


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_a_seed_repeats_its_text_whatever_was_drafted_ahead(rule: str, eager: Service) -> None:
    """In float32 a branch draws what would have been drawn: the same numbers, by the same laws."""
    ahead, plain = (_write(eager, seed=9, rule=rule, outcome_cache=on) for on in (True, False))
    assert ahead.token_ids == plain.token_ids
    assert ahead.statistics.num_outcome_cache_hits > 0
    assert ahead.timings.saved_us > 0
