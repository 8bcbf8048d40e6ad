"""The cap on γ: where it comes to rest is about the best there is, it moves little at a time, and finds its way back.

The best is found by trying every γ in a simulation of the closed loop; what the cap makes of it is held against that.
Times are drawn, not measured, so nothing here depends on the machine.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.service.cost_model import CostLine
from outrider.theory import expected_tokens
from tests.verifier_service.closed_loop import ClosedLoop, World
from verifier_service.gamma_cap import LEAST_ROUNDS, MARGIN, PROBE_AFTER, PROBE_GAMMA, PROBE_TOKENS, STEP, GammaCap

GAMMA = 5
WORLDS = {
    "a deep target and a quick draft": World(0.020, 0.0002, 0.003, 0.001, 0.8),
    "every token costs": World(0.005, 0.001, 0.001, 0.001, 0.7),
    "a slow draft": World(0.003, 0.0003, 0.001, 0.005, 0.7),
    "a draft far away": World(0.020, 0.0002, 0.020, 0.001, 0.7),
    "a bad draft": World(0.020, 0.002, 0.001, 0.001, 0.2),
    "a good draft, and every token costs": World(0.020, 0.002, 0.003, 0.001, 0.95),
}


@pytest.mark.parametrize("sequences", [2, 8, 24])
@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_to_rest_near_the_best_gamma(name: str, sequences: int) -> None:
    """Within a tenth of the best of γ = 0 to 5, and never more than 5 % behind the target alone."""
    rates = []
    for gamma in range(GAMMA + 1):
        loop = ClosedLoop(WORLDS[name], sequences, gamma=gamma)
        loop.run(50)
        rates.append(loop.run(150))
    loop = ClosedLoop(WORLDS[name], sequences, gamma=GAMMA, caps=GammaCap())
    loop.run(250)
    rate = loop.run(250)
    print([round(each, 1) for each in rates], round(rate, 1), loop.told)
    assert rate > 0.9 * max(rates)
    assert rate > 0.95 * rates[0]


@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_longer_than_two_tokens(seed: int) -> None:
    """Over changes of the draft and of the number of sequences that bring the cap down and up again."""
    loop = ClosedLoop(WORLDS["every token costs"], 12, gamma=9, caps=GammaCap(), seed=seed)
    for sequences, alpha in ((12, 0.7), (3, 0.95), (16, 0.3)):
        loop.resize(sequences)
        loop.world = replace(loop.world, alpha=alpha)
        loop.run(400)
    print(loop.told)
    assert {None, 0} <= set(loop.told)
    steps = [(9 if cap is None else cap) for cap in loop.told]
    assert all(0 < abs(after - before) <= STEP for before, after in pairwise(steps))


def test_a_lone_sequence_is_never_capped() -> None:
    """Whatever it costs itself; and one that is left alone is free at once."""
    loop = ClosedLoop(WORLDS["a bad draft"], 1, gamma=GAMMA, caps=GammaCap())
    loop.run(500)
    assert loop.told == [None]
    loop.resize(6)
    loop.run(300)
    assert loop.told[-1] == 0
    loop.resize(1)
    loop.run(1)
    assert loop.told[-1] is None


def test_the_cap_rises_when_sequences_leave() -> None:
    """Where it was 0 and nothing more was heard of drafts: what was known of them is enough."""
    loop = ClosedLoop(World(0.010, 0.002, 0.001, 0.0005, 0.8), 32, gamma=GAMMA, caps=GammaCap())
    loop.run(200)
    assert loop.told[-1] == 0
    loop.resize(2)
    loop.run(400)  # too few for a probe
    assert loop.told[-1] in (None, 2, 3, 4)  # which are within a few per cent of each other


def test_the_cap_is_lifted_when_drafts_have_become_good() -> None:
    """While it was 0 none was seen, so it takes a probe; until there is one, nothing is told."""
    loop = ClosedLoop(WORLDS["a bad draft"], 4, gamma=GAMMA, caps=GammaCap())
    loop.run(200)
    assert loop.told == [None, 3, 1, 0]
    loop.world = replace(loop.world, alpha=0.95)
    loop.run(PROBE_AFTER - 200)
    assert loop.told[-1] == 0
    loop.run(3 * PROBE_AFTER)
    assert loop.told[-1] is None


# --------------------------------------------------------------------------------------------- rounds told one by one

LINE = CostLine(0.010, 0.001)
SEQUENCES = 4


class Told:
    """A cap that is told of rounds, all alike: as many as a look takes."""

    def __init__(self) -> None:
        self.caps = GammaCap()
        self.running = dict.fromkeys(range(SEQUENCES), 10)
        self._owed = 0.0

    def rounds(
        self,
        gamma: int,
        *,
        alpha: float,
        turnaround: float,
        line: CostLine = LINE,
        looks: int = 1,
        waiting: float = 0.0,
    ) -> None:
        """As many as so many looks take; `alpha` is the share of first tokens that are accepted, and no other is. With
        drafts a sequence waits for so long besides.
        """
        for _ in range(looks * LEAST_ROUNDS // SEQUENCES):
            for sequence in self.running:
                whole = (turnaround + waiting if gamma else 0.0) + line.seconds(SEQUENCES * (gamma + 1))
                self._owed += alpha
                accepted = int(self._owed >= 1)
                self._owed -= accepted
                self.caps.add(
                    sequence,
                    drafted=gamma,
                    judged=min(accepted + 1, gamma),
                    accepted=accepted,
                    turnaround=turnaround,
                    whole=whole,
                )
            self.caps.look(self.running, line)


def alpha_at_which_alone_gains(share: float, gamma: int, turnaround: float) -> float:
    """The α at which γ = 0 brings `share` more than this γ, with passes of `LINE`."""
    cycle = turnaround + LINE.seconds(SEQUENCES * (gamma + 1))
    wanted = cycle / LINE.seconds(SEQUENCES) / (1 + share)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < wanted else (low, middle)
    return low


@pytest.mark.parametrize(("gain", "moves"), [(MARGIN - 0.02, False), (MARGIN + 0.02, True)])
def test_nothing_is_said_where_little_would_be_gained(gain: float, moves: bool) -> None:
    """γ of 1 throughout, so that 0 is all there is beside it, and α is exact: 2 % on either side of the margin."""
    alpha, told = alpha_at_which_alone_gains(gain, 1, turnaround=0.008), Told()
    told.rounds(1, alpha=alpha, turnaround=0.008, looks=1)
    told.rounds(0 if told.caps.cap == 0 else 1, alpha=alpha, turnaround=0.008, looks=50)
    assert told.caps.alpha == pytest.approx(alpha, abs=0.02)
    assert told.caps.cap == (0 if moves else None)


@pytest.mark.parametrize(("waiting", "cap"), [(0.0, None), (0.012, 0)])
def test_a_cycle_is_as_long_as_it_is_measured_to_be(waiting: float, cap: int | None) -> None:
    """Turnaround and pass alone would be 20 ms for 2 tokens, against 14 ms for 1; but sequences wait for 12 ms more."""
    told = Told()
    told.rounds(1, alpha=1.0, turnaround=0.002, waiting=waiting, looks=2)
    assert told.caps.cap == cap


def test_a_move_that_has_begun_goes_on_to_the_best() -> None:
    """Each token of a pass costs as much as the rest of it and no draft is ever right: 5, 3, 1, 0."""
    told, line, seen = Told(), CostLine(0.001, 0.001), []
    for gamma in (5, 3, 1):
        told.rounds(gamma, alpha=0.0, turnaround=0.001, line=line)
        seen.append(told.caps.cap)
    assert seen == [3, 1, 0]


def test_rounds_that_were_under_way_do_not_hasten_the_next_step() -> None:
    told, line = Told(), CostLine(0.001, 0.001)
    told.rounds(5, alpha=0.0, turnaround=0.001, line=line)
    assert told.caps.cap == 3
    told.rounds(5, alpha=0.0, turnaround=0.001, line=line, looks=3)
    assert told.caps.cap == 3


def test_a_probe_is_of_one_sequence_and_short() -> None:
    """The youngest; it ends after its rounds, or where it proposes nothing, and the others are told nothing of it."""
    told, line = Told(), CostLine(0.001, 0.001)
    for gamma in (5, 3, 1):
        told.rounds(gamma, alpha=0.0, turnaround=0.001, line=line)
    told.running[2] = 9
    told.rounds(0, alpha=0.0, turnaround=0.001, line=line, looks=PROBE_AFTER * SEQUENCES // LEAST_ROUNDS - 1)
    assert [told.caps.of(each) for each in told.running] == [0] * SEQUENCES
    told.rounds(0, alpha=0.0, turnaround=0.001, line=line)
    assert [told.caps.of(each) for each in told.running] == [0, 0, PROBE_GAMMA, 0]
    told.rounds(0, alpha=0.0, turnaround=0.001, line=line, looks=PROBE_TOKENS * SEQUENCES // LEAST_ROUNDS)
    assert told.caps.of(2) == PROBE_GAMMA  # it is still to end the Decode that it had asked for
    for each, gamma in ((2, PROBE_GAMMA), (2, PROBE_GAMMA)):
        told.caps.add(each, drafted=gamma, judged=1, accepted=0, turnaround=0.001, whole=0.01)
        told.caps.look(told.running, line)
        assert told.caps.of(2) == PROBE_GAMMA
    told.rounds(0, alpha=0.0, turnaround=0.001, line=line, looks=2 * PROBE_TOKENS * SEQUENCES // LEAST_ROUNDS)
    assert [told.caps.of(each) for each in told.running] == [0] * SEQUENCES


def test_one_that_reads_slowly_does_not_move_the_cap() -> None:
    """A draft service whose client takes ten seconds over each round, among three that answer at once."""
    told = Told()
    for number in range(100):
        for sequence in range(SEQUENCES):
            if sequence or number % 8 == 0:
                seconds = 0.002 if sequence else 10.0
                told.caps.add(
                    sequence, drafted=4, judged=4, accepted=4, turnaround=seconds, whole=seconds + LINE.seconds(20)
                )
        told.caps.look(told.running, LINE)
    assert told.caps.cap is None


def test_where_sequences_leave_the_next_look_may_find_no_cycle() -> None:
    """Cycles are noted in the second half of the rounds until a look, and with fewer sequences fewer rounds are needed:
    the look may then come before the first note.
    """
    caps, line = GammaCap(), CostLine(0.004, 0.0004)
    everyone = dict.fromkeys(range(24), 10)
    caps.look(everyone, line)
    for name in range(LEAST_ROUNDS):
        caps.add(name % 24, drafted=5, judged=5, accepted=4, turnaround=0.002, whole=0.02)
    caps.look({0: 10, 1: 10}, line)
    assert caps.cap is None
    for _ in range(2 * LEAST_ROUNDS):
        caps.add(0, drafted=5, judged=5, accepted=0, turnaround=0.002, whole=0.02)
    caps.look({0: 10, 1: 10}, line)
    assert caps.cap is not None, "the rounds were not lost"


SECONDS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1.0, 1.0) | st.just(0.0)
ROUNDS = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), SECONDS, SECONDS)
LOOKS = st.tuples(st.dictionaries(st.integers(0, 9), st.integers(0, 99)), st.floats(0.0, 1.0), st.floats(0.0, 1.0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(ROUNDS, st.integers(1, 80)) | LOOKS, max_size=40))
def test_whatever_happens_the_cap_is_in_its_range(events: list[Any]) -> None:
    """Sequences come and go, rounds have no tokens, come in bursts, and take no time, less than none, or no number."""
    caps, longest = GammaCap(), 0
    for event in events:
        if len(event) == 2:
            (name, drafted, judged, accepted, turnaround, whole), times = event
            judged = min(judged, drafted)
            longest = max(longest, drafted)
            for _ in range(times):
                caps.add(
                    name, drafted=drafted, judged=judged, accepted=min(accepted, judged), turnaround=turnaround,
                    whole=whole,
                )  # fmt: skip
        else:
            running, fixed, per_token = event
            caps.look(running, CostLine(fixed, per_token))
        assert caps.cap is None or 0 <= caps.cap <= longest
        assert all(cap is None or 0 <= cap <= max(longest, PROBE_GAMMA) for cap in map(caps.of, range(10)))
        assert 0.0 <= caps.alpha <= 1.0
