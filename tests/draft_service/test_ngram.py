"""Counts of n-grams, their distribution, and drafts sampled from it under each rule."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Draft, DraftSequence
from draft_service.drafters.ngram import NGramDrafter
from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution
from kernels.verify import Rule
from outrider.runtime.ngram import NGramCounts, back_off
from tests.kernels.cases import sparsify
from tests.kernels.reference import coupled_choice, standardise

V = 12
SPARSE = SparseConfig(keep_mass=0.9, max_support=6)
TEXT = [int(token) for token in np.random.default_rng(1).integers(0, 8, 300)]
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(temperature=0.8, top_k=9)


def counted(order: int, *documents: Sequence[int], entries: int = 10_000) -> NGramCounts:
    counts = NGramCounts(order, V, entries)
    for document in documents:
        counts.add(document)
    return counts


def distribution(tables: Sequence[NGramCounts], tokens: Sequence[int]) -> np.ndarray:
    p = back_off(tables, tokens)
    assert p is not None
    return p


def test_the_distribution_backs_off_to_shorter_contexts() -> None:
    counts = NGramCounts(2, 4, 100)
    assert back_off([counts], [1]) is None, "without counts"
    counts.add([0, 1, 0, 1, 0, 2])
    singles = (np.array([3, 2, 1, 0]) + 3 / 4) / (6 + 3)  # six tokens, three kinds
    assert distribution([counts], []) == pytest.approx(singles)
    assert distribution([counts], [9]) == pytest.approx(singles), "an unknown context changes nothing"
    after_0 = (np.array([0, 2, 1, 0]) + 2 * singles) / (3 + 2)  # three followers, two kinds
    assert distribution([counts], [2, 0]) == pytest.approx(after_0)
    assert distribution([counts], [1]) == pytest.approx((np.array([2, 0, 0, 0]) + singles) / (2 + 1))


def test_memory_is_bounded_and_keeps_the_most_frequent() -> None:
    counts = counted(4, entries=200)
    for at in range(0, len(TEXT), 10):
        counts.add([9, 10, 11] * 3)
        counts.add(TEXT[at : at + 10])
        assert counts.entries <= 200
    assert counts.followers[9, 10] == {11: 90}
    assert distribution([counts], [9, 10])[11] > 0.9


def drafter(*, learns: bool = False, corpus: Sequence[Sequence[int]] = (TEXT,)) -> NGramDrafter:
    return NGramDrafter(corpus, vocab_size=V, sparse=SPARSE, order=3, entries=10_000, learns=learns)


def sequence(**changes: Any) -> DraftSequence:
    return replace(DraftSequence(PROMPT, [], PARAMS, LogitRules(), 77), **changes)


def rounds(
    drafter_: NGramDrafter, opening: DraftSequence, verdicts: Sequence[Sequence[int]], gamma: int = 4
) -> list[Draft]:
    """The proposal before each verdict, and the one after the last."""

    async def run() -> list[Draft]:
        drafting = drafter_.open(opening)
        drafts = [await drafting.propose(gamma)]
        for verdict in verdicts:
            drafting.advance(verdict)
            drafts.append(await drafting.propose(gamma))
        drafting.close()
        return drafts

    return asyncio.run(run())


def reference(tokens: list[int], opening: DraftSequence, gamma: int = 4) -> tuple[list[int], list[SparseDistribution]]:
    """γ tokens one by one, with new counts for each; and their distributions under `tokenwise`."""
    base, distributions = len(tokens), list[SparseDistribution]()
    own = counted(3, tokens)
    for index in range(gamma):
        z = torch.from_numpy(np.log(distribution([counted(3, TEXT), own], tokens))).float()
        if opening.draft_params.is_greedy:
            token = int(z.argmax())
        elif opening.rule is Rule.COUPLED:
            token = coupled_choice(standardise(z.double().numpy(), opening.draft_params), opening.seed, len(tokens))
        else:
            (q,) = sparsify(probabilities(z[None], opening.draft_params), SPARSE)
            token = q.token_at(uniform(opening.seed, base, index, Domain.DRAFT))
            distributions.append(q)
        tokens = [*tokens, token]
    return tokens[base:], distributions


@pytest.mark.parametrize(
    "opening",
    [
        sequence(),
        sequence(rule=Rule.COUPLED),
        sequence(params=SamplingParams(temperature=0.0), draft_temperature=3.0),
        sequence(committed=[2, 2], draft_temperature=3.0),
        sequence(draft_temperature=0.0),
    ],
    ids=["tokenwise", "coupled", "greedy", "resumed, hotter", "greedy draft"],
)
def test_drafts_equal_the_reference_over_many_rounds(opening: DraftSequence) -> None:
    tokens = [*opening.prompt, *opening.committed]
    verdicts = [[5, 2], [7], [1, 4, 1, 5, 2], [0], [0]]
    for draft, verdict in zip(rounds(drafter(), opening, verdicts), [*verdicts, []], strict=True):
        expected, distributions = reference(tokens, opening)
        assert draft.token_ids == expected
        if opening.draft_params.is_greedy or opening.rule is Rule.COUPLED:
            assert draft.distributions == ([] if opening.rule is Rule.COUPLED else [None] * 4)
        for own, q in zip(draft.distributions if distributions else [], distributions, strict=True):
            assert isinstance(own, SparseDistribution)
            assert (own.ids.tolist(), own.weights.tolist()) == (q.ids.tolist(), q.weights.tolist())
        tokens += verdict


def test_served_texts_are_used_only_where_no_draw_depends_on_them() -> None:
    """Under `tokenwise`, a request whose seed may be reused neither uses served texts nor is one."""
    taught, fresh = drafter(learns=True), drafter()
    served = sequence(prompt=[*PROMPT, 11, 10, 9] * 4, seed_is_fresh=True)
    for _ in range(30):
        rounds(taught, served, [[11, 10, 9]])
    opening = sequence(prompt=[2, 11])
    for rule, temperature in ((Rule.TOKENWISE, None), (Rule.BLOCK, None), (Rule.TOKENWISE, 0.0)):
        drawn = replace(opening, rule=rule, draft_temperature=temperature)
        assert rounds(taught, drawn, [])[0].token_ids == rounds(fresh, drawn, [])[0].token_ids
    greedy = replace(opening, params=SamplingParams(temperature=0.0))
    assert rounds(taught, greedy, [])[0].token_ids[:2] == [10, 9]
    assert rounds(fresh, greedy, [])[0].token_ids[:2] != [10, 9]
    other = drafter(learns=True)
    for _ in range(30):  # another text may have its seed, and be behind it
        rounds(other, replace(served, seed_is_fresh=False), [[11, 10, 9]])
    assert rounds(other, greedy, [])[0].token_ids == rounds(fresh, greedy, [])[0].token_ids
    first = [rounds(taught, replace(opening, seed=seed, seed_is_fresh=True), [])[0].token_ids[0] for seed in range(20)]
    assert first.count(10) > 10


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_guesses_behind_uncommitted_tokens_leave_no_trace(penalty: float) -> None:
    """They draw by their own domain and the inner base. Penalties count uncommitted tokens only meanwhile."""
    opening = sequence(logit_rules=LogitRules(presence_penalty=penalty))
    guesser = drafter().guesser(opening, Domain.STAGED_DRAFT)
    guesser.read(opening.prompt)
    before = guesser.guess(3)
    ahead = [2, 9]
    for index, (token, q) in enumerate(guesser.guess(3, ahead)):
        assert q is not None
        assert token == q.token_at(uniform(opening.seed, len(opening.prompt), index, Domain.STAGED_DRAFT, len(ahead)))
    after = guesser.guess(3)
    assert [token for token, _ in after] == [token for token, _ in before]
    guesser.read(ahead)
    fresh = drafter().guesser(replace(opening, committed=ahead), Domain.STAGED_DRAFT)
    fresh.read([*opening.prompt, *ahead])
    assert [token for token, _ in guesser.guess(4)] == [token for token, _ in fresh.guess(4)]
