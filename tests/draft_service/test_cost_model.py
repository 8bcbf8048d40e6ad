"""The cost model: what it measures, and what it leaves out."""

from dataclasses import replace

import pytest

from draft_service.cost_model import CostModel, JudgedRound
from outrider.service.fitted_cost import CostLine
from tests.draft_service.records import STEP_COST, judged


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


def slow(active: int) -> JudgedRound:
    usual = judged(4, accepted=2, active=active)
    assert usual.seconds is not None
    return replace(usual, seconds=1.5 * usual.seconds)


def test_tokens_of_a_verdict_are_forgotten_one_by_one() -> None:
    costs = CostModel()
    for _ in range(20):
        costs.add(judged(4, accepted=0))
    for share in (1.0, 0.2):
        for _ in range(20):
            decode = replace(judged(0, accepted=0), seconds=16 * share * STEP_COST.seconds(1), decoded=16)
            costs.add(decode)
    assert costs.cycle(0) < 0.3 * STEP_COST.seconds(1)


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


@pytest.mark.parametrize("is_first", [False, True])
def test_one_slow_round_changes_little(is_first: bool) -> None:
    costs, typical = CostModel(), judged(4, accepted=2)
    assert typical.seconds is not None
    for _ in range(20):
        for round_ in (replace(typical, is_first=True), *[typical] * 9):
            costs.add(round_)
    (before,) = costs.rates([0.8], 1.0)[1:]
    costs.add(replace(typical, seconds=1000 * typical.seconds, is_first=is_first))
    assert costs.rates([0.8], 1.0)[1] == pytest.approx(before, rel=0.03)


def test_cycles_count_though_their_steps_hold_prompts() -> None:
    """If many short texts begin, there are no others."""
    costs, typical = CostModel(), judged(4, accepted=2)
    assert typical.seconds is not None
    for number in range(1000):
        crowded = replace(typical, seconds=5 * typical.seconds, tokens=500)
        costs.add(crowded if number > 20 else typical)
    assert costs.cycle(4) == pytest.approx(5 * typical.seconds, rel=0.05)


def test_a_fast_decode_that_becomes_slow_is_followed() -> None:
    costs = CostModel()
    for _ in range(30):
        costs.add(judged(4, accepted=0))
    for share in (0.1, 1.0):
        costs.begin_trial(drafts=False)
        for _ in range(30):
            costs.add(replace(judged(0, accepted=0), seconds=share * STEP_COST.seconds(1)))
    assert costs.cycle(0) > 0.85 * STEP_COST.seconds(1)


def text(tokens: int, prompt: float, *, gamma: int = 0) -> list[JudgedRound]:
    """The rounds of a text, none of its drafts accepted. `prompt` is the seconds of the prompt."""
    first, *others = [judged(gamma, accepted=0)] * tokens
    assert first.seconds is not None
    return [replace(first, seconds=first.seconds + prompt, is_first=True), *others]


def model_of(*texts: list[JudgedRound]) -> CostModel:
    costs = CostModel()
    for rounds in texts:
        for round_ in rounds:
            costs.add(round_)
    return costs


def seconds_of_tokens(costs: CostModel) -> tuple[float, float]:
    """Seconds of a token with γ = 4, of which none are accepted, and of a token of a `Decode`."""
    rates = costs.rates([0.0] * 4, 1.0)
    return 1 / rates[4], 1 / rates[0]


def test_the_first_cycle_counts_by_the_length_of_a_text() -> None:
    for tokens in (10, 40):
        costs = model_of(*[text(tokens, 0.4, gamma=4)] * 200, *[text(tokens, 0.2)] * 200)
        drafted, alone = seconds_of_tokens(costs)
        assert drafted == pytest.approx(costs.cycle(4) + 0.4 / tokens, rel=0.03)
        assert alone == pytest.approx(costs.cycle(0) + 0.2 / tokens, rel=0.03)


def test_the_mean_length_of_a_text_follows_the_texts() -> None:
    for tokens, others in ((10, 40), (40, 10)):
        costs = model_of(*[text(others, 0.4, gamma=4)] * 200, *[text(tokens, 0.4, gamma=4)] * 100)
        assert seconds_of_tokens(costs)[0] == pytest.approx(costs.cycle(4) + 0.4 / tokens, rel=0.1)


@pytest.mark.parametrize("round_", [judged(4, accepted=4), replace(judged(0, accepted=0), decoded=5)])
def test_all_tokens_of_a_verdict_count_for_the_length_of_a_text(round_: JudgedRound) -> None:
    first = replace(round_, is_first=True, seconds=(round_.seconds or 0.0) + 0.4)
    costs = model_of([judged(4, accepted=0)] * 20, *[[first, *[round_] * 7]] * 200)
    cycle = costs.cycle(4) if round_.gamma else costs.cycle(0)
    assert seconds_of_tokens(costs)[0 if round_.gamma else 1] == pytest.approx(cycle + 0.4 / 40, rel=0.03)


def test_without_first_cycles_of_one_kind_those_of_the_other_count() -> None:
    costs = model_of(*[text(40, 0.4, gamma=4)] * 20, [judged(0, accepted=0)] * 40)
    assert seconds_of_tokens(costs)[1] == pytest.approx(costs.cycle(0) + 0.4 / 40, rel=0.1)
    for round_ in text(40, 0.0):
        costs.add(round_)
    assert seconds_of_tokens(costs)[1] > costs.cycle(0) + 0.2 / 40, "one text is too few to know"


def test_a_trial_measures_first_cycles_again() -> None:
    costs = model_of(*[text(10, 0.4, gamma=4)] * 100)
    costs.begin_trial(drafts=True)
    for round_ in text(10, 0.05, gamma=4) * 10:
        costs.add(round_)
    assert seconds_of_tokens(costs)[0] < costs.cycle(4) + 0.1 / 10


def test_first_cycles_are_known_at_the_nearest_number_of_sequences() -> None:
    costs = model_of(*[text(10, 0.4, gamma=4)] * 100)
    for _ in range(100):
        costs.add(judged(4, accepted=0, active=4))
    assert costs.size == 2
    assert costs.first_excess(drafts=True) == pytest.approx(0.4, rel=0.03)


@pytest.mark.parametrize("tokens", [10, 64])
def test_texts_of_one_verdict_are_measured_by_it(tokens: int) -> None:
    """Their only cycle is the first one, also beside some texts that have more."""
    whole = replace(judged(0, accepted=0), decoded=tokens, seconds=0.4, is_first=True)
    drafts = text(tokens, 0.3, gamma=4)
    costs = model_of(*[drafts] * 100, *[[whole]] * 100)
    assert costs.has_decoded
    assert costs.first_excess(drafts=True) == pytest.approx(0.3, rel=0.01)
    assert seconds_of_tokens(costs) == pytest.approx((costs.cycle(4) + 0.3 / tokens, 0.4 / tokens), rel=0.03)
    for round_ in [*[judged(0, accepted=0)] * 40, *[whole] * 100]:
        costs.add(round_)
    assert seconds_of_tokens(costs)[1] == pytest.approx(0.4 / tokens, rel=0.15)


def test_a_rate_is_positive_while_the_mean_length_is_old() -> None:
    whole = replace(judged(0, accepted=0), decoded=64, seconds=0.05, is_first=True)
    costs = model_of(*[text(10, 0.0, gamma=4)] * 3, *[[*[judged(0, accepted=0)] * 40, whole]] * 3)
    costs._tokens = 2.0 * costs._texts
    assert costs.first_excess(drafts=False) < -2 * costs.cycle(0)
    assert seconds_of_tokens(costs)[1] == pytest.approx(0.1 * costs.cycle(0))
