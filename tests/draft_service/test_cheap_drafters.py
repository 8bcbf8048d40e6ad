"""`lookup` against a plain search, and `random` against its distribution."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from draft_service.drafters.base import Draft, Drafter, DraftSequence
from draft_service.drafters.cheap import LookupDrafter, NoDrafter, RandomDrafter, support
from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution, validate
from kernels.verify import Rule

PLAIN = DraftSequence([1, 2, 3], [], SamplingParams(), LogitRules(), 5)
GREEDY = SamplingParams(temperature=0.0)


def propose(drafter: Drafter, opening: DraftSequence, gamma: int, verdicts: Sequence[Sequence[int]] = ()) -> Draft:
    """The proposal after these verdicts."""

    async def run() -> Draft:
        drafting = drafter.open(opening)
        for verdict in verdicts:
            drafting.advance(verdict)
        return await drafting.propose(gamma)

    return asyncio.run(run())


def searched(tokens: list[int], gamma: int, min_match: int) -> list[int]:
    """Reference: the copy by trying every position."""
    best, source = 0, None
    for end in range(min_match, len(tokens)):
        length = 0
        while length < end and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        if length >= min_match and length >= best:
            best, source = length, end
    text = list(tokens)
    if source is not None:
        for index in range(gamma):
            text.append(text[source + index])
    return text[len(tokens) :]


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_copies_equal_a_plain_search_for_any_verdicts(min_match: int) -> None:
    generator = np.random.default_rng(min_match)
    found = 0
    for _ in range(60):
        text = [int(token) for token in generator.integers(0, 4, 50)]
        cut = sorted(generator.choice(np.arange(1, 50), 3, replace=False))
        verdicts = [text[cut[0] : cut[1]], text[cut[1] : cut[2]], text[cut[2] :]]
        draft = propose(LookupDrafter(min_match=min_match), replace(PLAIN, prompt=text[: cut[0]]), 6, verdicts)
        assert draft.token_ids == searched(text, 6, min_match)
        assert draft.distributions == [None] * len(draft.token_ids)
        found += bool(draft.token_ids)
    assert found > 20


def test_coupled_has_no_distributions_and_temperature_0_point_masses() -> None:
    for drafter in (LookupDrafter(min_match=1), RandomDrafter(vocab_size=600, max_support=256)):
        draft = propose(drafter, replace(PLAIN, prompt=[1, 2, 1], rule=Rule.COUPLED), 3)
        assert (len(draft.token_ids), draft.distributions) == (3, [])
        assert propose(drafter, replace(PLAIN, prompt=[1, 2, 1], params=GREEDY), 3).distributions == [None] * 3
    assert propose(NoDrafter(), PLAIN, 4).token_ids == []


@pytest.mark.parametrize(("size", "wanted"), [(2, 2), (256, 256), (151_936, 256)])
def test_random_distributions_pass_the_verifiers_check(size: int, wanted: int) -> None:
    draft = propose(RandomDrafter(vocab_size=size, max_support=256), PLAIN, 8)
    for token, q in zip(draft.token_ids, draft.distributions, strict=True):
        assert isinstance(q, SparseDistribution)
        assert validate(q.ids, q.weights, size).total == wanted
        assert q.probability(token) == 1 / wanted


def test_random_tokens_are_uniform_over_the_vocabulary_and_within_each_support() -> None:
    """9,600 rounds: a total variation of 0.05 over 30 tokens is noticed at a level of 0.1 % with a power of 99 %."""
    size, kept = 30, 8
    drafter = RandomDrafter(vocab_size=size, max_support=kept)
    tokens, slots = np.zeros((2, size)), np.zeros((2, kept))
    for seed in range(9_600):
        guesser = drafter.guesser(replace(PLAIN, seed=seed))
        guesser.read(PLAIN.prompt)
        for index, (token, q) in enumerate(guesser.guess(2)):
            assert q is not None
            tokens[index, token] += 1
            slots[index, np.searchsorted(q.ids, token)] += 1
    for found in (*tokens, *slots):
        assert stats.chisquare(found).pvalue > 1e-3


def test_random_draws_are_keyed_by_base_index_and_seed() -> None:
    drafter = RandomDrafter(vocab_size=600, max_support=256)
    draft = propose(drafter, PLAIN, 3, [[4, 4]])
    q = support(5, 5, vocab_size=600, size=256)
    for index, (token, drawn_from) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        assert isinstance(drawn_from, SparseDistribution)
        assert drawn_from.ids.tolist() == q.ids.tolist()
        assert token == q.ids[int(uniform(5, 5, index, Domain.DRAFT) * 256)]
    others = (PLAIN, replace(PLAIN, seed=6), replace(PLAIN, prompt=[1]))
    assert len({tuple(propose(drafter, opening, 8).token_ids) for opening in others}) == 3
