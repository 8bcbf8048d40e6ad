"""The verifier as a process, spoken to with plain stubs: streams, limits, bad input, and what it leaves behind."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.errors import from_rpc_error
from protos.outrider.v1 import sampling_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2 import VerifyRequest
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.cluster import Cluster, Service, wait_until
from tests.verifier_service.streams import PROMPT, Stream, opening

MAX_SEQUENCES, WAITING = 4, 1
COUPLED = sampling_pb2.ACCEPTANCE_RULE_COUPLED


@pytest.fixture(scope="module")
def verifier() -> Iterator[Service]:
    limits = f"--max-sequences {MAX_SEQUENCES} --max-waiting {WAITING} --idle-timeout 3 --slow-client-timeout 1.5"
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
    with Stream(channel) as stream:
        stream.open()
        stream.decode(1, PROMPT, 8)
        return [stream.verdict().token_ids[0] for _ in range(8)]


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
            stream.propose(number, PROMPT + text[:at], drafted, seen=number - 1, sends_distributions=False)
            verdict = stream.verdict()
            assert list(verdict.token_ids) == text[at : at + accepted + 1]
            assert (verdict.accepted, list(verdict.beta)) == (accepted, [])


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


INVALID = grpc.StatusCode.INVALID_ARGUMENT
GARBAGE = b"\xff" * 4


def foreign(stream: Stream) -> None:
    stream.open()
    stream.sequence_id = "another"
    stream.decode(1, PROMPT)


# What the fields of a message may be: `test_request`.
BAD_STREAMS: list[tuple[Any, str, str]] = [
    (lambda s: s.decode(1, PROMPT), "OUT_OF_ORDER", "must be OpenSequence"),
    (lambda s: s.close_sending(), "OUT_OF_ORDER", "must be OpenSequence"),
    (lambda s: s.send(GARBAGE), "INVALID_FIELD", "4 bytes cannot be decoded"),
    (lambda s: (s.open(), s.send(GARBAGE)), "INVALID_FIELD", "4 bytes cannot be decoded"),
    (lambda s: (s.open(), s.open()), "OUT_OF_ORDER", "second OpenSequence"),
    (lambda s: (s.open(), s.send(VerifyRequest(sequence_id="s"))), "INVALID_FIELD", "kind is not set"),
    (foreign, "INVALID_FIELD", "'another'"),
    (lambda s: s.open(opening([2048])), "INVALID_FIELD", "is 2048"),
    (lambda s: (s.open(), s.decode(2, PROMPT), s.decode(2, PROMPT)), "OUT_OF_ORDER", "round 2 came after round 2"),
    (lambda s: (s.open(), s.decode(1, [*PROMPT, 1])), "WRONG_BASE", "base_length of round 1 is 5"),
    (lambda s: (s.open(), s.decode(1, [9, 9, 9, 9])), "WRONG_BASE", "prefix_hash"),
    (lambda s: (s.open(), s.decode(1, PROMPT, 0)), "INVALID_FIELD", "num_tokens is 0"),
    (lambda s: (s.open(), s.propose(1, PROMPT, [1] * 17)), "INVALID_FIELD", "17"),
    (lambda s: (s.open(), s.propose(1, PROMPT, [1, 2], sends_distributions=False)), "INVALID_FIELD", "requires 2"),
    (
        lambda s: (s.open(opening(rule=COUPLED)), s.propose(1, PROMPT, [1, 2])),
        "INVALID_FIELD",
        "2 entries for 2 token_ids; the rule coupled requires 0",
    ),
]


@pytest.mark.parametrize(("act", "reason", "says"), BAD_STREAMS)
def test_bad_input_ends_its_own_stream_with_a_clear_status(
    channel: grpc.Channel, alone: list[int], act: Callable[[Stream], object], reason: str, says: str
) -> None:
    with Stream(channel, "bystander") as bystander, Stream(channel) as stream:
        bystander.open()
        bystander.decode(1, PROMPT, 4)
        act(stream)
        error = from_rpc_error(ends(stream))
        assert (error.code, error.reason) == (INVALID, reason)
        assert says in error.message
        assert [bystander.verdict().token_ids[0] for _ in range(4)] == alone[:4]


def test_streams_of_garbage_free_their_sequences_at_once(channel: grpc.Channel, verifier: Service) -> None:
    """Each holds KV by then: a sequence with a round has been answered. More would be too many at once."""
    for _ in range(2 * (MAX_SEQUENCES + WAITING)):
        with Stream(channel, "garbage") as stream:
            stream.open()
            stream.decode(1, PROMPT)
            stream.verdict()
            stream.send(GARBAGE)
            assert ends(stream).code() is INVALID
    unary: Any = channel.unary_unary("/outrider.v1.VerifierService/GetModel")
    with pytest.raises(grpc.RpcError) as caught:
        unary(GARBAGE, timeout=60)
    assert caught.value.code() is INVALID
    assert not any("Traceback" in line or "DecodeError" in line for line in verifier.log_lines())


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
        wait_until(lambda: any('"unread"' in line and "DEADLINE_EXCEEDED" in line for line in verifier.log_lines()))
        error = from_rpc_error(ends(stream))
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")
    assert "read no responses" in error.message


# --------------------------------------------------------------------------------------------------------------- queue


def test_a_client_that_vanishes_frees_its_sequence(channel: grpc.Channel, verifier: Service) -> None:
    for _ in range(3):
        with ExitStack() as held:
            streams = [held.enter_context(Stream(channel)) for _ in range(MAX_SEQUENCES)]
            for stream in streams:
                stream.open(opening(max_new_tokens=900))
                stream.decode(1, PROMPT, 900)
            for stream in streams:
                stream.verdict()  # in the middle of it
        wait_until(lambda: verifier.count("outrider_num_requests_running") == 0)
    assert verifier.count("outrider_kv_integrity_checks_total", outcome="corrupted") == 0


def test_sequences_wait_for_room_and_too_many_are_refused(channel: grpc.Channel, alone: list[int]) -> None:
    """Those that were in progress elsewhere are let in all the same, and go first."""
    with ExitStack() as stack:
        running = [stack.enter_context(Stream(channel, f"s{i}")) for i in range(MAX_SEQUENCES)]
        for stream in running:
            stream.open()
            stream.decode(1, PROMPT)
            stream.verdict()
        fresh, refused, again = (stack.enter_context(Stream(channel, name)) for name in ("fresh", "refused", "again"))
        fresh.open()
        fresh.decode(1, PROMPT, 3)
        assert fresh.take().WhichOneof("kind") == "opened"
        assert fresh.take().notice.kind == verifier_service_pb2.NOTICE_KIND_QUEUED
        refused.open()
        error = from_rpc_error(ends(refused))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 60
        resumed = opening()
        resumed.reopened = True
        again.open(resumed)
        again.decode(1, PROMPT)
        assert again.take().WhichOneof("kind") == "opened"
        assert again.take().notice.queue_position == 0
        running[0].call.cancel()
        verdict = again.verdict()
        assert list(verdict.token_ids) == alone[:1]
        assert verdict.load.waiting == 2, "the load is that before the step: this sequence and the other one waited"
        again.call.cancel()
        assert [fresh.verdict().token_ids[0] for _ in range(3)] == alone[:3]


# --------------------------------------------------------------------------------------------------------------- life


def test_health_and_the_model_are_served(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "outrider.v1.VerifierService"):
        status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    model = VerifierServiceStub(channel).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest()).model
    assert (model.vocab_size, model.context_length, model.dtype) == (2048, 1024, "float32")
    assert model.limits.max_sequences == MAX_SEQUENCES
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


def test_what_cannot_serve_says_why_in_one_line() -> None:
    with Cluster() as cluster:
        process = cluster.verifier(model=Path("/nowhere/at/all"))
        assert process.process.wait(60) == 1
        assert any("/nowhere/at/all" in line for line in process.lines)


def test_every_response_has_the_size_asked_for(channel: grpc.Channel) -> None:
    message = opening(max_new_tokens=12)
    message.response_bytes = 1000
    with Stream(channel) as stream:
        stream.open(message)
        stream.decode(1, PROMPT, tokens=12)
        replies = [stream.take() for _ in range(13)]
    assert {reply.ByteSize() for reply in replies} == {1000}


def test_an_idle_stream_ends_for_a_queued_sequence() -> None:
    with ExitStack() as stack:
        limits = "--max-sequences 1 --max-waiting 1 --idle-timeout 8 --contended-idle-timeout 3"
        verifier = stack.enter_context(Cluster(limits)).verifier()
        verifier.wait_healthy()
        channel = stack.enter_context(grpc.insecure_channel(verifier.address))
        idle, waits = (stack.enter_context(Stream(channel, name)) for name in ("idle", "waits"))
        idle.open()
        idle.decode(1, PROMPT)
        alone = list(idle.verdict().token_ids)
        waits.open()
        waits.decode(1, PROMPT)
        assert list(waits.verdict().token_ids) == alone
        with pytest.raises(grpc.RpcError) as caught:
            idle.take()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDLE")
    assert "others wait in the queue" in error.message
    assert error.retry_after is not None
