"""The draft's engine: what it proposes is the draft's law, whoever else drafts beside it and whatever came before."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.drafters.base import Draft, DraftError, DraftSequence
from draft_service.drafters.drawing import Drawn
from draft_service.drafters.engine import DraftEngine, DraftWork
from draft_service.drafters.sequence import Ask, Close, ModelSequence
from kernels.adjustments import LogitRules
from kernels.dense import EXCLUDED, DraftLogits
from kernels.distribution import SamplingLaw, probabilities
from kernels.philox import Domain, uniform
from kernels.sparse import SparseConfig, SparseLaw, sample, sparsify
from kernels.verify import Rule
from kernels.verify_reference import coupled_choice, standardise
from outrider.lm.checkpoint import LoadedModel, ModelSource, load_model
from outrider.lm.packed import Chunk, PackedModel

DRAFT = Path(__file__).parents[2] / "models" / "demo" / "draft"
VOCABULARY = 2000  # less than the logits have columns: the rest is padding
CONFIG = SparseConfig(keep_mass=0.98, max_support=40)
PROMPT = [5, 17, 300, 42, 7, 7, 1999]
PLAIN = LogitRules()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(DRAFT), dtype="float32", device="cpu"))


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    packed = PackedModel.build(loaded, max_sequences=4, max_length=96)
    engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=16, threads=1)
    engine.start()
    yield engine
    engine.stop()


class Driver:
    """One sequence of an engine, driven by hand."""

    def __init__(self, engine: DraftEngine, sequence: DraftSequence, *, vocab_size: int = VOCABULARY) -> None:
        self._engine = engine
        self.sequence = ModelSequence.begin(sequence, vocab_size)
        self._results: queue.SimpleQueue[Draft | DraftError] = queue.SimpleQueue()

    def ask(self, gamma: int, committed: list[int] | None = None) -> None:
        self._engine.post(Ask(self.sequence, committed or [], gamma, self._results.put))

    def answer(self) -> Draft:
        result = self._results.get(timeout=20)
        if isinstance(result, DraftError):
            raise result
        return result

    def propose(self, gamma: int, committed: list[int] | None = None) -> Draft:
        self.ask(gamma, committed)
        return self.answer()

    def close(self) -> None:
        self._engine.post(Close(self.sequence))


def sequence(
    temperature: float = 1.0,
    *,
    prompt: list[int] | None = None,
    rules: LogitRules = PLAIN,
    seed: int = 3,
    rule: Rule = Rule.TOKENWISE,
) -> DraftSequence:
    return DraftSequence(prompt or PROMPT, [], SamplingLaw(temperature=temperature, top_p=0.95), rules, seed, rule)


def reference(
    packed: PackedModel, tokens: list[int], law: SamplingLaw, seed: int, gamma: int, rule: Rule = Rule.TOKENWISE
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
            tokens = [*tokens, sample(q, uniform(seed, base, index, Domain.DRAFT))]
    return tokens[base:]


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_models_own_over_many_rounds(
    engine: DraftEngine, loaded: LoadedModel, temperature: float, rule: Rule
) -> None:
    """Verdicts that accept all, some and none of a proposal: each next draft is what a fresh reading gives."""
    fresh = PackedModel.build(loaded, max_sequences=1, max_length=96)
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
    fresh = PackedModel.build(loaded, max_sequences=1, max_length=96)
    told = replace(sequence(rule=rule), draft_temperature=temperature)
    draft = Driver(engine, told).propose(4)
    assert draft.token_ids == reference(fresh, PROMPT, replace(told.law, temperature=temperature), told.seed, 4, rule)
    if rule is Rule.TOKENWISE:
        assert [law is None for law in draft.laws] == [temperature == 0] * 4
    greedy = replace(sequence(0.0, rule=rule), draft_temperature=temperature)
    assert Driver(engine, greedy).propose(4).token_ids == reference(fresh, PROMPT, greedy.law, told.seed, 4, rule)


def test_what_others_wrote_meanwhile_replaces_what_was_drafted(engine: DraftEngine, loaded: LoadedModel) -> None:
    """The target has gone on alone for a while: several tokens that nobody drafted, some of them where drafts lie."""
    fresh = PackedModel.build(loaded, max_sequences=1, max_length=96)
    driver = Driver(engine, sequence())
    drafted = driver.propose(6).token_ids
    committed = [drafted[0], 12, 13, 14, 15]
    again = driver.propose(4, committed)
    assert again.token_ids == reference(fresh, [*PROMPT, *committed], driver.sequence.law, 3, 4)


def test_after_a_pause_it_catches_up_in_one_pass(
    engine: DraftEngine, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier wanted no proposals for a while: what the target wrote meanwhile is read as one chunk, no token by
    itself.
    """
    fresh = PackedModel.build(loaded, max_sequences=1, max_length=96)
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


def test_a_cut_verdict_may_end_inside_what_was_drafted(engine: DraftEngine, loaded: LoadedModel) -> None:
    fresh = PackedModel.build(loaded, max_sequences=1, max_length=96)
    driver = Driver(engine, sequence())
    drafted = driver.propose(6).token_ids
    again = driver.propose(4, drafted[:3])
    assert again.token_ids == reference(fresh, [*PROMPT, *drafted[:3]], driver.sequence.law, 3, 4)


def test_what_is_sent_is_what_was_sampled_from(engine: DraftEngine) -> None:
    draft = Driver(engine, sequence()).propose(8)
    for index, (token, law) in enumerate(zip(draft.token_ids, draft.laws, strict=True)):
        assert isinstance(law, SparseLaw)
        assert token == sample(law, uniform(3, len(PROMPT), index, Domain.DRAFT))
        assert 1 <= len(law.ids) <= CONFIG.max_support
        assert law.total == int(law.weights.sum(dtype=np.int64))


def test_under_sigmoid_the_same_tokens_come_with_the_models_logits(engine: DraftEngine, loaded: LoadedModel) -> None:
    fresh = PackedModel.build(loaded, max_sequences=1, max_length=96)
    told = replace(sequence(), rule=Rule.SIGMOID, law=SamplingLaw(temperature=0.8, top_k=30))
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


def test_sequences_under_different_rules_draft_side_by_side(engine: DraftEngine) -> None:
    """Three of them share their passes; each is told what it would be told alone, up to the rounding of a pass."""
    law = SamplingLaw(temperature=0.8)
    kinds = [
        replace(sequence(prompt=[*PROMPT, 8 + number], seed=number), rule=rule, law=law)
        for number, rule in enumerate((Rule.SIGMOID, Rule.TOKENWISE, Rule.SIGMOID))
    ]
    drivers = [Driver(engine, told) for told in kinds]
    for driver in drivers:
        driver.ask(4)
    together = [driver.answer() for driver in drivers]
    for driver in drivers:
        driver.close()
    alone = [Driver(engine, told).propose(4) for told in kinds]
    assert [draft.token_ids for draft in together] == [draft.token_ids for draft in alone]
    assert all(isinstance(law, SparseLaw) for law in together[1].laws)
    for number in (0, 2):
        for mine, own in zip(together[number].laws, alone[number].laws, strict=True):
            assert isinstance(mine, DraftLogits)
            assert isinstance(own, DraftLogits)
            assert mine.values.float() == pytest.approx(own.values.float(), abs=0.02)


def test_a_draft_of_fewer_ids_excludes_the_rest(loaded: LoadedModel) -> None:
    packed = PackedModel.build(loaded, max_sequences=1, max_length=96)
    columns = loaded.vocab_size
    engine = DraftEngine(packed, vocab_size=columns + 7, config=CONFIG, prefill_tokens=16, threads=1)
    engine.start()
    try:
        told = replace(sequence(), rule=Rule.SIGMOID, law=SamplingLaw())
        (logits,) = Driver(engine, told, vocab_size=columns + 7).propose(1).laws
    finally:
        engine.stop()
    assert isinstance(logits, DraftLogits)
    assert (logits.values == EXCLUDED).tolist() == [False] * columns + [True] * 7


def test_under_sigmoid_greedy_drafts_are_point_masses_too(engine: DraftEngine) -> None:
    assert Driver(engine, replace(sequence(0.0), rule=Rule.SIGMOID)).propose(2).laws == [None] * 2


def test_greedy_drafts_are_point_masses(engine: DraftEngine) -> None:
    assert Driver(engine, sequence(0.0)).propose(4).laws == [None] * 4


def test_padding_is_never_drafted(loaded: LoadedModel) -> None:
    """A target whose vocabulary ends before what the draft would say most gladly."""
    packed = PackedModel.build(loaded, max_sequences=1, max_length=96)
    slot = packed.pool.allocate()
    logits = packed.forward([Chunk(slot, PROMPT, 0, len(PROMPT) - 1)])[0]
    packed.pool.free(slot)
    end = int(logits.argmax())
    engine = DraftEngine(packed, vocab_size=end, config=CONFIG, prefill_tokens=16, threads=1)
    engine.start()
    drafted = Driver(engine, sequence(0.0), vocab_size=end).propose(6).token_ids
    engine.stop()
    assert drafted[0] == int(logits[:end].argmax())
    assert max(drafted) < end


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
def test_a_target_may_know_more_tokens_than_the_draft_has(loaded: LoadedModel, rule: Rule) -> None:
    """It drafts what it has, in one call as by steps."""
    packed = PackedModel.build(loaded, max_sequences=2, max_length=96)
    vocab_size = loaded.vocab_size + 7
    wide = DraftEngine(packed, vocab_size=vocab_size, config=CONFIG, prefill_tokens=16, threads=1)
    wide.start()
    lone = Driver(wide, sequence(rule=rule), vocab_size=vocab_size)
    alone = lone.propose(6).token_ids
    lone.close()
    both = [Driver(wide, sequence(rule=rule), vocab_size=vocab_size) for _ in range(2)]
    for driver in both:
        driver.ask(6)
    assert [driver.answer().token_ids for driver in both] == [alone] * 2
    wide.stop()


@pytest.mark.parametrize("adjusted", [PLAIN, LogitRules(presence_penalty=1.0)], ids=["plain", "adjusted"])
def test_neighbours_change_nothing(engine: DraftEngine, adjusted: LogitRules) -> None:
    """Four at once, of different rules and temperatures, draft what each drafts alone, in one call or by steps."""
    kinds = [(1.0, Rule.COUPLED), (1.0, Rule.TOKENWISE), (0.7, Rule.COUPLED), (0.0, Rule.COUPLED)]

    def drivers() -> list[Driver]:
        told = [
            sequence(temperature, seed=seed, prompt=PROMPT[seed:], rule=rule, rules=adjusted)
            for seed, (temperature, rule) in enumerate(kinds)
        ]
        return [Driver(engine, each) for each in told]

    alone = []
    for driver in drivers():
        alone.append(driver.propose(6))
        driver.close()
    together = drivers()
    for driver in together:
        driver.ask(6)
    drafts = [driver.answer() for driver in together]
    assert [draft.token_ids for draft in drafts] == [draft.token_ids for draft in alone]
    assert [len(draft.laws) for draft in (*alone, *drafts)] == [0, 6, 0, 0] * 2


@pytest.mark.parametrize("adjusted", [PLAIN, LogitRules(presence_penalty=1.0)], ids=["plain", "adjusted"])
def test_an_unsure_draft_ends_its_proposal_and_goes_on_after_the_verdict(
    engine: DraftEngine, loaded: LoadedModel, adjusted: LogitRules
) -> None:
    """Alone or in company it ends at the same token; what came until then is what would have come without a bound."""
    kinds = [(1.0, Rule.TOKENWISE), (1.0, Rule.COUPLED), (0.0, Rule.TOKENWISE)]
    told = [
        replace(sequence(temperature, seed=seed, rule=rule, rules=adjusted), max_entropy=1.5)
        for seed, (temperature, rule) in enumerate(kinds)
    ]
    free, alone = list[Draft](), list[Draft]()
    for each in told:
        for bounded, into in ((replace(each, max_entropy=None), free), (each, alone)):
            driver = Driver(engine, bounded)
            into.append(driver.propose(8))
            if bounded is each:  # the proposal ended early; the next one follows all the same
                again = driver.propose(2, [*into[-1].token_ids, 9])
                assert 1 <= len(again.token_ids) <= 2
            driver.close()
    together = [Driver(engine, each) for each in told]
    for driver in together:
        driver.ask(8)
    lengths = []
    for whole, one, driver in zip(free, alone, together, strict=True):
        draft = driver.answer()
        assert draft.token_ids == one.token_ids == whole.token_ids[: len(one.token_ids)]
        assert len(draft.laws) == len(one.laws) in (0, len(one.token_ids))
        lengths.append(len(one.token_ids))
    assert min(lengths) >= 1
    assert min(lengths) < 8


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
    driver = Driver(engine, sequence(0.0, rules=LogitRules(presence_penalty=100.0)))
    first = driver.propose(8).token_ids
    assert len(set(first)) == 8
    second = driver.propose(8, [*first[:2], 11]).token_ids
    assert not set(second) & {*first[:2], 11}
    fresh = Driver(
        engine,
        DraftSequence(PROMPT, [*first[:2], 11], SamplingLaw(temperature=0.0), LogitRules(presence_penalty=100.0), 3),
    )
    assert fresh.propose(8).token_ids == second
    stop = first[0]
    held = Driver(engine, sequence(0.0, rules=LogitRules(stop_token_ids=(stop,), min_new_tokens=3)))
    assert stop not in held.propose(3).token_ids


def test_a_long_prompt_does_not_hold_up_others(engine: DraftEngine) -> None:
    """A prompt of five pieces and a step: the step is done first, though it was asked for last."""
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    quick = Driver(engine, sequence())
    quick.propose(1)
    long = ModelSequence.begin(sequence(prompt=PROMPT * 11), VOCABULARY)
    engine.post(Ask(long, [], 1, lambda _: order.put("long")))
    engine.post(Ask(quick.sequence, [9], 1, lambda _: order.put("quick")))
    assert [order.get(timeout=20), order.get(timeout=20)] == ["quick", "long"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_a_pool_with_room_for_one_many_draft_as_with_room_for_all(loaded: LoadedModel, temperature: float) -> None:
    """Some lose what they hold, and are run again when it is their turn; their draws are those of their seed."""

    def drafted(blocks: int | None) -> list[list[int]]:
        packed = PackedModel.build(loaded, max_sequences=6, max_length=96, blocks=blocks)
        engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=16, threads=1)
        engine.start()
        drivers = [Driver(engine, sequence(temperature, prompt=PROMPT * (i + 3), seed=i)) for i in range(6)]
        told: list[list[int]] = [[] for _ in drivers]
        committed: list[list[int] | None] = [None] * 6
        for _ in range(3):
            for driver, tokens in zip(drivers, committed, strict=True):
                driver.ask(4, tokens)
            for i, driver in enumerate(drivers):
                tokens = driver.answer().token_ids
                told[i] += tokens
                committed[i] = [*tokens[: i % 4], 11 + i]
        for driver in drivers:
            driver.close()
            driver.close()
        Driver(engine, sequence()).propose(1)  # what was closed has been taken in by now
        engine.stop()
        packed.pool.check_integrity()
        assert packed.pool.used_blocks == 1
        return told

    assert drafted(blocks=3) == drafted(blocks=None)


def test_a_round_has_room_for_all_of_itself_before_it_begins(loaded: LoadedModel) -> None:
    """A proposal that is written in one call grows into a block that another has to give back."""
    packed = PackedModel.build(loaded, max_sequences=2, max_length=96, blocks=3)
    engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=64, threads=1)
    engine.start()
    Driver(engine, sequence(prompt=PROMPT * 6)).propose(1)
    assert packed.pool.used_blocks == 2
    assert len(Driver(engine, sequence(prompt=[*PROMPT * 4, 5, 6, 7])).propose(6).token_ids) == 6
    engine.stop()
    assert packed.pool.used_blocks == 2, "the first has given both of its own back"


def test_two_that_both_need_more_do_not_wait_for_each_other(loaded: LoadedModel) -> None:
    packed = PackedModel.build(loaded, max_sequences=2, max_length=96, blocks=3)
    engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=64, threads=1)
    first, second = (ModelSequence.begin(sequence(prompt=PROMPT * n), VOCABULARY) for n in (3, 9))
    told: list[str] = []

    def ask(who: ModelSequence, name: str, committed: list[int]) -> None:
        engine.receive(Ask(who, committed, 1, lambda _: told.append(name)))

    def run() -> None:
        if work := engine.schedule():
            engine.process(work, engine.forward(work))

    for who, name in ((first, "first"), (second, "second")):
        ask(who, name, [])
        run()
    assert packed.pool.used_blocks == 3
    ask(first, "first again", [8] * 20)  # a block more
    ask(second, "second again", [8] * 10)  # and one more here
    for _ in range(4):
        run()
    assert told == ["first", "second", "first again", "second again"]


def test_logits_that_are_no_numbers_end_one_sequence(engine: DraftEngine) -> None:
    bad = Driver(engine, sequence(rules=LogitRules(banned_tokens=tuple(range(VOCABULARY)))))
    good = Driver(engine, sequence())
    bad.ask(2)
    good.ask(2)
    with pytest.raises(DraftError, match="no numbers") as caught:
        bad.answer()
    assert caught.value.reason == "BAD_LOGITS"
    assert len(good.answer().token_ids) == 2
