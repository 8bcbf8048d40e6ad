"""Long texts of a Markov target, through both services over gRPC: every token is a sample of a known table.

The target's attention outputs are zero, so the next token's law depends on the last token alone, and the transitions of
a text are counted against it, row by row. This is the law after hundreds of rounds, with caches that were rolled back
as often; `test_first_tokens` has a target that attends.

Power (`chisquare` has the derivation), with three rank classes for each of 24 tokens, some 45 degrees of freedom, at a
level of 1 %: λ = 52 is passed with 95 %, so that N = λ/(4 · 0.05²) = 5,200 tokens notice any mean total variation of
0.05. Token by token, `-m slow` has 363,520 tokens for each bad draft: at a level of 0.1 %, λ = 143 is passed with 99 %,
and N = λ/(4 · 0.01²) = 357,000 notice 0.01.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.exactness import chisquare, sampling
from tests.exactness.pairs import BAD_DRAFTS
from tests.exactness.results import Recorder, Row
from tests.exactness.sampling import Run
from tests.exactness.worlds import FILTERS, Chain, World

PROMPT = (14,)
GAMMA = 3
LEVEL = 0.01


@pytest.fixture(scope="module")
def chain(markov: World) -> Chain:
    return Chain.of(markov.target)


def _write(markov: World, kind: str, *, length: int, samples: int, rule: str = "tokenwise") -> Run:
    # Seeds of their own for each draft: texts of one seed share the verifier's draws, and are no independent samples.
    seed = 20 + BAD_DRAFTS.index(kind)
    return sampling.sample(
        markov.services[kind].address,
        PROMPT,
        length=length,
        samples=samples,
        filters=FILTERS,
        gamma=GAMMA,
        seed=seed,
        rule=rule,
    )


def test_every_token_of_long_texts_follows_the_targets_law(markov: World, chain: Chain) -> None:
    runs = {kind: _write(markov, kind, length=28, samples=64) for kind in BAD_DRAFTS}
    counts = np.sum([chain.counts(PROMPT, run.tokens) for run in runs.values()], axis=0)
    outcomes, classes = chain.outcomes(counts), chain.by_class(counts)
    print(*(f"{kind}: {run}" for kind, run in runs.items()), f"outcomes: {outcomes}", f"classes:  {classes}", sep="\n")
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= 0.05
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rule", ["block", "tokenwise"])
@pytest.mark.parametrize("kind", BAD_DRAFTS)
def test_every_token_of_350_000_follows_the_targets_law(
    kind: str, rule: str, markov: World, chain: Chain, recorder: Recorder
) -> None:
    started = time.monotonic()
    run = _write(markov, kind, length=1420, samples=256, rule=rule)
    counts = chain.counts(PROMPT, run.tokens)
    outcomes, classes = chain.outcomes(counts), chain.by_class(counts)
    row = Row("long texts, Markov target", rule, kind, f"{GAMMA}", run, outcomes, classes, time.monotonic() - started)
    recorder.add(row)
    print(row)
    assert run.tokens.size >= 350_000
    assert row.detects <= 0.01
    assert min(outcomes.p_value, classes.p_value) > 1e-3
