"""Counts of n-grams, the law they make, and drafts that are sampled from it as the rule of the request has it."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters import ngram
from draft_service.drafters.base import Draft, DraftSequence
from draft_service.drafters.ngram import NGramCounts, NGramDrafter, back_off
from kernels.adjustments import LogitRules
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, sparsify
from kernels.verify import Rule
from tests.kernels.reference import coupled_choice, standardise

V = 12
SPARSE = SparseConfig(keep_mass=0.9, max_support=6)
TEXT = [int(token) for token in np.random.default_rng(1).integers(0, 8, 300)]
PROMPT = [3, 1, 4, 1, 5]
LAW = SamplingParams(temperature=0.8, top_k=9)


def counted(order: int, *documents: Sequence[int], entries: int = 10_000) -> NGramCounts:
    counts = NGramCounts(order, V, entries)
    for document in documents:
        counts.add(document)
    return counts


def law(tables: Sequence[NGramCounts], tokens: Sequence[int]) -> np.ndarray:
    p = back_off(tables, tokens)
    assert p is not None
    return p


def test_a_law_is_the_counts_share_and_the_rest_of_the_shorter_context() -> None:
    counts = NGramCounts(2, 4, 100)
    assert back_off([counts], [1]) is None, "nothing was counted yet"
    counts.add([0, 1, 0, 1, 0, 2])
    singles = (np.array([3, 2, 1, 0]) + 3 / 4) / (6 + 3)  # six tokens, three kinds
    assert law([counts], []) == pytest.approx(singles)
    assert law([counts], [9]) == pytest.approx(singles), "what was never seen says nothing"
    after_0 = (np.array([0, 2, 1, 0]) + 2 * singles) / (3 + 2)  # three followers, two kinds
    assert law([counts], [2, 0]) == pytest.approx(after_0)
    assert law([counts], [1]) == pytest.approx((np.array([2, 0, 0, 0]) + singles) / (2 + 1))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_every_law_is_one_and_gives_every_token_a_chance(order: int) -> None:
    counts = counted(order, TEXT)
    for end in range(0, 60, 7):
        p = law([counts], TEXT[:end])
        assert p.sum() == pytest.approx(1)
        assert p.min() > 0
    assert counts.entries == sum(
        len({tuple(TEXT[at - length : at + 1]) for at in range(length, len(TEXT))}) for length in range(1, order)
    )


def test_tables_together_are_one_table_of_all_documents() -> None:
    first, second = TEXT[:100], TEXT[100:250]
    both = counted(3, first, second)
    apart = (counted(3, first), counted(3, second))
    for context in ([], [1], [1, 4], [7, 7, 2]):
        assert law(apart, context) == pytest.approx(law([both], context))


def test_longer_contexts_say_more_of_a_text_that_repeats_itself() -> None:
    text = [1, 2, 3, 1, 2, 4] * 20
    chance = [law([counted(order, text)], [3, 1, 2])[4] for order in (1, 2, 3, 4)]
    assert chance == sorted(chance)
    assert chance[0] < 0.2 < 0.9 < chance[3]


def test_memory_is_bounded_and_what_was_seen_most_stays() -> None:
    counts = counted(4, entries=200)
    for at in range(0, len(TEXT), 10):
        counts.add([9, 10, 11] * 3)
        counts.add(TEXT[at : at + 10])
        assert counts.entries <= 200
    assert counts.followers[9, 10] == {11: 90}
    assert law([counts], [9, 10])[11] > 0.9


# ------------------------------------------------------------------------------------------------------------ drafts


def drafter(*, learns: bool = False, corpus: Sequence[Sequence[int]] = (TEXT,)) -> NGramDrafter:
    return NGramDrafter(corpus, vocab_size=V, sparse=SPARSE, order=3, entries=10_000, learns=learns)


def sequence(**changes: Any) -> DraftSequence:
    return replace(DraftSequence(PROMPT, [], LAW, LogitRules(), 77), **changes)


def rounds(of: NGramDrafter, told: DraftSequence, verdicts: Sequence[Sequence[int]], gamma: int = 4) -> list[Draft]:
    """The proposal before each verdict, and the one after the last."""

    async def run() -> list[Draft]:
        drafting = of.open(told)
        drafts = [await drafting.propose(gamma)]
        for verdict in verdicts:
            drafting.advance(verdict)
            drafts.append(await drafting.propose(gamma))
        drafting.close()
        return drafts

    return asyncio.run(run())


def reference(tokens: list[int], told: DraftSequence, gamma: int = 4) -> list[int]:
    """γ tokens one by one, everything counted anew for each."""
    base = len(tokens)
    own = counted(3, tokens)
    for place in range(gamma):
        z = torch.from_numpy(np.log(law([counted(3, TEXT), own], tokens))).float()
        if told.draft_law.is_greedy:
            token = int(z.argmax())
        elif told.rule is Rule.COUPLED:
            token = coupled_choice(standardise(z.double().numpy(), told.draft_law), told.seed, len(tokens))
        else:
            (q,) = sparsify(probabilities(z[None], told.draft_law), SPARSE)
            token = q.token_at(uniform(told.seed, base, place, Domain.DRAFT))
        tokens = [*tokens, token]
    return tokens[base:]


@pytest.mark.parametrize(
    "told",
    [
        sequence(),
        sequence(rule=Rule.COUPLED),
        sequence(law=SamplingParams(temperature=0.0), draft_temperature=3.0),
        sequence(committed=[2, 2]),
        sequence(draft_temperature=3.0),
        sequence(draft_temperature=0.2, rule=Rule.COUPLED),
        sequence(draft_temperature=0.0),
    ],
    ids=["tokenwise", "coupled", "greedy", "resumed", "hotter", "colder", "greedy draft"],
)
def test_drafts_are_drawn_from_the_law_by_the_rule_round_after_round(told: DraftSequence) -> None:
    tokens = [*told.prompt, *told.committed]
    verdicts = [[5, 2], [7], [1, 4, 1, 5, 2], [0], [0]]
    for draft, verdict in zip(rounds(drafter(), told, verdicts), [*verdicts, []], strict=True):
        assert draft.token_ids == reference(tokens, told)
        if told.rule is Rule.COUPLED:
            assert draft.laws == []
        else:
            assert [law is None for law in draft.laws] == [told.draft_law.is_greedy] * 4
        tokens += verdict


def test_what_is_told_is_what_was_sampled_from() -> None:
    """Cut to 0.9 of the mass, and standardised as the request asks."""
    (draft,) = rounds(drafter(), sequence(), [])
    z = torch.from_numpy(np.log(law([counted(3, TEXT), counted(3, PROMPT)], PROMPT))).float()
    (whole,) = sparsify(probabilities(z[None], LAW), SPARSE)
    told = draft.laws[0]
    assert told is not None
    assert (told.ids.tolist(), told.weights.tolist()) == (whole.ids.tolist(), whole.weights.tolist())  # type: ignore[union-attr]
    assert 1 < len(whole.ids) <= 6


def test_what_may_not_be_written_is_not_drafted() -> None:
    banned = LogitRules(banned_tokens=(0, 1, 2, 3), presence_penalty=100.0)
    for seed in range(20):
        (draft,) = rounds(drafter(), sequence(logit_rules=banned, seed=seed), [])
        assert not {0, 1, 2, 3}.intersection(draft.token_ids)
        assert len(set(draft.token_ids)) == 4, "a token drafted before is as good as banned"
    (draft,) = rounds(drafter(), sequence(logit_rules=LogitRules(banned_tokens=tuple(range(V)))), [])
    assert draft.token_ids == []


def test_penalties_count_what_was_committed_and_not_what_was_rejected() -> None:
    told = sequence(
        logit_rules=LogitRules(presence_penalty=3.0, frequency_penalty=2.0), law=SamplingParams(temperature=0)
    )
    verdicts = [[9, 8], [7], [9]]
    later = rounds(drafter(), told, verdicts)
    for after, draft in enumerate(later):
        committed = [token for verdict in verdicts[:after] for token in verdict]
        assert draft.token_ids == rounds(drafter(), replace(told, committed=committed), [])[0].token_ids


def test_what_is_learned_serves_where_no_draw_can_depend_on_it() -> None:
    """Under `tokenwise` a seed that somebody may have had before drafts as if nothing had been learned."""
    taught, fresh = drafter(learns=True), drafter()
    for _ in range(30):
        rounds(taught, sequence(prompt=[*PROMPT, 11, 10, 9] * 4), [[11, 10, 9]])
    asked = sequence(prompt=[2, 11])
    for rule, temperature in ((Rule.TOKENWISE, None), (Rule.BLOCK, None), (Rule.TOKENWISE, 0.0)):
        told = replace(asked, rule=rule, draft_temperature=temperature)
        assert rounds(taught, told, [])[0].token_ids == rounds(fresh, told, [])[0].token_ids
    greedy = replace(asked, law=SamplingParams(temperature=0.0))
    assert rounds(taught, greedy, [])[0].token_ids[:2] == [10, 9]
    assert rounds(fresh, greedy, [])[0].token_ids[:2] != [10, 9]
    drawn = [rounds(taught, replace(asked, seed=seed, seed_is_fresh=True), [])[0].token_ids[0] for seed in range(20)]
    assert drawn.count(10) > 10


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_what_is_ahead_is_drafted_behind_and_leaves_no_trace(penalty: float) -> None:
    """By draws of its domain and the inner base; penalties count it, and take it back."""
    told = sequence(logit_rules=LogitRules(presence_penalty=penalty))
    guesser = drafter().guesser(told, Domain.STAGED_DRAFT)
    guesser.read(told.prompt)
    before = guesser.guess(3)
    ahead = [2, 9]
    for place, (token, law) in enumerate(guesser.guess(3, ahead)):
        assert law is not None
        assert token == law.token_at(uniform(told.seed, len(told.prompt), place, Domain.STAGED_DRAFT, len(ahead)))
    after = guesser.guess(3)
    assert [token for token, _ in after] == [token for token, _ in before]
    guesser.read(ahead)
    fresh = drafter().guesser(replace(told, committed=ahead), Domain.STAGED_DRAFT)
    fresh.read([*told.prompt, *ahead])
    assert [token for token, _ in guesser.guess(4)] == [token for token, _ in fresh.guess(4)]


def test_it_counts_and_drafts_on_one_thread_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it works, the event loop goes on; the text comes in order all the same."""
    threads, release, honest = set[str](), threading.Event(), ngram.back_off

    def slow(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        assert release.wait(60)
        return honest(*arguments)

    monkeypatch.setattr(ngram, "back_off", slow)

    async def run() -> None:
        of, told = drafter(), [sequence(seed=seed, prompt=TEXT) for seed in range(3)]
        proposals = [of.open(each).propose(2) for each in told]
        await asyncio.sleep(0.01)
        release.set()
        for each, proposal in zip(told, proposals, strict=True):
            assert (await proposal).token_ids == reference(TEXT, each, 2)
        drafting = of.open(told[0])
        abandoned = drafting.propose(2)
        drafting.close()
        with pytest.raises(asyncio.CancelledError):
            await abandoned

    asyncio.run(run())
    assert threads == {"ngram_0"}
