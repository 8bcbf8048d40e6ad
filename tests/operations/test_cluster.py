"""A cluster at work: traces, logs and metrics; then one service after the other ends, and texts go on."""

import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.client import Chunk, Client, Completion, Event, Options
from protos.outrider.v1 import draft_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.draft_service.calls import request
from tests.operations.collector import Collector, Span, collecting
from tests.operations.metrics_in_use import (
    ALERTS,
    GIVEN,
    OPERATOR_RULES,
    OPERATORS,
    Shown,
    documented,
    expressions,
    query,
    read_rules,
)
from tests.slow_steps import STEP_SECONDS, slow_steps

FIELDS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "gamma": 4}


@dataclass(frozen=True)
class Watched:
    """Two verifiers, two draft services of both, and a collector of their traces.

    The first draft service traces only requests with a recorded trace; the second traces all. `step_seconds` is a file
    for `slow_steps`.
    """

    verifiers: list[Service]
    drafts: list[Service]
    collector: Collector
    step_seconds: Path

    def client(self) -> Client:
        return Client([draft.address for draft in self.drafts], timeout=120)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Healthy services. The last tests leave none of it whole."""
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # milliseconds between two exports
    file = tmp_path_factory.mktemp("slow") / "step-seconds"
    slow: dict[str, Any] = {"fault": "slow_steps", "env": soon | {STEP_SECONDS: str(file)}}
    with collecting() as collector, Cluster(f"--otlp-endpoint http://{collector.address}") as cluster:
        verifiers = [cluster.verifier(flags="--grace 30", **slow) for _ in range(2)]
        drafts = [
            # So little grace that some requests outlast it.
            cluster.draft(*verifiers, flags=f"--trace-sample {share} --grace 2", env=soon)
            for share in (0, 1)
        ]
        wait_healthy(*verifiers, *drafts)
        yield Watched(verifiers, drafts, collector, file)


def finished(draft: Service, traceparent: str | None = None, **fields: Any) -> list[draft_service_pb2.GenerateFinished]:
    """Send a request, as part of a trace; return the ends of its samples."""
    metadata = None if traceparent is None else (("traceparent", traceparent),)
    with grpc.insecure_channel(draft.address) as channel:
        call = DraftServiceStub(channel).Generate(request(**FIELDS | fields), timeout=60, metadata=metadata)
        return [response.finished for response in call if response.HasField("finished")]


def about(service: Service, event: str, request_id: str) -> dict[str, Any]:
    """The entry of its log for an event of a request; empty until it is there."""
    return next((line for line in service.logged(event) if line["request_id"] == request_id), {})


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_one_trace_a_request_with_the_rounds_of_both_services(watched: Watched) -> None:
    """The trace is the client's; each round has a span of either service, below that of the request or sequence."""
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    (end,) = finished(watched.drafts[0], f"00-{trace_id}-{caller}-01", request_id="traced")
    rounds = end.statistics.num_rounds
    spans = watched.collector.wait(trace_id, 2 + 2 * rounds)
    assert len(spans) == 2 + 2 * rounds
    (generate,), (verify,) = named(spans, "Generate"), named(spans, "Verify")
    assert (generate.service, generate.parent) == ("draft_service", caller)
    assert (verify.service, verify.parent) == ("verifier_service", generate.span_id)
    assert generate.attributes["outrider.request_id"] == verify.attributes["outrider.request_id"] == "traced"
    assert generate.attributes["outrider.tokens"] == end.usage.completion_tokens
    # By number: a span's beginning is counted back from when its verdict left, and two may leave together.
    rounds_sent, verdicts = (
        sorted(named(spans, each), key=lambda span: span.attributes["outrider.round"]) for each in ("round", "verdict")
    )
    for own, around in ((rounds_sent, generate), (verdicts, verify)):
        assert [(span.service, span.parent) for span in own] == [(around.service, around.span_id)] * rounds
    assert sum(span.attributes["outrider.accepted"] for span in rounds_sent) == end.statistics.num_accepted_tokens
    assert sum(span.attributes["outrider.drafted"] for span in rounds_sent) == end.statistics.num_draft_tokens
    for sent, answered in zip(rounds_sent, verdicts, strict=True):
        for key in ("round", "base_length", "accepted", "committed", "queue_seconds", "forward_seconds"):
            assert sent.attributes[f"outrider.{key}"] == answered.attributes[f"outrider.{key}"]
        assert generate.began <= sent.began <= sent.ended <= generate.ended


def test_sampled_requests_leave_spans_and_logs_have_the_ids_of_all(watched: Watched) -> None:
    """A trace that is not recorded leaves none; of requests without a trace, each service samples a share (0 and 1)."""
    before = {span.trace_id for span in watched.collector.spans}
    trace_id = secrets.token_hex(16)
    finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-00", request_id="unsampled")
    finished(watched.drafts[0], request_id="without")
    (end,) = finished(watched.drafts[1], request_id="sampled here")
    line = wait_until(lambda: about(watched.drafts[1], "generate", "sampled here"))
    spans = watched.collector.wait(line["trace_id"], 2 + 2 * end.statistics.num_rounds)
    (generate,) = named(spans, "Generate")
    assert (generate.parent, generate.span_id) == ("", line["span_id"])
    assert {span.trace_id for span in watched.collector.spans} - before == {line["trace_id"]}
    assert wait_until(lambda: about(watched.drafts[0], "generate", "unsampled"))["trace_id"] == trace_id
    (line,) = wait_until(
        lambda: list(filter(None, (about(each, "sequence", "unsampled") for each in watched.verifiers)))
    )
    assert line["trace_id"] == trace_id


def test_metrics_of_requests_are_their_own_figures(watched: Watched) -> None:
    """The statistics and timings of two requests; one of them is without a draft."""

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
    drafted, alone = ends = [finished(watched.drafts[0], gamma=gamma)[0] for gamma in (4, 0)]
    added = {name: value - before[name] for name, value in shown().items()}
    tokens = sum(end.usage.completion_tokens for end in ends)
    rounds = sum(end.statistics.num_rounds for end in ends)
    assert added["OK"] == added["outrider_e2e_request_latency_seconds_count"] == 2
    assert added["outrider_generation_tokens_total"] == tokens
    assert added["outrider_time_to_first_token_seconds_count"] == 2
    # All tokens but those that came with the first: at most a round's, and of the target alone only one.
    assert tokens - 2 - FIELDS["gamma"] <= added["outrider_inter_token_latency_seconds_count"] <= tokens - 2
    assert added["count draft"] == drafted.statistics.num_drafts > alone.statistics.num_drafts == 0
    assert {added[f"count {phase}"] for phase in ("wire", "queue", "forward", "verify")} == {rounds}
    for phase in ("queue", "forward", "verify", "draft"):
        timing = sum(getattr(end.timings, f"{phase}_us") for end in ends) / 1e6
        assert added[f"sum {phase}"] == pytest.approx(timing, abs=1e-5), phase


def shown_by(services: Sequence[Service]) -> Shown:
    found = Shown()
    for service in services:
        found.add(service.metrics_url)
    return found


def test_dashboard_and_alerts_query_existing_metrics(watched: Watched) -> None:
    """Each name, each label that it is matched, grouped or joined by, and each value that a label is compared with."""
    shown = shown_by([*watched.verifiers, watched.drafts[0]]).samples | {"up": {}}  # which Prometheus adds
    for labels in shown.values():
        if "status" in labels:
            labels["status"] |= {code.name for code in grpc.StatusCode}
    for title, expression in expressions():
        metrics, grouped = query(expression)
        assert metrics, title
        for name, matchers in metrics:
            assert name in shown, f"{title}: no service shows {name}"
            for label, value in matchers:
                known = label in GIVEN or (label in shown[name] and value in {"", *shown[name][label]})
                assert known, f"{title}: {name} with {label}={value!r}"
        # Without the operator no target has a namespace, and grouping by it changes nothing.
        assert grouped - GIVEN - {"namespace"} <= {label for name, _ in metrics for label in shown[name]}, title


def test_the_operator_gets_the_same_rules() -> None:
    assert read_rules(OPERATOR_RULES)["spec"] == read_rules(ALERTS)


def test_no_query_needs_a_label_that_the_operator_replaces() -> None:
    for title, expression in expressions():
        matchers, _ = query(expression)
        assert OPERATORS.isdisjoint(label for _, matched in matchers for label, _ in matched), title


def test_the_tables_of_metrics_are_whole(watched: Watched) -> None:
    """Every name of ours with its type and labels, of each service, and nothing besides."""
    rows, seen = documented(), dict[str, set[str]]()
    for name, services in (("verifier", watched.verifiers), ("draft", watched.drafts)):
        shown = shown_by(services)
        labels = {family: set(found) for family, found in shown.families.items() if family.startswith("outrider_")}
        written = {family: row for family, row in rows.items() if name in row.services}
        assert labels.keys() == written.keys()
        for family, row in written.items():
            # The same name may have other labels at the other service.
            assert labels[family] <= row.labels, family
            assert shown.kinds[family] == row.kind, family
            seen.setdefault(family, set()).update(labels[family])
    assert seen == {family: row.labels for family, row in rows.items()}


REQUESTS, TOKENS, GAMMA = 4, 80, 4
STEP_S = 0.1  # a text has at least TOKENS / (GAMMA + 1) steps: none ends before this process stops a service
PROMPT = "def area(radius):\n"


def write(client: Client, seed: int, begun: threading.Event) -> Completion:
    """One text, the same for a seed whichever service writes it. `begun` is set at its first chunk."""
    taken: list[Event] = []
    options: Options = {"temperature": 1.0, "seed": seed, "max_new_tokens": TOKENS, "ignore_eos": True, "gamma": GAMMA}
    for event in client.generate(PROMPT, **options):
        taken.append(event)
        if isinstance(event, Chunk):
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
    with watched.client() as client, writing(client) as texts:
        return [text.result().text for text in texts]


def test_a_draining_verifier_hands_its_sequences_over(watched: Watched, undisturbed: Sequence[str]) -> None:
    """It is frozen until SIGTERM is pending, so that its texts have not ended, however fast this machine is."""
    leaving, staying = watched.verifiers
    with slow_steps(watched.step_seconds, STEP_S), watched.client() as client, writing(client) as texts:
        leaving.process.send_signal(signal.SIGSTOP)
        try:
            sequences = {"metric": "outrider_verifier_sequences", "verifier": leaving.address}
            wait_until(lambda: any(each.count(**sequences) for each in watched.drafts))
            leaving.process.send_signal(signal.SIGTERM)
        finally:
            leaving.process.send_signal(signal.SIGCONT)
        found = [text.result() for text in texts]
    assert leaving.process.wait(60) == 0
    assert [each.text for each in found] == undisturbed
    assert sum(each.samples[0].statistics.num_drain_moves for each in found) > 0
    assert not any(each.samples[0].num_resumes for each in found), "clients notice nothing"
    wait_until(lambda: leaving.logged("stopped"))
    assert not any("--grace is over" in line["event"] for line in leaving.logged())
    assert sum(draft.count("outrider_verifier_switches_total", reason="draining") for draft in watched.drafts) > 0
    assert staying.returncode is None


def test_clients_leave_a_draining_draft_service_for_another(watched: Watched, undisturbed: Sequence[str]) -> None:
    """The verifier is frozen until the draft service has ended: so the texts outlast its grace on any machine."""
    leaving, _ = watched.drafts
    (verifier,) = [each for each in watched.verifiers if each.returncode is None]
    with slow_steps(watched.step_seconds, STEP_S), watched.client() as client, writing(client) as texts:
        verifier.process.send_signal(signal.SIGSTOP)
        try:
            leaving.process.send_signal(signal.SIGTERM)
            assert leaving.process.wait(60) == 0
        finally:
            verifier.process.send_signal(signal.SIGCONT)
        found = [text.result() for text in texts]
    assert [each.text for each in found] == undisturbed
    assert sum(each.samples[0].num_resumes for each in found) > 0
    wait_until(lambda: any("--grace is over" in line["event"] for line in leaving.logged()))
