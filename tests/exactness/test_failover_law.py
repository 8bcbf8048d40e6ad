"""The law of texts whose verifiers are cut off again and again: by χ², under the rules that equality says less of.

A tiny target that looks at the last token alone, behind four proxies; each is cut at random places, inside a message or
between two, and a text goes to another one in the middle of a round. Each token of a text is a sample of one table.

Power (`chisquare` has the derivation): 5,888 tokens, half of them by each rule, over three rank classes a row, some 48
degrees of freedom, at a level of 0.5 %, notice a total variation of 0.05 with 95 %; `-m slow` has four times as many,
which notice 0.025. A token that were lost or repeated at each failover would show on some 5 % of the tokens, each of
which is then drawn from a law half or more of whose mass lies elsewhere: the slow test is for that, and in each run
`test_failover` compares token by token, which also shows what a round that is drawn anew would do.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, sampling
from tests.exactness.worlds import FILTERS, Chain, World
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


@dataclass(frozen=True)
class Torn:
    """A draft service, and the ways to its verifier."""

    draft: Service
    ways: list[Proxy]

    def failovers(self) -> int:
        return int(self.draft.count("outrider_verifier_switches_total"))

    def rounds(self) -> float:
        """Verdicts so far."""
        return self.draft.count("outrider_spec_decode_gamma_count")

    @contextmanager
    def torn(self, seed: int) -> Iterator[None]:
        """Cuts one way or another for as long as it is open, as often as the budget bears, and never so soon after the
        last cut that a text may lose one verifier after the other without a verdict.
        """
        over = threading.Event()

        def tear() -> None:
            chance = random.Random(seed)
            wanted = 0.0
            while not over.wait(SECONDS_PER_LOOK):
                if self.rounds() < wanted or self.draft.count("outrider_failover_budget") < sampling.SEQUENCES / WAYS:
                    continue
                way, reset = chance.choice(list(Way)), chance.random() < 0.5
                chance.choice(self.ways).cut_after(chance.randint(1, BYTES), way, reset=reset)
                over.wait(SECONDS_PER_LOOK)
                wanted = self.rounds() + ROUNDS_BETWEEN * SAMPLES

        thread = threading.Thread(target=tear)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def torn(cluster: Cluster, markov: World) -> Iterator[Torn]:
    with ExitStack() as stack:
        ways = [stack.enter_context(Proxy(markov.verifier.address)) for _ in range(WAYS)]
        model = markov.drafts["uniform"]
        # How many verifiers a round may lose in a row is another test's affair, and here a matter of chance.
        draft = cluster.draft(*(way.address for way in ways), model=model, fault="stubborn", flags=sampling.DRAFT_FLAGS)
        wait_healthy(draft)
        yield Torn(draft, ways)
        draft.end()


@pytest.mark.parametrize(("length", "distance"), [(46, 0.05), pytest.param(184, 0.025, marks=pytest.mark.slow)])
def test_the_law_is_the_targets_however_often_a_text_changes_its_verifier(
    length: int, distance: float, torn: Torn, markov: World
) -> None:
    before = torn.failovers()
    with torn.torn(seed=5):
        runs = [
            sampling.sample(
                torn.draft.address,
                PROMPT,
                length=length,
                samples=SAMPLES,
                filters=FILTERS,
                gamma=4,
                seed=seed,
                rule=rule,
            )
            for seed, rule in enumerate(("tokenwise", "block"), start=17)  # of one seed they would share their draws
        ]
    failovers = torn.failovers() - before
    chain = Chain.of(markov.target)
    counts = chain.counts(PROMPT, np.concatenate([run.tokens for run in runs]))
    outcomes, classes = chain.outcomes(counts), chain.by_class(counts)
    for run in runs:
        print(run)
        assert run.tokens.shape == (SAMPLES, length)
    print(f"{failovers} failovers\noutcomes: {outcomes}\nclasses:  {classes}")
    assert failovers > 0.01 * counts.sum()
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL
