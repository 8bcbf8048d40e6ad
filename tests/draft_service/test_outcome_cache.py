"""The outcome cache in the engine: what was drafted ahead is what would be drafted, and nothing is left of it."""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest

from draft_service.drafters import engine as engine_module
from draft_service.drafters.base import Draft, DraftError, DraftSequence
from draft_service.drafters.engine import OUTCOME_CACHE, DraftEngine
from draft_service.drafters.outcome_cache import END, LEAST_CHANCE, Trial
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams, sample
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from tests.draft_service import engines
from tests.draft_service.engines import PLAIN, PROMPT, WITHIN_S, engine_of, running, sequence
from tests.draft_service.pairs import DEMO

ADJUSTED = LogitRules(repetition_penalty=1.3, presence_penalty=0.4, banned_tokens=(9, 11))
GAMMA = 4


class Open(DraftEngine):
    """An engine that can be looked into between two passes, on its own thread."""

    def look(self, inside: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox.put(lambda: answers.put(inside()))  # type: ignore[arg-type]
        return answers.get(timeout=WITHIN_S)

    def receive(self, message: Any) -> None:
        message() if callable(message) else super().receive(message)


class Eager(Open):
    """It always has time to draft ahead, until somebody asks."""

    def start(self) -> None:
        self.cache.spare.steps = lambda now, width: 64  # type: ignore[method-assign]
        super().start()


class Clock:
    """The engine's, moved by hand, on its own thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(engine_module, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def move(self, to: float) -> None:
        self.now = to


@pytest.fixture(params=[1, 3], ids=["one by one", "three a pass"])
def engine(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Eager]:
    engine = eager(loaded)
    engine.cache.width = request.param
    with running(engine):
        yield engine


def eager(loaded: LoadedModel, kind: type[Open] = Eager, **how: Any) -> Any:
    return engine_of(loaded, kind, **{"max_length": 160, "blocks": 64, **how})


def told(
    temperature: float, rule: Rule, rules: LogitRules = PLAIN, *, seed: int = 3, looks_ahead: bool = True
) -> DraftSequence:
    return sequence(temperature, rule=rule, logit_rules=rules, seed=seed, looks_ahead=looks_ahead)


class Driver(engines.Driver):
    """It waits for what is drafted ahead."""

    engine: Open

    def foresee(self) -> list[tuple[int, int]]:
        """Waits until nothing is left to draft ahead; returns the outcomes that were drafted for, likeliest first."""
        end = time.monotonic() + WITHIN_S
        while (drafted := self.engine.look(self._foreseen)) is None:
            assert time.monotonic() < end, "it goes on and on"
            time.sleep(0.002)
        bounded = self.sequence.told.max_entropy is not None
        assert all(tokens == GAMMA or bounded for tokens in drafted.values())
        return list(drafted)

    def likeliest(self, draft: Draft, which: int = 0) -> list[int]:
        """What such a verdict on the proposal commits."""
        accepted, token = self.foresee()[which]
        return [*draft.token_ids[:accepted], token]

    def _foreseen(self) -> dict[tuple[int, int], int] | None:
        """How many tokens were drafted for each outcome; None while there is more to be."""
        look = self.engine.cache.lookaheads.get(self.sequence)
        if look is None or look.next_chance >= LEAST_CHANCE or look.open:
            return None
        return {outcome: branch.drafted for outcome, branch in look.branches.items() if outcome[1] != END}


def assert_alike(draft: Draft, other: Draft) -> None:
    """The same tokens, and the same laws but for how passes of other widths round."""
    assert draft.token_ids == other.token_ids
    assert len(draft.laws) == len(other.laws)
    for law, same in zip(draft.laws, other.laws, strict=True):
        assert isinstance(law, SparseDistribution) == isinstance(same, SparseDistribution)
        if isinstance(law, SparseDistribution) and isinstance(same, SparseDistribution):
            assert law.ids.tolist() == same.ids.tolist()
            assert law.weights.tolist() == pytest.approx(same.weights.tolist(), rel=1e-4, abs=1)


@pytest.mark.parametrize(
    ("temperature", "rule", "rules"),
    [
        (0.0, Rule.TOKENWISE, ADJUSTED),
        (1.0, Rule.TOKENWISE, PLAIN),
        (1.0, Rule.BLOCK, PLAIN),
        (1.0, Rule.COUPLED, ADJUSTED),
    ],
    ids=["greedy, adjusted", "tokenwise", "block", "coupled, adjusted"],
)
def test_a_branch_is_the_proposal_that_would_be_drafted(
    engine: Eager, temperature: float, rule: Rule, rules: LogitRules
) -> None:
    """Verdicts that were foreseen, on all of a proposal and on parts of it, and some that were not."""
    ahead = Driver(engine, told(temperature, rule, rules))
    plain = Driver(engine, told(temperature, rule, rules, looks_ahead=False))
    committed, hits = list[int](), 0
    for round_ in range(8):
        draft, without = ahead.propose(GAMMA, committed), plain.propose(GAMMA, committed)
        assert_alike(draft, without)
        assert without.foresight is None
        if round_:
            assert draft.foresight is not None
            assert draft.foresight.drafted >= draft.foresight.used == GAMMA * draft.foresight.hit
            hits += draft.foresight.hit
        outcomes = ahead.foresee()
        accepted, token = outcomes[round_ % len(outcomes)] if round_ % 4 != 3 else (2, 1234)
        committed = [*draft.token_ids[:accepted], token]
    assert hits == 6
    assert (engine.cache.counts.hits, engine.cache.counts.misses) == (6, 1)


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
def test_a_branch_ends_where_the_draft_is_unsure_too(engine: Eager, rule: Rule) -> None:
    ahead, plain = (Driver(engine, replace(told(1.0, rule, looks_ahead=on), max_entropy=3.0)) for on in (True, False))
    committed, lengths = list[int](), set[int]()
    for _ in range(8):
        draft, without = ahead.propose(GAMMA, committed), plain.propose(GAMMA, committed)
        assert_alike(draft, without)
        lengths.add(len(draft.token_ids))
        committed = ahead.likeliest(draft)
    assert engine.cache.counts.hits == 7
    assert len(lengths) > 1


def test_siblings_and_rounds_draw_apart(engine: Eager) -> None:
    """Each branch draws by the base that it would have: no draw of one round comes again in the next (invariant 2)."""
    driver = Driver(engine, replace(told(1.0, Rule.TOKENWISE), law=SamplingParams(temperature=100.0)))
    proposals, committed = list[list[int]](), list[int]()
    for _ in range(8):
        draft = driver.propose(GAMMA, committed)
        proposals.append(draft.token_ids)
        committed = driver.likeliest(draft, -1)
    assert all(set(one).isdisjoint(other) for one, other in pairwise(proposals))


@pytest.mark.parametrize(("gamma", "more", "hit"), [(2, [], True), (7, [], True), (GAMMA, [12, 13], False)])
def test_a_length_may_change_and_what_the_target_wrote_alone_is_no_outcome(
    engine: Eager, gamma: int, more: list[int], hit: bool
) -> None:
    ahead, plain = (Driver(engine, told(1.0, Rule.TOKENWISE, looks_ahead=on)) for on in (True, False))
    draft = ahead.propose(GAMMA)
    assert plain.propose(GAMMA).token_ids == draft.token_ids
    committed = [*ahead.likeliest(draft), *more]
    draft, without = ahead.propose(gamma, committed), plain.propose(gamma, committed)
    assert draft.foresight is not None
    assert draft.foresight.hit is hit
    assert_alike(draft, without)


def test_nothing_is_left_of_sequences_that_end(engine: Eager) -> None:
    drivers = [Driver(engine, told(1.0, rule, seed=i)) for i, rule in enumerate((Rule.COUPLED, Rule.BLOCK))]
    for driver in drivers:
        driver.propose(GAMMA, driver.likeliest(driver.propose(GAMMA)))
        driver.foresee()
    for driver in drivers:
        driver.close()
    engine.stop()
    assert not engine.cache.lookaheads
    assert engine.model_runner.pool.used_blocks == 0
    engine.model_runner.pool.check_integrity()


def rounds(engine: Eager, driver: Driver, *, until_foreseen: bool) -> list[Draft]:
    """Six rounds, whose verdicts accept more and more of each proposal."""
    drafts, committed = list[Draft](), list[int]()
    for accepted in (0, 1, 4, 2, 3, 4):
        drafts.append(driver.propose(GAMMA, committed))
        if until_foreseen:
            time.sleep(0.01)
        committed = [*drafts[-1].token_ids[:accepted], 7]
    return drafts


@pytest.mark.parametrize(
    ("engine", "broken"),
    [
        (1, "asked"),
        (3, "_look"),
        (3, "_begin"),
        (1, "work"),
        (3, "_take"),
        (1, "took"),
        (3, "left"),
        (3, "drop"),
        (1, "before"),
        (3, "after"),
    ],
    indirect=["engine"],
)
def test_a_cache_that_fails_costs_branches_and_nothing_else(
    engine: Eager, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third call of it raises, or that of its component does, before it begins or once it is done."""
    calls = count()
    plain = Driver(engine, told(1.0, Rule.COUPLED, looks_ahead=False))
    expected = rounds(engine, plain, until_foreseen=False)
    of, name = (OUTCOME_CACHE, "run") if broken in ("before", "after") else (engine.cache, broken)
    honest = getattr(of, name)

    def fails(*arguments: Any, **named: Any) -> Any:
        is_broken = next(calls) % 3 == 2
        if of is OUTCOME_CACHE:
            call, default = arguments

            def broken_call() -> Any:
                if broken == "after":
                    call()
                raise RuntimeError("injected")

            return honest(broken_call if is_broken else call, default)
        if is_broken:
            raise RuntimeError("injected")
        return honest(*arguments, **named)

    monkeypatch.setattr(of, name, fails)
    before = OUTCOME_CACHE.errors
    drivers = [Driver(engine, told(1.0, Rule.COUPLED)) for _ in range(2)]
    for driver in drivers:
        for draft, other in zip(rounds(engine, driver, until_foreseen=True), expected, strict=True):
            assert_alike(draft, other)
    for driver in (plain, *drivers):
        driver.close()
    engine.stop()
    assert not engine.lost.done()
    assert next(calls) >= 3
    assert OUTCOME_CACHE.errors > before
    assert engine.model_runner.pool.used_blocks == 0
    engine.model_runner.pool.check_integrity()


def test_a_sequence_that_breaks_its_turn_ends_alone(engine: Eager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its message and its proposal, wherever that is."""
    driver, other = Driver(engine, told(1.0, Rule.COUPLED)), Driver(engine, told(1.0, Rule.COUPLED, seed=4))
    for owner, name in ((engine, "_work_of"), (engine, "_take"), (engine, "_begin")):
        broken = Driver(engine, told(1.0, Rule.COUPLED, seed=5))
        honest = getattr(owner, name)

        def breaks(first: Any, *rest: Any, honest: Any = honest, broken: Driver = broken) -> Any:
            if getattr(first, "sequence", first) is broken.sequence:
                raise RuntimeError("injected")
            return honest(first, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, breaks)
            with pytest.raises(DraftError, match="injected"):
                broken.propose(GAMMA)
            assert len(other.propose(GAMMA, [7]).token_ids) == GAMMA
        broken.close()
    assert len(driver.propose(GAMMA).token_ids) == GAMMA
    for each in (driver, other):
        each.close()
    engine.stop()
    assert engine.model_runner.pool.used_blocks == 0


def test_where_drawing_fails_the_pool_is_as_it_was(engine: Eager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass went well before it. The step is tried again, and drafts what it would have."""
    plain = Driver(engine, told(1.0, Rule.COUPLED, ADJUSTED, looks_ahead=False))
    expected = plain.propose(GAMMA)
    honest, calls = sample, count()

    def fails(*arguments: Any) -> Any:
        if next(calls) % 2 == 0:
            raise RuntimeError("injected")
        return honest(*arguments)

    monkeypatch.setattr(engine_module, "sample", fails)
    again = Driver(engine, told(1.0, Rule.COUPLED, ADJUSTED, looks_ahead=False))
    assert_alike(again.propose(GAMMA), expected)
    assert next(calls) > 2


def test_branches_give_way_to_sequences(loaded: LoadedModel) -> None:
    """Of a pool of 12 blocks one sequence and its branches hold some; another asks for nearly all."""
    engine = eager(loaded, prefill_tokens=512, max_length=340, blocks=12)
    engine.start()
    small, large = Driver(engine, told(0.0, Rule.TOKENWISE)), Driver(engine, told(0.0, Rule.TOKENWISE))
    small.propose(GAMMA)
    small.foresee()
    draft = large.propose(GAMMA, list(range(1, 330)))
    assert len(draft.token_ids) == GAMMA
    engine.stop()
    engine.model_runner.pool.check_integrity()


def test_a_branch_whose_logits_are_no_numbers_harms_nobody(loaded: LoadedModel) -> None:
    """The token that follows in one outcome has an embedding that is none."""
    broken = load_model(ModelSource(str(DEMO / "draft"), dtype="float32", device="cpu"))
    engine = eager(broken)
    assert isinstance(broken.fused, FusedDecoder)
    engine.start()
    probe = Driver(engine, told(0.0, Rule.TOKENWISE))
    draft = probe.propose(GAMMA)
    outcomes = probe.foresee()
    probe.close()
    token = next(token for accepted, token in outcomes if token not in (*draft.token_ids, *PROMPT))
    broken.fused._layers.embedding[token] = float("nan")
    driver = Driver(engine, told(0.0, Rule.TOKENWISE))
    assert driver.propose(GAMMA).token_ids == draft.token_ids
    time.sleep(0.2)
    assert len(driver.propose(GAMMA, [*draft.token_ids[:1], 12]).token_ids) == GAMMA
    engine.stop()


def test_a_trial_is_told_of_a_round_together_with_what_it_saves(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call takes 30 ms here, a verdict a second, and every other round is begun with branches: it is the shorter one
    by a call, where its outcome was among them.
    """
    engine, clock = eager(loaded), Clock(monkeypatch)
    decode, turns, told_of = engine.loop.decode, count(), {True: list[float](), False: list[float]()}

    def slow(*arguments: Any) -> Any:
        clock.now += 0.03
        return decode(*arguments)

    monkeypatch.setattr(engine.loop, "decode", slow)
    monkeypatch.setattr(Trial, "choose", lambda self: next(turns) % 2 == 0)
    monkeypatch.setattr(Trial, "add", lambda self, seconds, on: told_of[on].append(seconds))
    engine.start()
    driver, committed = Driver(engine, told(0.0, Rule.TOKENWISE), clock=clock.perf_counter), list[int]()
    fresh = Driver(engine, told(0.0, Rule.TOKENWISE, looks_ahead=False), clock=clock.perf_counter)
    for round_ in range(9):
        draft = driver.propose(GAMMA, committed)
        left = engine.look(lambda: driver.sequence.left)
        follows = fresh.propose(GAMMA + 1, committed).token_ids[GAMMA]
        engine.look(lambda: clock.move(clock.now + 0.01))  # both have left
        while engine.look(lambda: driver.sequence in engine.cache.leaving):
            pass
        if round_ % 2 == 0:
            driver.foresee()
        engine.look(partial(clock.move, left + 1.0))
        committed = [*draft.token_ids, follows]
    engine.stop()
    assert len(told_of[True]) == len(told_of[False]) == 4
    assert told_of[False] == pytest.approx([1.03] * 4)
    assert engine.cache.counts.hits >= 3, "but for one that was not likely enough"
    assert sorted(told_of[True])[:3] == pytest.approx([1.0] * 3)


def test_where_waits_are_short_nothing_is_drafted_ahead(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = eager(loaded, Open), Clock(monkeypatch)
    engine.start()
    driver, committed = Driver(engine, told(0.0, Rule.TOKENWISE), clock=clock.perf_counter), list[int]()
    for _ in range(20):
        committed = [driver.propose(GAMMA, committed).token_ids[0], 12]
        engine.look(lambda: clock.move(clock.now + 0.0006))  # it has left, and the next is about to be asked for
        for _ in range(3):  # times that the engine looks for something to do
            engine.look(lambda: None)
    engine.stop()
    assert engine.cache.counts.drafted == 0
