"""Long texts of a Markov target, through both services over gRPC: every token is a sample of a known table.

The target's attention outputs are zero, so the next token depends on the last token alone, and the transitions of a
text are counted row by row. This is the distribution after hundreds of rounds, with caches that were rolled back as
often; `test_first_tokens` has a target that attends.

Power (`chisquare` has the derivation), with three rank classes for each of 24 tokens, some 45 degrees of freedom, at a
level of 1 %: λ = 52 is passed with 95 %, so that N = λ/(4 · 0.05²) = 5,200 tokens notice any mean total variation of
0.05. Token by token, `-m slow` has 363,520 tokens for each bad draft: at a level of 0.1 %, λ = 143 is passed with 99 %,
and N = λ/(4 · 0.01²) = 357,000 notice 0.01.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.exactness import chisquare
from tests.exactness.pairs import BAD_DRAFTS
from tests.exactness.sampling import Run, sample
from tests.exactness.worlds import FILTERS, World, chain_fits, transitions

PROMPT = (14,)
LEVEL = 0.01


def _write(markov: World, kind: str, *, length: int, samples: int, rule: str = "tokenwise") -> Run:
    # Seeds of their own for each draft: texts of one seed share the verifier's draws, and are no independent samples.
    seed, address = 20 + BAD_DRAFTS.index(kind), markov.service(kind).address
    run = sample(address, PROMPT, length=length, samples=samples, filters=FILTERS, gamma=3, seed=seed, rule=rule)
    print(f"{kind}: {run}")
    return run


def test_every_token_of_long_texts_is_distributed_as_the_targets(markov: World) -> None:
    tokens = np.concatenate([_write(markov, kind, length=28, samples=64).tokens for kind in BAD_DRAFTS])
    outcomes, classes = chain_fits(transitions(markov.target), PROMPT, tokens)
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= 0.05
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rule", ["block", "tokenwise"])
@pytest.mark.parametrize("kind", BAD_DRAFTS)
def test_every_token_of_350_000_is_distributed_as_the_targets(kind: str, rule: str, markov: World) -> None:
    run = _write(markov, kind, length=1420, samples=256, rule=rule)
    outcomes, classes = chain_fits(transitions(markov.target), PROMPT, run.tokens)
    assert run.tokens.size >= 350_000
    assert chisquare.detectable(outcomes.df, outcomes.n, level=1e-3, power=0.99) <= 0.01
    assert min(outcomes.p_value, classes.p_value) > 1e-3
