"""The exact laws themselves: by hand, against each other, and against `kernels`, which was written apart from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.sampling import SamplingParams, probabilities
from tests.exactness import laws, pairs
from tests.exactness.laws import Filters, TooClose
from tests.exactness.worlds import FILTERS

PREFIXES = [[first, second, 5] for first in range(21) for second in (1, 9, 17)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs.write_target(tmp_path_factory.mktemp("laws"), seed=1)


def test_filters_by_hand() -> None:
    """exp(z) is 8, 4, 2, 2, 1: top-k 3 keeps the tie at 2; of 8/16, 4/16, 2/16, 2/16 the first two reach 0.7."""
    logits = np.log([2.0, 8.0, 1.0, 4.0, 2.0])
    assert Filters(top_k=3).law(logits) == pytest.approx([2 / 16, 8 / 16, 0, 4 / 16, 2 / 16])
    assert Filters(top_k=3, top_p=0.7).law(logits) == pytest.approx([0, 2 / 3, 0, 1 / 3, 0])
    assert Filters(top_k=3, top_p=0.8).law(logits) == pytest.approx([2 / 16, 8 / 16, 0, 4 / 16, 2 / 16])
    assert Filters(temperature=0.5, top_k=2).law(logits) == pytest.approx([0, 64 / 80, 0, 16 / 80, 0])


def test_a_cut_too_near_a_tie_is_refused() -> None:
    with pytest.raises(TooClose):
        Filters(top_k=1).law(np.array([1.0, 1.0 - 1e-7]))
    with pytest.raises(TooClose):
        Filters(top_p=0.5 + 1e-7).law(np.zeros(2))


@pytest.mark.parametrize("filters", [FILTERS, Filters(top_k=6, top_p=0.8), Filters(temperature=0.7, top_p=0.95)])
def test_filters_agree_with_the_kernels(filters: Filters) -> None:
    logits = np.random.default_rng(1).normal(0, 2, size=(60, 24))
    theirs = probabilities(
        torch.from_numpy(logits),
        SamplingParams(temperature=filters.temperature, top_k=filters.top_k, top_p=filters.top_p),
        torch.float64,
    )
    assert theirs.numpy() == pytest.approx(np.stack([filters.law(row) for row in logits]), abs=1e-12)


def test_both_filters_cut_and_laws_follow_the_whole_prefix(target: Path) -> None:
    model, prompt = laws.load(target), [15, 12, 14]
    law = laws.joint_law(model, prompt, 3, FILTERS)
    for fewer in (Filters(top_p=FILTERS.top_p), Filters(top_k=FILTERS.top_k)):
        assert laws.total_variation(law, laws.joint_law(model, prompt, 3, fewer)) > 0.03
    other = laws.joint_law(model, [15, 3, 14], 1, FILTERS)
    assert laws.total_variation(law.sum(axis=(1, 2)), other) > 0.1


def test_without_attention_the_law_follows_the_last_token_alone(tmp_path: Path) -> None:
    model = laws.load(pairs.write_target(tmp_path, seed=4, markov=True))
    logits = laws.next_logits(model, PREFIXES)
    assert np.abs(logits - logits[0]).max() < 1e-12
    transitions = laws.transition_law(model, FILTERS)
    assert transitions[5] == pytest.approx(FILTERS.law(logits[0]), abs=1e-12)
    assert transitions.sum(axis=1) == pytest.approx(np.ones(pairs.VOCABULARY))


def test_the_joint_law_is_the_chain_rule(target: Path) -> None:
    model, prompt = laws.load(target), [15, 12, 14]
    law = laws.joint_law(model, prompt, 3, FILTERS)
    assert law.sum() == pytest.approx(1.0)
    first = FILTERS.law(laws.next_logits(model, [prompt])[0])
    assert law.sum(axis=(1, 2)) == pytest.approx(first)
    a, b, c = (int(i) for i in np.unravel_index(law.argmax(), law.shape))
    second, third = (FILTERS.law(laws.next_logits(model, [[*prompt, *more]])[0]) for more in ((a,), (a, b)))
    assert law[a, b, c] == pytest.approx(first[a] * second[b] * third[c])


def test_rank_classes_share_the_mass() -> None:
    law = np.array([0.05, 0.5, 0.15, 0.3, 0.0])
    assert laws.rank_classes(law).tolist() == [2, 0, 2, 1, 2]


def test_joint_classes_hold_each_outcome_once(target: Path) -> None:
    law = laws.joint_law(laws.load(target), [15, 12, 14], 3, FILTERS)
    classes = laws.joint_classes(law)
    mass = np.bincount(classes.ravel(), law.ravel(), minlength=27)
    assert classes.shape == law.shape
    assert (mass > 0).all()
    assert mass.max() < 0.2
