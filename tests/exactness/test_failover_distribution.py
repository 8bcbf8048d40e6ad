"""Texts whose verifiers are cut off again and again: by χ², under the rules that equality says less of.

A tiny target that looks at the last token alone, behind four proxies; each is cut at random places, inside a message or
between two, and a text goes to another one in the middle of a round. Each token of a text is a sample of one table.

Power (`chisquare` has the derivation): 5,888 tokens, half of them by each rule, over three rank classes a row, some 48
degrees of freedom, at a level of 0.5 %, notice a total variation of 0.05 with 95 %; `-m slow` has four times as many,
which notice 0.025. A token that were lost or repeated at each failover would show on some 5 % of the tokens: the slow
test is for that, and in each run `test_failover` compares token by token.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, sampling
from tests.exactness.worlds import FILTERS, World, chain_fits, transitions
from tests.proxy import Proxy, Way

PROMPT = (15, 12, 14)
SAMPLES = sampling.SAMPLES_PER_REQUEST
"""Under each rule."""
LEVEL, POWER = 0.005, 0.95
WAYS = 4
SECONDS_PER_LOOK = 0.05
ROUNDS_BETWEEN = 3
"""Of each text on the average, from one cut to the next."""
BYTES = 5_000
"""What passes at most until a cut: a message or two of each sequence there, so that it falls anywhere in one."""


@contextmanager
def torn(draft: Service, ways: list[Proxy], seed: int) -> Iterator[None]:
    """Cut one way or another for as long as it is open, as often as the budget bears, and never so soon after the last
    cut that a text may lose one verifier after the other without a verdict.
    """
    over = threading.Event()

    def verdicts() -> float:
        return draft.count("outrider_spec_decode_gamma_count")

    def tear() -> None:
        chance = random.Random(seed)
        wanted = 0.0
        while not over.wait(SECONDS_PER_LOOK):
            if verdicts() < wanted or draft.count("outrider_failover_budget") < sampling.SEQUENCES / WAYS:
                continue
            way, reset = chance.choice(list(Way)), chance.random() < 0.5
            chance.choice(ways).cut_after(chance.randint(1, BYTES), way, reset=reset)
            over.wait(SECONDS_PER_LOOK)
            wanted = verdicts() + ROUNDS_BETWEEN * SAMPLES

    thread = threading.Thread(target=tear)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(("length", "distance"), [(46, 0.05), pytest.param(184, 0.025, marks=pytest.mark.slow)])
def test_the_distribution_is_the_targets_however_often_a_text_changes_its_verifier(
    length: int, distance: float, cluster: Cluster, markov: World
) -> None:
    with ExitStack() as stack:
        ways = [stack.enter_context(Proxy(markov.verifier.address)) for _ in range(WAYS)]
        model = markov.drafts["uniform"]
        # How many verifiers a round may lose in a row is another test's affair, and here a matter of chance.
        draft = cluster.draft(*(way.address for way in ways), model=model, fault="stubborn", flags=sampling.DRAFT_FLAGS)
        wait_healthy(draft)
        asked: dict[str, Any] = {"length": length, "samples": SAMPLES, "filters": FILTERS, "gamma": 4}
        with torn(draft, ways, seed=5):
            runs = [
                sampling.sample(draft.address, PROMPT, seed=seed, rule=rule, **asked)
                for seed, rule in enumerate(("tokenwise", "block"), start=17)  # of one seed they would share draws
            ]
        failovers = draft.count("outrider_verifier_switches_total")
        draft.end()
    for run in runs:
        print(run)
        assert run.tokens.shape == (SAMPLES, length)
    print(f"{failovers:.0f} failovers")
    tokens = np.concatenate([run.tokens for run in runs])
    outcomes, classes = chain_fits(transitions(markov.target), PROMPT, tokens)
    assert failovers > 0.01 * tokens.size
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL
