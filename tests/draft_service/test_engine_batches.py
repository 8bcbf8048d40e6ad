"""The draft's engine with several at once: each drafts what it drafts alone, and nobody is held up for long."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from draft_service.drafters.base import Draft, DraftError, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import Ask, ModelSequence
from kernels.adjustments import LogitRules
from kernels.dense import DraftLogits
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel
from tests.draft_service.engines import PLAIN, PROMPT, VOCABULARY, Driver, engine_of, running, sequence


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[DraftEngine]:
    with running(engine_of(loaded)) as engine:
        yield engine


def alone(engine: DraftEngine, told: DraftSequence, gamma: int) -> Draft:
    driver = Driver(engine, told)
    draft = driver.propose(gamma)
    driver.close()
    return draft


def together(engine: DraftEngine, told: Sequence[DraftSequence], gamma: int) -> list[Draft]:
    drivers = [Driver(engine, each) for each in told]
    for driver in drivers:
        driver.ask(gamma)
    return [driver.answer() for driver in drivers]


ADJUSTED = pytest.mark.parametrize("rules", [PLAIN, LogitRules(presence_penalty=1.0)], ids=["plain", "adjusted"])


@ADJUSTED
def test_neighbours_change_nothing(engine: DraftEngine, rules: LogitRules) -> None:
    """Four at once, of different rules and temperatures, draft what each drafts alone, in one call or by steps."""
    kinds = [(1.0, Rule.COUPLED), (1.0, Rule.TOKENWISE), (0.7, Rule.SIGMOID), (0.0, Rule.COUPLED)]
    told = [
        sequence(temperature, seed=seed, prompt=PROMPT[seed:], rule=rule, logit_rules=rules)
        for seed, (temperature, rule) in enumerate(kinds)
    ]
    for draft, own in zip(together(engine, told, 6), [alone(engine, each, 6) for each in told], strict=True):
        assert draft.token_ids == own.token_ids
        for law, same in zip(draft.laws, own.laws, strict=True):
            assert type(law) is type(same)
            if isinstance(law, DraftLogits) and isinstance(same, DraftLogits):  # passes of other widths round otherwise
                assert law.values.float() == pytest.approx(same.values.float(), abs=0.02)


@ADJUSTED
def test_an_unsure_draft_ends_its_proposal_and_goes_on_after_the_verdict(
    engine: DraftEngine, rules: LogitRules
) -> None:
    """Alone or in company it ends at the same token; what came until then is what would have come without a bound."""
    kinds = [(1.0, Rule.TOKENWISE), (1.0, Rule.COUPLED), (0.0, Rule.TOKENWISE)]
    told = [
        sequence(temperature, seed=seed, rule=rule, logit_rules=rules, max_entropy=1.5)
        for seed, (temperature, rule) in enumerate(kinds)
    ]
    lengths = []
    for each, draft in zip(told, together(engine, told, 8), strict=True):
        whole, driver = alone(engine, replace(each, max_entropy=None), 8), Driver(engine, each)
        one = driver.propose(8)
        assert 1 <= len(driver.propose(2, [*one.token_ids, 9]).token_ids) <= 2
        driver.close()
        assert draft.token_ids == one.token_ids == whole.token_ids[: len(one.token_ids)]
        assert len(draft.laws) == len(one.laws) == (0 if each.rule is Rule.COUPLED else len(one.token_ids))
        lengths.append(len(one.token_ids))
    assert 1 <= min(lengths) < 8


def test_a_long_prompt_does_not_hold_up_others(loaded: LoadedModel) -> None:
    """A prompt of five pieces and a step: the step is done first, though it was asked for last."""
    engine = engine_of(loaded)
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
        engine = engine_of(loaded, max_sequences=6, blocks=blocks)
        pool = engine.model_runner.pool
        engine.start()
        drivers = [Driver(engine, sequence(temperature, prompt=PROMPT * (i + 3), seed=i)) for i in range(6)]
        told: list[list[int]] = [[] for _ in drivers]
        committed: list[list[int]] = [[]] * 6
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
        Driver(engine, sequence(looks_ahead=False)).propose(1)  # what was closed has been taken in by now
        engine.stop()
        pool.check_integrity()
        assert pool.used_blocks == 1
        return told

    assert drafted(blocks=3) == drafted(blocks=None)


def test_a_round_has_room_for_all_of_itself_before_it_begins(loaded: LoadedModel) -> None:
    """A proposal that is written in one call grows into a block that another has to give back."""
    engine = engine_of(loaded, prefill_tokens=64, max_sequences=2, blocks=3)
    pool = engine.model_runner.pool
    engine.start()
    Driver(engine, sequence(prompt=PROMPT * 6)).propose(1)
    assert pool.used_blocks == 2
    assert len(Driver(engine, sequence(prompt=[*PROMPT * 4, 5, 6, 7])).propose(6).token_ids) == 6
    engine.stop()
    assert pool.used_blocks == 2, "the first has given both of its own back"


def test_two_that_both_need_more_do_not_wait_for_each_other(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, prefill_tokens=64, max_sequences=2, blocks=3)
    pool = engine.model_runner.pool
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
    assert pool.used_blocks == 3
    ask(first, "first again", [8] * 20)  # a block more
    ask(second, "second again", [8] * 10)  # and one more here
    for _ in range(4):
        run()
    assert told == ["first", "second", "first again", "second again"]


def test_logits_that_are_no_numbers_end_one_sequence(engine: DraftEngine) -> None:
    bad = Driver(engine, sequence(logit_rules=LogitRules(banned_tokens=tuple(range(VOCABULARY)))))
    good = Driver(engine, sequence())
    bad.ask(2)
    good.ask(2)
    with pytest.raises(DraftError, match="no numbers") as caught:
        bad.answer()
    assert caught.value.reason == "BAD_LOGITS"
    assert len(good.answer().token_ids) == 2
