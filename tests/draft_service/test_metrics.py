"""Metrics of both services as processes, scraped over HTTP, against what the requests report of themselves."""

from typing import Any

import grpc
import pytest

from outrider.cli.processes import Pair
from protos.outrider.v1 import draft_service_pb2
from tests.cluster import Service, wait_until
from tests.draft_service.calls import sampling, write

TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
GAMMA = 4


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_counters_are_the_requests_own_statistics(demo_pair: Pair, rule: str) -> None:
    verifier = demo_pair.verifier
    assert isinstance(verifier, Service)

    def shown() -> list[float]:
        prefix = "outrider_spec_decode_"
        by_place = [
            verifier.count(f"{prefix}num_accepted_tokens_per_pos_total", rule=rule, position=str(index))
            for index in range(GAMMA)
        ]
        return [verifier.count(f"{prefix}{name}_total", rule=rule) for name in TOTALS] + by_place

    before = shown()
    params = sampling(1.0, seed=1, rule=f"ACCEPTANCE_RULE_{rule.upper()}")
    with grpc.insecure_channel(demo_pair.address) as channel:
        statistics = write(channel, gamma=GAMMA, max_new_tokens=24, ignore_eos=True, sampling=params).end.statistics
    assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens
    expected = [*(getattr(statistics, name) for name in TOTALS), *statistics.num_accepted_tokens_per_pos]
    # A verdict is on its way a moment before it is counted.
    wait_until(lambda: [b - a for a, b in zip(before, shown(), strict=True)] == expected)


@pytest.mark.parametrize("name", ["model", "staged", "lookup"])
def test_each_drafter_shows_what_it_costs(demo_pair: Pair, name: str) -> None:
    """By its name: what is added is what the requests report of themselves."""
    draft = demo_pair.draft
    assert isinstance(draft, Service)

    def shown() -> list[float]:
        metrics = ("spec_decode_num_draft_tokens", "draft_proposals", "draft_seconds")
        return [draft.count(f"outrider_{metric}_total", drafter=name) for metric in metrics]

    before = shown()
    how: dict[str, Any] = {"gamma": GAMMA, "drafter": f"DRAFTER_{name.upper()}"}
    speculation = draft_service_pb2.SpeculationParams(**how)
    with grpc.insecure_channel(demo_pair.address) as channel:
        end = write(channel, [7, 8, 9] * 8, speculation=speculation, max_new_tokens=24, ignore_eos=True).end
    tokens, proposals, seconds = (b - a for a, b in zip(before, shown(), strict=True))
    assert tokens == end.statistics.num_draft_tokens > 0
    assert proposals >= end.statistics.num_drafts > 0
    assert seconds == pytest.approx(end.timings.draft_us / 1e6, rel=0.01, abs=1e-4)
