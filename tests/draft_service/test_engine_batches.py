"""The draft's engine with several at once: each drafts what it drafts alone, and nobody is held up for long."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from draft_service.drafters.base import Draft, DraftError
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import Ask, ModelSequence
from kernels.adjustments import LogitRules
from kernels.dense import DraftLogits
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import ModelRunner
from tests.draft_service.engines import CONFIG, PLAIN, PROMPT, VOCABULARY, Driver, running, sequence


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    with running(loaded) as engine:
        yield engine


def test_sequences_under_different_rules_draft_side_by_side(engine: DraftEngine) -> None:
    """Three of them share their passes; each is told what it would be told alone, up to the rounding of a pass."""
    law = SamplingParams(temperature=0.8)
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
    assert all(isinstance(law, SparseDistribution) for law in together[1].laws)
    for number in (0, 2):
        for mine, own in zip(together[number].laws, alone[number].laws, strict=True):
            assert isinstance(mine, DraftLogits)
            assert isinstance(own, DraftLogits)
            assert mine.values.float() == pytest.approx(own.values.float(), abs=0.02)


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


def test_a_long_prompt_does_not_hold_up_others(loaded: LoadedModel) -> None:
    """A prompt of five pieces and a step: the step is done first, though it was asked for last."""
    packed = ModelRunner.build(loaded, max_sequences=2, max_length=96)
    engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=16, threads=1)
    quick, long = (ModelSequence.begin(sequence(prompt=PROMPT * n), VOCABULARY) for n in (1, 11))
    order: list[str] = []

    def run(*, asked: dict[str, Ask]) -> None:
        for ask in asked.values():
            engine.receive(ask)
        while work := engine.schedule():
            engine.process(work, engine.forward(work))

    run(asked={"first": Ask(quick, [], 1, lambda _: order.append("first"))})
    run(
        asked={
            "long": Ask(long, [], 1, lambda _: order.append("long")),
            "quick": Ask(quick, [9], 1, lambda _: order.append("quick")),
        }
    )
    assert order == ["first", "quick", "long"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_a_pool_with_room_for_one_many_draft_as_with_room_for_all(loaded: LoadedModel, temperature: float) -> None:
    """Some lose what they hold, and are run again when it is their turn; their draws are those of their seed."""

    def drafted(blocks: int | None) -> list[list[int]]:
        packed = ModelRunner.build(loaded, max_sequences=6, max_length=96, blocks=blocks)
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
    packed = ModelRunner.build(loaded, max_sequences=2, max_length=96, blocks=3)
    engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=64, threads=1)
    engine.start()
    Driver(engine, sequence(prompt=PROMPT * 6)).propose(1)
    assert packed.pool.used_blocks == 2
    assert len(Driver(engine, sequence(prompt=[*PROMPT * 4, 5, 6, 7])).propose(6).token_ids) == 6
    engine.stop()
    assert packed.pool.used_blocks == 2, "the first has given both of its own back"


def test_two_that_both_need_more_do_not_wait_for_each_other(loaded: LoadedModel) -> None:
    packed = ModelRunner.build(loaded, max_sequences=2, max_length=96, blocks=3)
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
