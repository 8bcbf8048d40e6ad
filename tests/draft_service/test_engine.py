"""The draft's engine: what it proposes is the draft's law, whatever came before."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import DraftWork, Drawn
from kernels.adjustments import LogitRules
from kernels.dense import EXCLUDED, DraftLogits
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseDistribution, sparsify
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.draft_service.engines import CONFIG, PROMPT, VOCABULARY, Driver, engine_of, running, sequence
from tests.kernels.reference import coupled_choice, standardise


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    with running(engine_of(loaded)) as engine:
        yield engine


def reference(
    packed: ModelRunner, tokens: list[int], law: SamplingParams, seed: int, gamma: int, rule: Rule = Rule.TOKENWISE
) -> list[int]:
    """γ tokens drafted one by one, the whole prefix read anew for each."""
    base = len(tokens)
    for index in range(gamma):
        slot = packed.pool.allocate()
        logits = packed.forward([Chunk(slot, tokens, 0, len(tokens) - 1)])[:, :VOCABULARY]
        packed.pool.free(slot)
        if law.is_greedy:
            tokens = [*tokens, int(logits.argmax())]
        elif rule is Rule.COUPLED:
            tokens = [*tokens, coupled_choice(standardise(logits[0].double().numpy(), law), seed, len(tokens))]
        else:
            (q,) = sparsify(probabilities(logits, law), CONFIG)
            tokens = [*tokens, q.token_at(uniform(seed, base, index, Domain.DRAFT))]
    return tokens[base:]


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_models_own_over_many_rounds(
    engine: DraftEngine, loaded: LoadedModel, temperature: float, rule: Rule
) -> None:
    """Verdicts that accept all, some and none of a proposal: each next draft is what a fresh reading gives."""
    fresh = ModelRunner.build(loaded, max_sequences=1, max_length=96)
    told = sequence(temperature, rule=rule)
    driver, tokens, committed = Driver(engine, told), list(PROMPT), list[int]()
    for accepted in (5, 0, 2, 5, 5, 1, 4):
        draft = driver.propose(5, committed)
        assert draft.token_ids == reference(fresh, tokens, told.law, told.seed, 5, rule)
        assert len(draft.laws) == (0 if rule is Rule.COUPLED else 5)
        committed = [*draft.token_ids[:accepted], 11 + accepted]
        tokens += committed


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
def test_a_draft_may_have_a_temperature_of_its_own(
    engine: DraftEngine, loaded: LoadedModel, rule: Rule, temperature: float
) -> None:
    """And what is told is what was drawn from: a point mass at 0."""
    fresh = ModelRunner.build(loaded, max_sequences=1, max_length=96)
    told = replace(sequence(rule=rule), draft_temperature=temperature)
    draft = Driver(engine, told).propose(4)
    assert draft.token_ids == reference(fresh, PROMPT, replace(told.law, temperature=temperature), told.seed, 4, rule)
    if rule is Rule.TOKENWISE:
        assert [law is None for law in draft.laws] == [temperature == 0] * 4
    greedy = replace(sequence(0.0, rule=rule), draft_temperature=temperature)
    assert Driver(engine, greedy).propose(4).token_ids == reference(fresh, PROMPT, greedy.law, told.seed, 4, rule)


@pytest.mark.parametrize(("kept", "committed"), [(1, [12, 13, 14, 15]), (3, [])], ids=["alone meanwhile", "cut"])
def test_what_was_committed_replaces_what_was_drafted(
    engine: DraftEngine, loaded: LoadedModel, kept: int, committed: list[int]
) -> None:
    """The target has gone on alone for a while, or a verdict ends inside the proposal."""
    fresh = ModelRunner.build(loaded, max_sequences=1, max_length=96)
    driver = Driver(engine, sequence())
    committed = [*driver.propose(6).token_ids[:kept], *committed]
    again = driver.propose(4, committed)
    assert again.token_ids == reference(fresh, [*PROMPT, *committed], driver.sequence.law, 3, 4)


def test_after_a_pause_it_catches_up_in_one_pass(
    engine: DraftEngine, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier wanted no proposals for a while: what the target wrote meanwhile is read as one chunk, no token by
    itself.
    """
    fresh = ModelRunner.build(loaded, max_sequences=1, max_length=96)
    driver = Driver(engine, sequence())
    driver.propose(3)
    forward, chunks = engine.forward, list[int]()

    def recorded(work: Sequence[DraftWork]) -> list[Drawn]:
        chunks.extend(len(item.chunk.tokens) for item in work)
        return forward(work)

    monkeypatch.setattr(engine, "forward", recorded)
    committed = list(range(20, 34))  # within what one pass reads
    again = driver.propose(3, committed)
    assert again.token_ids == reference(fresh, [*PROMPT, *committed], driver.sequence.law, 3, 3)
    assert [chunk for chunk in chunks if chunk > 1] == [len(committed)]


def test_what_is_sent_is_what_was_sampled_from(engine: DraftEngine) -> None:
    draft = Driver(engine, sequence()).propose(8)
    for index, (token, law) in enumerate(zip(draft.token_ids, draft.laws, strict=True)):
        assert isinstance(law, SparseDistribution)
        assert token == law.token_at(uniform(3, len(PROMPT), index, Domain.DRAFT))
        assert 1 <= len(law.ids) <= CONFIG.max_support
        assert law.total == int(law.weights.sum(dtype=np.int64))


def test_under_sigmoid_the_same_tokens_come_with_the_models_logits(engine: DraftEngine, loaded: LoadedModel) -> None:
    fresh = ModelRunner.build(loaded, max_sequences=1, max_length=96)
    told = sequence(rule=Rule.SIGMOID, law=SamplingParams(temperature=0.8, top_k=30))
    draft = Driver(engine, told).propose(6)
    assert draft.token_ids == Driver(engine, replace(told, rule=Rule.TOKENWISE)).propose(6).token_ids
    slot = fresh.pool.allocate()
    z = fresh.forward([Chunk(slot, [*PROMPT, *draft.token_ids[:-1]], 0, len(PROMPT) - 1)])[:, :VOCABULARY] / 0.8
    for row, token, logits in zip(z, draft.token_ids, draft.laws, strict=True):
        assert isinstance(logits, DraftLogits)
        assert (logits.values.dtype, logits.values.shape) == (torch.float16, (VOCABULARY,))
        inside = logits.values != EXCLUDED
        assert inside[token]
        assert inside.nonzero().flatten().tolist() == sorted(row.topk(30).indices.tolist())
        assert logits.values[inside].float() == pytest.approx(row[inside], abs=0.02)  # 16 bits of logits up to 32


def test_a_draft_of_fewer_ids_excludes_the_rest(loaded: LoadedModel) -> None:
    columns = loaded.vocab_size
    with running(engine_of(loaded, vocab_size=columns + 7)) as engine:
        told = sequence(rule=Rule.SIGMOID, law=SamplingParams())
        (logits,) = Driver(engine, told, vocab_size=columns + 7).propose(1).laws
    assert isinstance(logits, DraftLogits)
    assert (logits.values == EXCLUDED).tolist() == [False] * columns + [True] * 7


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.SIGMOID])
def test_greedy_drafts_are_point_masses(engine: DraftEngine, rule: Rule) -> None:
    assert Driver(engine, sequence(0.0, rule=rule)).propose(4).laws == [None] * 4


def test_padding_is_never_drafted(loaded: LoadedModel) -> None:
    """A target whose vocabulary ends before what the draft would say most gladly."""
    packed = ModelRunner.build(loaded, max_sequences=1, max_length=96)
    logits = packed.forward([Chunk(packed.pool.allocate(), PROMPT, 0, len(PROMPT) - 1)])[0]
    end = int(logits.argmax())
    with running(engine_of(loaded, vocab_size=end)) as engine:
        drafted = Driver(engine, sequence(0.0), vocab_size=end).propose(6).token_ids
    assert drafted[0] == int(logits[:end].argmax())
    assert max(drafted) < end


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
def test_a_target_may_know_more_tokens_than_the_draft_has(loaded: LoadedModel, rule: Rule) -> None:
    """It drafts what it has, in one call as by steps."""
    vocab_size = loaded.vocab_size + 7
    with running(engine_of(loaded, vocab_size=vocab_size)) as wide:
        lone, *both = [Driver(wide, sequence(rule=rule), vocab_size=vocab_size) for _ in range(3)]
        alone = lone.propose(6).token_ids
        for driver in both:
            driver.ask(6)
        assert [driver.answer().token_ids for driver in both] == [alone] * 2


def test_at_least_one_token_is_drafted_however_unsure(engine: DraftEngine) -> None:
    assert len(Driver(engine, replace(sequence(), max_entropy=0.0)).propose(5).token_ids) == 1


def test_under_coupled_drafts_depend_on_the_position_and_not_on_the_round(engine: DraftEngine) -> None:
    """What is committed as drafted is drafted on as if no round had ended there."""
    whole = Driver(engine, sequence(rule=Rule.COUPLED)).propose(8).token_ids
    driver = Driver(engine, sequence(rule=Rule.COUPLED))
    first = driver.propose(3).token_ids
    second = driver.propose(3, first).token_ids
    assert [*first, *second, *driver.propose(2, second).token_ids] == whole
    fresh = replace(sequence(rule=Rule.COUPLED), committed=whole[:5])
    assert Driver(engine, fresh).propose(3).token_ids == whole[5:]


def test_penalties_and_bans_count_drafted_tokens(engine: DraftEngine) -> None:
    """With presence at its most no token comes twice, drafted or committed; a taken-back one may come again."""
    driver = Driver(engine, sequence(0.0, logit_rules=LogitRules(presence_penalty=100.0)))
    first = driver.propose(8).token_ids
    assert len(set(first)) == 8
    second = driver.propose(8, [*first[:2], 11]).token_ids
    assert not set(second) & {*first[:2], 11}
    fresh = Driver(engine, sequence(0.0, committed=[*first[:2], 11], logit_rules=LogitRules(presence_penalty=100.0)))
    assert fresh.propose(8).token_ids == second
    stop = first[0]
    held = Driver(engine, sequence(0.0, logit_rules=LogitRules(stop_token_ids=(stop,), min_new_tokens=3)))
    assert stop not in held.propose(3).token_ids
