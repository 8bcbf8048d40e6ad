"""The verifier as a process: rounds, bad input, limits, queue. `tests/exactness` has its drain and failures."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.outrider.v1 import sampling_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2 import VerifyRequest
from tests.cluster import Cluster, Service, wait_until
from tests.slow_steps import SLOW_STEP, STEP_SECONDS, slow_steps
from tests.verifier_service.streams import PROMPT, Stream, decode, error_of, opening

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
    """The target's own tokens after PROMPT."""
    with Stream(channel) as stream:
        stream.open()
        stream.decode(1, PROMPT, 8)
        return [stream.verdict().token_ids[0] for _ in range(8)]


def test_a_stream_ends_without_error_after_the_last_verdict_and_after_half_closing(channel: grpc.Channel) -> None:
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


def test_a_decode_that_comes_with_the_opening_runs_in_the_step_of_the_prompt(
    channel: grpc.Channel, alone: list[int]
) -> None:
    with Stream(channel) as stream:
        stream.open(opening(decode=decode(1, PROMPT, 3)))
        assert stream.take().opened.round == 1
        verdicts = [stream.verdict() for _ in range(3)]
        stream.decode(2, [*PROMPT, *alone[:3]], 5, seen=1)
        verdicts += [stream.verdict() for _ in range(5)]
    assert [verdict.token_ids[0] for verdict in verdicts] == alone
    assert [verdict.round for verdict in verdicts] == [1] * 3 + [2] * 5
    assert verdicts[0].timings.pass_tokens == len(PROMPT)
    with Stream(channel) as stream:
        stream.open()
        assert stream.take().opened.round == 0


INVALID = grpc.StatusCode.INVALID_ARGUMENT
GARBAGE = b"\xff" * 4


def foreign(stream: Stream) -> None:
    stream.open()
    stream.sequence_id = "another"
    stream.decode(1, PROMPT)


# `test_request` has the fields of each message.
BAD_STREAMS: list[tuple[Any, str, str]] = [
    (lambda s: s.decode(1, PROMPT), "OUT_OF_ORDER", "must be OpenSequence"),
    (lambda s: s.close_sending(), "OUT_OF_ORDER", "must be OpenSequence"),
    (lambda s: s.send(GARBAGE), "INVALID_FIELD", "4 bytes cannot be decoded"),
    (lambda s: (s.open(), s.send(GARBAGE)), "INVALID_FIELD", "4 bytes cannot be decoded"),
    (lambda s: (s.open(), s.open()), "OUT_OF_ORDER", "second OpenSequence"),
    (lambda s: (s.open(), s.send(VerifyRequest(sequence_id="s"))), "INVALID_FIELD", "kind is not set"),
    (foreign, "INVALID_FIELD", "'another'"),
    (lambda s: s.open(opening([2048])), "INVALID_FIELD", "is 2048"),
    (lambda s: (s.open(), s.decode(2, PROMPT), s.decode(2, PROMPT)), "OUT_OF_ORDER", "number is 2; it must be above 2"),
    (lambda s: (s.open(), s.decode(1, [*PROMPT, 1])), "WRONG_BASE", "base_length of round 1 is 5"),
    (lambda s: (s.open(), s.decode(1, [9, 9, 9, 9])), "WRONG_BASE", "prefix_hash"),
    (lambda s: (s.open(), s.decode(1, PROMPT, 0)), "INVALID_FIELD", "num_tokens is 0"),
    (lambda s: s.open(opening(decode=decode(1, PROMPT, 0))), "INVALID_FIELD", "num_tokens is 0"),
    (lambda s: s.open(opening(decode=decode(1, [9, 9, 9, 9]))), "WRONG_BASE", "prefix_hash"),
    (lambda s: (s.open(opening(decode=decode(2, PROMPT))), s.decode(2, PROMPT)), "OUT_OF_ORDER", "must be above 2"),
    (lambda s: (s.open(), s.propose(1, PROMPT, [1] * 17)), "INVALID_FIELD", "17"),
    (
        lambda s: (s.open(), s.propose(1, PROMPT, [1, 2], sends_distributions=False)),
        "INVALID_FIELD",
        "needs 2 for 2 tokens",
    ),
    (
        lambda s: (s.open(opening(rule=COUPLED)), s.propose(1, PROMPT, [1, 2])),
        "INVALID_FIELD",
        "2 elements; the rule coupled needs 0 for 2 tokens",
    ),
]


@pytest.mark.parametrize(("act", "reason", "words"), BAD_STREAMS)
def test_bad_input_ends_its_own_stream_with_a_clear_status(
    channel: grpc.Channel, alone: list[int], act: Callable[[Stream], object], reason: str, words: str
) -> None:
    with Stream(channel, "bystander") as bystander, Stream(channel) as stream:
        bystander.open()
        bystander.decode(1, PROMPT, 4)
        act(stream)
        error = error_of(stream.call)
        assert (error.code, error.reason) == (INVALID, reason)
        assert words in error.message
        assert [bystander.verdict().token_ids[0] for _ in range(4)] == alone[:4]


@pytest.mark.parametrize("begins", [True, False])
def test_a_silent_stream_is_closed(channel: grpc.Channel, begins: bool) -> None:
    with Stream(channel) as stream:
        if begins:
            stream.open()
        error = error_of(stream.call)
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")


@contextmanager
def unread(address: str) -> Iterator[Stream]:
    """A stream with a Decode of 900 tokens, after its first verdict. The client buffers very little."""
    small_buffers = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    heavy = opening(max_new_tokens=900)
    heavy.logprobs.top_n = 20
    with grpc.insecure_channel(address, options=small_buffers) as channel, Stream(channel, "unread") as stream:
        stream.open(heavy)
        stream.decode(1, PROMPT, 900)
        stream.verdict()
        yield stream


def test_a_paused_sequence_goes_on_when_its_client_reads(verifier_address: str) -> None:
    """Not only when the verifier looks after it, every 5 s: then a notice would come first."""
    with unread(verifier_address) as stream:
        time.sleep(0.5)  # all replies that may wait have come
        assert {stream.take().WhichOneof("kind") for _ in range(899)} == {"verdict"}


def test_a_client_that_does_not_read_is_cut(verifier: Service) -> None:
    """The service waits 1.5 s."""
    with unread(verifier.address) as stream:
        wait_until(lambda: any('"unread"' in line and "DEADLINE_EXCEEDED" in line for line in verifier.log_lines()))
        error = error_of(stream.call)
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE")
    assert "read no responses" in error.message


def test_sequences_queue_and_too_many_are_refused(channel: grpc.Channel, alone: list[int]) -> None:
    """A sequence from another verifier is admitted to a full queue, and goes first."""
    with ExitStack() as stack:
        running = [stack.enter_context(Stream(channel, f"s{i}")) for i in range(MAX_SEQUENCES)]
        for stream in running:
            stream.open()
            stream.decode(1, PROMPT)
            stream.verdict()
        fresh, refused, moved = (stack.enter_context(Stream(channel, name)) for name in ("fresh", "refused", "moved"))
        fresh.open()
        fresh.decode(1, PROMPT, 3)
        assert fresh.take().WhichOneof("kind") == "opened"
        assert fresh.take().notice.kind == verifier_service_pb2.NOTICE_KIND_QUEUED
        refused.open()
        error = error_of(refused.call)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert error.retry_after is not None
        assert 0 < error.retry_after <= 60
        resumed = opening()
        resumed.reopened = True
        moved.open(resumed)
        moved.decode(1, PROMPT)
        assert moved.take().WhichOneof("kind") == "opened"
        assert moved.take().notice.queue_position == 0
        running[1].decode(2, [*PROMPT, *alone[:1]], 2, seen=1)
        load = [running[1].verdict().load for _ in range(2)][-1]  # as it was after the step before
        assert (load.running, load.waiting) == (MAX_SEQUENCES, 2)
        running[0].call.cancel()
        assert list(moved.verdict().token_ids) == alone[:1]
        moved.call.cancel()
        assert [fresh.verdict().token_ids[0] for _ in range(3)] == alone[:3]


@contextmanager
def holding(limits: str) -> Iterator[tuple[Stream, Stream, list[int]]]:
    """The one stream that a verifier runs at once, after its first verdict; one in the queue with a round; and the
    verdict's tokens.
    """
    with Cluster(f"--max-sequences 1 --max-waiting 1 {limits}") as cluster:
        verifier = cluster.verifier()
        verifier.wait_healthy()
        with (
            grpc.insecure_channel(verifier.address) as channel,
            Stream(channel, "holds") as holds,
            Stream(channel, "waits") as waits,
        ):
            holds.open()
            holds.decode(1, PROMPT)
            alone = list(holds.verdict().token_ids)
            waits.open()
            waits.decode(1, PROMPT)
            yield holds, waits, alone


def test_an_idle_stream_ends_for_a_queued_sequence() -> None:
    with holding("--idle-timeout 60 --contended-idle-timeout 0.5") as (holds, waits, alone):
        assert list(waits.verdict().token_ids) == alone
        error = error_of(holds.call)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDLE")
    assert "others wait in the queue" in error.message
    assert 0.5 <= float(error.metadata["seconds"]) < 4.5, "notices are 5 s apart"
    assert error.retry_after is not None


def test_a_stream_of_stale_rounds_ends_for_a_queued_sequence() -> None:
    """They ask for no work, and would hold the place of a sequence that has some."""
    with holding("--contended-idle-timeout 1.5") as (holds, waits, alone):

        def stale_rounds() -> None:
            for number in range(2, 100):
                holds.decode(number, PROMPT, seen=0)
                holds.verdict()
                time.sleep(0.2)

        with pytest.raises(grpc.RpcError, match="others wait in the queue"):
            stale_rounds()
        assert list(waits.verdict().token_ids) == alone


@pytest.fixture(scope="module")
def seconds_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `slow_steps`."""
    return tmp_path_factory.mktemp("slow") / "seconds"


@pytest.fixture(scope="module")
def impatient(seconds_file: Path) -> Iterator[Service]:
    """A verifier whose steps may take longer than a client may be silent."""
    with Cluster("--idle-timeout 0.5") as cluster:
        verifier = cluster.verifier(fault="slow_steps", env={STEP_SECONDS: str(seconds_file)})
        verifier.wait_healthy()
        yield verifier


def test_a_sequence_whose_prompt_is_scored_is_not_idle(impatient: Service, seconds_file: Path) -> None:
    with (
        slow_steps(seconds_file, 1.5),
        grpc.insecure_channel(impatient.address) as channel,
        Stream(channel) as stream,
    ):
        scored = opening()
        scored.prompt_logprobs.top_n = 1
        stream.open(scored)
        while (reply := stream.take()).WhichOneof("kind") != "prompt_logprobs":
            pass
    assert len(reply.prompt_logprobs.logprobs) == len(PROMPT) - 1


def test_a_round_that_comes_during_a_step_ends_the_clients_silence(impatient: Service, seconds_file: Path) -> None:
    """The engine takes the round only after the step."""
    slow_before = len(impatient.logged(SLOW_STEP))
    with (
        grpc.insecure_channel(impatient.address) as channel,
        Stream(channel, "waits") as waits,
        Stream(channel, "runs") as runs,
    ):
        waits.open()
        waits.decode(1, PROMPT)
        alone = list(waits.verdict().token_ids)
        with slow_steps(seconds_file, 1.5):
            runs.open()
            runs.decode(1, PROMPT)
            wait_until(lambda: len(impatient.logged(SLOW_STEP)) > slow_before)
            waits.decode(2, [*PROMPT, *alone], seen=1)
            assert list(runs.verdict().token_ids) == alone
            assert waits.verdict().round == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_trying_the_verification_leaves_no_threads() -> None:
    """A pool beside the engine's keeps libgomp from spinning: passes with two threads took 3 to 6 times as long."""
    with Cluster(fault="tries_with_two_threads") as cluster:
        verifier = cluster.verifier(flags="--verify-path torch")  # C's has no pool
        wait_until(lambda: verifier.returncode is not None)
        assert (verifier.stop(), verifier.plain_lines()) == (0, ["2 0"])
