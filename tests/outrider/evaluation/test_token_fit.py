"""Places of tokens are uniform and independent if the tokens fit, and only then; rounding at a filter is no misfit."""

from collections import Counter

import numpy as np
import pytest
import torch

from kernels.sampling import SamplingParams, probabilities
from outrider.evaluation.chisquare import Array
from outrider.evaluation.reference import distribution
from outrider.evaluation.token_fit import Distribution, holm, next_tokens, three_tokens

VOCABULARY = 12


def chain(seed: int, kept: int = VOCABULARY) -> list[Distribution]:
    """The distribution after each token of a Markov chain; the others are the rest."""
    rows = np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.5), VOCABULARY)
    return [Distribution(order := np.argsort(-row)[:kept], row[order]) for row in rows]


def whole(each: Distribution) -> Array:
    p = np.full(VOCABULARY, each.rest / max(VOCABULARY - len(each.ids), 1))
    p[each.ids] = each.p
    return p / p.sum()


def write(table: list[Distribution], uniforms: Array) -> list[list[tuple[Distribution, int]]]:
    """Texts by inverse CDF, as the services draw: `uniforms` are `[texts, tokens]`."""
    edges = np.stack([whole(each).cumsum()[:-1] for each in table])
    before, texts = np.zeros(len(uniforms), dtype=np.int64), list[list[tuple[Distribution, int]]]([] for _ in uniforms)
    for column in uniforms.T:
        tokens = (column[:, None] >= edges[before]).sum(axis=1)
        for text, last, token in zip(texts, before.tolist(), tokens.tolist(), strict=True):
            text.append((table[last], token))
        before = tokens
    return texts


@pytest.mark.parametrize("kept", [VOCABULARY, 5])
def test_p_values_are_uniform_for_the_targets_own_text(kept: int) -> None:
    """200 runs of 90 texts: a level of 5 % rejects 3 to 20 of them (99.9 %)."""
    table, generator = chain(1, kept), np.random.default_rng(2)
    runs = [write(table, generator.random((90, 9))) for _ in range(200)]
    for by_id in (False, True):
        p_values = [three_tokens(texts, generator, 0.0, by_id=by_id).p_value for texts in runs]
        assert 3 <= sum(p < 0.05 for p in p_values) <= 20
        assert 70 < sum(p < 0.5 for p in p_values) < 130


def test_skipped_tokens_leave_the_others_uniform() -> None:
    """Whether a distribution is sure depends on the token before it: to drop whole triples would select tokens."""
    table = [Distribution(each.ids, each.p, is_sure=number % 3 > 0) for number, each in enumerate(chain(3))]
    generator = np.random.default_rng(4)
    texts = write(table, generator.random((3000, 9)))
    for by_id in (False, True):
        fit = three_tokens(texts, generator, 0.0, by_id=by_id)
        assert fit.p_value > 1e-3
        assert fit.n < 2.5 * 3000


def test_random_numbers_used_twice_are_found_by_id() -> None:
    """The second token of each text has the uniform of its first: each alone fits, both together do not."""
    table, generator = chain(5), np.random.default_rng(6)
    uniforms = generator.random((600, 9))
    uniforms[:, 1] = uniforms[:, 0]
    texts = write(table, uniforms)
    assert three_tokens(texts, generator, 0.0, by_id=True).p_value < 1e-12
    without = [[text[0], *text[2:]] for text in texts]
    assert three_tokens(without, generator, 0.0, by_id=True).p_value > 1e-3


def test_next_tokens_and_places_find_tokens_that_are_too_frequent() -> None:
    """A text of which each token is the most probable one in one case of five."""
    table, generator = chain(7), np.random.default_rng(8)
    texts = write(table, generator.random((900, 9)))
    biased = [
        [(each, int(each.ids[0]) if generator.random() < 0.2 else token) for each, token in text] for text in texts
    ]
    for found, is_biased in ((texts, False), (biased, True)):
        counts = {0: Counter(text[0][1] for text in found)}
        fit = next_tokens(counts, {0: table[0]}, 0.0)
        assert (fit.p_value < 1e-4) == is_biased
        assert (three_tokens(found, generator, 0.0, by_id=False).p_value < 1e-9) == is_biased


def test_an_impossible_token_is_found() -> None:
    filtered = Distribution(np.array([4, 2]), np.array([0.6, 0.3]), frozenset({7, 8}))
    assert [filtered.cell(token) for token in (4, 2, 7, 8, 5)] == [0, 1, 2, 2, 3]
    counts = {0: Counter({4: 600, 2: 300, 7: 100})}
    assert next_tokens(counts, {0: filtered}, 0.0).p_value > 0.9
    counts[0][5] = 1
    assert next_tokens(counts, {0: filtered}, 0.0).p_value == 0.0
    text = [(filtered, 4), (filtered, 7), (filtered, 5)]
    assert three_tokens([text] * 200, np.random.default_rng(0), 0.0, by_id=False).p_value == 0.0


@pytest.mark.parametrize(
    ("rounding", "named", "edge", "is_sure"),
    [
        (5e-4, [0, 1], {2}, True),
        (0.2, [0], {1, 2, 3}, True),  # the logits of 1, 2 and 3 are within 0.2
        (2.0, [], {0, 1, 2, 3}, False),  # the first three tokens have a mass near 0.8
    ],
)
def test_tokens_near_a_filter_are_one_cell(rounding: float, named: list[int], edge: set[int], is_sure: bool) -> None:
    z, params = torch.tensor([[3.0, 2.1, 2.05, 2.0, -2.0, -3.0]]), SamplingParams(top_p=0.7)
    p = probabilities(z, params, torch.float64)[0].numpy()
    scaled = torch.log_softmax(z.double(), -1)[0].numpy()
    found = distribution(np.arange(6), scaled, p, params, rounding)
    assert found.ids.tolist() == named
    assert set(found.edge or ()) == edge
    assert found.is_sure == is_sure
    others = [0, 2, 3]  # token 1 is kept, but not among the reported ones
    assert distribution(np.array(others), scaled[others], p[others], params, rounding).edge is None


def test_holm_rejects_from_the_least_p_value_on() -> None:
    assert holm([0.5, 0.004, 0.02], 0.05) == [False, True, True]
    assert holm([0.03, 0.02, 0.04], 0.05) == [False, False, False]
    assert holm([], 0.05) == []
