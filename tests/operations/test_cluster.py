"""A cluster at work: traces, logs and metrics; then one service after the other ends, and no client notices."""

import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import yaml

from outrider.client import Chunk, Client, Completion, Event
from protos.outrider.v1 import draft_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.draft_service.calls import request
from tests.operations.collector import Collector, Span, collecting
from tests.operations.metrics_in_use import (
    ALERTS,
    GIVEN,
    OPERATOR_RULES,
    Shown,
    alerts,
    documented,
    live,
    metric_queries,
    panels,
)

ASKED: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "gamma": 4}


@dataclass(frozen=True)
class Watched:
    """Two verifiers, two draft services that know both, and a collector of their traces.

    The first draft service traces only requests that come with a recorded trace; the second traces all.
    """

    verifiers: list[Service]
    drafts: list[Service]
    collector: Collector

    @property
    def draft_addresses(self) -> list[str]:
        return [draft.address for draft in self.drafts]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """Healthy services. The last tests leave none of it whole."""
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # milliseconds that spans are gathered for
    with collecting() as collector, Cluster(f"--otlp-endpoint http://{collector.address}") as cluster:
        verifiers = [cluster.verifier(flags="--grace 30", env=soon) for _ in range(2)]
        drafts = [
            # So little grace that some requests outlast it.
            cluster.draft(*verifiers, flags=f"--trace-sample {share} --grace 2", env=soon)
            for share in (0, 1)
        ]
        wait_healthy(*verifiers, *drafts)
        yield Watched(verifiers, drafts, collector)


def finished(draft: Service, traceparent: str | None = None, **fields: Any) -> list[draft_service_pb2.GenerateFinished]:
    """How the samples of a request ended, which comes with this metadata."""
    metadata = None if traceparent is None else (("traceparent", traceparent),)
    with grpc.insecure_channel(draft.address) as channel:
        call = DraftServiceStub(channel).Generate(request(**ASKED | fields), timeout=60, metadata=metadata)
        return [response.finished for response in call if response.HasField("finished")]


def about(service: Service, event: str, request_id: str) -> dict[str, Any]:
    """The line of its log with this event about a request; empty until it is there."""
    return next((line for line in service.logged(event) if line["request_id"] == request_id), {})


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


# ------------------------------------------------------------------------------------------------------------ traces


def test_one_trace_a_request_with_the_rounds_of_both_services(watched: Watched) -> None:
    """The trace is the client's; each round is there twice, with what it did, and each span is under its whole."""
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    (end,) = finished(watched.drafts[0], f"00-{trace_id}-{caller}-01", request_id="traced")
    rounds = end.statistics.num_rounds
    spans = watched.collector.wait(trace_id, lambda found: len(found) >= 2 + 2 * rounds)
    assert len(spans) == 2 + 2 * rounds
    (generate,), (verify,) = named(spans, "Generate"), named(spans, "Verify")
    assert (generate.service, generate.parent) == ("draft_service", caller)
    assert (verify.service, verify.parent) == ("verifier_service", generate.span_id)
    assert generate.attributes["outrider.request_id"] == verify.attributes["outrider.request_id"] == "traced"
    assert generate.attributes["outrider.tokens"] == end.usage.completion_tokens
    assert not generate.is_error
    assert not verify.is_error
    rounds_sent, verdicts = named(spans, "round"), named(spans, "verdict")
    for own, around in ((rounds_sent, generate), (verdicts, verify)):
        assert len(own) == rounds
        assert {(span.service, span.parent) for span in own} == {(around.service, around.span_id)}
        assert len({span.span_id for span in own}) == rounds
    assert sum(span.attributes["outrider.accepted"] for span in rounds_sent) == end.statistics.num_accepted_tokens
    assert sum(span.attributes["outrider.drafted"] for span in rounds_sent) == end.statistics.num_draft_tokens
    for sent, answered in zip(rounds_sent, verdicts, strict=True):
        for key in ("round", "base_length", "accepted", "committed", "queue_seconds", "pass_seconds"):
            assert sent.attributes[f"outrider.{key}"] == answered.attributes[f"outrider.{key}"]
        assert generate.began <= sent.began <= sent.ended <= generate.ended


def test_the_samples_of_a_request_share_its_trace(watched: Watched) -> None:
    trace_id = secrets.token_hex(16)
    ends = finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-01", n=2)
    rounds = sum(end.statistics.num_rounds for end in ends)
    spans = watched.collector.wait(trace_id, lambda found: len(found) >= 3 + 2 * rounds)
    assert len(named(spans, "Generate")) == 1
    assert len(named(spans, "Verify")) == 2
    assert {span.attributes["outrider.sample"] for span in named(spans, "round")} == {0, 1}


def test_what_is_not_sampled_leaves_no_span_and_its_logs_have_its_ids(watched: Watched) -> None:
    """Nor does a request without a trace, where the share of those is 0. A request after them shows that they had
    their time.
    """
    before = len(watched.collector.spans())
    trace_id, later = secrets.token_hex(16), secrets.token_hex(16)
    finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-00", request_id="unsampled")
    finished(watched.drafts[0], request_id="without")
    finished(watched.drafts[0], f"00-{later}-{secrets.token_hex(8)}-01")
    spans = watched.collector.wait(later, lambda found: bool(named(found, "Generate") and named(found, "Verify")))
    wait_until(lambda: len(watched.collector.spans()) >= before + len(spans))
    assert watched.collector.spans(trace_id) == []
    assert {span.trace_id for span in watched.collector.spans()[before:]} == {later}

    assert wait_until(lambda: about(watched.drafts[0], "generate", "unsampled"))["trace_id"] == trace_id
    (line,) = wait_until(
        lambda: list(filter(None, (about(each, "sequence", "unsampled") for each in watched.verifiers)))
    )
    assert line["trace_id"] == trace_id
    assert wait_until(lambda: about(watched.drafts[0], "generate", "without"))["trace_id"] not in (trace_id, later)


def test_of_requests_without_a_trace_a_share_gets_one(watched: Watched) -> None:
    """All of them, at the second draft service; the log has its id."""
    (end,) = finished(watched.drafts[1], request_id="sampled here")
    line = wait_until(lambda: about(watched.drafts[1], "generate", "sampled here"))
    rounds = end.statistics.num_rounds
    spans = watched.collector.wait(line["trace_id"], lambda found: len(found) >= 2 + 2 * rounds)
    (generate,) = named(spans, "Generate")
    assert generate.parent == ""
    assert line["span_id"] == generate.span_id
    assert {span.service for span in spans} == {"draft_service", "verifier_service"}


def test_a_request_that_is_refused_is_an_error_in_its_trace(watched: Watched) -> None:
    trace_id = secrets.token_hex(16)
    try:
        finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-01", max_new_tokens=1 << 20)
    except grpc.RpcError:
        (span,) = watched.collector.wait(trace_id, bool)
        assert span.is_error
        assert span.attributes["outrider.status"] == "INVALID_ARGUMENT"
    else:
        raise AssertionError("not refused")


# ------------------------------------------------------------------------------------------------------------ counts


def test_the_metrics_of_requests_are_the_requests_own_figures(watched: Watched) -> None:
    """What two requests add, by their statistics and timings; one of them has its target write alone."""

    def shown() -> dict[str, float]:
        found = watched.drafts[0].samples()
        one = {name: values[()] for name, values in found.items() if name.startswith("outrider_") and () in values}
        phases = {
            f"{part} {dict(labels)['phase']}": value
            for part in ("count", "sum")
            for labels, value in found[f"outrider_round_seconds_{part}"].items()
        }
        return one | phases | {"OK": found["outrider_requests_total"][("status", "OK"),]}

    before = shown()
    drafted, alone = (finished(watched.drafts[0], gamma=gamma)[0] for gamma in (4, 0))
    ends = (drafted, alone)
    added = {name: value - before[name] for name, value in shown().items()}
    tokens = sum(end.usage.completion_tokens for end in ends)
    rounds = sum(end.statistics.num_rounds for end in ends)
    assert added["OK"] == added["outrider_e2e_request_latency_seconds_count"] == 2
    assert added["outrider_generation_tokens_total"] == tokens
    assert added["outrider_prompt_tokens_total"] == sum(end.usage.prompt_tokens for end in ends)
    assert added["outrider_time_to_first_token_seconds_count"] == 2
    first = sum(end.timings.time_to_first_token_us for end in ends) / 1e6
    assert added["outrider_time_to_first_token_seconds_sum"] == pytest.approx(first, abs=1e-5)
    # All tokens but those that came with the first: at most a round's, and of the target alone only one.
    assert tokens - 2 - ASKED["gamma"] <= added["outrider_inter_token_latency_seconds_count"] <= tokens - 2
    assert added["count draft"] == drafted.statistics.num_drafts > 0
    assert {added[f"count {phase}"] for phase in ("wire", "queue", "pass", "accept")} == {rounds}
    for phase, field in (("queue", "queue_us"), ("pass", "forward_us"), ("accept", "verify_us"), ("draft", "draft_us")):
        timing = sum(getattr(end.timings, field) for end in ends) / 1e6
        assert added[f"sum {phase}"] == pytest.approx(timing, abs=1e-5), phase
    waited = sum(end.timings.verdict_us for end in ends) / 1e6
    assert sum(added[f"sum {phase}"] for phase in ("wire", "queue", "pass", "accept")) >= waited - 1e-5
    assert added["outrider_num_requests_waiting"] == before["outrider_num_requests_waiting"] == 0


# ------------------------------------------------------------------------------------------------------------- names

GRPC_STATUSES = {code.name for code in grpc.StatusCode}


def test_dashboard_and_alerts_ask_for_what_is_there(watched: Watched) -> None:
    """Each name, each label that it is matched, grouped or joined by, and each value that a label is compared with."""
    shown: dict[str, Shown] = {}
    for service in (watched.verifiers[0], watched.verifiers[1], watched.drafts[0]):
        for name, found in live(service.metrics_url)[0].items():
            for label, values in found.labels.items():
                shown.setdefault(name, Shown()).labels.setdefault(label, set()).update(values)
            shown.setdefault(name, Shown())
    expressions = [*panels(), *((rule["alert"], rule["expr"]) for rule in alerts())]
    assert len(expressions) > 50
    for title, expression in expressions:
        for each in metric_queries(expression):
            assert each.name in shown, f"{title}: no service shows {each.name}"
            labels = shown[each.name].labels
            assert each.labels - GIVEN <= labels.keys(), f"{title}: {each.name} has {sorted(labels)}"
            for label, value in each.values:
                known = labels.get(label, set()) | (GRPC_STATUSES if label == "status" else set())
                assert label in GIVEN or not value or value in known, f"{title}: {each.name} with {label}={value!r}"


def test_each_alert_says_what_it_means_and_what_to_do() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert all(len(rule["annotations"][key]) > 20 for key in ("summary", "description", "action"))


def test_the_operator_gets_the_same_rules() -> None:
    rules, wrapped = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ALERTS, OPERATOR_RULES))
    assert wrapped["kind"] == "PrometheusRule"
    assert wrapped["spec"] == rules


def test_the_table_of_metrics_is_what_is_shown(watched: Watched) -> None:
    """Every name of ours with its labels, of each service, and nothing besides."""
    rows, seen = documented(), dict[str, set[str]]()
    for name, service in (("verifier", watched.verifiers), ("draft", watched.drafts)):
        labels: dict[str, set[str]] = {}
        for process in service:
            for family, found in live(process.metrics_url)[1].items():
                if family.startswith("outrider_"):
                    labels.setdefault(family, set()).update(found.labels)
        written = {family: row for family, row in rows.items() if name in row.services}
        assert labels.keys() == written.keys()
        for family, row in written.items():
            # The same name may have other labels at the other service.
            assert labels[family] <= row.labels, family
            seen.setdefault(family, set()).update(labels[family])
    for family, row in rows.items():
        assert seen[family] == row.labels, family
        assert row.services <= {"draft", "verifier"}, family
        assert row.services, family


# ------------------------------------------------------------------------------------------------------------- going

REQUESTS, TOKENS = 4, 96
PROMPT = "def area(radius):\n"


def write(client: Client, seed: int, begun: threading.Event | None = None) -> Completion:
    """One text; a seed is the same text whoever writes it. `begun` is set at its first chunk."""
    taken: list[Event] = []
    for event in client.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=TOKENS, ignore_eos=True):
        taken.append(event)
        if begun is not None and isinstance(event, Chunk):
            begun.set()
    return Completion.of(taken)


@contextmanager
def writing(client: Client) -> Iterator[list[Future[Completion]]]:
    """All texts at once, each begun."""
    begun = [threading.Event() for _ in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        texts = [pool.submit(write, client, seed, each) for seed, each in enumerate(begun)]
        assert all(each.wait(60) for each in begun)
        yield texts


@pytest.fixture(scope="module")
def undisturbed(watched: Watched) -> Sequence[str]:
    """The texts, by seed."""
    with Client(watched.draft_addresses, timeout=120) as client, writing(client) as texts:
        return [text.result().text for text in texts]


def sequences_at(watched: Watched, verifier: Service) -> float:
    """How many the draft services have there."""
    key = (("verifier", verifier.address),)
    return sum(draft.samples()["outrider_verifier_sequences"].get(key, 0.0) for draft in watched.drafts)


def test_a_verifier_that_is_told_to_go_hands_its_sequences_over(watched: Watched, undisturbed: Sequence[str]) -> None:
    """It stands still until it is timing, so that its texts have not ended, however fast this machine is."""
    leaving, staying = watched.verifiers
    with Client(watched.draft_addresses, timeout=120) as client, writing(client) as texts:
        leaving.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: sequences_at(watched, leaving))
            leaving.process.send_signal(signal.SIGTERM)
        finally:
            leaving.process.send_signal(signal.SIGCONT)
        found = [text.result() for text in texts]
    assert leaving.process.wait(60) == 0
    assert [each.text for each in found] == undisturbed
    assert sum(each.samples[0].statistics.num_drain_moves for each in found) > 0
    assert not any(each.samples[0].num_resumes for each in found), "no client was bothered"
    wait_until(lambda: leaving.logged("stopped"))
    assert not any("are cut" in line["event"] for line in leaving.logged())
    switches = [draft.samples()["outrider_verifier_switches_total"] for draft in watched.drafts]
    assert sum(each[("reason", "draining"),] for each in switches) > 0
    assert sum(value for each in switches for value in each.values()) == sum(
        each.samples[0].statistics.num_failovers for each in found
    )
    for draft in watched.drafts:
        assert draft.is_healthy(within=20), "with a verifier less it is as ready as before"
    assert staying.returncode is None


def test_a_draft_service_that_is_told_to_go_is_left_for_another(watched: Watched, undisturbed: Sequence[str]) -> None:
    """The verifier stands still from when all texts have begun until the draft service has gone: so the texts outlast
    its grace, however fast this machine is.
    """
    leaving, _ = watched.drafts
    (verifier,) = [each for each in watched.verifiers if each.returncode is None]
    with Client(watched.draft_addresses, timeout=120) as client, writing(client) as texts:
        verifier.process.send_signal(signal.SIGSTOP)
        try:
            leaving.process.send_signal(signal.SIGTERM)
            assert leaving.process.wait(60) == 0
        finally:
            verifier.process.send_signal(signal.SIGCONT)
        found = [text.result() for text in texts]
    assert [each.text for each in found] == undisturbed
    assert sum(each.samples[0].num_resumes for each in found) > 0
    wait_until(lambda: any("are cut" in line["event"] for line in leaving.logged()))
