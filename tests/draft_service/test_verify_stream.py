"""Errors of a stream to a verifier: silence, refusals, deadlines and a wrong rule."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from draft_service.drafters.base import Draft
from draft_service.privacy import RoundSizes
from draft_service.replicas import Replica
from draft_service.sequence import Round, Sequence
from draft_service.verify_stream import VerifyStream
from outrider.rpc.errors import RequestError, invalid_field, overloaded, to_status
from outrider.rpc.server import bind, create_server
from outrider.rpc.tls import TLS, ChannelTLS
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2 import VerifyResponse
from tests.draft_service.records import record
from tests.draft_service.verifiers import NO_VERIFIER, Verify, connect, fake_verifier, status_of

COUPLED, TOKENWISE = sampling_pb2.ACCEPTANCE_RULE_COUPLED, sampling_pb2.ACCEPTANCE_RULE_TOKENWISE
OPENED = verifier_service_pb2.Opened(rule=COUPLED)
LONG_S = 60.0


def responding(opened: verifier_service_pb2.Opened | None = None, error: RequestError | None = None) -> Verify:
    """Respond to the opening with `opened` if given, then end the call with the error, or be silent."""

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        if opened is not None:
            await context.write(VerifyResponse(opened=opened))
        if error is not None:
            await context.abort_with_status(to_status(error))
        await asyncio.sleep(LONG_S)

    return verify


@asynccontextmanager
async def stream_to(
    address: str,
    sequence: Sequence | None = None,
    *,
    silence: float = 30.0,
    tls: ChannelTLS | None = None,
    target: model_pb2.ModelInfo | None = None,
) -> AsyncIterator[VerifyStream]:
    replica = Replica(address, connect(address, tls=tls), timeout=silence)
    stream = VerifyStream(replica, sequence or record(), target=target or model_pb2.ModelInfo(), timeout=60.0)
    try:
        yield stream
    finally:
        stream.cancel()


async def refusal(address: str, **options: Any) -> RequestError:
    async with stream_to(address, **options) as stream:
        with pytest.raises(RequestError) as caught:
            await stream.open()
    return caught.value


async def test_a_silent_verifier_is_unavailable() -> None:
    """Silent after the opening, or from the first byte on."""
    async with fake_verifier(responding()) as address:
        error = await refusal(address, silence=0.3)
    assert status_of(error) == NO_VERIFIER
    assert address in error.message
    assert "0.3 s" in error.message
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert status_of(await refusal(f"127.0.0.1:{port}", silence=0.5)) == NO_VERIFIER


@pytest.mark.parametrize(("silence", "join_ms"), [(30.0, 1000), (0.5, 250)])
async def test_tokens_wait_for_less_than_the_time_of_a_silent_verifier(silence: float, join_ms: int) -> None:
    async def verify(_: Any, context: Any) -> None:
        opening = (await context.read()).open
        await context.write(
            VerifyResponse(opened=verifier_service_pb2.Opened(rule=COUPLED, cached_tokens=opening.join_ms))
        )

    async with (
        fake_verifier(verify) as address,
        stream_to(address, record(joined_responses=True), silence=silence) as stream,
    ):
        assert (await stream.open()).cached_tokens == join_ms


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        (None, "the service at {} is not a verifier; correct --verifier"),
        (TLS(), "does not speak TLS, and this call does; give the verifier --tls-cert and --tls-key, or leave out"),
    ],
)
async def test_a_wrong_service_at_the_address_is_named_with_advice(tls: TLS | None, message: str) -> None:
    server = create_server(max_message_bytes=1 << 20)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        error = await refusal(address, tls=tls and ChannelTLS(tls))
    finally:
        await server.stop(None)
    assert status_of(error) == NO_VERIFIER
    assert message.format(address) in error.message


async def test_a_verifier_that_has_other_weights_now_is_refused() -> None:
    """It was restarted since the pair was matched."""
    opened = verifier_service_pb2.Opened(rule=COUPLED, weights_fingerprint="b" * 64)
    async with fake_verifier(responding(opened)) as address:
        error = await refusal(address, target=model_pb2.ModelInfo(weights_fingerprint="a" * 64))
    assert status_of(error) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH")
    assert f"{'b' * 16}, and had {'a' * 16}" in error.message


async def test_notices_restart_the_timeout() -> None:
    silence, pause = 3.0, 0.1
    notice = verifier_service_pb2.Notice(kind=3)  # type: ignore[arg-type]  # a kind of another version

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        await context.write(VerifyResponse(opened=OPENED))
        await context.read()
        for _ in range(round(1.2 * silence / pause)):
            await asyncio.sleep(pause)
            await context.write(VerifyResponse(notice=notice))
        judged = speculation_pb2.VERDICT_STATUS_JUDGED
        await context.write(
            VerifyResponse(verdict=speculation_pb2.Verdict(round=1, base_length=3, token_ids=[7], status=judged))
        )
        await context.read()

    sequence = record()
    async with fake_verifier(verify) as address, stream_to(address, sequence, silence=silence) as stream:
        await stream.open()
        sequence.decode(1)
        await stream.send()
        sequence.commit(await stream.verdict())
    assert sequence.tokens == [1, 2, 3, 7]


def verdicts(*tokens: list[int]) -> Verify:
    """A verifier that answers the first round with these verdicts."""

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        await context.write(VerifyResponse(opened=OPENED))
        await context.read()
        base, judged = 3, speculation_pb2.VERDICT_STATUS_JUDGED
        for each in tokens:
            verdict = speculation_pb2.Verdict(round=1, base_length=base, token_ids=each, status=judged)
            await context.write(VerifyResponse(verdict=verdict))
            base += len(each)
        await context.read()

    return verify


async def test_a_verdict_may_hold_several_tokens_of_a_decode() -> None:
    """Or one each, as of a verifier that does not know `joined_verdicts`."""
    for parts in ([[7, 8], [9]], [[7], [8], [9]], [[7, 8, 9]]):
        sequence = record()
        assert sequence.opening().joined_verdicts
        async with fake_verifier(verdicts(*parts)) as address, stream_to(address, sequence) as stream:
            await stream.open()
            sequence.decode(3)
            await stream.send()
            for part in parts:
                assert sequence.round.owed > 0
                sequence.commit(await stream.verdict())
                assert sequence.tokens[-len(part) :] == part
        assert sequence.round.owed == 0
    assert record(joined_responses=True).opening().join_ms == 1000
    for how in ({}, {"joined_responses": True, "stop": ["."]}, {"joined_responses": True, "time_limit": 9.0}):
        assert not record(**how).opening().HasField("join_ms")
    fixed = record(round_sizes=RoundSizes(request=512, response=512))
    assert not fixed.opening().joined_verdicts  # the size of a message must not show how many tokens it holds


@pytest.mark.parametrize("takes", [True, False])
async def test_the_opening_carries_a_decode_that_is_sent_again_to_an_older_verifier(takes: bool) -> None:
    messages: list[verifier_service_pb2.VerifyRequest] = []
    received = asyncio.Event()

    async def verify(_: Any, context: Any) -> None:
        messages.append(await context.read())
        await context.write(VerifyResponse(opened=verifier_service_pb2.Opened(rule=COUPLED, round=int(takes))))
        if not takes:
            messages.append(await context.read())
        received.set()
        await context.read()

    sequence = record()
    sequence.decode(5)
    async with fake_verifier(verify) as address, stream_to(address, sequence) as stream:
        await stream.open()
        assert stream.has_round is takes
        if not takes:
            await stream.send()
        await asyncio.wait_for(received.wait(), LONG_S)
    first = messages[0].open.decode
    assert (first.round, first.base_length, first.num_tokens) == (1, 3, 5)
    assert first.prefix_hash == sequence.prefix_hash
    if not takes:
        assert messages[1].decode == first


async def test_an_opening_carries_neither_a_proposal_nor_a_decode_of_fixed_size() -> None:
    for sequence, begin in (
        (record(), lambda it: it.propose(Draft([1], [], 0.0))),
        (record(round_sizes=RoundSizes(request=512, response=512)), lambda it: it.decode(5)),
    ):
        openings: list[verifier_service_pb2.OpenSequence] = []

        async def verify(_: Any, context: Any, openings: list[Any] = openings) -> None:
            openings.append((await context.read()).open)
            await context.write(VerifyResponse(opened=OPENED))
            await context.read()

        begin(sequence)
        async with fake_verifier(verify) as address, stream_to(address, sequence) as stream:
            await stream.open()
            assert not stream.has_round
        assert [each.HasField("decode") for each in openings] == [False]


async def test_a_verdict_without_tokens_or_with_too_many_is_refused() -> None:
    given: list[list[list[int]]] = [[[]], [[7, 8], [9, 10]]]
    for parts in given:
        sequence = record()
        async with fake_verifier(verdicts(*parts)) as address, stream_to(address, sequence) as stream:
            await stream.open()
            sequence.decode(3)
            await stream.send()
            for _ in parts[:-1]:
                sequence.commit(await stream.verdict())
            with pytest.raises(RequestError) as caught:
                await stream.verdict()
        assert caught.value.code == grpc.StatusCode.INTERNAL
        assert f"has {len(parts[-1])} tokens; at least 1, and at most {sequence.round.owed}" in caught.value.message


@pytest.mark.parametrize(
    ("given", "code", "metadata"),
    [
        (overloaded("no blocks", running=4), grpc.StatusCode.RESOURCE_EXHAUSTED, {"running": "4"}),
        (invalid_field("sampling.rule", "rule is 9"), grpc.StatusCode.INVALID_ARGUMENT, {"field": "sampling.rule"}),
        (invalid_field("proposal.token_ids", "too many"), grpc.StatusCode.INTERNAL, {}),
    ],
    ids=["no blocks", "bad request", "bad proposal"],
)
async def test_errors_reach_the_client_except_those_about_proposals(
    given: RequestError, code: grpc.StatusCode, metadata: dict[str, str]
) -> None:
    async with fake_verifier(responding(error=given)) as address:
        error = await refusal(address)
    assert error.code is code
    assert metadata.items() <= error.metadata.items()
    assert (error.message == given.message) == bool(metadata)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_gamma": 4, "max_support": 64}, "its limit max_gamma is 4; it must be at least the first verifier's, 8"),
        ({"max_gamma": 8, "max_support": 32}, "its limit max_support is 32"),
        ({"max_gamma": 9, "max_support": 64}, ""),
    ],
)
async def test_a_verifier_with_lower_limits_than_the_first_is_another_one(given: dict[str, int], words: str) -> None:
    """It was restarted with other settings, and would refuse the rounds of the sequence."""
    target = model_pb2.ModelInfo(limits=model_pb2.Limits(max_gamma=8, max_support=64))
    opened = verifier_service_pb2.Opened(rule=COUPLED, limits=model_pb2.Limits(**given))
    async with fake_verifier(responding(opened)) as address, stream_to(address, target=target) as stream:
        if not words:
            assert await stream.open() == opened
            return
        with pytest.raises(RequestError) as caught:
            await stream.open()
    assert status_of(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIR_MISMATCH")
    assert words in caught.value.message


async def test_a_verifier_with_another_rule_is_an_error() -> None:
    async with fake_verifier(responding(verifier_service_pb2.Opened(rule=TOKENWISE))) as address:
        error = await refusal(address)
    assert error.code is grpc.StatusCode.INTERNAL
    assert "uses the rule ACCEPTANCE_RULE_TOKENWISE, and the request ACCEPTANCE_RULE_COUPLED" in error.message
    async with fake_verifier(responding(OPENED)) as address, stream_to(address) as stream:
        assert (await stream.open()).rule == COUPLED


def test_a_verdict_that_took_hours_is_counted_and_reported() -> None:
    sequence = record()
    sequence.round = Round(1, owed=1, draft=Draft([7], [], 7200.0), waited=7200.0)
    verdict = speculation_pb2.Verdict(round=1, base_length=3, token_ids=[7, 8], accepted=1)
    sequence.timings.add(7200.0, verdict)
    sequence.commit(verdict)
    whole, report = sequence.timings.to_message(), sequence.report(verdict)
    assert whole.verdict_us == 7200 * 10**6
    assert whole.first_round.verdict_us == report.timings.verdict_us == report.timings.draft_us == 2**32 - 1
