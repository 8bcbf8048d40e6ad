"""The verifier as a process, spoken to with plain stubs: streams, limits, bad input, and what it leaves behind."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc.errors import from_rpc_error
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.cluster import Cluster, Service
from tests.verifier_service.bad_streams import BAD_STREAMS, COUPLED, GARBAGE, INVALID
from tests.verifier_service.streams import PROMPT, Stream, opening

PLACES, WAITING = 4, 1


@pytest.fixture(scope="module")
def verifier() -> Iterator[Service]:
    limits = f"--max-sequences {PLACES} --max-waiting {WAITING} --idle-timeout 3 --slow-client-timeout 1.5"
    with Cluster(f"{limits} --max-message-bytes {1 << 16}") as cluster:
        service = cluster.verifier()
        service.wait_healthy()
        yield service


@pytest.fixture(scope="module")
def channel(verifier: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(verifier.address) as channel:
        yield channel


@pytest.fixture
def alone(channel: grpc.Channel) -> list[int]:
    """What the target writes after PROMPT by itself."""
    return decoded(channel)


def decoded(channel: grpc.Channel, tokens: int = 8) -> list[int]:
    with Stream(channel) as stream:
        stream.open()
        stream.decode(1, PROMPT, tokens)
        return [stream.verdict().token_ids[0] for _ in range(tokens)]


def ends(stream: Stream) -> grpc.RpcError:
    """Reads to the error that ends the call."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stream.call)
    return caught.value


# ------------------------------------------------------------------------------------------------------------- rounds


def test_a_proposal_in_the_targets_own_words_is_accepted_whole(channel: grpc.Channel, alone: list[int]) -> None:
    with Stream(channel) as stream:
        stream.open()
        stream.propose(1, PROMPT, alone[:4])
        verdict = stream.verdict()
        assert list(verdict.token_ids) == alone[:5]
        assert (verdict.judged, verdict.accepted) == (4, 4)
        assert verdict.timings.forward_us > 0
        stream.propose(2, PROMPT + alone[:5], [alone[5], (alone[6] + 1) % 50, alone[7]], seen=1)
        verdict = stream.verdict()
        assert list(verdict.token_ids) == alone[5:7]
        assert (verdict.judged, verdict.accepted) == (2, 1)
        assert verdict.load.running >= 1, "as of the step before"


def test_under_coupled_the_text_is_the_seeds_and_proposals_are_bare(channel: grpc.Channel) -> None:
    """With drafts that are right, wrong or cut short, and with none: the same tokens, and no chance of acceptance."""
    message = opening(temperature=1.0, seed=9, rule=COUPLED)
    with Stream(channel) as stream:
        stream.open(message)
        assert stream.take().opened.rule == COUPLED
        stream.decode(1, PROMPT, 8)
        text = [stream.verdict().token_ids[0] for _ in range(8)]
    with Stream(channel) as stream:
        stream.open(message)
        for number, (at, drafted, accepted) in enumerate(
            ((0, text[:3], 3), (4, [text[4], text[5] + 1, text[6]], 1), (6, [], 0), (7, [text[7] + 1], 0)), start=1
        ):
            stream.propose(number, PROMPT + text[:at], drafted, seen=number - 1, tells_laws=False)
            verdict = stream.verdict()
            assert list(verdict.token_ids) == text[at : at + accepted + 1]
            assert (verdict.accepted, list(verdict.beta)) == (accepted, [])


def test_rounds_sent_ahead_are_answered_in_order_and_stale_where_overtaken(
    channel: grpc.Channel, alone: list[int]
) -> None:
    with Stream(channel) as stream:
        stream.open()
        stream.propose(1, PROMPT, alone[:2])
        stream.propose(2, PROMPT + alone[:3], alone[3:5])  # right guess of the first verdict
        stream.propose(3, [*PROMPT, 1, 2, 3], [4])  # wrong guess
        answers = [stream.verdict() for _ in range(3)]
        assert [answer.round for answer in answers] == [1, 2, 3]
        assert [answer.status for answer in answers] == [
            speculation_pb2.VERDICT_STATUS_JUDGED,
            speculation_pb2.VERDICT_STATUS_JUDGED,
            speculation_pb2.VERDICT_STATUS_STALE,
        ]
        assert [*answers[0].token_ids, *answers[1].token_ids] == alone[:6]


def test_a_resumed_sequence_goes_on_where_it_was(channel: grpc.Channel, alone: list[int]) -> None:
    with Stream(channel) as stream:
        message = opening()
        message.committed_token_ids.extend(alone[:3])
        stream.open(message)
        stream.decode(1, PROMPT + alone[:3], 5)
        assert [stream.verdict().token_ids[0] for _ in range(5)] == alone[3:]


def test_a_prompt_longer_than_a_pass_is_prefilled_in_pieces(channel: grpc.Channel) -> None:
    long = [2 + i % 40 for i in range(900)]  # the default pass takes 512
    with Stream(channel) as stream:
        stream.open(opening(long, max_new_tokens=3))
        stream.decode(1, long, 3)
        first = [stream.verdict() for _ in range(3)]
    with Stream(channel) as stream:  # the same, its first token given away: only rounding may differ
        message = opening(long, max_new_tokens=3)
        message.committed_token_ids.append(first[0].token_ids[0])
        stream.open(message)
        stream.decode(1, [*long, first[0].token_ids[0]], 2)
        assert [stream.verdict().token_ids[0] for _ in range(2)] == [v.token_ids[0] for v in first[1:]]
    assert first[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH


def test_the_stream_ends_well_after_the_last_verdict_and_after_half_closing(channel: grpc.Channel) -> None:
    with Stream(channel) as stream:
        stream.open(opening(max_new_tokens=2))
        stream.decode(1, PROMPT, 5)
        assert stream.verdict().finish_reason == sampling_pb2.FINISH_REASON_UNSPECIFIED
        assert stream.verdict().finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        with pytest.raises(StopIteration):
            stream.take()
    with Stream(channel) as stream:
        stream.open()
        stream.decode(1, PROMPT, 2)
        stream.close_sending()
        assert [len(stream.verdict().token_ids) for _ in range(2)] == [1, 1]
        with pytest.raises(StopIteration):
            stream.take()


def test_verdicts_tell_what_a_pass_costs(channel: grpc.Channel) -> None:
    """The line they tell speaks of passes as their own timings do; no width is another order of magnitude."""
    with Stream(channel) as stream:
        stream.open(opening(max_new_tokens=400, rule=COUPLED))
        prefix = list(PROMPT)
        ratios: dict[int, list[float]] = {}
        for number in range(1, 41):
            drafted = [7] * (number % 3 * 6)
            stream.propose(number, prefix, drafted, seen=number - 1, tells_laws=False)
            verdict = stream.verdict()
            prefix += verdict.token_ids
            load, timings = verdict.load, verdict.timings
            assert load.pass_fixed_us >= 0
            assert load.pass_token_us >= 0
            foretold = load.pass_fixed_us + load.pass_token_us * timings.pass_tokens
            if timings.pass_tokens == 1 + len(drafted):  # not the first, which reads the prompt too
                ratios.setdefault(len(drafted), []).append((timings.forward_us + timings.verify_us) / foretold)
    for drafted_tokens in (0, 12):
        assert 0.1 < statistics.median(ratios[drafted_tokens][3:]) < 10


def test_logprobs_come_with_every_committed_token(channel: grpc.Channel) -> None:
    with Stream(channel) as stream:
        message = opening(temperature=1.0)
        message.logprobs.top_n = 3
        stream.open(message)
        stream.decode(1, PROMPT, 1)
        [position] = stream.verdict().logprobs
    assert position.token.raw <= position.top[0].raw < 0
    assert position.token.adjusted == pytest.approx(position.token.raw, abs=1e-4)  # temperature 1 adjusts nothing
    assert [entry.raw for entry in position.top] == sorted((entry.raw for entry in position.top), reverse=True)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("act", "code", "reason", "says"), BAD_STREAMS)
def test_bad_input_ends_its_own_stream_with_a_clear_status(
    channel: grpc.Channel,
    alone: list[int],
    act: Callable[[Stream], object],
    code: grpc.StatusCode,
    reason: str,
    says: str,
) -> None:
    with Stream(channel, "bystander") as bystander, Stream(channel) as stream:
        bystander.open()
        bystander.decode(1, PROMPT, 4)
        act(stream)
        error = from_rpc_error(ends(stream))
        assert (error.code, error.reason) == (code, reason)
        assert says in error.message
        assert [bystander.verdict().token_ids[0] for _ in range(4)] == alone[:4]


def test_streams_of_garbage_leave_their_places_at_once(channel: grpc.Channel, verifier: Service) -> None:
    """Each holds KV by then: a sequence with a round has been answered."""
    for _ in range(2 * (PLACES + WAITING)):
        with Stream(channel, "garbage") as stream:
            stream.open()
            stream.decode(1, PROMPT)
            stream.verdict()
            stream.send(GARBAGE)
            assert ends(stream).code() is INVALID
    with Stream(channel) as stream:
        wait_until_alone(stream)
    unary: Any = channel.unary_unary("/outrider.v1.VerifierService/GetModel")
    with pytest.raises(grpc.RpcError) as caught:
        unary(GARBAGE, timeout=60)
    assert caught.value.code() is INVALID
    assert not any("Traceback" in line or "DecodeError" in line for line in verifier.log_lines())


def test_a_message_beyond_the_limit_is_refused(channel: grpc.Channel) -> None:
    with Stream(channel) as stream:
        stream.open(opening([1] * 70_000))
        assert ends(stream).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("begins", [True, False])
def test_a_silent_stream_is_closed(channel: grpc.Channel, begins: bool) -> None:
    with Stream(channel) as stream:
        if begins:
            stream.open()
        error = from_rpc_error(ends(stream))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")


def test_a_client_that_does_not_read_is_cut(verifier: Service) -> None:
    """The service of these tests waits 1.5 s, and the client takes next to nothing unread."""
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    heavy = opening(max_new_tokens=900)
    heavy.logprobs.top_n = 20
    with grpc.insecure_channel(verifier.address, options=narrow) as channel, Stream(channel, "unread") as stream:
        stream.open(heavy)
        stream.decode(1, PROMPT, 900)
        stream.verdict()
        end = time.monotonic() + 60
        while not any('"unread"' in line and "DEADLINE_EXCEEDED" in line for line in verifier.log_lines()):
            assert time.monotonic() < end, "it is still served"
            time.sleep(0.1)
        error = from_rpc_error(ends(stream))
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")
    assert "unread" in error.message


# --------------------------------------------------------------------------------------------------------------- room


def test_a_client_that_vanishes_leaves_its_place(channel: grpc.Channel) -> None:
    for _ in range(3):
        with ExitStack() as held:
            streams = [held.enter_context(Stream(channel)) for _ in range(PLACES)]
            for stream in streams:
                stream.open(opening(max_new_tokens=900))
                stream.decode(1, PROMPT, 900)
            for stream in streams:
                stream.verdict()  # in the middle of it
        with Stream(channel) as stream:
            wait_until_alone(stream)


def test_sequences_wait_for_room_and_too_many_are_refused(channel: grpc.Channel, alone: list[int]) -> None:
    streams = [Stream(channel, f"s{i}") for i in range(PLACES + 2)]
    try:
        for stream in streams[:PLACES]:
            stream.open()
            assert stream.take().WhichOneof("kind") == "opened"
            stream.decode(1, PROMPT)
            stream.verdict()
        waiting, refused = streams[PLACES:]
        waiting.open()
        waiting.decode(1, PROMPT, 3)
        assert waiting.take().WhichOneof("kind") == "opened"
        assert waiting.take().notice.kind == verifier_service_pb2.NOTICE_KIND_QUEUED
        refused.open()
        error = from_rpc_error(ends(refused))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 60
        streams[0].call.cancel()
        assert [waiting.verdict().token_ids[0] for _ in range(3)] == alone[:3]
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)


def wait_until_alone(stream: Stream) -> None:
    """Opens a stream, and waits until those that were cancelled have left."""
    stream.open(opening(max_new_tokens=1000))
    prefix, deadline = list(PROMPT), time.monotonic() + 60
    for number in range(1, 1000):
        stream.decode(number, prefix, seen=number - 1)
        verdict = stream.verdict()
        prefix += verdict.token_ids
        if (verdict.load.running, verdict.load.waiting) == (1, 0):
            return
        assert time.monotonic() < deadline, f"{verdict.load.running} sequences are still here"
        time.sleep(0.1)


def test_a_burst_does_not_slip_past_the_queue(channel: grpc.Channel) -> None:
    """All at once, before the engine has seen any of them: as many are refused as are too many."""
    too_many = 3
    streams = [Stream(channel, f"s{i}") for i in range(PLACES + WAITING + too_many)]
    try:
        wait_until_alone(streams[0])
        for stream in streams[1:]:
            stream.open()
        refused = 0
        for stream in streams[1:]:
            try:
                stream.take()
            except grpc.RpcError as error:
                refused += from_rpc_error(error).reason == "OVERLOADED"
        assert refused == too_many
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)


# --------------------------------------------------------------------------------------------------------------- life


def test_health_reflection_and_the_model_are_served(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "outrider.v1.VerifierService"):
        status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    names = {service.name for service in next(listing).list_services_response.service}
    assert {"outrider.v1.VerifierService", "grpc.health.v1.Health"} <= names
    model = VerifierServiceStub(channel).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest()).model
    assert (model.vocab_size, model.context_length, model.dtype) == (2048, 1024, "float32")
    assert model.limits.max_sequences == PLACES
    assert len(model.weights_fingerprint) == len(model.vocabulary_fingerprint) == 64


def test_sigterm_lets_running_sequences_finish() -> None:
    with Cluster("--grace 90") as cluster:
        process = cluster.verifier()
        process.wait_healthy()
        with grpc.insecure_channel(process.address) as channel, Stream(channel) as stream:
            stream.open(opening(max_new_tokens=101))
            stream.decode(1, PROMPT)
            prefix = [*PROMPT, *stream.verdict().token_ids]
            process.end()
            assert stream.take().notice.kind == verifier_service_pb2.NOTICE_KIND_DRAINING
            stream.decode(2, prefix, 100, seen=1)
            replies = list(stream.call)
            assert [reply.WhichOneof("kind") for reply in replies] == ["verdict"] * 100
        assert process.process.wait(90) == 0


@pytest.mark.parametrize("model", ["/nowhere/at/all", "models"])
def test_what_cannot_serve_says_why_in_one_line(model: str) -> None:
    with Cluster() as cluster:
        process = cluster.verifier(model=Path(model))
        assert process.process.wait(60) == 1
        assert any(model in line for line in process.lines)
