"""The joint law of the first three tokens, through both services over gRPC, against exact enumeration.

Random weights over 24 tokens, temperature 1, top-k 20, top-p 0.9; three drafts that are bad on purpose; γ of 1, 2 and
4, so that three tokens take one to three rounds. N = 2,112 texts, 704 for each draft.

Power (`chisquare` has the derivation): over the 27 rank classes, at a level of 1 %, λ = 42.5 is passed with 95 %; so
N = λ/(4 · 0.072²) = 2,050 texts notice any total variation of 0.072 there, and one draft's 704 notice 0.13. Over the
single outcomes, some 250 cells, the same N notices 0.11. `-m slow` goes down to 0.01.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from tests.exactness import chisquare, sampling
from tests.exactness.chisquare import Array
from tests.exactness.pairs import BAD_DRAFTS
from tests.exactness.results import Recorder, Row
from tests.exactness.sampling import Run
from tests.exactness.worlds import FILTERS, FirstTokens, World

PROMPT = (15, 12, 14)
LENGTHS = {1: 3, 2: 3, 4: 5}
"""Tokens to write for each γ: a proposal is never longer than what may still be written, less one."""
SAMPLES = {gamma: requests * sampling.SAMPLES_PER_REQUEST for gamma, requests in {1: 4, 2: 4, 4: 3}.items()}
"""Texts of each draft for each γ: those at γ = 4 cost twice as much."""
ALONE = 10 * sampling.SAMPLES_PER_REQUEST
LEVEL = 0.01
POWER = 0.95
DISTANCE = 0.072

Runs = dict[tuple[str, int], Run]


@pytest.fixture(scope="module")
def first_tokens(attentive: World) -> FirstTokens:
    return FirstTokens.of(attentive.target, PROMPT)


@pytest.fixture(scope="module")
def runs(attentive: World) -> Runs:
    """What every draft and γ wrote, with seeds of their own: texts of one seed share the verifier's draws."""
    return {
        (kind, gamma): _write(attentive, kind, gamma, SAMPLES[gamma], seed=10 * number + gamma)
        for number, kind in enumerate(BAD_DRAFTS)
        for gamma in LENGTHS
    }


def test_the_law_of_the_first_three_tokens_is_the_targets(runs: Runs, first_tokens: FirstTokens) -> None:
    tokens = _first_three(runs.values())
    outcomes, classes = first_tokens.outcomes(tokens), first_tokens.by_class(tokens)
    print(f"outcomes: {outcomes}\nclasses:  {classes}")
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=POWER) <= DISTANCE
    assert min(classes.p_value, outcomes.p_value) > LEVEL


@pytest.mark.parametrize("kind", BAD_DRAFTS)
def test_the_law_is_the_targets_with_each_bad_draft(kind: str, runs: Runs, first_tokens: FirstTokens) -> None:
    """At a tenth of the level, being one of several."""
    tokens = _first_three(runs[kind, gamma] for gamma in LENGTHS)
    outcomes, classes = first_tokens.outcomes(tokens), first_tokens.by_class(tokens)
    print(f"outcomes: {outcomes}\nclasses:  {classes}")
    assert min(classes.p_value, outcomes.p_value) > LEVEL / 10


def test_the_texts_took_several_rounds_of_drafts_accepted_and_rejected(runs: Runs) -> None:
    for (kind, gamma), run in runs.items():
        print(f"{kind}, γ = {gamma}: {run}")
        assert run.rounds > 1.4 * len(run.tokens)
        assert 0.005 * run.drafted < run.accepted < 0.9 * run.drafted


def test_the_law_does_not_depend_on_gamma(attentive: World, runs: Runs, first_tokens: FirstTokens) -> None:
    """γ = 0, where the target writes alone, against γ = 4, by class: 640 and 576 texts notice about 0.19."""
    longest = [runs[kind, max(LENGTHS)] for kind in BAD_DRAFTS]
    _compare_with_none(attentive, ALONE, longest, first_tokens)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_law_does_not_depend_on_gamma_with_ten_times_the_texts(attentive: World, first_tokens: FirstTokens) -> None:
    """6,400 texts at γ = 0 and 5,760 at γ = 4 notice about 0.06."""
    gamma = max(LENGTHS)
    longest = [
        _write(attentive, kind, gamma, 10 * SAMPLES[gamma], seed=500 + number) for number, kind in enumerate(BAD_DRAFTS)
    ]
    _compare_with_none(attentive, 10 * ALONE, longest, first_tokens)


def _compare_with_none(world: World, samples: int, drafted: Sequence[Run], first_tokens: FirstTokens) -> None:
    alone = sampling.sample(
        world.services["uniform"].address, PROMPT, length=3, samples=samples, filters=FILTERS, gamma=0, seed=99
    )
    assert alone.drafted == 0
    longest = _first_three(drafted)
    fit = chisquare.two_sample(first_tokens.class_counts(alone.tokens), first_tokens.class_counts(longest))
    print(fit)
    assert fit.p_value > LEVEL
    assert first_tokens.by_class(alone.tokens).p_value > LEVEL


def test_the_power_is_as_stated_for_this_law(runs: Runs, first_tokens: FirstTokens) -> None:
    """1,000 simulated samples from the hardest law at a distance of 0.072 are refuted as often as promised."""
    law, n = first_tokens.class_law, sum(len(run.tokens) for run in runs.values())
    counts = np.random.default_rng(7).multinomial(n, chisquare.hardest_bias(law, DISTANCE), size=1000)
    refuted = np.mean([chisquare.goodness_of_fit(row, law).p_value < LEVEL for row in counts])
    assert refuted >= POWER - 0.02


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_law_of_the_first_three_tokens_is_the_targets_to_a_hundredth(
    attentive: World, first_tokens: FirstTokens, recorder: Recorder
) -> None:
    """162,432 texts: by class they notice 0.01 at a level of 0.1 % with a power of 99 %."""
    rows: list[Row] = []
    everything: list[Run] = []
    for number, kind in enumerate(BAD_DRAFTS):
        started = time.monotonic()
        written = [_write(attentive, kind, gamma, 18_048, seed=1000 + 10 * number + gamma) for gamma in LENGTHS]
        everything += written
        rows.append(_row(kind, written, first_tokens, time.monotonic() - started))
    rows.append(_row("all three", everything, first_tokens, sum(row.seconds for row in rows)))
    for row in rows:
        recorder.add(row)
        print(row)
    assert rows[-1].class_detects <= 0.01
    assert all(min(row.classes.p_value, row.outcomes.p_value) > 1e-3 for row in rows)


def _write(world: World, kind: str, gamma: int, samples: int, *, seed: int) -> Run:
    return sampling.sample(
        world.services[kind].address,
        PROMPT,
        length=LENGTHS[gamma],
        samples=samples,
        filters=FILTERS,
        gamma=gamma,
        seed=seed,
    )


def _row(draft: str, runs: Sequence[Run], law: FirstTokens, seconds: float) -> Row:
    tokens = _first_three(runs)
    whole = Run(
        tokens,
        rounds=sum(run.rounds for run in runs),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
    )
    gammas = ", ".join(map(str, LENGTHS))
    return Row(
        "first three tokens", "tokenwise", draft, gammas, whole, law.outcomes(tokens), law.by_class(tokens), seconds
    )


def _first_three(runs: Iterable[Run]) -> Array:
    return np.concatenate([run.tokens[:, :3] for run in runs])
