"""The cost model and the choice whether to draft: what they measure, and when drafting is tried again."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from draft_service.cost_model import CostModel, JudgedRound
from draft_service.speculation import LEAST_DECODED, Adaptive
from draft_service.statistics import LONGEST_PAUSE, AcceptanceStatistics
from outrider.service.fitted_cost import CostLine

CEILING = 16
STEP_COST = CostLine(0.008, 0.0003)


@pytest.mark.parametrize(
    ("delay", "least", "most", "share"),
    [
        (0.0, 900, 1200, 0.003),
        (0.005, 3000, LONGEST_PAUSE - 1, 0.003),
        (0.05, LONGEST_PAUSE, LONGEST_PAUSE, 0.004),
    ],
)
def test_trials_of_drafting_cost_a_quarter_of_a_percent_while_it_does_not_pay(
    delay: float, least: int, most: int, share: float
) -> None:
    """Also where the formula does not know what they cost: steps hold other sequences' tokens, and take longer. Those
    that would cost more even after the longest pause end early.
    """
    statistics, costs, pauses = AcceptanceStatistics(), CostModel(), [0.0]
    seconds, lost, gamma = 0.0, 0.0, 5
    for number in range(40_000):
        before = statistics.pause
        gamma = chosen(statistics, costs, gamma, number)
        pauses += [statistics.pause] if statistics.pause > before else []
        round_ = judged(gamma, accepted=0)
        took = round_.seconds or 0.0
        if delay and statistics.is_trial:
            took += delay
            round_ = replace(round_, seconds=took, tokens=10 * round_.tokens)
        if number > 10_000:
            seconds += took
            lost += took - STEP_COST.seconds(1)
        costs.add(round_)
        statistics.add(round_, costs)
        if gamma:
            statistics.accepted.add(0, 0.0)
            statistics.texts += 1
    assert pauses[:2] == [0, 32]
    assert 400 < pauses[2] < 600, "by the formula, before the first trial"
    assert least <= max(pauses) <= most
    assert 0.002 * seconds < lost < share * seconds


def chosen(statistics: AcceptanceStatistics, costs: CostModel, last: int, number: int) -> int:
    """γ of this round. As in the service it is chosen for each proposal, and for several tokens of a `Decode`."""
    if not costs.is_measured:
        return 5
    return statistics.choose(costs, CEILING) if last or number % LEAST_DECODED == 0 else 0


@cache
def judged(gamma: int, accepted: int, active: int = 1) -> JudgedRound:
    """A round: 1 ms for each drafted token, 1 ms of round trip, and a step of all active sequences."""
    tokens = active * (gamma + 1)
    step = STEP_COST.seconds(tokens)
    overhead = 0.001 * (gamma + 1) if gamma else None
    seconds = step + (overhead or 0.0)
    return JudgedRound(
        gamma, gamma, min(gamma, accepted + 1), accepted, (), overhead, step, STEP_COST, active, tokens, active,
        seconds, 0.001 * gamma,
    )  # fmt: skip


def test_the_number_of_active_sequences_is_a_running_mean() -> None:
    """Short texts begin and end all the time: with each change of B the choice might change too."""
    costs = CostModel()
    for number in range(10_000):
        active = 9 + number * 7 % 16
        step = CostLine(0.02, 0.0002)
        costs.add(JudgedRound(3, 3, 3, 2, (), 0.004, 0.02, step, active, 4 * active, active, 0.03))
    assert 15 <= costs.active <= 17


def test_an_empty_proposal_is_no_decode() -> None:
    """Its round takes a whole round trip."""
    costs = CostModel()
    for _ in range(100):
        costs.add(judged(4, accepted=2))
    for _ in range(100):
        costs.add(replace(judged(4, accepted=0), drafted=0, judged=0, decoded=1, wanted=4))
    assert not costs.has_decoded


@pytest.mark.parametrize("active", [4, 16])
def test_pauses_of_all_sequences_at_the_beginning_are_no_overhead(active: int) -> None:
    """Otherwise drafting would not pay for thousands of rounds: only trials measure it again."""
    costs = CostModel()
    for number in range(5 * active):
        typical = judged(4, accepted=2, active=active)
        assert typical.overhead is not None
        costs.add(replace(typical, overhead=typical.overhead + 5.0) if number // active in (1, 2) else typical)
    assert costs.is_measured
    assert costs.cycle(4) == pytest.approx(typical.seconds, rel=0.5)


def test_texts_that_end_together_leave_the_number_of_active_sequences() -> None:
    costs = CostModel()
    for active in [4] * 200 + [1]:
        costs.add(judged(4, accepted=0, active=active))
    assert costs.size == 2


def test_a_verdict_of_many_decoded_tokens_counts_as_so_many_rounds() -> None:
    """Otherwise a sequence that is alone after many would decode whole texts: each has a few such verdicts."""
    costs = CostModel()
    for _ in range(1000):
        costs.add(judged(4, accepted=0, active=16))
    costs.add(replace(judged(0, accepted=0), drafted=0, judged=0, decoded=64))
    assert costs.active == 1


def test_sequences_that_begin_together_count_before_their_first_verdicts() -> None:
    """Otherwise all texts of a burst draft, as after a pause the last verdict was of one sequence."""
    costs = CostModel()
    for active in (16, 1):
        for _ in range(1000):
            costs.add(judged(4, accepted=0, active=active))
    assert costs.active == 1
    costs.expect(6)
    assert (costs.active, costs.size) == (6, 3)
    for active in (3, 11):  # a sequence that begins ends no other; those that end are counted for a moment
        costs.expect(active)
        assert costs.active == 6
    costs.expect(100)
    assert costs.active == 16, "the others may wait in the queue"
    for _ in range(50):
        costs.add(judged(4, accepted=0))
    assert costs.active == 1


def test_a_decode_is_as_slow_as_at_the_nearest_number_of_sequences_that_used_it() -> None:
    """While texts begin or end, there is no time to measure it at each number of sequences."""
    costs, step = CostModel(), CostLine(0.01, 0.001)
    for active, seconds in ((16, 0.026), (4, 0.021)):  # at 4, it is 1.5 times the published step
        decode = JudgedRound(0, step=step, active=active, tokens=active, sequences=active, seconds=seconds)
        for round_ in (judged(4, accepted=0, active=active), decode):
            for _ in range(500 * active):
                costs.add(round_)
    for _ in range(100):
        costs.add(judged(4, accepted=0))
    assert costs.active == 1
    assert costs.has_decoded
    assert costs.cycle(0) == pytest.approx(1.5 * step.seconds(1), rel=0.02)


def test_a_decode_is_measured_only_where_about_all_active_sequences_share_its_step() -> None:
    """B is a mean: when texts begin together, steps hold more sequences than B for a while, and when they end fewer."""
    costs = CostModel()
    for _ in range(100):
        costs.add(judged(4, accepted=0, active=8))
    for sequences, seconds in ((32, 0.02), (2, 0.005), (7, 0.012)):
        for _ in range(400):
            decode = JudgedRound(
                0, step=CostLine(0.01, 0.0), active=8, tokens=sequences, sequences=sequences, seconds=seconds
            )
            costs.add(decode)
    assert costs.cycle(0) == pytest.approx(0.012, rel=0.05)


def test_at_another_number_of_sequences_it_begins_with_the_nearest_cycles() -> None:
    """Proposals take 1.5 times what the formula says. With two sequences it need not learn that again."""
    costs = CostModel()
    for _ in range(600):
        costs.add(slow(active=1))
    assert costs.is_firm
    while costs.active < 2:
        costs.add(slow(active=2))
        assert costs.is_firm
    for _ in range(20):
        costs.add(slow(active=2))
    assert costs.cycle(4) == pytest.approx(slow(active=2).seconds, rel=0.02)


def test_at_another_number_of_sequences_it_does_not_draft_to_measure_that() -> None:
    """Drafting does not pay. On its way from 32 sequences to one, B passes numbers that were never measured."""
    statistics, costs = AcceptanceStatistics(), CostModel()
    run(statistics, costs, active=32, rounds=20_000)
    assert run(statistics, costs, active=1, rounds=100) == 0
    assert (costs.active, costs.size) == (1, 0)
    assert run(statistics, costs, active=1, rounds=5_000) > 0, "after a pause it is measured there too"


def run(statistics: AcceptanceStatistics, costs: CostModel, *, active: int, rounds: int) -> int:
    """Verdicts of sequences whose drafts are all rejected; returns the number of proposals."""
    proposals, gamma = 0, 5
    for number in range(rounds):
        gamma = chosen(statistics, costs, gamma, number)
        round_ = judged(gamma, accepted=0, active=active)
        costs.add(round_)
        statistics.add(round_, costs)
        if gamma:
            statistics.accepted.add(0, 0.0)
            statistics.texts = proposals = proposals + 1
    return proposals


def slow(active: int) -> JudgedRound:
    usual = judged(4, accepted=2, active=active)
    assert usual.seconds is not None
    return replace(usual, seconds=1.5 * usual.seconds)


@pytest.mark.parametrize("decoded", [1, 4])
def test_a_verdict_of_several_decoded_tokens_counts_as_so_many(decoded: int) -> None:
    """Their time is that of all, and so many tokens of the pause are over. Nine tokens after a proposal they count."""
    costs, statistics = CostModel(), AcceptanceStatistics()
    statistics._choice.drafts, statistics._choice.left = False, 512.0
    for _ in range(20):
        costs.add(judged(4, accepted=0))
    for _ in range(512 // decoded):
        verdict = JudgedRound(0, step=CostLine(0.01, 0.0), seconds=0.012 * decoded, decoded=decoded)
        costs.add(verdict)
        statistics.add(verdict, costs)
        decoded_so_far = 512 - statistics._choice.left
        assert costs.has_decoded == (decoded_so_far >= 9)
    assert costs.cycle(0) == pytest.approx(0.012, rel=0.03)
    assert statistics._choice.left == 0


@pytest.mark.parametrize(("share", "drafts"), [(0.2, False), (1.0, True)])
def test_decode_is_measured_once_though_drafting_pays_by_the_formula(share: float, drafts: bool) -> None:
    """The verifier writes several tokens of a `Decode` in a step: they may cost a fifth of as many steps."""
    gamma, decoded = run_accepted([share] * 300)
    assert bool(gamma) is drafts
    assert decoded == 32 if drafts else decoded > 3000


@pytest.mark.parametrize(("share", "drafts"), [(0.2, False), (1.0, True)])
def test_decode_is_measured_again_while_drafting_pays_by_old_measurements(share: float, drafts: bool) -> None:
    """Otherwise one slow moment, in which it was measured, would let all draft for good."""
    gamma, decoded = run_accepted([1.0] * 1000 + [share] * 7000)
    assert bool(gamma) is drafts
    assert not drafts or 32 < decoded < 0.005 * 5 * 8000


def run_accepted(shares: Iterable[float]) -> tuple[int, int]:
    """Verdicts of a sequence whose drafts are all accepted. A token of a `Decode` costs that share of a step.

    Returns:
        The last γ, and the tokens by `Decode`.
    """
    statistics, costs, decoded, gamma = AcceptanceStatistics(), CostModel(), 0, 4
    for share in shares:
        gamma = statistics.choose(costs, 4) if costs.is_measured else 4
        round_ = judged(gamma, accepted=gamma)
        if gamma:
            statistics.texts += 1
            for position in range(gamma):
                statistics.accepted.add(position, 1.0)
        else:
            round_ = replace(round_, seconds=16 * share * STEP_COST.seconds(1), decoded=16)
            decoded += 16
        costs.add(round_)
        statistics.add(round_, costs)
    return gamma, decoded


def test_tokens_of_a_verdict_are_forgotten_one_by_one() -> None:
    costs = CostModel()
    for _ in range(20):
        costs.add(judged(4, accepted=0))
    for share in (1.0, 0.2):
        for _ in range(20):
            decode = replace(judged(0, accepted=0), seconds=16 * share * STEP_COST.seconds(1), decoded=16)
            costs.add(decode)
    assert costs.cycle(0) < 0.3 * STEP_COST.seconds(1)


@pytest.mark.parametrize(("tokens", "accepted"), [(2, 0), (2, 1), (4, 1), (4, 2)])
def test_short_texts_do_not_draft_where_it_does_not_pay(tokens: int, accepted: int) -> None:
    """They have one proposal or two, and may end with a `Decode` of one token."""
    drafted = texts_with_drafts(tokens, accepted, prompt=0.01, proposal=0.03, token=0.002)
    assert all(drafted[:10])
    assert sum(drafted[300:]) < 20


@pytest.mark.parametrize("prompt", [0.0, 0.05, 1.0])
@pytest.mark.parametrize(("proposal", "pays"), [(0.018, True), (0.05, False)])
def test_prompts_do_not_change_whether_drafting_pays(prompt: float, proposal: float, pays: bool) -> None:
    """They take as long with drafts as without."""
    drafted = texts_with_drafts(64, 4, prompt=prompt, proposal=proposal, token=0.0063)
    assert sum(drafted[-20:]) == 20 if pays else sum(drafted[-20:]) < 3


def test_first_rounds_show_overhead_only_while_no_others_have() -> None:
    """In them the draft reads the prompt."""
    typical, costs = judged(4, accepted=2), CostModel()
    assert typical.overhead is not None
    first = replace(typical, overhead=typical.overhead + 0.5, is_first=True)
    for _ in range(16):
        costs.add(typical)
    for _ in range(100):
        costs.add(first)
    assert costs.cycle(4) == pytest.approx(typical.seconds, rel=0.1)


def texts_with_drafts(tokens: int, most_accepted: int, *, prompt: float, proposal: float, token: float) -> list[bool]:
    """Whether each text, one after another, has proposals. Times, in seconds, are of a prompt, of a round with a
    proposal, and of a token of a `Decode`.
    """
    statistics, costs, drafted = AcceptanceStatistics(), CostModel(), list[bool]()
    step = CostLine(0.9 * token, 0.02 * token)
    for _ in range(600):
        policy = Adaptive(5, ceiling=CEILING, statistics=statistics, costs=costs)
        left, gammas = tokens, list[int]()
        while left:
            gamma = policy.next(left - 1)
            accepted = min(gamma, most_accepted)
            sizes = [accepted + 1] if gamma else [min(left, max(1, policy.pause))]
            if not gamma and not gammas and sizes[0] > 1:
                sizes = [1, sizes[0] - 1]  # the first token comes at once
            for nth, size in enumerate(sizes):
                is_first = not gammas and not nth
                own = proposal if gamma else size * token
                reads = bool(gamma and gammas and not gammas[-1])  # the draft first reads the tokens of the `Decode`
                round_ = JudgedRound(gamma, gamma, min(gamma, accepted + 1), accepted, step=step, is_first=is_first)
                at_verifier = step.seconds(gamma + 1)
                round_ = replace(
                    round_,
                    at_verifier=at_verifier,
                    overhead=None if reads or not gamma else own - at_verifier,
                    seconds=None if reads else own + prompt * is_first,
                    tokens=gamma + 1,
                    decoded=1 if gamma else size,
                    wanted=max(gamma, policy.wanted),
                )
                policy.observe(round_)
                left -= size
            gammas.append(gamma)
        drafted.append(any(gammas))
    return drafted
