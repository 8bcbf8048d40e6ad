"""Bad input over gRPC: status, field and numbers of each error; and every sequence is freed."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from outrider.cli.processes import ServiceProcess
from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1 import draft_service_pb2, sampling_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Service, wait_until
from tests.draft_service import oracle
from tests.draft_service.calls import PROMPT, ProposeStream, request, sampling, write
from tests.draft_service.conftest import CLIENT_SEQUENCES, MAX_SEQUENCES, VERIFIER_MAX_SEQUENCES
from tests.verifier_service.streams import error_of

VOCABULARY = 2048
IDS = oracle.encode(PROMPT)
SIGMOID, SCALES = sampling_pb2.ACCEPTANCE_RULE_SIGMOID, {"alpha": -10, "beta": 10}


def refusal(draft: grpc.Channel, message: draft_service_pb2.GenerateRequest) -> RequestError:
    return error_of(DraftServiceStub(draft).Generate(message, timeout=60))


BAD_FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("prompt", {"chat": None}, ("not set",)),
    ("token_ids.ids", {"prompt": []}, ("token",)),
    ("token_ids.ids", {"prompt": [1, VOCABULARY]}, ("2048",)),
    ("text", {"prompt": ""}, ("empty",)),
    ("text", {"prompt": "x" * 32_737}, ("32737 bytes", "32736", "1023 tokens", "32 bytes")),
    # Of a length that is refused no token is read: millions would hold up all requests.
    ("prompt", {"prompt": [VOCABULARY] * 2000}, ("2000", "1024")),
    ("committed_token_ids", {"committed_token_ids": [VOCABULARY] * 2000}, ("2000", "1024")),
    ("chat.messages", {"chat": {"messages": [{}] * 2000}}, ("2000", "1023")),
    ("max_new_tokens", {"prompt": [1] * 1000, "max_new_tokens": 25}, ("25", "1000", "24")),
    ("max_new_tokens", {"max_new_tokens": 0}, ("0",)),
    ("max_new_tokens", {"max_new_tokens": 0, "fill_context": True}, ("0",)),
    ("max_new_tokens", {"max_new_tokens": 3, "committed_token_ids": [1, 2, 3]}, ("3",)),
    ("min_new_tokens", {"max_new_tokens": 3, "min_new_tokens": 4}, ("3", "4")),
    ("committed_token_ids", {"committed_token_ids": [1, 4000]}, ("4000", "2048")),
    ("committed_token_ids", {"committed_token_ids": [1], "n": 2}, ("2",)),
    (
        "held_tokens",
        {"committed_token_ids": [1], "held_tokens": 2},
        ("is 2; at most 1, the number of committed_token_ids",),
    ),
    ("n", {"n": MAX_SEQUENCES + 1}, (str(MAX_SEQUENCES + 1), str(MAX_SEQUENCES))),
    ("n", {"n": 2**32 - 1}, (f"1 to {MAX_SEQUENCES}",)),  # nor does it count for the limits of the client
    ("speculation.gamma", {"speculation": {"gamma": 17}}, ("is 17; at most 16: give less, or raise --max-gamma",)),
    (
        "speculation.gamma",
        {"speculation": {"gamma": 16}, "sampling": {"rule": SIGMOID, "sigmoid": SCALES}},
        ("16", "67072", "65536", "15"),
    ),
    ("speculation.draft_temperature", {"speculation": {"draft_temperature": math.nan}}, ("nan", "100")),
    ("speculation.policy", {"speculation": {"policy": 77}}, ("77", "fixed (1)", "heuristic (2)")),
    ("speculation.max_entropy", {"speculation": {"max_entropy": math.nan}}, ("nan", "at least 0")),
    (
        "speculation.drafter",
        {"speculation": {"drafter": "DRAFTER_NGRAM"}},
        ("is ngram", "lookup, model, none, random, staged"),
    ),
    (
        "sampling.rule",
        {"speculation": {"drafter": "DRAFTER_LOOKUP"}, "sampling": {"rule": SIGMOID, "sigmoid": SCALES}},
        ("the drafter lookup has none",),
    ),
    (
        "speculation.draft_temperature",
        {"speculation": {"draft_temperature": 0}, "sampling": {"rule": SIGMOID, "sigmoid": SCALES}},
        ("0", "sigmoid"),
    ),
    ("prompt_logprobs.top_n", {"prompt_logprobs": {"top_n": 21}}, ("is 21; at most 20",)),
    (
        "prompt_logprobs",
        {"prompt_logprobs": {}, "emission": {"frame_bytes": 4096}},
        ("prompt_logprobs and emission are both set",),
    ),
    (
        "speculation.report_probabilities",
        {"speculation": {"report_probabilities": True}, "emission": {"frame_bytes": 4096}},
        ("speculation.report_probabilities and emission are both set",),
    ),
    ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}, ("2048",)),
    ("stop_token_ids", {"stop_token_ids": list(range(65))}, ("65", "64")),
    ("stop", {"stop": ["x"] * 17}, ("17", "16")),
    ("stop[1]", {"stop": ["x", ""]}, ("0",)),
    ("stop[0]", {"stop": ["x" * 257]}, ("257", "256")),
    ("time_limit", {"time_limit": Duration(seconds=-3)}, ("-3",)),
    ("logprobs.top_n", {"logprobs": {"top_n": 21}}, ("21", "20")),
    ("request_id", {"request_id": "x" * 129}, ("129", "128")),
    ("chat.messages[1].role", {"chat": {"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}}, ("empty",)),
    ("chat.messages", {"chat": {"messages": [{"role": "tool", "content": "a"}]}}, ("tools are not allowed",)),
    ("sampling.temperature", {"sampling": {"temperature": math.nan}}, ("nan",)),
    ("sampling.sigmoid", {"sampling": {"rule": SIGMOID}}, ("not set", "alpha and beta")),
    ("emission.frame_bytes", {"emission": {"frame_bytes": 70_000}}, ("70000", "65536")),
    ("emission.pace", {"emission": {"pace": Duration(nanos=100_000)}}, ("0.0001", "0.001")),
    (
        "speculation.report_rounds",
        {"emission": {"frame_bytes": 512}, "speculation": {"report_rounds": True}},
        ("emission",),
    ),
]


@pytest.mark.parametrize(("field", "fields", "numbers"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named_with_its_numbers(
    draft: grpc.Channel, field: str, fields: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    fields = dict(fields)
    error = refusal(draft, request(fields.pop("prompt", PROMPT), **fields))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["field"] == field
    for number in (field, *numbers):
        assert number in error.message


def test_unknown_features_and_other_weights_are_a_failed_precondition(draft: grpc.Channel) -> None:
    error = refusal(draft, request(required_features=["chat", "telepathy", ""]))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_FEATURE")
    assert error.message.startswith("required_features has '', 'telepathy'; ")
    assert "chat" in error.message
    error = refusal(draft, request(weights_fingerprint="0" * 64))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH")
    assert error.metadata["field"] == "weights_fingerprint"


def test_an_oversized_message_is_refused(draft: grpc.Channel) -> None:
    error = refusal(draft, request("x" * (1 << 16)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(1 << 16) in error.message


def opening(**fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"prompt_token_ids": [1, 2], "sampling": sampling(1.0, seed=1)}
    return {"open": draft_service_pb2.OpenDraft(**(defaults | fields))}


def advance(number: int, base: int, committed: list[int], gamma: int = 2) -> dict[str, Any]:
    message = draft_service_pb2.Advance(round=number, base_length=base, committed_token_ids=committed, gamma=gamma)
    return {"advance": message}


BAD_STREAMS: dict[str, tuple[str, list[dict[str, Any]], tuple[str, ...]]] = {
    "before open": ("OUT_OF_ORDER", [advance(1, 2, [])], ("OpenDraft",)),
    "open twice": ("OUT_OF_ORDER", [opening(), opening()], ("second",)),
    "no seed": ("INVALID_FIELD", [opening(sampling=sampling(1.0))], ("sampling.seed",)),
    "foreign prompt": ("INVALID_FIELD", [opening(prompt_token_ids=[9999])], ("9999", "2048")),
    "other name": ("INVALID_FIELD", [opening(), advance(1, 2, []) | {"sequence_id": "t"}], ("'t'", "'s'")),
    "round again": ("OUT_OF_ORDER", [opening(), advance(4, 2, []), advance(4, 2, [7])], ("4",)),
    "wrong base": ("WRONG_BASE", [opening(), advance(1, 3, [])], ("3", "2")),
    "nothing committed": ("INVALID_FIELD", [opening(), advance(1, 2, []), advance(2, 2, [])], ("committed", "2")),
    "foreign token": ("INVALID_FIELD", [opening(), advance(1, 2, []), advance(2, 2, [2048])], ("2048",)),
    "gamma": ("INVALID_FIELD", [opening(), advance(1, 2, [], gamma=17)], ("17", "16")),
    "too long": ("INVALID_FIELD", [opening(prompt_token_ids=[1] * 1020), advance(1, 1020, [1] * 5)], ("1025", "1024")),
}


@pytest.mark.parametrize(("reason", "messages", "texts"), BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_a_bad_propose_stream_ends_with_the_reason(
    draft: grpc.Channel, reason: str, messages: list[dict[str, Any]], texts: tuple[str, ...]
) -> None:
    with ProposeStream(draft) as stream:
        for message in messages:
            stream.send(**message)
        error = error_of(stream.call)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    for text in texts:
        assert text in error.message


def test_a_silent_propose_stream_is_closed(draft: grpc.Channel) -> None:
    with ProposeStream(draft) as stream:
        stream.open(IDS)
        stream.take()
        error = error_of(stream.call)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")


def test_undecodable_requests_are_invalid_arguments_and_free_their_sequences(
    draft: grpc.Channel, pair_process: ServiceProcess
) -> None:
    garbage = b"\xff" * 4
    unary: Any = draft.unary_unary("/outrider.v1.DraftService/Generate")
    with pytest.raises(grpc.RpcError) as caught:
        unary(garbage, timeout=60)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert "4 bytes cannot be decoded" in error.message
    propose: Any = draft.stream_stream("/outrider.v1.DraftService/Propose")
    opened = draft_service_pb2.ProposeRequest(sequence_id="s", **opening()).SerializeToString()
    for _ in range(MAX_SEQUENCES + 1):
        assert error_of(propose(iter([opened, garbage]), timeout=60)).reason == "INVALID_FIELD"
    assert not any("Traceback" in line or "DecodeError" in line for line in pair_process.log_lines())


@contextmanager
def fill(draft: grpc.Channel, count: int) -> Iterator[list[ProposeStream]]:
    """Open `count` Propose streams, which occupy the draft service and no verifier."""
    with ExitStack() as stack:
        streams = [stack.enter_context(ProposeStream(draft)) for _ in range(count)]
        for stream in streams:
            stream.open(IDS)
            stream.take()
            stream.advance(1, len(IDS), [], gamma=1)
            stream.take()
        yield streams


def test_queued_calls_get_their_position(draft: grpc.Channel) -> None:
    with fill(draft, MAX_SEQUENCES), ThreadPoolExecutor(4) as threads:
        requests = [request(max_new_tokens=2, joined_responses=is_joined) for is_joined in (False, True) * 2]
        queued = [DraftServiceStub(draft).Generate(each, timeout=60) for each in requests]
        first = [next(call) for call in queued]
        with ProposeStream(draft) as stream:
            stream.open(IDS)
            assert next(stream.call).WhichOneof("kind") == "queue_position"
        assert sorted(response.queue_position for response in first) == [0, 1, 2, 3]
        assert all(response.HasField("queue_position") for response in first)
        ends = [threads.submit(list, call) for call in queued]
    for end in ends:
        last = end.result()[-1]
        assert (last.joined or [last])[-1].WhichOneof("event") == "finished"
    wait_until_idle(draft)


def test_a_time_limit_that_passes_in_the_queue_ends_the_text(draft: grpc.Channel) -> None:
    with fill(draft, MAX_SEQUENCES):
        sample = write(draft, time_limit=Duration(nanos=200_000_000))
    assert (sample.reason, sample.ids) == ("TIME_LIMIT", [])
    wait_until_idle(draft)


def test_an_idle_stream_ends_for_a_queued_request(draft: grpc.Channel) -> None:
    with fill(draft, MAX_SEQUENCES) as streams:
        assert write(draft, max_new_tokens=2, ignore_eos=True).reason == "LENGTH"
        ends = [error_of(stream.call) for stream in streams]
    assert [(end.code.name, end.reason) for end in ends].count(("RESOURCE_EXHAUSTED", "IDLE")) == 1
    wait_until_idle(draft)


def test_a_clients_limit_counts_sequences_of_all_its_calls(draft: grpc.Channel, pair_process: Service) -> None:
    def refused() -> float:
        return pair_process.count("outrider_requests_total", status="RESOURCE_EXHAUSTED")

    before = refused()
    with ExitStack() as stack:
        for _ in range(CLIENT_SEQUENCES - MAX_SEQUENCES + 1):  # some of them are queued
            stream = stack.enter_context(ProposeStream(draft))
            stream.open(IDS)
            next(stream.call)
        error = refusal(draft, request(n=MAX_SEQUENCES, max_new_tokens=2))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.metadata["limit"] == "max-client-sequences"
        assert error.metadata["given"] == str(CLIENT_SEQUENCES + 1)
    assert refused() == before, "an alert of overload counts these"
    wait_until_idle(draft)


def test_vanished_clients_free_their_sequences(draft: grpc.Channel, target_process: Service) -> None:
    """At once: the target does not write their texts to the end."""
    message = request(temperature=1.0, max_new_tokens=900, ignore_eos=True, request_id="vanished")
    for _ in range(3):
        calls = [DraftServiceStub(draft).Generate(message, timeout=90) for _ in range(VERIFIER_MAX_SEQUENCES)]
        for call in calls:
            next(call)
            next(call)
        for call in calls:
            call.cancel()
        wait_until_idle(draft)
    ended = [line for line in target_process.logged("sequence") if line["request_id"].startswith("vanished")]
    assert len(ended) == 3 * VERIFIER_MAX_SEQUENCES
    assert max(line["tokens"] for line in ended) < 900


def test_a_client_that_does_not_read_is_cut(draft: grpc.Channel, pair_process: ServiceProcess) -> None:
    """The service waits 2 s, and the client buffers very little."""
    heavy = request(
        temperature=1.0, max_new_tokens=900, ignore_eos=True, logprobs=sampling_pb2.LogprobsParams(top_n=20)
    )
    small_buffers = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(pair_process.address, options=small_buffers) as channel:
        call = DraftServiceStub(channel).Generate(heavy, timeout=90)
        next(call)
        wait_until(lambda: any("DEADLINE_EXCEEDED" in line for line in pair_process.log_lines()[-3:]))
        error = error_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")
    wait_until_idle(draft)


def wait_until_idle(draft: grpc.Channel) -> None:
    """Wait until both services can run their most sequences at once, with drafts."""

    def runs_at_capacity() -> bool:
        count = VERIFIER_MAX_SEQUENCES
        try:
            with fill(draft, MAX_SEQUENCES - count), ThreadPoolExecutor(count) as threads:
                running = [
                    threads.submit(write, draft, temperature=1.0, gamma=3, max_new_tokens=12, ignore_eos=True)
                    for _ in range(count)
                ]
                return all(each.result().end.statistics.num_drafts for each in running)
        except grpc.RpcError as error:
            assert from_rpc_error(error).reason in ("OVERLOADED", "IDLE")  # noqa: PT017
            return False

    wait_until(runs_at_capacity)
