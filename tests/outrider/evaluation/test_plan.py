"""A plan follows from the formulas; a measured pair has the costs that its rounds had, and the network's distance."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider import theory
from outrider.cli.processes import Pair as Services
from outrider.client import Client, Completion, RoundTimings, Sample, Started, Statistics, Timings, Usage
from outrider.evaluation import EvaluationError
from outrider.evaluation.figures import draw_plan
from outrider.evaluation.pictures import svg
from outrider.evaluation.plan import Pair, extended, make_plan, measure
from tests.cluster import MODELS, Cluster, wait_healthy
from tests.proxy import Proxy

# --------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_is_that_of_the_formulas() -> None:
    pair = Pair(alpha=0.8, c=0.1, round_trip=0.3, token_cost=0.02, c_hat=0.05)
    plan = make_plan(pair)
    speed_ups = [theory.improvement(0.8, row.gamma, 0.1, 0.3, 1 + 0.02 * row.gamma) for row in plan.rows]
    assert [row.gamma for row in plan.rows] == list(range(1, 17))
    assert [row.speed_up for row in plan.rows] == pytest.approx(speed_ups)
    assert plan.fastest.speed_up == max(speed_ups) > 1
    assert plan.gamma == plan.fastest.gamma
    assert plan.fastest.operations == theory.operations(0.8, plan.gamma, 0.05)
    assert plan.lower_bound == pytest.approx(speed_ups[0])
    tokens = theory.expected_tokens(0.8, 16)  # of a round that accepts all that γ = 16 would
    assert plan.oracle is not None
    assert plan.oracle == pytest.approx(tokens / ((tokens - 1) * (0.1 + 0.02) + 1 + 0.3))
    assert plan.fastest.speed_up < plan.oracle < theory.oracle(0.8, 0.1 + 0.02, 0.3)
    assert plan.tokens_per_second is None
    rates = make_plan(replace(pair, step_ms=20)).tokens_per_second
    assert rates == pytest.approx((50 * plan.fastest.speed_up, 50))


def test_one_target_feeds_as_many_drafts_as_fill_its_time() -> None:
    """A round is 0.4 (draft) + 1 (target) + 0.6 (network): two streams need the target all the time."""
    plan = make_plan(Pair(alpha=1, c=0.2, round_trip=0.6, max_gamma=2))
    assert plan.gamma == 2
    assert plan.drafts == pytest.approx(2)
    assert plan.target_share == pytest.approx(0.5)
    assert plan.draft_share == pytest.approx(0.2)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_where_drafting_pays_is_where_it_begins_to(share: float) -> None:
    pair = Pair(alpha=0.7, c=0.1, round_trip=0.4, share=share)
    plan = make_plan(pair)
    assert plan.least_alpha is not None
    assert plan.gamma > 0
    assert make_plan(replace(pair, alpha=plan.least_alpha - 1e-6)).gamma == 0
    assert make_plan(replace(pair, alpha=plan.least_alpha + 1e-6)).gamma > 0
    assert make_plan(replace(pair, round_trip=plan.most_round_trip + 1e-6)).gamma == 0
    assert make_plan(replace(pair, round_trip=plan.most_round_trip - 1e-6)).gamma > 0


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_streams_share_a_pass(share: float) -> None:
    """As by hand: N streams take a step of v(N) alone, and a pass of v(N·(γ + 1)) if all have drafts."""
    pair = Pair(alpha=0.8, c=0.1, round_trip=0.2, token_cost=0.02, share=share)
    plan = make_plan(pair)
    assert plan.of_streams[0].gamma == plan.gamma
    assert plan.of_streams[0].speed_up == plan.fastest.speed_up
    for each in plan.of_streams[:4]:
        rows = each.streams * (share * each.gamma + 1)
        whole = share * each.gamma * 0.1 + 0.2 + 1 + 0.02 * (rows - 1)
        tokens = 1 + share * (theory.expected_tokens(0.8, each.gamma) - 1)
        expected = tokens * pair.verify_cost(each.streams) / whole
        assert each.speed_up == pytest.approx(expected)
    gains = [each.speed_up for each in plan.of_streams]
    assert gains == sorted(gains, reverse=True)
    assert make_plan(replace(pair, token_cost=0.0)).of_streams == ()


def test_a_parallel_draft_has_alpha_by_position() -> None:
    plan = make_plan(Pair(alpha=0.8, by_position=(0.9, 0.8, 0.5), c=0.1, parallel=True, max_gamma=5))
    assert (plan.gamma, plan.lower_bound, plan.oracle) == (3, None, None)
    assert plan.fastest.speed_up == pytest.approx((1 + 0.9 + 0.72 + 0.36) / 1.1)


def test_alpha_by_position_limits_the_oracle() -> None:
    """Drafts of three positions: the oracle drafts the accepted ones of these, 0.9 + 0.72 + 0.36 in the mean."""
    plan = make_plan(Pair(alpha=0.8, by_position=(0.9, 0.8, 0.5), c=0.1, round_trip=0.2, token_cost=0.05))
    drafted = 0.9 + 0.72 + 0.36
    assert plan.oracle == pytest.approx((1 + drafted) / (drafted * (0.1 + 0.05) + 1 + 0.2))
    assert plan.lower_bound == pytest.approx(1.9 / (0.1 + 1.05 + 0.2)) == plan.rows[0].speed_up
    assert (plan.oracle or 0) > plan.fastest.speed_up


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    "pair",
    [
        Pair(alpha=0.0, c=0.5, round_trip=3.0, token_cost=0.2),
        Pair(alpha=1.0, c=0.0, max_gamma=64),
    ],
)
def test_the_figures_hold_the_pair(pair: Pair) -> None:
    plan = make_plan(pair)
    text = svg(lambda to: draw_plan(to, plan))
    written = "\n".join("".join(each.itertext()) for each in ElementTree.fromstring(text).iter())
    for title in ("Figure 2", "Figure 3", "Figure 4", "This pair"):
        assert title in written
    labels = [each.text for each in ElementTree.fromstring(text).iter() if each.text == "this pair"]
    assert len(labels) == 4, "one in the legend of each figure"
    assert f"α = {pair.alpha:.3g}, γ = {plan.fastest.gamma}, c = {pair.c:.3g}" in written


# ----------------------------------------------------------------------------------------------------------- measuring


def _blank(kind: Any, **values: Any) -> Any:
    return kind(**{field.name: values.get(field.name, 0) for field in fields(kind)})


class Rounds:
    """Texts of a pair whose times are known, in microseconds: a target step, a draft step, R, and a token more."""

    def __init__(
        self,
        *,
        step: int = 10_000,
        draft: int = 800,
        rest: int = 3000,
        token: int = 200,
        hit_rate: float = 0.0,
        tokens: int = 65,
        accepted: Sequence[int] = (32,),
        joined: int = 1,
        undrafted: int = 0,
    ) -> None:
        """`joined` tokens of a `Decode` come in one verdict. So many rounds of 32 have no draft."""
        self.step, self.draft, self.rest, self.token, self.hit_rate = step, draft, rest, token, hit_rate
        self.tokens, self.accepted, self.asked = tokens, accepted, list[tuple[str, int]]()
        self.joined, self.undrafted = joined, undrafted

    def __call__(self, prompt: str, *, gamma: int) -> Completion:
        """Of the 32 proposals of a text `accepted` have an accepted token at each position."""
        self.asked.append((prompt, gamma))
        rounds = self.tokens if gamma == 0 else self.tokens // 2
        drafts = rounds - self.undrafted if gamma else 0
        drafted = drafts * gamma / rounds  # tokens of a round
        full = rounds * drafted * self.draft
        verify = self.step + drafted * self.token
        spent = [full * (1 - self.hit_rate) / rounds, verify, self.rest if gamma else 0]
        first = _blank(RoundTimings, draft_us=7000, queue_us=100, forward_us=5000, verify_us=11)
        timings = _blank(
            Timings,
            time_to_first_token_us=99_999,
            total_us=99_999 + round((rounds - 1) * sum(spent)),
            draft_us=7000 + round((rounds - 1) * spent[0]),
            queue_us=100 + (rounds - 1) * 10,
            forward_us=5000 + round((rounds - 1) * (verify - 30 - 50 * gamma)),
            verify_us=11 + (rounds - 1) * (20 + 50 * gamma),
            saved_us=round((rounds - 1) * drafted * self.draft * self.hit_rate),
            first_round=first,
        )
        accepted = [*self.accepted, *[0] * gamma][:gamma]
        statistics = _blank(
            Statistics,
            num_rounds=rounds if gamma else 1 + (rounds - 1) // self.joined,
            num_drafts=drafts,
            num_draft_tokens=drafts * gamma,
            num_accepted_tokens=sum(accepted),
            num_accepted_tokens_per_pos=tuple(accepted),
            num_draft_tokens_per_pos=(drafts,) * gamma,
            alpha=0.5 if gamma else 0.0,
        )
        usage = _blank(Usage, completion_tokens=rounds + sum(accepted) if gamma else self.tokens)
        sample = _blank(Sample, usage=usage, statistics=statistics, timings=timings)
        return Completion(started=_blank(Started), samples=(sample,))


@pytest.mark.parametrize(("hit_rate", "joined"), [(0.0, 1), (0.25, 1), (0.0, 16)])
def test_the_costs_of_rounds_are_found_again(hit_rate: float, joined: int) -> None:
    """Without the first round, which reads the prompt, and without the first turn, which warms up."""
    rounds = Rounds(hit_rate=hit_rate, joined=joined)
    done: list[tuple[int, int]] = []
    found = measure(rounds, ["one", "two"], report=lambda *each: done.append(each))
    pair = found.pair
    assert rounds.asked == [(prompt, gamma) for prompt in ("one", "one", "two") for gamma in (0, 2, 16)]
    assert done == [(nth, 9) for nth in range(1, 10)]
    assert pair.step_ms == pytest.approx(10)
    assert pair.c == pytest.approx(0.08, rel=1e-3)
    assert pair.token_cost == pytest.approx(0.02, rel=1e-3)
    assert pair.round_trip == pytest.approx(0.3, rel=1e-3)
    assert pair.hit_rate == pytest.approx(hit_rate, rel=1e-3)
    assert pair.alpha == 0.5
    assert found.judged == 2 * (2 * 32 + 2 * 32)  # of each proposal the accepted token and the rejected one
    for gamma, speed_up in found.speed_ups.items():
        assert speed_up.median == speed_up.low == speed_up.high
        assert speed_up.median == pytest.approx(
            2 / theory.round_time(gamma, pair.c, pair.round_trip, **pair.ways), rel=1e-3
        )


@pytest.mark.parametrize("gamma", [2, 8])
def test_rounds_without_a_draft_count(gamma: int) -> None:
    """A drafter such as `lookup` drafts in 10 of 32 rounds; then 8 tokens are accepted at each position."""
    rounds = Rounds(undrafted=22, accepted=(8,) * 8)
    pair = measure(rounds, ["one"]).pair
    tokens, drafted = 1 + gamma * 8 / 32, gamma * 10 / 32
    seconds = rounds.step + rounds.rest + drafted * (rounds.draft + rounds.token)
    assert pair.improvement(gamma) == pytest.approx(tokens * rounds.step / seconds, rel=0.03)
    assert (pair.c, pair.token_cost) == pytest.approx((0.08, 0.02), rel=1e-3)
    operations = (1 + drafted + drafted * pair.c) / tokens
    assert pair.operations(gamma) == pytest.approx(operations, rel=0.03)
    assert make_plan(pair).oracle > make_plan(pair).fastest.speed_up  # type: ignore[operator]


def test_alpha_by_position_is_found_again() -> None:
    """The text with γ = 2 counts at its two positions."""
    pair = measure(Rounds(accepted=(24, 18, 9, 9, 9, 9, 9, 9, 9, 9)), ["one"], max_gamma=10).pair
    assert pair.by_position == pytest.approx((0.75, 0.75, 0.5, *[1] * 7))
    pair = measure(Rounds(accepted=(32, 32, 16, 8, 4, 2, 1, 0, 0, 0)), ["one"], max_gamma=10).pair
    assert pair.by_position == pytest.approx((1, 1, *[0.5] * 5, *[0] * 3))


def test_alpha_goes_on_as_at_the_last_four_positions() -> None:
    assert extended([0.9, 0.5, 1, 1, 0.5, 0.5], 8) == pytest.approx((0.9, 0.5, 1, 1, 0.5, 0.5, 0.5**0.5, 0.5**0.5))
    assert extended([0.9, 0.4], 4) == pytest.approx((0.9, 0.4, 0.6, 0.6))
    assert extended([0.9, 0.5, 0.2], 2) == (0.9, 0.5)


def test_one_stall_does_not_decide() -> None:
    """The third of five texts with γ = 2, and of the target alone, takes a second more: its prompt alone shows it."""
    even, stalled = Rounds(), Rounds()

    def complete(prompt: str, *, gamma: int) -> Completion:
        done = stalled(prompt, gamma=gamma)
        if prompt != "2" or gamma == 16:
            return done
        (sample,) = done.samples
        timings = replace(sample.timings, total_us=sample.timings.total_us + (1_000_000 if gamma else 3_000_000))
        return Completion(done.started, (replace(sample, timings=timings),))

    prompts = [str(number) for number in range(5)]
    expected, found = measure(even, prompts), measure(complete, prompts)
    assert found.pair == expected.pair
    assert found.prompts == 5
    assert found.interval == pytest.approx((0.5, 0.5))
    for gamma, each in found.speed_ups.items():
        assert each.median == expected.speed_ups[gamma].median == each.low < 1.6 < each.high
        assert each.is_unclear == (gamma == 16)  # 0.69 for the other prompts
    assert measure(even, prompts[:4]).interval is None


def test_a_gamma_that_the_service_refuses_is_not_asked_for() -> None:
    rounds = Rounds()
    found = measure(rounds, ["one"], max_gamma=1)
    assert found.speed_ups.keys() == {1}
    assert found.judged == 32  # each token was accepted, and there was no next one
    assert {gamma for _, gamma in rounds.asked} == {0, 1}


def test_texts_of_one_round_are_refused() -> None:
    with pytest.raises(EvaluationError, match="the texts ended after their first round"):
        measure(Rounds(tokens=2), ["one"])


@pytest.fixture(scope="module")
def distant_draft(demo_pair: Services) -> Iterator[tuple[str, Proxy]]:
    """A draft service with a proxy between it and the verifier of the demo pair."""
    with Proxy(demo_pair.verifier.address) as proxy, Cluster() as cluster:
        draft = cluster.draft(proxy.address)
        wait_healthy(draft)
        yield draft.address, proxy


def test_a_running_pair_is_measured_with_its_distance(distant_draft: tuple[str, Proxy]) -> None:
    """A proxy adds 60 ms to each round trip; the target alone sends its tokens on and waits for none of them."""
    address, proxy = distant_draft
    prompt = json.loads((MODELS / "prompts.jsonl").read_text().splitlines()[0])["text"]
    how: Mapping[str, Any] = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, "outcome_cache": False}
    with Client(address, timeout=60) as client:

        def complete(prompt: str, gamma: int) -> Completion:
            return client.complete(prompt, gamma=gamma, **how)

        near = measure(complete, [prompt])
        proxy.delay(0.03)
        far = measure(complete, [prompt])
    for found in (near, far):
        assert 0.5 < found.pair.alpha < 1
        assert len(found.pair.by_position) == 16
        assert 0.5 < found.pair.by_position[0] <= 1
        assert found.pair.hit_rate == 0
        assert found.pair.c > 0
        assert found.pair.step_ms is not None
        assert found.judged > 20
    assert far.pair.alpha == near.pair.alpha  # the same greedy texts
    pair = far.pair
    rounds = [theory.round_time(gamma, pair.c, pair.round_trip, **pair.ways) for gamma in far.speed_ups]
    assert max(rounds) * (pair.step_ms or 0) > 60
