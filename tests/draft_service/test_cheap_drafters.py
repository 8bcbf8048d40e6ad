"""`lookup` against a plain search, `random` against its law, and `none`."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from draft_service.drafters.base import SLICE, Draft, Drafter, DraftSequence
from draft_service.drafters.lookup import Copier, LookupDrafter
from draft_service.drafters.none import NoDrafter
from draft_service.drafters.random import RandomDrafter, support
from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution, validate
from kernels.verify import Rule

PLAIN = DraftSequence([1, 2, 3], [], SamplingParams(), LogitRules(), 5)
GREEDY = SamplingParams(temperature=0.0)


def propose(of: Drafter, told: DraftSequence, gamma: int, verdicts: Sequence[Sequence[int]] = ()) -> Draft:
    """The proposal after these verdicts."""

    async def run() -> Draft:
        drafting = of.open(told)
        for verdict in verdicts:
            drafting.advance(verdict)
        return await drafting.propose(gamma)

    return asyncio.run(run())


def copied(tokens: list[int], gamma: int, min_match: int = 2) -> list[int]:
    return propose(LookupDrafter(min_match=min_match), replace(PLAIN, prompt=tokens), gamma).token_ids


def searched(tokens: list[int], gamma: int, min_match: int) -> list[int]:
    """The same by trying every place."""
    best, source = 0, None
    for end in range(min_match, len(tokens)):
        length = 0
        while length < end and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        if length >= min_match and length >= best:
            best, source = length, end
    text = list(tokens)
    if source is not None:
        for place in range(gamma):
            text.append(text[source + place])
    return text[len(tokens) :]


def test_what_followed_the_longest_match_is_copied() -> None:
    assert copied([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == [9], "three tokens match there, and two at the later place"
    assert copied([1, 2, 9, 1, 2, 8, 1, 2], 2) == [8, 1], "the later one of equals"
    assert copied([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1], "past the end the copy itself goes on"
    assert copied([1, 2, 3, 4], 4) == []
    assert copied([1, 2, 9, 3, 2], 1) == []
    assert copied([1, 2, 9, 3, 2], 1, min_match=1) == [9]
    assert copied([7], 3) == []


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_copies_are_those_of_a_plain_search_however_the_text_came(min_match: int) -> None:
    generator = np.random.default_rng(min_match)
    found = 0
    for _ in range(60):
        text = [int(token) for token in generator.integers(0, 4, 50)]
        cut = sorted(generator.choice(np.arange(1, 50), 3, replace=False))
        verdicts = [text[cut[0] : cut[1]], text[cut[1] : cut[2]], text[cut[2] :]]
        draft = propose(LookupDrafter(min_match=min_match), replace(PLAIN, prompt=text[: cut[0]]), 6, verdicts)
        assert draft.token_ids == searched(text, 6, min_match)
        assert draft.laws == [None] * len(draft.token_ids)
        found += bool(draft.token_ids)
    assert found > 20


def test_what_is_ahead_is_matched_and_leaves_no_trace() -> None:
    """As if it were written, but for copies of what is ahead itself: those begin to count once it is committed."""
    generator = np.random.default_rng(7)
    found = 0
    for _ in range(60):
        text, ahead = ([int(token) for token in generator.integers(0, 4, size)] for size in (30, 4))
        copier = LookupDrafter(min_match=2).guesser(PLAIN)
        copier.read(text)
        plain = copier.guess(5)
        whole = [*text, *ahead]
        ends = [end for end in range(2, len(text)) if whole[end - 2 : end] == whole[-2:]]
        guessed = [token for token, _ in copier.guess(3, ahead)]
        assert bool(guessed) == bool(ends)
        assert not guessed or any((whole + guessed)[end : end + 3] == guessed for end in ends)
        assert copier.guess(5) == plain
        copier.read(ahead)
        assert [token for token, _ in copier.guess(6)] == searched(whole, 6, 2)
        found += bool(guessed)
    assert found > 20


def test_a_long_text_is_read_in_slices_between_which_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is copied from as a whole, whatever was committed meanwhile."""
    text, read, turns = [9, 8, 7] + [1, 2] * 5_000, list[int](), 0
    honest = Copier.read

    def noted(self: Copier, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        honest(self, tokens)

    monkeypatch.setattr(Copier, "read", noted)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        drafting = LookupDrafter(min_match=2).open(replace(PLAIN, prompt=text[:4_000], committed=text[4_000:]))
        other = asyncio.ensure_future(others())
        proposal = drafting.propose(4)
        await asyncio.sleep(0)
        drafting.advance([9] * 200)
        drafting.advance([8])
        assert (await proposal).token_ids == [7, 1, 2, 1]
        assert (max(read), sum(read)) == (SLICE, len(text) + 201)
        assert turns >= len(read) - 1
        drafting.advance([7])
        read.clear()
        assert (await drafting.propose(2)).token_ids == [1, 2]
        assert read == [1]
        drafting.advance(text)
        late = drafting.propose(2)
        drafting.close()
        with pytest.raises(asyncio.CancelledError):
            await late
        other.cancel()

    asyncio.run(run())


def test_under_coupled_no_law_is_told() -> None:
    for of in (LookupDrafter(min_match=1), RandomDrafter(vocab_size=600, max_support=256)):
        draft = propose(of, replace(PLAIN, prompt=[1, 2, 1], rule=Rule.COUPLED), 3)
        assert (len(draft.token_ids), draft.laws) == (3, [])


@pytest.mark.parametrize(("size", "wanted"), [(256, 256), (24, 24), (300, 256), (151_936, 256), (2, 2)])
def test_random_laws_are_ones_that_the_verifier_takes(size: int, wanted: int) -> None:
    draft = propose(RandomDrafter(vocab_size=size, max_support=256), PLAIN, 8)
    for token, law in zip(draft.token_ids, draft.laws, strict=True):
        assert isinstance(law, SparseDistribution)
        assert validate(law.ids, law.weights, size).total == wanted
        assert law.probability(token) == 1 / wanted


def test_random_tokens_are_uniform_over_the_vocabulary_and_within_each_support() -> None:
    """9,600 rounds: over 30 tokens, at a level of 0.1 %, a total variation of 0.05 is noticed with a power of 99 %."""
    size, kept = 30, 8
    of = RandomDrafter(vocab_size=size, max_support=kept)
    tokens, slots = np.zeros((2, size)), np.zeros((2, kept))
    for seed in range(9_600):
        guesser = of.guesser(replace(PLAIN, seed=seed))
        guesser.read(PLAIN.prompt)
        for place, (token, law) in enumerate(guesser.guess(2)):
            assert law is not None
            tokens[place, token] += 1
            slots[place, np.searchsorted(law.ids, token)] += 1
    for found in (*tokens, *slots):
        print(stats.chisquare(found))
        assert stats.chisquare(found).pvalue > 1e-3


def test_random_draws_are_keyed_by_base_place_and_seed() -> None:
    of = RandomDrafter(vocab_size=600, max_support=256)
    draft = propose(of, PLAIN, 3, [[4, 4]])
    told = support(5, 5, vocab_size=600, size=256)
    for place, (token, law) in enumerate(zip(draft.token_ids, draft.laws, strict=True)):
        assert isinstance(law, SparseDistribution)
        assert law.ids.tolist() == told.ids.tolist()
        assert token == told.ids[int(uniform(5, 5, place, Domain.DRAFT) * 256)]
    others = (PLAIN, replace(PLAIN, seed=6), replace(PLAIN, prompt=[1]))
    assert len({tuple(propose(of, told, 8).token_ids) for told in others}) == 3


def test_at_temperature_zero_laws_are_point_masses() -> None:
    draft = propose(RandomDrafter(vocab_size=600, max_support=256), replace(PLAIN, law=GREEDY), 4)
    assert draft.laws == [None] * 4


def test_none_has_no_room_and_proposes_nothing() -> None:
    assert NoDrafter().open(PLAIN).room() == 0
    assert propose(NoDrafter(), PLAIN, 4).token_ids == []


def test_a_match_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_match is 0"):
        LookupDrafter(min_match=0)
