"""Statistics and timings count what verdicts say."""

import time

import pytest

from draft_service.sequence import SpeculationCounts, Timings
from protos.outrider.v1 import speculation_pb2


def verdict(accepted: int, beta: list[float], judged: int = 0) -> speculation_pb2.Verdict:
    return speculation_pb2.Verdict(
        judged=judged,
        accepted=accepted,
        beta=beta,
        timings=speculation_pb2.VerdictTimings(queue_us=10, forward_us=200, verify_us=30),
    )


def test_counts_are_the_fields_own() -> None:
    counts = SpeculationCounts()
    counts.add(3, verdict(3, [0.5, 0.75, 1.0]))
    counts.add(3, verdict(1, [0.5, 0.25]))
    counts.add(1, verdict(0, [0.0]))
    counts.add(0, verdict(0, []))
    message = counts.to_message()
    assert (message.num_drafts, message.num_rounds) == (3, 4)
    assert (message.num_draft_tokens, message.num_accepted_tokens) == (7, 4)
    assert list(message.num_draft_tokens_per_pos) == [3, 2, 2]
    assert list(message.num_accepted_tokens_per_pos) == [2, 1, 1]
    assert message.draft_acceptance_rate == pytest.approx(4 / 7)
    assert message.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert message.alpha == pytest.approx(3.0 / 6)


def test_nothing_drafted_makes_no_division_by_zero() -> None:
    counts = SpeculationCounts()
    counts.add(0, verdict(0, []))
    message = counts.to_message()
    assert (message.num_rounds, message.num_drafts, message.alpha, message.draft_acceptance_rate) == (1, 0, 0.0, 0.0)


def test_where_no_chance_is_known_alpha_is_the_accepted_share_of_what_was_judged() -> None:
    counts = SpeculationCounts()
    counts.add(4, verdict(4, [], judged=4))
    counts.add(4, verdict(1, [], judged=2))
    counts.add(4, verdict(0, [], judged=1))
    counts.add(0, verdict(0, []))
    message = counts.to_message()
    assert message.alpha == pytest.approx(5 / 7)
    assert message.draft_acceptance_rate == pytest.approx(5 / 12)


def test_timings_add_up_over_rounds() -> None:
    timings = Timings(arrived=time.perf_counter() - 2.0)
    timings.draft += 0.25
    timings.add(0.5, verdict(0, []))
    timings.add(0.25, verdict(0, []))
    timings.tokens_out(1)
    first = timings.first_token
    timings.tokens_out(1)
    message = timings.to_message()
    assert (message.draft_us, message.verdict_us) == (250_000, 750_000)
    assert (message.queue_us, message.forward_us, message.verify_us) == (20, 400, 60)
    assert timings.first_token == first
    assert 2_000_000 <= message.time_to_first_token_us <= message.total_us
