"""The outcome cache through both services: it changes no distribution, and under `coupled` and at temperature 0 no
token.

The draft service drafts for four outcomes whatever the time (`eager_outcome_cache`), so that half of all proposals come
from the cache, with a target as small as this one. It is the Markov one: each of the 1,600 tokens of 64 texts is a
sample of one table, and a total variation of 0.09 is noticed at a level of 1 % with a power of 95 % (`chisquare`); of
16,384 (`-m slow`) one of 0.03. That branches which send another q̂ than they drew from (invariant 1) would be noticed is
shown by a mutant, under `-m slow` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.client import Client, Completion, Options
from tests.cluster import Service
from tests.exactness import chisquare
from tests.exactness.chisquare import Fit
from tests.exactness.distributions import Filters
from tests.exactness.worlds import World, chain_fits, transitions

PROMPT = (14,)
PLAIN = Filters(temperature=1.0, top_k=6)
NOTICED_BY = 52  # tokens of a text, where a fault is to be seen
AT_ONCE = 32
LEVEL, POWER = 0.01, 0.95
REFUTED = 1e-9


@pytest.fixture(scope="module")
def eager(markov: World, sharpened: Path) -> Iterator[Service]:
    with markov.with_fault(sharpened, "draft_service", "eager_outcome_cache") as service:
        yield service


def _write(service: Service, **options: object) -> Completion:
    asked = Options(max_new_tokens=42, ignore_eos=True, gamma=2, top_k=PLAIN.top_k)
    asked.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **asked)


def _fits(service: Service, markov: World, rule: str, length: int) -> tuple[float, Fit, Fit]:
    """The share of the proposals of 64 texts that came from the cache, and how well the texts fit."""
    done = [_write(service, n=AT_ONCE, seed=seed, rule=rule, max_new_tokens=length) for seed in (31, 32)]
    samples = [sample for each in done for sample in each.samples]
    hits = sum(sample.statistics.num_outcome_cache_hits for sample in samples)
    share = hits / sum(sample.statistics.num_drafts for sample in samples)
    print(f"{share:.0%} of the proposals came from the cache")
    tokens = np.array([sample.token_ids for sample in samples])
    return share, *chain_fits(transitions(markov.target, PLAIN), PROMPT, tokens)


@pytest.mark.parametrize(("length", "distance"), [(25, 0.092), pytest.param(256, 0.03, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_each_next_token_is_distributed_as_the_targets(
    rule: str, length: int, distance: float, eager: Service, markov: World
) -> None:
    share, outcomes, classes = _fits(eager, markov, rule, length)
    assert share > 0.35
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
def test_a_distribution_that_was_not_drawn_from_is_noticed(markov: World, sharpened: Path) -> None:
    with markov.with_fault(sharpened, "draft_service", "branches_take_the_likeliest") as service:
        _, outcomes, classes = _fits(service, markov, "tokenwise", NOTICED_BY)
    assert min(outcomes.p_value, classes.p_value) < REFUTED


@pytest.mark.parametrize(
    ("options", "gamma"),
    [({"seed": 5}, 1), ({"temperature": 0.0}, 3), ({"seed": 6, "presence_penalty": 0.5}, 8)],
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
    """In float32 a branch draws what would have been drawn: the same numbers, from the same q̂."""
    ahead, plain = (_write(eager, seed=9, rule=rule, outcome_cache=on) for on in (True, False))
    assert ahead.token_ids == plain.token_ids
    assert ahead.statistics.num_outcome_cache_hits > 0
    assert ahead.timings.saved_us > 0
