"""Bad input over gRPC: the right status, a text that names field and numbers, and nothing left behind."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from outrider.cli.processes import ServiceProcess
from outrider.rpc.errors import RequestError, from_rpc_error
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service import oracle
from tests.draft_service.calls import (
    BLOCK,
    COUPLED,
    PROMPT,
    TOKENWISE,
    ProposeStream,
    generate,
    request,
    sampling,
    write,
)
from tests.draft_service.conftest import CLIENT_SEQUENCES, PLACES, VERIFIER_PLACES
from tests.verifier_service.streams import Stream

CONTEXT, VOCABULARY = 1024, 2048
IDS = oracle.encode(PROMPT)
NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # takes next to nothing unread
NAN, INF = math.nan, math.inf
SIGMOID, SCALES = sampling_pb2.ACCEPTANCE_RULE_SIGMOID, sampling_pb2.SigmoidScales(alpha=-10, beta=10)


def refusal(draft: grpc.Channel, message: draft_service_pb2.GenerateRequest) -> RequestError:
    with pytest.raises(grpc.RpcError) as caught:
        generate(draft, message)
    return from_rpc_error(caught.value)


def law(**fields: Any) -> dict[str, Any]:
    return {"sampling": sampling_pb2.SamplingParams(**fields)}


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    said = [draft_service_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return {"chat": draft_service_pb2.ChatPrompt(messages=said)}


def speculation(gamma: int) -> dict[str, Any]:
    return {"speculation": draft_service_pb2.SpeculationParams(gamma=gamma)}


def draft_temperature(value: float) -> dict[str, Any]:
    return {"speculation": draft_service_pb2.SpeculationParams(draft_temperature=value)}


BAD_FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("token_ids.ids", {"prompt": []}, ("token",)),
    ("token_ids.ids", {"prompt": [1, VOCABULARY]}, ("2048",)),
    ("text", {"prompt": ""}, ("no tokens",)),
    ("text", {"prompt": "x" * 32_737}, ("32737 bytes", "32736", "1023 tokens", "32 bytes")),
    ("chat.messages", chat(("user", "é" * 8_000), ("user", "x" * 16_730)), ("32738 bytes", "32736", "1023 tokens")),
    ("prompt", {"prompt": [1] * CONTEXT}, ("1024",)),
    ("prompt", {"prompt": [1] * 2000}, ("2000", "1024")),
    ("max_new_tokens", {"prompt": [1] * 1000, "max_new_tokens": 25}, ("25", "1000", "24")),
    ("max_new_tokens", {"max_new_tokens": 0}, ("0",)),
    ("max_new_tokens", {"max_new_tokens": 3, "committed_token_ids": [1, 2, 3]}, ("3",)),
    ("min_new_tokens", {"max_new_tokens": 3, "min_new_tokens": 4}, ("3", "4")),
    ("committed_token_ids", {"committed_token_ids": [1, 4000]}, ("4000", "2048")),
    ("committed_token_ids", {"committed_token_ids": [1], "n": 2}, ("2",)),
    ("n", {"n": 0}, ("0", str(PLACES))),
    ("n", {"n": 17}, ("17", str(PLACES))),
    ("speculation.gamma", speculation(17), ("17", "16")),
    ("speculation.draft_temperature", draft_temperature(-0.5), ("-0.5", "100")),
    ("speculation.draft_temperature", draft_temperature(1e-7), ("1e-07", "1e-06", "100")),
    ("speculation.draft_temperature", draft_temperature(101), ("101", "100")),
    ("speculation.draft_temperature", draft_temperature(NAN), ("nan", "100")),
    ("speculation.draft_temperature", draft_temperature(0) | law(rule=SIGMOID, sigmoid=SCALES), ("0", "sigmoid")),
    ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}, ("2048",)),
    ("stop_token_ids", {"stop_token_ids": list(range(65))}, ("65", "64")),
    ("stop", {"stop": ["x"] * 17}, ("17", "16")),
    ("stop[1]", {"stop": ["x", ""]}, ("0",)),
    ("stop[0]", {"stop": ["x" * 257]}, ("257", "256")),
    ("time_limit", {"time_limit": Duration(seconds=0)}, ("0",)),
    ("time_limit", {"time_limit": Duration(seconds=-3)}, ("-3",)),
    ("logprobs.top_n", {"logprobs": sampling_pb2.LogprobsParams(top_n=21)}, ("21", "20")),
    ("request_id", {"request_id": "x" * 129}, ("129", "128")),
    ("chat.messages", chat(), ("empty",)),
    ("chat.messages[1].role", chat(("user", "a"), ("", "b")), ("empty",)),
    ("chat.messages", chat(("tool", "a")), ("tools do not speak here",)),
    ("sampling.temperature", law(temperature=-1.0), ("-1",)),
    ("sampling.temperature", law(temperature=NAN), ("nan",)),
    ("sampling.temperature", law(temperature=INF), ("inf",)),
    ("sampling.temperature", law(temperature=1e-30), ("1e-30", "1e-06", "100")),
    ("sampling.top_p", law(top_p=0.0), ("0",)),
    ("sampling.top_p", law(top_p=NAN), ("nan",)),
    ("sampling.min_p", law(min_p=1.5), ("1.5",)),
    ("sampling.top_k", law(top_k=2**31), (str(2**31),)),
    ("sampling.repetition_penalty", law(repetition_penalty=0.0), ("0",)),
    ("sampling.repetition_penalty", law(repetition_penalty=1e-38), ("1e-38", "0.01")),
    ("sampling.presence_penalty", law(presence_penalty=101.0), ("101",)),
    ("sampling.frequency_penalty", law(frequency_penalty=-INF), ("-inf",)),
    ("sampling.logit_bias", law(logit_bias=[sampling_pb2.LogitBias(token_id=VOCABULARY)]), ("2048",)),
    ("sampling.logit_bias", law(logit_bias=[sampling_pb2.LogitBias(token_id=1, bias=101.0)]), ("101",)),
    ("sampling.banned_token_ids", law(banned_token_ids=[3000]), ("3000", "2048")),
    ("sampling.lenience", law(lenience=1.5), ("1.5",)),
    ("sampling.lenience", law(lenience=1e-30), ("1e-30", "1e-06")),
    ("sampling.rule", law(rule=99), ("99",)),
    ("sampling.sigmoid", law(rule=SIGMOID), ("not set", "alpha and beta")),
    ("sampling.sigmoid", law(sigmoid=SCALES), ("block",)),
    ("sampling.sigmoid.alpha", law(rule=SIGMOID, sigmoid=sampling_pb2.SigmoidScales(alpha=2, beta=1)), ("2", "1")),
    ("sampling.sigmoid.beta", law(rule=SIGMOID, sigmoid=sampling_pb2.SigmoidScales(beta=NAN)), ("nan",)),
    ("sampling.sigmoid.beta", law(rule=SIGMOID, sigmoid=sampling_pb2.SigmoidScales(beta=1e30)), ("1e+30", "1e+06")),
    ("sampling.sigmoid.alpha", law(rule=SIGMOID, sigmoid=sampling_pb2.SigmoidScales(beta=1e-40)), ("0", "0.001")),
    ("speculation.gamma", speculation(16) | law(rule=SIGMOID, sigmoid=SCALES), ("16", "67072", "65536", "15")),
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


# Both ends of each range, as the contract states them.
SMALL: dict[str, Any] = {
    "temperature": 1e-6,
    "top_p": 1e-38,
    "repetition_penalty": 0.01,
    "presence_penalty": -100,
    "frequency_penalty": -100,
    "logit_bias": [sampling_pb2.LogitBias(token_id=token, bias=-100) for token in range(50)],
}
LARGE: dict[str, Any] = {
    "temperature": 100,
    "min_p": 1e-38,
    "repetition_penalty": 100,
    "presence_penalty": 100,
    "frequency_penalty": 100,
    "logit_bias": [sampling_pb2.LogitBias(token_id=token, bias=100) for token in range(50)],
}
RULES = [TOKENWISE, BLOCK, COUPLED, SIGMOID]


@pytest.mark.parametrize("rule", RULES, ids=sampling_pb2.AcceptanceRule.Name)
@pytest.mark.parametrize("fields", [SMALL, LARGE, SMALL | {"temperature": 0}], ids=["small", "large", "greedy"])
def test_no_number_within_its_range_fails_a_text(draft: grpc.Channel, fields: dict[str, Any], rule: Any) -> None:
    fields = dict(fields)
    if rule in (TOKENWISE, SIGMOID):
        fields["lenience"] = 1e-6
    if rule == SIGMOID:
        fields["sigmoid"] = sampling_pb2.SigmoidScales(alpha=999_999, beta=1_000_000)
    sample = write(draft, sampling=sampling_pb2.SamplingParams(**fields, rule=rule, seed=1), gamma=3, max_new_tokens=12)
    assert 1 <= len(sample.ids) <= 12


def test_a_prompt_is_needed(draft: grpc.Channel) -> None:
    error = refusal(draft, draft_service_pb2.GenerateRequest())
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")


def test_what_cannot_be_kept_is_a_failed_precondition(draft: grpc.Channel) -> None:
    error = refusal(draft, request(required_features=["chat", "telepathy"]))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_FEATURE")
    assert "telepathy" in error.message
    assert "chat" in error.message
    error = refusal(draft, request(weights_fingerprint="0" * 64))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH")
    assert error.metadata["field"] == "weights_fingerprint"


def test_an_oversized_message_is_refused(draft: grpc.Channel) -> None:
    error = refusal(draft, request("x" * (1 << 16)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(1 << 16) in error.message


# ------------------------------------------------------------------------------------------------------------- Propose


def opening(**fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"prompt_token_ids": [1, 2], "sampling": sampling(1.0, seed=1)}
    return {"open": draft_service_pb2.OpenDraft(**(defaults | fields))}


def advance(number: int, base: int, committed: list[int], gamma: int = 2) -> dict[str, Any]:
    message = draft_service_pb2.Advance(round=number, base_length=base, committed_token_ids=committed, gamma=gamma)
    return {"advance": message}


BAD_STREAMS: list[tuple[str, str, list[dict[str, Any]], tuple[str, ...]]] = [
    ("before open", "OUT_OF_ORDER", [advance(1, 2, [])], ("OpenDraft",)),
    ("nothing", "OUT_OF_ORDER", [{}], ("OpenDraft",)),
    ("open twice", "OUT_OF_ORDER", [opening(), opening()], ("second",)),
    ("no kind", "INVALID_FIELD", [opening(), {}], ("kind",)),
    ("no seed", "INVALID_FIELD", [opening(sampling=sampling(1.0))], ("sampling.seed",)),
    ("empty prompt", "INVALID_FIELD", [opening(prompt_token_ids=[])], ("prompt_token_ids",)),
    ("foreign prompt", "INVALID_FIELD", [opening(prompt_token_ids=[9999])], ("9999", "2048")),
    ("long prompt", "INVALID_FIELD", [opening(prompt_token_ids=[1] * 1025)], ("1025", "1024")),
    ("no name", "INVALID_FIELD", [opening() | {"sequence_id": ""}], ("sequence_id",)),
    ("other name", "INVALID_FIELD", [opening(), advance(1, 2, []) | {"sequence_id": "t"}], ("'t'", "'s'")),
    ("round 0", "OUT_OF_ORDER", [opening(), advance(0, 2, [])], ("0",)),
    ("round again", "OUT_OF_ORDER", [opening(), advance(4, 2, []), advance(4, 2, [7])], ("4",)),
    ("wrong base", "WRONG_BASE", [opening(), advance(1, 3, [])], ("3", "2")),
    ("nothing committed", "INVALID_FIELD", [opening(), advance(1, 2, []), advance(2, 2, [])], ("committed", "2")),
    ("foreign token", "INVALID_FIELD", [opening(), advance(1, 2, []), advance(2, 2, [2048])], ("2048",)),
    ("gamma", "INVALID_FIELD", [opening(), advance(1, 2, [], gamma=17)], ("17", "16")),
    ("too long", "INVALID_FIELD", [opening(prompt_token_ids=[1] * 1020), advance(1, 1020, [1] * 5)], ("1025", "1024")),
]


@pytest.mark.parametrize(("name", "reason", "messages", "texts"), BAD_STREAMS, ids=[case[0] for case in BAD_STREAMS])
def test_a_bad_propose_stream_ends_with_the_reason(
    draft: grpc.Channel, name: str, reason: str, messages: list[dict[str, Any]], texts: tuple[str, ...]
) -> None:
    with ProposeStream(draft) as stream:
        for message in messages:
            stream.send(**message)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream.call)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    for text in texts:
        assert text in error.message


def test_a_silent_propose_stream_is_closed(draft: grpc.Channel) -> None:
    with ProposeStream(draft) as stream:
        stream.open(IDS)
        stream.take()
        with pytest.raises(grpc.RpcError) as caught:
            stream.take()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")


def test_an_unknown_feature_of_propose_is_refused(draft: grpc.Channel) -> None:
    with ProposeStream(draft) as stream:
        stream.open(IDS, required_features=["telepathy"])
        with pytest.raises(grpc.RpcError) as caught:
            stream.take()
    assert from_rpc_error(caught.value).reason == "UNKNOWN_FEATURE"


# --------------------------------------------------------------------------------------------------------- undecodable

GARBAGE = b"\xff" * 4


@pytest.mark.parametrize("method", ["Generate", "GetModel"])
def test_a_request_that_cannot_be_decoded_is_an_invalid_argument(
    draft: grpc.Channel, pair_process: ServiceProcess, method: str
) -> None:
    call: Any = draft.unary_unary(f"/outrider.v1.DraftService/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(GARBAGE, timeout=60)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert "4 bytes cannot be decoded" in error.message
    assert not any("Traceback" in line or "DecodeError" in line for line in pair_process.log_lines())


@pytest.mark.parametrize("messages", [[], [draft_service_pb2.ProposeRequest(sequence_id="s", **opening())]])
def test_a_propose_stream_that_cannot_be_decoded_ends_at_once(
    draft: grpc.Channel, pair_process: ServiceProcess, messages: list[draft_service_pb2.ProposeRequest]
) -> None:
    sent = [*(message.SerializeToString() for message in messages), GARBAGE]
    propose: Any = draft.stream_stream("/outrider.v1.DraftService/Propose")
    for _ in range(PLACES + 1):
        with pytest.raises(grpc.RpcError) as caught:
            list(propose(iter(sent), timeout=60))
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert not any("Traceback" in line or "DecodeError" in line for line in pair_process.log_lines())


# ------------------------------------------------------------------------------------------------------ room and leaks


@contextmanager
def fill(draft: grpc.Channel, count: int) -> Iterator[list[ProposeStream]]:
    """Takes so many places of the draft service, and of its engine, and none of the verifier's."""
    with ExitStack() as held:
        streams = [held.enter_context(ProposeStream(draft)) for _ in range(count)]
        for stream in streams:
            stream.open(IDS)
            stream.take()
            stream.advance(1, len(IDS), [], gamma=1)
            stream.take()
        yield streams


def test_calls_beyond_what_runs_at_once_wait_and_learn_their_position(draft: grpc.Channel) -> None:
    with fill(draft, PLACES), ThreadPoolExecutor(4) as threads:
        queued = [DraftServiceStub(draft).Generate(request(max_new_tokens=2), timeout=60) for _ in range(4)]
        first = [next(call) for call in queued]
        with ProposeStream(draft) as stream:
            stream.open(IDS)
            assert next(stream.call).WhichOneof("kind") == "queue_position"
        assert sorted(response.queue_position for response in first) == [0, 1, 2, 3]
        assert all(response.HasField("queue_position") for response in first)
        ends = [threads.submit(list, call) for call in queued]
    for end in ends:
        assert end.result()[-1].WhichOneof("event") == "finished"
    everything_is_free(draft)


def test_more_samples_than_ever_run_at_once_are_refused_for_good(draft: grpc.Channel) -> None:
    error = refusal(draft, request(n=PLACES + 1, max_new_tokens=2))
    assert (error.code, error.metadata["maximum"]) == (grpc.StatusCode.INVALID_ARGUMENT, str(PLACES))


def test_idle_streams_give_way_to_a_text_that_is_queued(draft: grpc.Channel) -> None:
    with fill(draft, PLACES) as streams:
        assert write(draft, max_new_tokens=2, ignore_eos=True).reason == "LENGTH"
        assert [refused(stream) for stream in streams].count("RESOURCE_EXHAUSTED IDLE") == 1
    everything_is_free(draft)


def test_a_propose_client_that_does_not_read_is_cut(draft: grpc.Channel, pair_process: ServiceProcess) -> None:
    """Its messages do not keep the stream alive."""
    with grpc.insecure_channel(pair_process.address, options=NARROW) as channel, ProposeStream(channel) as stream:
        stream.open(IDS)
        for number in range(1, 200):
            stream.advance(number, len(IDS) + max(0, number - 2), [1] * (number > 1), gamma=8)
        end = time.monotonic() + 60
        while not any('"propose"' in line and "DEADLINE_EXCEEDED" in line for line in pair_process.log_lines()[-3:]):
            assert time.monotonic() < end, "it is still served"
            time.sleep(0.1)
        assert refused(stream) == "DEADLINE_EXCEEDED IDLE"
    everything_is_free(draft)


def refused(stream: ProposeStream) -> str:
    """How the service ends a stream whose client says nothing more, and reads to its end."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stream.call)
    error = from_rpc_error(caught.value)
    return f"{error.code.name} {error.reason}"


def test_a_client_is_limited_by_its_sequences_whatever_calls_they_come_in(draft: grpc.Channel) -> None:
    with ExitStack() as held:
        for _ in range(CLIENT_SEQUENCES - PLACES + 1):  # some of them are queued
            stream = held.enter_context(ProposeStream(draft))
            stream.open(IDS)
            next(stream.call)
        error = refusal(draft, request(n=PLACES, max_new_tokens=2))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.metadata["limit"] == "max-client-sequences"
        assert error.metadata["given"] == str(CLIENT_SEQUENCES + 1)
    everything_is_free(draft)


def test_the_verifiers_refusal_reaches_the_client_as_it_is(draft: grpc.Channel, verifier: grpc.Channel) -> None:
    with ExitStack() as held:
        for number in range(VERIFIER_PLACES + 1):  # one more waits; with it the queue is full
            stream = held.enter_context(Stream(verifier, sequence_id=str(number)))
            stream.open()
            assert stream.take().WhichOneof("kind") == "opened"
        assert stream.take().notice.kind == verifier_service_pb2.NOTICE_KIND_QUEUED
        error = refusal(draft, request(max_new_tokens=2))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert "wait for room" in error.message
        assert error.retry_after is not None
        assert error.retry_after > 0
    everything_is_free(draft)


def test_vanished_clients_leave_nothing_behind(draft: grpc.Channel) -> None:
    """As many as the verifier has places for, gone in the middle of their text, three times over."""
    message = request(temperature=1.0, max_new_tokens=900, ignore_eos=True)
    for _ in range(3):
        calls = [DraftServiceStub(draft).Generate(message, timeout=90) for _ in range(VERIFIER_PLACES)]
        for call in calls:
            next(call)
            next(call)
        for call in calls:
            call.cancel()
        everything_is_free(draft)


def test_a_client_that_does_not_read_is_cut(draft: grpc.Channel, pair_process: ServiceProcess) -> None:
    """The service of these tests waits 2 s, and the client takes next to nothing unread."""
    heavy: dict[str, Any] = {"logprobs": sampling_pb2.LogprobsParams(top_n=20), "temperature": 1.0}
    with grpc.insecure_channel(pair_process.address, options=NARROW) as channel:
        call = DraftServiceStub(channel).Generate(request(max_new_tokens=900, ignore_eos=True, **heavy), timeout=90)
        next(call)
        end = time.monotonic() + 60
        while not any("DEADLINE_EXCEEDED" in line for line in pair_process.log_lines()[-3:]):
            assert time.monotonic() < end, "it is still served"
            time.sleep(0.1)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")
    everything_is_free(draft)


def test_a_bad_request_does_not_touch_its_neighbours(draft: grpc.Channel) -> None:
    expected = write(draft, max_new_tokens=30, ignore_eos=True).ids
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(write, draft, max_new_tokens=30, ignore_eos=True) for _ in range(2)]
        for field, fields, _ in BAD_FIELDS[:12]:
            fields = dict(fields)
            assert refusal(draft, request(fields.pop("prompt", PROMPT), **fields)).metadata["field"] == field
        assert [each.result().ids for each in running] == [expected, expected]


def everything_is_free(draft: grpc.Channel) -> None:
    """Every place of both sides' pools can be had at once, and drafting works in each. Freeing takes a moment."""
    end = time.monotonic() + 60
    while True:
        try:
            return take_all(draft)
        except grpc.RpcError as error:
            assert from_rpc_error(error).reason in ("OVERLOADED", "IDLE")  # noqa: PT017
            assert time.monotonic() < end, "places are lost"
            time.sleep(0.1)


def take_all(draft: grpc.Channel) -> None:
    with fill(draft, PLACES - VERIFIER_PLACES) as streams, ThreadPoolExecutor(VERIFIER_PLACES) as threads:
        running = [
            threads.submit(write, draft, temperature=1.0, gamma=3, max_new_tokens=12, ignore_eos=True)
            for _ in range(VERIFIER_PLACES)
        ]
        for each in running:
            assert each.result().end.statistics.num_drafts > 0, "the draft's engine had room for it"
        for stream in streams:  # they would have given way to a text that was queued
            stream.advance(2, len(IDS), [1], gamma=1)
            stream.take()
