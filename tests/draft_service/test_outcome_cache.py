"""The outcome cache in the engine: a branch equals the proposal drafted after the verdict, and frees its blocks."""

import queue
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from draft_service.drafters.base import Draft, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.outcome_cache import END, LEAST_CHANCE, SpareTime, Trial
from draft_service.drafters.sequence import DraftWork, Drawn, ModelSequence
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel
from tests.cluster import wait_until
from tests.draft_service import engines
from tests.draft_service.engines import PLAIN, TIMEOUT_S, engine_of, running, sequence

ADJUSTED = LogitRules(repetition_penalty=1.3, presence_penalty=0.4, banned_tokens=(9, 11))
GAMMA = 4


class Always(Trial):
    def choose(self) -> bool:
        return True


class Eager(DraftEngine):
    """Drafts branches in each round until a proposal is requested. `look` runs a function between two steps."""

    def start(self) -> None:
        self.drawn: list[ModelSequence] = []  # of each work, in order
        self.cache.trials = defaultdict(Always)
        self.cache.spare.steps = lambda now, width: 64  # type: ignore[method-assign]
        super().start()

    def look(self, inside: Callable[[], Any]) -> Any:
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox.put(lambda: results.put(inside()))  # type: ignore[arg-type]
        return results.get(timeout=TIMEOUT_S)

    def receive(self, message: Any) -> None:
        message() if callable(message) else super().receive(message)

    def draw(self, work: Sequence[DraftWork]) -> Sequence[Drawn]:
        self.drawn += [item.sequence for item in work]
        return super().draw(work)


@pytest.fixture(params=[1, 3], ids=["one by one", "three a step"])
def engine(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Eager]:
    engine = eager(loaded)
    engine.cache.width = request.param
    with running(engine):
        yield engine


def eager(loaded: LoadedModel, **how: Any) -> Any:
    return engine_of(loaded, Eager, **{"max_length": 160, "blocks": 64, **how})


def opening(
    temperature: float, rule: Rule, rules: LogitRules = PLAIN, *, seed: int = 3, uses_outcome_cache: bool = True
) -> DraftSequence:
    return sequence(temperature, rule=rule, logit_rules=rules, seed=seed, uses_outcome_cache=uses_outcome_cache)


class Driver(engines.Driver):
    """Waits for branches."""

    engine: Eager

    def wait_for_branches(self) -> list[tuple[int, int]]:
        """Wait until all branches are drafted. Return their outcomes, likeliest first."""
        drafted = wait_until(lambda: self.engine.look(self._branches))
        assert set(drafted.values()) == {GAMMA}
        return list(drafted)

    def likeliest(self, draft: Draft, which: int = 0) -> list[int]:
        """The tokens that this outcome commits."""
        accepted, token = self.wait_for_branches()[which]
        return [*draft.token_ids[:accepted], token]

    def _branches(self) -> dict[tuple[int, int], int] | None:
        """Tokens drafted for each outcome; None while there is more to draft."""
        entry = self.engine.cache.entries.get(self.sequence)
        if entry is None or entry.next_chance >= LEAST_CHANCE or entry.open:
            return None
        return {outcome: branch.drafted for outcome, branch in entry.branches.items() if outcome[1] != END}


def assert_alike(draft: Draft, other: Draft) -> None:
    """The same tokens, and the same distributions, up to the rounding of steps of other widths."""
    assert draft.token_ids == other.token_ids
    assert len(draft.distributions) == len(other.distributions)
    for q, same in zip(draft.distributions, other.distributions, strict=True):
        assert isinstance(q, SparseDistribution) == isinstance(same, SparseDistribution)
        if isinstance(q, SparseDistribution) and isinstance(same, SparseDistribution):
            assert q.ids.tolist() == same.ids.tolist()
            assert q.weights.tolist() == pytest.approx(same.weights.tolist(), rel=1e-4, abs=1)


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
def test_a_branch_equals_the_proposal_drafted_after_the_verdict(
    engine: Eager, temperature: float, rule: Rule, rules: LogitRules
) -> None:
    """Verdicts on whole proposals and on parts, with and without a branch."""
    ahead = Driver(engine, opening(temperature, rule, rules))
    plain = Driver(engine, opening(temperature, rule, rules, uses_outcome_cache=False))
    committed, hits = list[int](), 0
    for round_ in range(8):
        draft, without = ahead.propose(GAMMA, committed), plain.propose(GAMMA, committed)
        assert_alike(draft, without)
        assert without.cache_use is None
        if round_:
            assert draft.cache_use is not None
            assert draft.cache_use.drafted >= draft.cache_use.used == GAMMA * draft.cache_use.hit
            hits += draft.cache_use.hit
        outcomes = ahead.wait_for_branches()
        accepted, token = outcomes[round_ % len(outcomes)] if round_ % 4 != 3 else (2, 1234)
        committed = [*draft.token_ids[:accepted], token]
    assert hits == 6


def test_only_tokens_of_the_proposal_count_as_used(engine: Eager) -> None:
    driver = Driver(engine, opening(0.0, Rule.TOKENWISE))
    first = driver.propose(GAMMA)
    own = engine.drawn[0]
    accepted, token = driver.wait_for_branches()[0]
    before = sum(each is own for each in engine.drawn)
    draft = driver.propose(2, [*first.token_ids[:accepted], token])
    assert draft.cache_use is not None
    assert draft.cache_use.hit
    assert sum(each is own for each in engine.drawn) == before > 0, "its tokens are those of the branch"
    assert draft.cache_use.used == len(draft.token_ids) == 2 < draft.cache_use.drafted


def test_no_draw_of_a_round_is_used_in_the_next(engine: Eager) -> None:
    """Each branch draws by the base that it would have (invariant 2)."""
    driver = Driver(engine, replace(opening(1.0, Rule.TOKENWISE), params=SamplingParams(temperature=100.0)))
    proposals, committed = list[list[int]](), list[int]()
    for _ in range(8):
        draft = driver.propose(GAMMA, committed)
        proposals.append(draft.token_ids)
        committed = driver.likeliest(draft, -1)
    assert all(set(one).isdisjoint(other) for one, other in pairwise(proposals))


@pytest.mark.parametrize(("gamma", "more", "hit"), [(2, [], True), (7, [], True), (GAMMA, [12, 13], False)])
def test_gamma_may_change_and_tokens_of_decode_match_no_branch(
    engine: Eager, gamma: int, more: list[int], hit: bool
) -> None:
    ahead, plain = (Driver(engine, opening(1.0, Rule.TOKENWISE, uses_outcome_cache=on)) for on in (True, False))
    draft = ahead.propose(GAMMA)
    assert plain.propose(GAMMA).token_ids == draft.token_ids
    committed = [*ahead.likeliest(draft), *more]
    draft, without = ahead.propose(gamma, committed), plain.propose(gamma, committed)
    assert draft.cache_use is not None
    assert draft.cache_use.hit is hit
    assert_alike(draft, without)


def test_rounds_are_compared_after_the_first(engine: Eager) -> None:
    """The pass of the first one holds the prompt; after `Decode` a round does not follow the last proposal."""
    driver = Driver(engine, opening(1.0, Rule.TOKENWISE))
    committed, compared = list[int](), list[int]()
    for more in ([], [], [12, 13], []):
        draft = driver.propose(GAMMA, committed)
        compared.append(driver.sequence.judged)
        committed = [*driver.likeliest(draft), *more]
    driver.propose(GAMMA, committed)
    assert [*compared, driver.sequence.judged] == [0, 0, GAMMA, 0, GAMMA]


def test_a_cache_that_fails_frees_all_branches(engine: Eager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    driver = Driver(engine, opening(1.0, Rule.COUPLED))
    driver.propose(GAMMA)
    driver.wait_for_branches()
    monkeypatch.setattr(engine.cache, "drop", fail)
    driver.close()
    engine.stop()
    assert engine.model_runner.pool.used_blocks == 0


def test_sequences_that_end_free_their_branches(engine: Eager) -> None:
    drivers = [Driver(engine, opening(1.0, rule, seed=i)) for i, rule in enumerate((Rule.COUPLED, Rule.BLOCK))]
    for driver in drivers:
        driver.propose(GAMMA, driver.likeliest(driver.propose(GAMMA)))
        driver.wait_for_branches()
    for driver in drivers:
        driver.close()
    engine.stop()
    assert not engine.cache.entries
    assert engine.model_runner.pool.used_blocks == 0
    engine.model_runner.pool.check_integrity()


def test_sequences_preempt_branches(loaded: LoadedModel) -> None:
    """One sequence and its branches hold some of 12 blocks; another needs nearly all."""
    engine = eager(loaded, prefill_tokens=512, max_length=340, blocks=12)
    engine.start()
    small, large = Driver(engine, opening(0.0, Rule.TOKENWISE)), Driver(engine, opening(0.0, Rule.TOKENWISE))
    small.propose(GAMMA)
    small.wait_for_branches()
    draft = large.propose(GAMMA, list(range(1, 330)))
    assert len(draft.token_ids) == GAMMA
    engine.stop()
    engine.model_runner.pool.check_integrity()


def test_steps_end_before_the_first_expected_request() -> None:
    spare, now = SpareTime(), 0.0
    assert spare.steps(now, 1) == 0, "without measurements"
    spare.add_steps(1, 5, 0.0025)
    for _ in range(60):
        spare.sent["a"] = now
        now += 0.010
        spare.requested("a", now)
    spare.sent["late"] = now
    assert spare.steps(now, 1) == pytest.approx(20, abs=1)
    assert spare.steps(now, 0) == spare.steps(now, 1), "no branch is left to draft"
    assert spare.steps(now, 4) == pytest.approx(5, abs=1), "widths not measured: one after the other"
    assert spare.steps(now + 0.006, 1) == pytest.approx(8, abs=1)
    assert spare.steps(now + 0.02, 1) == 0, "overdue"
    spare.sent["early"] = now - 0.008
    assert spare.steps(now, 1) == pytest.approx(4, abs=1)


def share_on(gain: float, *, seed: int, rounds: int = 6000) -> float:
    """The share of rounds with branches, in the last half. Branches shorten a round by `gain`."""
    trial, coin, on_count = Trial(), random.Random(seed), 0
    for round_ in range(rounds):
        on = trial.choose()
        drift = 1.0 + 0.5 * round_ / rounds  # the machine becomes slower
        pause = 100.0 if coin.random() < 0.002 else 1.0
        gamma = coin.randint(1, 8)
        seconds = pause * drift * (4 + gamma) * (1.0 - gain * on) * coin.lognormvariate(0, 0.3)
        trial.add(seconds, gamma, on=on)
        on_count += on and round_ >= rounds // 2
    return on_count / (rounds // 2)


@pytest.mark.parametrize("seed", range(2))
def test_branches_are_used_only_where_they_pay(seed: int) -> None:
    assert share_on(0.1, seed=seed) > 0.9
    assert share_on(-0.1, seed=seed) < 0.1
