"""Metrics of both services as processes, scraped over HTTP, against what the requests report of themselves."""

from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from draft_service.drafters.guard import FAILURES_IN_A_ROW
from protos.outrider.v1 import draft_service_pb2
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.draft_service.calls import sampling, write
from tests.draft_service.pairs import BREAKING_TOKEN, write_awkward_draft
from tests.metrics import Samples

PREFIX = "outrider_spec_decode_"


@dataclass(frozen=True)
class Watched:
    """A pair, and where its metrics are."""

    channel: grpc.Channel
    verifier: Service
    draft: Service


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A pair whose draft one token breaks."""
    awkward = write_awkward_draft(tmp_path_factory.mktemp("watched") / "draft")
    with Cluster() as cluster:
        verifier = cluster.verifier()
        draft = cluster.draft(verifier, model=awkward)
        wait_healthy(verifier, draft)
        with grpc.insecure_channel(draft.address) as channel:
            yield Watched(channel, verifier, draft)


def counters(service: Service) -> Samples:
    return {name: found for name, found in service.samples().items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_counters_are_the_requests_own_statistics(watched: Watched, rule: str) -> None:
    law = sampling(1.0, seed=1, rule=f"ACCEPTANCE_RULE_{rule.upper()}")
    told = write(watched.channel, gamma=4, max_new_tokens=24, ignore_eos=True, sampling=law).end.statistics
    assert 0 < told.num_accepted_tokens < told.num_draft_tokens

    def found() -> dict[str, float]:
        shown = counters(watched.verifier).items()
        return {name: each.get((("rule", rule),), 0.0) for name, each in shown if "per_pos" not in name}

    expected = {
        f"{PREFIX}{name}_total": getattr(told, name)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    }
    wait_until(lambda: found() == expected)  # a verdict is on its way a moment before it is counted
    by_place = counters(watched.verifier)[f"{PREFIX}num_accepted_tokens_per_pos_total"]
    for place, count in enumerate(told.num_accepted_tokens_per_pos):
        assert by_place.get((("position", str(place)), ("rule", rule)), 0) == count


def test_each_drafter_shows_what_it_costs(watched: Watched) -> None:
    """By its name: what is added is what the requests report of themselves."""
    kinds = {
        "model": draft_service_pb2.DRAFTER_MODEL,
        "staged": draft_service_pb2.DRAFTER_STAGED,
        "lookup": draft_service_pb2.DRAFTER_LOOKUP,
    }

    def told(name: str) -> dict[str, float]:
        return {dict(labels)["drafter"]: value for labels, value in watched.draft.samples()[name].items()}

    tokens, proposals = "outrider_spec_decode_num_draft_tokens_total", "outrider_draft_proposals_total"
    seconds = "outrider_draft_seconds_total"
    before = {name: told(name) for name in (tokens, proposals, seconds)}
    assert set(before[tokens]) == {"model", "staged", "lookup", "random", "none"}
    for name, drafter in kinds.items():
        speculation = draft_service_pb2.SpeculationParams(drafter=drafter, gamma=4)
        sample = write(watched.channel, [7, 8, 9] * 8, speculation=speculation, max_new_tokens=24, ignore_eos=True)
        statistics = sample.end.statistics
        assert told(tokens)[name] - before[tokens][name] == statistics.num_draft_tokens > 0
        assert told(proposals)[name] - before[proposals][name] >= statistics.num_drafts > 0
        taken = told(seconds)[name] - before[seconds][name]
        assert taken == pytest.approx(sample.end.timings.draft_us / 1e6, rel=0.01, abs=1e-4)


def test_a_drafter_that_fails_shows_it(watched: Watched) -> None:
    """What fails is counted, under its name. It is asked on: these prompts break it, and a probe does not."""
    model = (("drafter", "model"),)
    before = watched.draft.samples()
    for _ in range(FAILURES_IN_A_ROW):
        write(watched.channel, [BREAKING_TOKEN, 7], max_new_tokens=3)
    found = watched.draft.samples()
    failures = "outrider_draft_failures_total"
    assert found[failures] == before[failures] | {model: before[failures][model] + FAILURES_IN_A_ROW}
    assert found["outrider_draft_proposals_total"] == before["outrider_draft_proposals_total"]
    assert set(found["outrider_drafter_up"].values()) == {1}
