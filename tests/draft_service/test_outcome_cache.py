"""The outcome cache in the engine: what was drafted ahead is what would be drafted, and nothing is left of it."""

import queue
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from draft_service.drafters.base import Draft, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.outcome_cache import END, LEAST_CHANCE, SpareTime, Trial
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel
from tests.cluster import wait_until
from tests.draft_service import engines
from tests.draft_service.engines import PLAIN, WITHIN_S, engine_of, running, sequence

ADJUSTED = LogitRules(repetition_penalty=1.3, presence_penalty=0.4, banned_tokens=(9, 11))
GAMMA = 4


class Eager(DraftEngine):
    """It always has time to draft ahead, until somebody asks; and can be looked into between two passes."""

    def start(self) -> None:
        self.cache.spare.steps = lambda now, width: 64  # type: ignore[method-assign]
        super().start()

    def look(self, inside: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox.put(lambda: answers.put(inside()))  # type: ignore[arg-type]
        return answers.get(timeout=WITHIN_S)

    def receive(self, message: Any) -> None:
        message() if callable(message) else super().receive(message)


@pytest.fixture(params=[1, 3], ids=["one by one", "three a pass"])
def engine(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Eager]:
    engine = eager(loaded)
    engine.cache.width = request.param
    with running(engine):
        yield engine


def eager(loaded: LoadedModel, **how: Any) -> Any:
    return engine_of(loaded, Eager, **{"max_length": 160, "blocks": 64, **how})


def told(
    temperature: float, rule: Rule, rules: LogitRules = PLAIN, *, seed: int = 3, looks_ahead: bool = True
) -> DraftSequence:
    return sequence(temperature, rule=rule, logit_rules=rules, seed=seed, looks_ahead=looks_ahead)


class Driver(engines.Driver):
    """It waits for what is drafted ahead."""

    engine: Eager

    def foresee(self) -> list[tuple[int, int]]:
        """Waits until nothing is left to draft ahead; returns the outcomes that were drafted for, likeliest first."""
        drafted = wait_until(lambda: self.engine.look(self._foreseen))
        assert set(drafted.values()) == {GAMMA}
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


# ------------------------------------------------------------------------------------------- what it chooses by


def test_what_is_begun_is_done_before_the_first_of_them_asks() -> None:
    spare, now = SpareTime(), 0.0
    assert spare.steps(now, 1) == 0, "no wait and no step is known yet"
    spare.spent(1, 5, 0.0025)
    for _ in range(60):
        spare.left["a"] = now
        now += 0.010
        spare.asked("a", now)
    spare.left["late"] = now
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)
    assert spare.steps(now, 4) == pytest.approx(5, abs=1), "as if one by one, until it is measured"
    assert spare.steps(now + 0.006, 1) == pytest.approx(8, abs=1)
    assert spare.steps(now + 0.02, 1) == 0, "overdue: it may ask at any moment"
    spare.left["early"] = now - 0.008
    assert spare.steps(now, 1) == pytest.approx(4, abs=1)


def share_on(gain: float, *, seed: int, rounds: int = 6000) -> float:
    """Of the last half of these rounds, how many were done with branches; a round is shorter by `gain` with them."""
    trial, coin, on_count = Trial(), random.Random(seed), 0
    for round_ in range(rounds):
        on = trial.choose()
        drift = 1.0 + 0.5 * round_ / rounds  # the machine grows slower
        pause = 100.0 if coin.random() < 0.002 else 1.0
        trial.add(pause * drift * (1.0 - gain * on) * coin.lognormvariate(0, 0.3), on=on)
        on_count += on and round_ >= rounds // 2
    return on_count / (rounds // 2)


@pytest.mark.parametrize("seed", range(2))
def test_what_pays_is_done_and_what_does_not_is_left(seed: int) -> None:
    assert share_on(0.1, seed=seed) > 0.9
    assert share_on(-0.1, seed=seed) < 0.1
