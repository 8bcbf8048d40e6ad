"""A house of services at work: its traces, its logs, its names; then one after the other goes, and nobody notices."""

import secrets
from typing import Any

import grpc

from outrider.cli.processes import ServiceProcess
from protos.outrider.v1 import draft_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service.calls import request
from tests.operations.collector import Span
from tests.operations.house import House, logged, until

ASKED: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "gamma": 4}


def finished(
    draft: ServiceProcess, traceparent: str | None = None, **fields: Any
) -> list[draft_service_pb2.GenerateFinished]:
    """How the samples of a request ended, which comes with this metadata."""
    metadata = None if traceparent is None else (("traceparent", traceparent),)
    with grpc.insecure_channel(draft.address) as channel:
        call = DraftServiceStub(channel).Generate(request(**ASKED | fields), timeout=60, metadata=metadata)
        return [response.finished for response in call if response.HasField("finished")]


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


# ------------------------------------------------------------------------------------------------------------ traces


def test_one_trace_a_request_with_the_rounds_of_both_services(watched: House) -> None:
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
    asked, judged = named(spans, "round"), named(spans, "verdict")
    for own, around in ((asked, generate), (judged, verify)):
        assert len(own) == rounds
        assert {(span.service, span.parent) for span in own} == {(around.service, around.span_id)}
        assert len({span.span_id for span in own}) == rounds
    assert sum(span.attributes["outrider.accepted"] for span in asked) == end.statistics.num_accepted_tokens
    assert sum(span.attributes["outrider.drafted"] for span in asked) == end.statistics.num_draft_tokens
    for sent, answered in zip(asked, judged, strict=True):
        for key in ("round", "base_length", "accepted", "committed", "queue_seconds", "pass_seconds"):
            assert sent.attributes[f"outrider.{key}"] == answered.attributes[f"outrider.{key}"]
        assert generate.began <= sent.began <= sent.ended <= generate.ended


def test_the_samples_of_a_request_share_its_trace(watched: House) -> None:
    trace_id = secrets.token_hex(16)
    ends = finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-01", n=2)
    rounds = sum(end.statistics.num_rounds for end in ends)
    spans = watched.collector.wait(trace_id, lambda found: len(found) >= 3 + 2 * rounds)
    assert len(named(spans, "Generate")) == 1
    assert len(named(spans, "Verify")) == 2
    assert {span.attributes["outrider.sample"] for span in named(spans, "round")} == {0, 1}


def test_what_is_not_sampled_leaves_no_span_and_its_logs_have_its_ids(watched: House) -> None:
    """Nor does a request without a trace, where the share of those is 0. A request after them shows that they had
    their time.
    """
    before = len(watched.collector.spans())
    trace_id, later = secrets.token_hex(16), secrets.token_hex(16)
    finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-00", request_id="unsampled")
    finished(watched.drafts[0], request_id="without")
    finished(watched.drafts[0], f"00-{later}-{secrets.token_hex(8)}-01")
    spans = watched.collector.wait(later, lambda found: bool(named(found, "Generate") and named(found, "Verify")))
    until(lambda: len(watched.collector.spans()) >= before + len(spans))
    assert watched.collector.spans(trace_id) == []
    assert {span.trace_id for span in watched.collector.spans()[before:]} == {later}

    def ids(service: ServiceProcess, event: str, name: str) -> list[str]:
        return [line["trace_id"] for line in logged(service, event) if line["request_id"] == name]

    assert ids(watched.drafts[0], "generate", "unsampled") == [trace_id]
    until(lambda: any(ids(each, "sequence", "unsampled") == [trace_id] for each in watched.verifiers))
    (own,) = ids(watched.drafts[0], "generate", "without")
    assert own not in (trace_id, later)


def test_of_requests_without_a_trace_a_share_gets_one(watched: House) -> None:
    """All of them, at the second draft service; the log has its id."""
    (end,) = finished(watched.drafts[1], request_id="sampled here")
    (line,) = [line for line in logged(watched.drafts[1], "generate") if line["request_id"] == "sampled here"]
    rounds = end.statistics.num_rounds
    spans = watched.collector.wait(line["trace_id"], lambda found: len(found) >= 2 + 2 * rounds)
    (generate,) = named(spans, "Generate")
    assert generate.parent == ""
    assert line["span_id"] == generate.span_id
    assert {span.service for span in spans} == {"draft_service", "verifier_service"}


def test_a_request_that_is_refused_is_an_error_in_its_trace(watched: House) -> None:
    trace_id = secrets.token_hex(16)
    try:
        finished(watched.drafts[0], f"00-{trace_id}-{secrets.token_hex(8)}-01", max_new_tokens=1 << 20)
    except grpc.RpcError:
        (span,) = watched.collector.wait(trace_id, bool)
        assert span.is_error
        assert span.attributes["outrider.status"] == "INVALID_ARGUMENT"
    else:
        raise AssertionError("not refused")
