"""Metrics of both services as processes, scraped over HTTP, against what the requests report of themselves."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from draft_service.drafters.guard import FAILURES_IN_A_ROW
from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from tests.cluster import Cluster, Service, wait_healthy
from tests.draft_service.calls import sampling, write
from tests.draft_service.pairs import BREAKING_TOKEN, write_awkward_draft
from tests.metrics import Samples

RULES = {"tokenwise": sampling_pb2.ACCEPTANCE_RULE_TOKENWISE, "block": sampling_pb2.ACCEPTANCE_RULE_BLOCK}
WITHIN_S = 60.0  # a verdict is on its way a moment before it is counted
PREFIX = "outrider_spec_decode_"


@dataclass(frozen=True)
class Watched:
    """A pair, and where its metrics are."""

    channel: grpc.Channel
    verifier: Service
    draft: Service


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A pair that judges in float64, so that the path in use is not the one that any device would pick, and whose draft
    one token breaks.
    """
    awkward = write_awkward_draft(tmp_path_factory.mktemp("watched") / "draft")
    with Cluster() as cluster:
        verifier = cluster.verifier(flags="--verify-path torch")
        draft = cluster.draft(verifier, model=awkward)
        wait_healthy(verifier, draft)
        with grpc.insecure_channel(draft.address) as channel:
            yield Watched(channel, verifier, draft)


def logged(service: Service, event: str) -> dict[str, str]:
    """The line of the log with this event."""
    (found,) = service.logged(event)
    return found


def scrape(service: Service) -> Samples:
    return service.samples()


def counters(service: Service) -> Samples:
    return {name: found for name, found in scrape(service).items() if name.startswith(PREFIX)}


def test_counters_are_the_requests_own_statistics(watched: Watched) -> None:
    assert counters(watched.verifier) == {}
    expected: Samples = {}
    rounds = 0
    for rule, number in RULES.items():
        totals: Counter[str] = Counter()
        accepted: Counter[str] = Counter()
        for seed in (1, 2):
            sample = write(
                watched.channel,
                gamma=4,
                max_new_tokens=24,
                ignore_eos=True,
                sampling=sampling(1.0, seed=seed, rule=number),
            )
            told = sample.end.statistics
            totals["num_drafts"] += told.num_drafts
            totals["num_draft_tokens"] += told.num_draft_tokens
            totals["num_accepted_tokens"] += told.num_accepted_tokens
            accepted.update({str(i): count for i, count in enumerate(told.num_accepted_tokens_per_pos) if count})
            rounds += told.num_rounds
        assert 0 < totals["num_accepted_tokens"] < totals["num_draft_tokens"]
        assert len(accepted) > 1
        for name, value in totals.items():
            expected.setdefault(f"{PREFIX}{name}_total", {})[("rule", rule),] = value
        per_position = expected.setdefault(f"{PREFIX}num_accepted_tokens_per_pos_total", {})
        per_position.update({(("position", at), ("rule", rule)): count for at, count in accepted.items()})
    end = time.monotonic() + WITHIN_S
    while (found := counters(watched.verifier)) != expected and time.monotonic() < end:
        time.sleep(0.05)
    assert found == expected
    assert scrape(watched.verifier)["outrider_verify_seconds_count"] == {(("path", "torch"),): rounds}
    (seconds,) = scrape(watched.verifier)["outrider_verify_seconds_sum"].values()
    assert 0 < seconds < 60


def test_a_target_that_writes_alone_drafts_nothing(watched: Watched) -> None:
    before = counters(watched.verifier)
    (calls,) = scrape(watched.verifier)["outrider_verify_seconds_count"].values() or (0,)
    write(watched.channel, gamma=0, max_new_tokens=3, ignore_eos=True)
    (after,) = scrape(watched.verifier)["outrider_verify_seconds_count"].values()
    assert after == calls + 3
    assert counters(watched.verifier) == before


def test_the_lengths_that_were_chosen_are_shown(watched: Watched) -> None:
    """One for each round, by policy: 0 for each token that the target wrote alone."""
    asked = (
        draft_service_pb2.SpeculationParams(gamma=3),
        draft_service_pb2.SpeculationParams(gamma=6, policy=draft_service_pb2.SPECULATION_POLICY_HEURISTIC),
        draft_service_pb2.SpeculationParams(gamma=0),
    )
    for name, speculation in zip(("fixed", "heuristic", "fixed"), asked, strict=True):
        rounds, total = _lengths(watched, name)
        told = write(watched.channel, speculation=speculation, max_new_tokens=16, ignore_eos=True).end.statistics
        more, summed = _lengths(watched, name)
        assert more - rounds == told.num_rounds
        assert (summed - total) / told.num_rounds == pytest.approx(told.mean_gamma)
        assert (told.mean_gamma == 0) is (speculation.gamma == 0)


def _lengths(watched: Watched, policy: str) -> tuple[float, float]:
    """How many were chosen, and their sum."""
    shown, labels = scrape(watched.draft), (("policy", policy),)
    count, total = (shown.get(f"{PREFIX}gamma_{part}", {}).get(labels, 0.0) for part in ("count", "sum"))
    return count, total


def test_the_outcome_cache_shows_what_it_does(watched: Watched) -> None:
    def shown() -> dict[str, float]:
        prefix = "outrider_outcome_cache_"
        return {
            name.removeprefix(prefix).removesuffix("_total"): value
            for name, found in scrape(watched.draft).items()
            if name.startswith(prefix)
            for value in found.values()
        }

    before = shown()
    told = write(watched.channel, gamma=4, max_new_tokens=64, ignore_eos=True, sampling=sampling(0.0)).end.statistics
    counted = {name: value - before[name] for name, value in shown().items()}
    assert counted["queries"] == told.num_outcome_cache_queries > 0
    assert counted["hits"] == told.num_outcome_cache_hits
    assert counted["drafted_tokens"] == told.num_predrafted_tokens
    assert counted["used_tokens"] == told.num_predrafted_tokens - told.num_wasted_tokens
    assert (counted["saved_seconds"] > 0) == (counted["used_tokens"] > 0)


def test_both_services_say_what_they_run(watched: Watched) -> None:
    (target,) = scrape(watched.verifier)["outrider_service_info"]
    assert {("service", "verifier_service"), ("device", "cpu"), ("verify_path", "torch")} < set(target)
    assert dict(target)["model"].endswith("target")
    assert re.match(r"\d+\.\d+", dict(target)["version"])
    (draft,) = scrape(watched.draft)["outrider_service_info"]
    assert {("service", "draft_service"), ("device", "cpu")} < set(draft)
    assert "verify_path" not in dict(draft)


def test_the_log_names_the_path_and_why(watched: Watched) -> None:
    line = logged(watched.verifier, "verifying")
    assert (line["verify_path"], line["reason"], line["device"]) == ("torch", "asked for", "cpu")


def test_each_drafter_shows_what_it_costs(watched: Watched) -> None:
    """By its name: what is added is what the requests report of themselves."""
    kinds = {
        "model": draft_service_pb2.DRAFTER_MODEL,
        "staged": draft_service_pb2.DRAFTER_STAGED,
        "lookup": draft_service_pb2.DRAFTER_LOOKUP,
    }

    def told(name: str) -> dict[str, float]:
        return {dict(labels)["drafter"]: value for labels, value in scrape(watched.draft)[name].items()}

    tokens, proposals = "outrider_spec_decode_num_draft_tokens_total", "outrider_draft_proposals_total"
    seconds, failures = "outrider_draft_seconds_total", "outrider_draft_failures_total"
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
        assert taken > 0
    assert told(failures) == dict.fromkeys(before[tokens], 0)
    assert told("outrider_drafter_up") == dict.fromkeys(before[tokens], 1)
    found = scrape(watched.draft)
    names = ("passes", "guessed_tokens", "accepted_tokens", "failures")
    passes, guessed, accepted, failed = (found[f"outrider_staged_{name}_total"][()] for name in names)
    assert 0 < accepted <= guessed
    assert 0 < passes <= guessed
    assert failed == 0


def test_a_drafter_that_fails_shows_it(watched: Watched) -> None:
    """What fails is counted, under its name. It is asked on: these prompts break it, and a probe does not."""
    model = (("drafter", "model"),)
    before = scrape(watched.draft)
    for _ in range(FAILURES_IN_A_ROW):
        write(watched.channel, [BREAKING_TOKEN, 7], max_new_tokens=3)
    found = scrape(watched.draft)
    failures, proposals = "outrider_draft_failures_total", "outrider_draft_proposals_total"
    assert found[failures] == before[failures] | {model: before[failures][model] + FAILURES_IN_A_ROW}
    assert found[proposals] == before[proposals]
    assert set(found["outrider_drafter_up"].values()) == {1}
