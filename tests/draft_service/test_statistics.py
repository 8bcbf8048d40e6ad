"""The choice whether to draft: when drafting stops, and when it is tried again."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from draft_service.cost_model import CostModel, JudgedRound
from draft_service.speculation import LEAST_DECODED, Adaptive
from draft_service.statistics import FIRST_PAUSE, LONGEST_PAUSE, AcceptanceStatistics
from outrider.service.fitted_cost import CostLine
from tests.draft_service.closed_loop import CEILING
from tests.draft_service.records import STEP_COST, judged


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


@pytest.mark.parametrize(("tokens", "accepted"), [(2, 0), (2, 1), (4, 1), (4, 2)])
def test_short_texts_do_not_draft_where_it_does_not_pay(tokens: int, accepted: int) -> None:
    """They have one proposal or two, and may end with a `Decode` of one token."""
    drafted = texts_with_drafts(tokens, accepted, prompt=0.01, proposal=0.03, token=0.002)
    assert all(drafted[:10])
    assert sum(drafted[300:]) < 20


@pytest.mark.parametrize(("proposal", "pays"), [(0.095, False), (0.04, True)])
def test_short_texts_are_measured_though_all_steps_hold_prompts(proposal: float, pays: bool) -> None:
    """Cycles then take several times what the published cost of a step says."""
    drafted = texts_with_drafts(4, 2, prompt=0.035, draft_prompt=0.02, proposal=proposal, token=0.033, published=0.24)
    assert sum(drafted[-100:]) == 100 if pays else sum(drafted[300:]) < 20


@pytest.mark.parametrize(("tokens", "pays"), [(4, False), (64, True)])
def test_a_draft_that_reads_prompts_slowly_pays_for_long_texts_only(tokens: int, pays: bool) -> None:
    """The first round takes 20 ms more with drafts; three tokens in 11 ms save 8 ms in each round."""
    drafted = texts_with_drafts(tokens, 2, prompt=0.01, draft_prompt=0.02, proposal=0.011, token=0.0063)
    assert sum(drafted[-100:]) == 100 if pays else sum(drafted[300:]) < 20


@pytest.mark.parametrize("tokens", [16, 64, 200])
@pytest.mark.parametrize("prompt", [0.0, 0.05, 1.0])
@pytest.mark.parametrize(("proposal", "pays"), [(0.018, True), (0.05, False)])
def test_prompts_do_not_change_whether_drafting_pays(tokens: int, prompt: float, proposal: float, pays: bool) -> None:
    """They take as long with drafts as without."""
    drafted = texts_with_drafts(tokens, 4, prompt=prompt, proposal=proposal, token=0.0063)
    assert sum(drafted[-20:]) == 20 if pays else sum(drafted[-20:]) < 3


def test_a_slow_moment_before_a_trial_does_not_let_all_draft() -> None:
    """`Decode` is measured again before drafting goes on."""
    statistics, costs, gamma, proposals, trials = AcceptanceStatistics(), CostModel(), 5, 0, 0
    for number in range(5000):
        was_trial = statistics.is_trial
        gamma = chosen(statistics, costs, gamma, number)
        trials += statistics.is_trial and not was_trial
        round_ = judged(gamma, accepted=0)
        assert round_.seconds is not None
        if not gamma and statistics._choice.pause > FIRST_PAUSE and statistics._choice.left < 200:
            round_ = replace(round_, seconds=3 * round_.seconds)
        costs.add(round_)
        statistics.add(round_, costs)
        if gamma:
            statistics.accepted.add(0, 0.0)
            statistics.texts += 1
            proposals += 1
    assert trials > 2
    assert proposals < 100 + 15 * trials


def test_a_prompt_is_no_cost_of_a_trial() -> None:
    statistics, costs, token = AcceptanceStatistics(), CostModel(), judged(0, accepted=0)
    assert token.seconds is not None
    first = replace(token, seconds=token.seconds + 0.4, is_first=True)
    for round_ in [judged(4, accepted=0)] * 20 + [first, *[token] * 39] * 20:
        costs.add(round_)
    statistics._choice.left = 10.0
    assert statistics.is_trial
    statistics.add(first, costs)
    assert abs(statistics._choice.lost) < 1
    statistics.add(replace(judged(4, accepted=0), seconds=5 * token.seconds), costs)
    assert statistics._choice.lost == pytest.approx(4, abs=1)


def texts_with_drafts(
    tokens: int,
    most_accepted: int,
    *,
    prompt: float,
    proposal: float,
    token: float,
    draft_prompt: float = 0.0,
    published: float = 1.0,
) -> list[bool]:
    """Whether each text, one after another, has proposals. Times, in seconds, are of a prompt, of a round while it
    drafts, with at most 10 ms outside the verifier, of a token of a `Decode`, and of what the draft adds to a prompt.
    `published` is the verifier's cost of a step, as a share of the time of a token.
    """
    statistics, costs, drafted = AcceptanceStatistics(), CostModel(), list[bool]()
    step = CostLine(0.9 * token * published, 0.02 * token * published)
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
                own = proposal if policy.wanted else size * token
                reads = bool(gamma and gammas and not gammas[-1])  # the draft first reads the tokens of the `Decode`
                round_ = JudgedRound(gamma, gamma, min(gamma, accepted + 1), accepted, step=step, is_first=is_first)
                at_verifier = max(step.seconds(gamma + 1), own - 0.01)
                round_ = replace(
                    round_,
                    at_verifier=at_verifier,
                    overhead=None if reads or not gamma else own - at_verifier,
                    seconds=None if reads else own + is_first * (prompt + draft_prompt * (gamma > 0)),
                    tokens=gamma + 1,
                    decoded=1 if gamma else size,
                    wanted=max(gamma, policy.wanted),
                )
                policy.observe(round_)
                left -= size
            gammas.append(gamma)
        drafted.append(any(gammas))
    return drafted
