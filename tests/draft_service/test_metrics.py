"""Metrics of both services as processes, scraped over HTTP, against the statistics of the requests."""

import time

import grpc
import pytest
from prometheus_client import CollectorRegistry

from draft_service.metrics import RequestMetrics
from draft_service.sequence import Timings
from outrider.cli.processes import Pair
from outrider.service.metrics import Metrics, TextMetrics
from protos.outrider.v1 import draft_service_pb2
from tests.cluster import Service, wait_until
from tests.draft_service.calls import sampling, write

GAMMA = 4


def test_the_statuses_of_alerts_are_there_before_the_first_request() -> None:
    metrics = Metrics()
    RequestMetrics(metrics)
    for status in ("INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        assert metrics.registry.get_sample_value("outrider_requests_total", {"status": status}) == 0


@pytest.mark.parametrize(("rule", "drafter"), [("tokenwise", "model"), ("block", "staged"), ("block", "lookup")])
def test_counters_grow_by_the_requests_statistics(demo_pair: Pair, rule: str, drafter: str) -> None:
    verifier, draft = demo_pair.verifier, demo_pair.draft
    assert isinstance(verifier, Service)
    assert isinstance(draft, Service)

    def of_verifier() -> list[float]:
        prefix = "outrider_spec_decode_num"
        totals = [verifier.count(f"{prefix}_{name}_total", rule=rule) for name in ("drafts", "draft_tokens")]
        by_position = f"{prefix}_accepted_tokens_per_pos_total"
        return totals + [verifier.count(by_position, rule=rule, position=str(index)) for index in range(GAMMA)]

    def of_draft() -> list[float]:
        metrics = ("spec_decode_num_draft_tokens", "draft_proposals", "draft_seconds")
        return [draft.count(f"outrider_{metric}_total", drafter=drafter) for metric in metrics]

    before, before_draft = of_verifier(), of_draft()
    params = sampling(1.0, seed=1, rule=f"ACCEPTANCE_RULE_{rule.upper()}")
    speculation = draft_service_pb2.SpeculationParams(gamma=GAMMA, drafter=f"DRAFTER_{drafter.upper()}")
    with grpc.insecure_channel(demo_pair.address) as channel:
        fields = {"sampling": params, "speculation": speculation, "max_new_tokens": 24, "ignore_eos": True}
        end = write(channel, [7, 8, 9] * 8, **fields).end
    counts = end.statistics
    assert counts.num_accepted_tokens < counts.num_draft_tokens
    assert counts.num_accepted_tokens > 0 or drafter == "lookup"
    expected = [counts.num_drafts, counts.num_draft_tokens, *counts.num_accepted_tokens_per_pos]
    # A verdict is sent a moment before it is counted.
    wait_until(lambda: [b - a for a, b in zip(before, of_verifier(), strict=True)] == expected)
    tokens, proposals, seconds = (b - a for a, b in zip(before_draft, of_draft(), strict=True))
    assert tokens == counts.num_draft_tokens
    assert proposals >= counts.num_drafts
    assert seconds == pytest.approx(end.timings.draft_us / 1e6, rel=0.01, abs=1e-4)


@pytest.mark.parametrize(("joined", "later"), [(0.0, 0), (30.0, 4)])
def test_tokens_that_waited_for_others_count_at_their_own_time(joined: float, later: int) -> None:
    registry = CollectorRegistry()
    timings = Timings(time.perf_counter() - 40.0, TextMetrics(registry, "t_", "requests"), joined)
    timings.tokens_out(5)
    found = [registry.get_sample_value(f"t_{name}_seconds_{what}") for name, what in (
        ("time_to_first_token", "sum"), ("inter_token_latency", "count"), ("inter_token_latency", "sum")
    )]  # fmt: skip
    assert found == pytest.approx([40.0 - joined, later, joined], abs=1.0)
