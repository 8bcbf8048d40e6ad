"""Policies as properties: what each may do to γ, what it must find, and that it does so within a few percent.

The rounds here are simulated with known chances and times, so that the best γ is known too; policies are the service's
own code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from draft_service.adaptive import FIRST_PAUSE, LONGEST_PAUSE, STEP, TRY_GAMMA, TRY_ROUNDS, Adaptive
from draft_service.experience import Experience, Times
from draft_service.speculation import Fixed, Heuristic, Policy, Round
from outrider.service.cost_model import CostLine
from outrider.theory import expected_tokens_by_position, fixed_rate

CEILING = 16


@dataclass
class World:
    """A draft, a target and a network of known figures; times are in seconds.

    Attributes:
        chance: of a place of the proposal, from 0, to stand where all before it did.
        draft: of γ tokens.
        verify: of a pass of that many tokens, of this sequence and `others`.
        way: there and back, a queue included.
        tells_chances: whether verdicts tell the chances, as under `tokenwise`, or only what became of tokens.
        sure: the draft ends a proposal before a token with the chance 1 - sure.
        hit: the chance that a proposal after one of that length was drafted ahead.
    """

    chance: Callable[[int], float]
    draft: Callable[[int], float] = lambda gamma: 0.0002 + 0.001 * gamma
    verify: CostLine = field(default_factory=lambda: CostLine(0.008, 0.0003))
    way: float = 0.001
    others: int = 0
    tells_chances: bool = False
    noise: float = 0.1
    sure: float = 1.0
    hit: Callable[[int], float] = lambda gamma: 0.0

    def rate(self, gamma: int) -> float:
        """Tokens a second with this γ; 0 is the target alone."""
        tokens = expected_tokens_by_position([self.chance(place) for place in range(gamma)])
        seconds = self.verify.seconds(gamma + 1 + self.others)
        return tokens / (seconds + ((1 - self.hit(gamma)) * self.draft(gamma) + self.way if gamma else 0.0))


@dataclass
class Text:
    """What came of a run."""

    gammas: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    alone: int = 0  # tokens of those that the target wrote alone

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(
    policy: Policy, world: World, tokens: int, seed: int = 1, most: Callable[[int], int] = lambda at: CEILING
) -> Text:
    """Writes so many tokens, as `Sample` does: `most` is what may be drafted, by the number of the round."""
    text, chance, is_first = Text(), random.Random(seed), True

    def noisy(seconds: float) -> float:
        return seconds * (1 + chance.uniform(-world.noise, world.noise))

    after_round = False
    while text.tokens < tokens:
        gamma = policy.next(most(len(text.gammas)))
        text.gammas.append(gamma)
        if gamma == 0:
            for nth in range(max(1, policy.pause)):
                seconds = noisy(world.verify.seconds(1 + world.others))
                policy.observe(
                    Round(0, waited=seconds if nth else None, pass_tokens=1 + world.others, pass_cost=world.verify)
                )
                text.tokens, text.seconds, text.alone = text.tokens + 1, text.seconds + seconds, text.alone + 1
            after_round = False
            continue
        drafted = 1
        while drafted < gamma and chance.random() < world.sure:
            drafted += 1
        accepted = 0
        while accepted < drafted and chance.random() < world.chance(accepted):
            accepted += 1
        judged = min(accepted + 1, drafted)
        is_hit = chance.random() < world.hit(gamma)
        drafting = noisy(0.0001 if is_hit else world.draft(drafted))
        waited = noisy(world.verify.seconds(drafted + 1 + world.others) + world.way)
        policy.observe(
            Round(
                gamma,
                drafted,
                judged,
                accepted,
                [world.chance(place) for place in range(judged)] if world.tells_chances else (),
                drafting if after_round else None,
                None if is_first else waited,
                drafted + 1 + world.others,
                world.verify,
                drafted if is_hit else 0,
            )
        )
        text.tokens, text.seconds = text.tokens + accepted + 1, text.seconds + drafting + waited
        is_first, after_round = False, True
    return text


def adaptive(gamma: int = 5, experience: Experience | None = None, times: Times | None = None) -> Adaptive:
    return Adaptive(
        gamma,
        ceiling=CEILING,
        experience=experience or Experience(first_pause=FIRST_PAUSE),
        times=times or Times(),
    )


def best(world: World) -> tuple[int, float]:
    gamma = max(range(CEILING + 1), key=world.rate)
    return gamma, world.rate(gamma)


# ------------------------------------------------------------------------------------------------- by the letter


def test_fixed_is_what_was_asked_for_within_what_is_possible() -> None:
    policy = Fixed(5)
    assert [policy.next(most) for most in (16, 5, 3, 0, -1)] == [5, 5, 3, 0, 0]
    policy.observe(Round(5, 5, 1, 0))
    assert policy.next(16) == 5


def test_the_heuristic_adds_two_after_a_whole_proposal_and_else_takes_one() -> None:
    policy = Heuristic(5, ceiling=9)
    found = []
    for accepted in (5, 7, 9, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1):
        gamma = policy.next(CEILING)
        found.append(gamma)
        policy.observe(Round(gamma, gamma, min(accepted + 1, gamma), min(accepted, gamma)))
    assert found == [5, 7, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert policy.next(CEILING) == 3
    assert policy.next(2) == 2  # a limit is no verdict
    assert policy.next(CEILING) == 3
    policy.observe(Round(0))  # nor is a token of the target's own
    assert policy.next(CEILING) == 3


# --------------------------------------------------------------------------------------------------- finding the best


WORLDS = {
    "good draft": World(lambda place: 0.9),
    "fair draft": World(lambda place: 0.7),
    "poor draft": World(lambda place: 0.45),
    "easier further on": World(lambda place: 0.6 + 0.05 * min(place, 6)),
    "harder further on": World(lambda place: 0.95 - 0.12 * min(place, 6)),
    "far away": World(lambda place: 0.8, way=0.05),
    "costly tokens": World(lambda place: 0.9, verify=CostLine(0.004, 0.004)),
    "in company": World(lambda place: 0.8, others=12),
    "chances told": World(lambda place: 0.8, tells_chances=True),
    "free draft": World(lambda place: 0.5, draft=lambda gamma: 0.0001),
    "drafted ahead": World(lambda place: 0.8, hit=lambda gamma: 0.9),
    "less likely ahead": World(lambda place: 0.7, hit=lambda gamma: 0.85 - 0.05 * min(gamma, 10)),
    "useless draft": World(lambda place: 0.05),
    "slow draft": World(lambda place: 0.8, draft=lambda gamma: 0.012 * gamma),
}


@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_within_a_few_percent_of_the_best_fixed_length(name: str) -> None:
    """Once it has seen a few hundred rounds; noise of 10 % on every time, and what became of tokens is chance."""
    world = WORLDS[name]
    gamma, rate = best(world)
    experience, times = Experience(first_pause=FIRST_PAUSE), Times()
    run(adaptive(experience=experience, times=times), world, 1500)
    texts = [run(adaptive(experience=experience, times=times), world, 400, seed) for seed in range(2, 10)]
    found = sum(text.tokens for text in texts) / sum(text.seconds for text in texts)
    print(f"{name}: best {gamma}, {rate:.1f}/s; found {found:.1f}/s, mean γ {_mean(texts[-1].gammas):.1f}")
    assert found > 0.95 * rate


def test_short_texts_begin_with_what_others_have_taught() -> None:
    world = WORLDS["costly tokens"]
    experience, times = Experience(first_pause=FIRST_PAUSE), Times()
    run(adaptive(experience=experience, times=times), world, 800)
    gamma, _ = best(world)
    assert abs(adaptive(experience=experience, times=times).next(CEILING) - gamma) <= 2
    assert adaptive(gamma=7).next(CEILING) == 7  # where there is nothing to know


def test_a_draft_that_ends_early_is_not_paid_for_where_it_ends() -> None:
    """Its proposals end by themselves after two tokens or so, so that it costs nothing to ask for more."""
    world = World(lambda place: 0.8, sure=0.5)
    text = run(adaptive(), world, 3000)
    fixed = run(Fixed(1), world, 3000)
    assert _mean(text.gammas[100:]) > 4
    assert text.rate > 1.02 * fixed.rate


# ------------------------------------------------------------------------------------------------------- how it moves


@pytest.mark.parametrize("name", WORLDS)
def test_it_moves_by_two_at_most(name: str) -> None:
    gammas = run(adaptive(), WORLDS[name], 2000).gammas
    steps = {abs(after - before) for before, after in pairwise(gammas)}
    assert max(steps) <= STEP
    assert min(gammas) >= 0


def test_a_limit_is_kept_and_forgotten() -> None:
    """What the verifier wants, or what is left to write, bounds a proposal; afterwards γ is where it was."""
    policy, world = adaptive(), WORLDS["good draft"]
    run(policy, world, 1500)
    before = policy.next(CEILING)
    for most in (3, 1, 0, 2):
        assert policy.next(most) == most
    assert policy.pause == 0
    assert abs(policy.next(CEILING) - before) <= STEP


def test_it_does_not_run_away_where_a_pass_grows_with_it() -> None:
    """A controller that took t_p for constant would go on to 16: drafts cost next to nothing, and nine in ten stand."""
    world = World(lambda place: 0.9, draft=lambda gamma: 1e-5 * gamma, verify=CostLine(0.002, 0.002))
    gamma, _ = best(world)
    text = run(adaptive(), world, 3000)
    assert gamma <= 4
    assert max(text.gammas[-300:]) <= gamma + STEP
    assert text.rate > 0.93 * world.rate(gamma)


def test_it_stops_where_nothing_pays_and_tries_after_growing_pauses() -> None:
    text = run(adaptive(), WORLDS["useless draft"], 6000)
    assert text.alone > 0.9 * text.tokens
    pauses = _pauses(text)
    assert len(pauses) >= 5
    assert set(pauses[1:]) == {TRY_ROUNDS}  # between two pauses there is one try of a few short proposals
    tried = [gamma for gamma in text.gammas[-3 * TRY_ROUNDS :] if gamma]
    assert max(tried) <= TRY_GAMMA


def test_pauses_double_up_to_the_longest() -> None:
    policy, world = adaptive(), WORLDS["useless draft"]
    pauses: list[int] = []

    class Watched(Policy):
        def next(self, most: int) -> int:
            gamma = policy.next(most)
            self.pause = policy.pause
            if gamma == 0:
                pauses.append(policy.pause)
            return gamma

        def observe(self, round_: Round) -> None:
            policy.observe(round_)

    run(Watched(), world, 6000)
    assert pauses[:7] == [32, 64, 128, 256, 512, 512, 512]
    assert (pauses[0], max(pauses)) == (FIRST_PAUSE, LONGEST_PAUSE)


def test_it_comes_back_when_speculation_pays_again() -> None:
    policy = adaptive()
    good = False
    world = World(lambda place: 0.9 if good else 0.05)
    run(policy, world, 1500)
    assert policy.next(CEILING) in range(TRY_GAMMA + 1)
    good = True
    text = run(policy, world, 6000)
    found = text.gammas[-100:]
    assert min(found) >= 4
    assert text.rate > 0.75 * best(world)[1]  # two pauses and a few tries included


def test_one_sample_tries_for_all() -> None:
    """Texts that are shorter than a pause: what they write alone adds up, so that none of it is lost on any of them."""
    experience, times = Experience(first_pause=FIRST_PAUSE), Times()
    tried, written = 0, 0
    for seed in range(120):
        text = run(adaptive(experience=experience, times=times), WORLDS["useless draft"], 40, seed)
        written += text.tokens
        tried += sum(gamma > 0 for gamma in text.gammas)
    assert experience.pause == LONGEST_PAUSE
    assert 4 * TRY_ROUNDS <= tried <= written / LONGEST_PAUSE * TRY_ROUNDS + 40


def test_it_comes_back_without_a_try_where_times_alone_change() -> None:
    """The pass grew dear, and is cheap again: what is known of the draft is enough to say so."""
    policy, times = adaptive(), {"verify": CostLine(0.001, 0.006)}
    cheap = CostLine(0.02, 0.0001)

    def world() -> World:
        return World(lambda place: 0.6, verify=times["verify"])

    text = run(policy, world(), 800)
    assert text.gammas[-1] <= TRY_GAMMA
    times["verify"] = cheap
    found = run(policy, world(), 1500).gammas
    assert min(found[3:]) >= 2
    assert abs(_mean(found[20:]) - best(world())[0]) <= 2


def test_slow_first_rounds_are_no_rule() -> None:
    """A service's first rounds take many times what later ones do: it must not give up for them."""
    policy, world = adaptive(), WORLDS["fair draft"]
    for _ in range(12):
        gamma = policy.next(CEILING)
        assert gamma
        policy.observe(Round(gamma, gamma, gamma, gamma - 1, (), 0.2, 0.5, gamma + 1, world.verify))
    text = run(policy, world, 300)
    assert min(text.gammas) > 0
    assert abs(_mean(text.gammas[-20:]) - best(world)[0]) <= 2


def test_what_a_try_takes_is_believed_at_once() -> None:
    """The way was long and speculation given up; once it is short, the first try that is due shows it."""
    policy, way = adaptive(), {"way": 0.05}

    def world() -> World:
        return World(lambda place: 0.7, way=way["way"])

    assert run(policy, world(), 2000).gammas[-1] <= TRY_GAMMA
    way["way"] = 0.001
    text = run(policy, world(), LONGEST_PAUSE + 400)
    assert text.gammas[-1] > TRY_GAMMA


def test_one_stall_moves_it_little() -> None:
    policy, world = adaptive(), WORLDS["fair draft"]
    run(policy, world, 2000)
    before = policy.next(CEILING)
    for _ in range(2):
        policy.observe(Round(before, before, before, before - 1, (), 5.0, 30.0, before + 1, world.verify))
    assert abs(policy.next(CEILING) - before) <= STEP
    assert abs(_mean(run(policy, world, 500).gammas) - before) <= 2


def test_without_a_cost_of_passes_it_still_finds_a_length() -> None:
    """An older verifier tells none: what passes take is then in what rounds take, whatever γ."""
    policy = adaptive()
    for _ in range(50):
        gamma = policy.next(CEILING)
        assert gamma >= 1
        policy.observe(Round(gamma, gamma, gamma, gamma - 1, (), 0.001 * gamma, 0.01, gamma + 1, None))


def test_the_rate_of_recorded_rounds_is_the_simulations() -> None:
    """`fixed_rate`, by which the oracle is compared, against a run with that γ."""
    world = World(lambda place: 0.75, noise=0.0)
    chance = random.Random(5)
    accepted = []
    for _ in range(20_000):
        count = 0
        while count < CEILING and chance.random() < 0.75:
            count += 1
        accepted.append(count)
    for gamma in (1, 4, 9):
        rate = fixed_rate(accepted, gamma, lambda g: world.draft(g) + world.verify.seconds(g + 1) + world.way)
        assert rate == pytest.approx(world.rate(gamma), rel=0.02)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _pauses(text: Text) -> list[int]:
    """Rounds with proposals before each pause."""
    found, since = [], 0
    for gamma in text.gammas:
        if gamma == 0:
            found.append(since)
            since = 0
        else:
            since += 1
    return found
