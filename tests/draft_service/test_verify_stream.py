"""A stream to a verifier that says nothing, or that nobody holds: an error within bounds, never a hang."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from draft_service.replicas import Replica
from outrider.cli.processes import ServiceProcess
from outrider.rpc.errors import RequestError, invalid_field, overloaded, to_status, wrong_base
from outrider.rpc.server import bind, create_server
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.draft_service.records import record

OPENED = verifier_service_pb2.Opened(rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)


def silent(error: RequestError | None, opened: verifier_service_pb2.Opened | None) -> grpc.GenericRpcHandler:
    """A `Verify` that takes the opening, and then says that it did, or nothing, or ends the call with an error."""

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        if opened is not None:
            await context.write(verifier_service_pb2.VerifyResponse(sequence_id="s", opened=opened))
        if error is not None:
            await context.abort_with_status(to_status(error))
        await asyncio.sleep(60)

    handler = grpc.stream_stream_rpc_method_handler(
        verify,
        verifier_service_pb2.VerifyRequest.FromString,
        verifier_service_pb2.VerifyResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("outrider.v1.VerifierService", {"Verify": handler})


@asynccontextmanager
async def peer(
    error: RequestError | None = None, opened: verifier_service_pb2.Opened | None = None
) -> AsyncIterator[str]:
    server = create_server(max_message_bytes=1 << 20)
    server.add_generic_rpc_handlers((silent(error, opened),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def refusal(address: str, *, silence: float = 30.0, timeout: float | None = None) -> RequestError:
    replica = Replica(address, max_message_bytes=1 << 20, silence=silence)
    lease = replica.open(record(), timeout=timeout)
    with pytest.raises(RequestError) as caught:
        await lease.stream.open()
    lease.cancel()
    return caught.value


async def test_a_silent_verifier_is_no_verifier() -> None:
    async with peer() as address:
        error = await refusal(address, silence=0.3)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert "0.3 s" in error.message
    assert address in error.message


@pytest.mark.parametrize("silence", [0.05, 0.5])
async def test_an_address_that_takes_connections_and_says_nothing_is_no_verifier(silence: float) -> None:
    """Whether the silence is noticed by us, while the opening cannot be written, or by gRPC, after 0.2 s."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await refusal(f"127.0.0.1:{port}", silence=silence)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_port_where_nobody_listens_is_no_verifier_at_once() -> None:
    started = time.monotonic()
    error = await refusal("127.0.0.1:1", silence=90.0, timeout=90.0)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert time.monotonic() - started < 45.0


async def test_a_refusal_that_meets_a_round_on_its_way_is_told_as_it_is() -> None:
    """A write that fails must not hide what the verifier said: of 200 refusals some thirty meet one."""

    async def refused(replica: Replica, turns: int) -> RequestError:
        sequence = record()
        lease = replica.open(sequence, timeout=None)
        await lease.stream.open()
        for _ in range(turns):  # of the event loop
            await asyncio.sleep(0)
        try:
            sequence.propose([1, 2, 3], [])
            await lease.stream.send()
            await lease.stream.verdict()
        except RequestError as error:
            return error
        finally:
            lease.cancel()
        raise AssertionError("there is no verdict to be had")

    async with peer(overloaded("no room"), OPENED) as address:
        replica = Replica(address, max_message_bytes=1 << 20, silence=30.0)
        errors = [
            error
            for _ in range(5)
            for error in await asyncio.gather(*(refused(replica, number % 7) for number in range(40)))
        ]
    assert {(error.code, error.reason) for error in errors} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")}


async def test_the_clients_deadline_holds_for_the_verifier_too() -> None:
    async with peer() as address:
        error = await refusal(address, silence=60.0, timeout=0.3)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_refusals_pass_through_but_for_those_of_our_own_rounds() -> None:
    async with peer(overloaded("no room", running=4)) as address:
        error = await refusal(address)
        assert (error.code, error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        assert error.metadata["running"] == "4"
    async with peer(invalid_field("sampling.rule", "sampling.rule is 9", given=9)) as address:
        error = await refusal(address)
        assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.rule")
    for ours in (invalid_field("proposal.token_ids", "proposal.token_ids is long"), wrong_base("wrong")):
        async with peer(ours) as address:
            error = await refusal(address)
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")


async def test_a_verifier_that_judges_by_another_rule_than_was_asked_for_is_not_written_to() -> None:
    opened = verifier_service_pb2.Opened(rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE)
    async with peer(opened=opened) as address:
        error = await refusal(address)
    assert error.code is grpc.StatusCode.INTERNAL
    assert "judges by ACCEPTANCE_RULE_TOKENWISE; ACCEPTANCE_RULE_COUPLED was asked for" in error.message
    async with peer(opened=verifier_service_pb2.Opened(rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED)) as address:
        replica = Replica(address, max_message_bytes=1 << 20, silence=30.0)
        lease = replica.open(record(), timeout=None)
        assert (await lease.stream.open()).rule == sampling_pb2.ACCEPTANCE_RULE_COUPLED
        lease.cancel()


async def test_verdicts_carry_the_load(verifier: grpc.Channel, target_process: ServiceProcess) -> None:
    model = VerifierServiceStub(verifier).GetModel(verifier_service_pb2.VerifierServiceGetModelRequest()).model
    replica = Replica(target_process.address, max_message_bytes=1 << 20, silence=30.0)
    replica.probed(model)
    sequence = record(max_new_tokens=4)
    lease = replica.open(sequence, timeout=30.0)
    await lease.stream.open()
    for step in range(2):
        sequence.propose([], [])
        await lease.stream.send()
        verdict = await lease.stream.verdict()
        sequence.commit(verdict)
        assert verdict.load.running >= step, "the load is that of the step before"
        assert verdict.load.pass_fixed_us + verdict.load.pass_token_us > 0
    lease.cancel()


@asynccontextmanager
async def serving(
    verify: Any, to_bytes: Any = verifier_service_pb2.VerifyResponse.SerializeToString
) -> AsyncIterator[str]:
    """The address of a server whose `Verify` is this."""
    handler = grpc.stream_stream_rpc_method_handler(verify, verifier_service_pb2.VerifyRequest.FromString, to_bytes)
    server = create_server(max_message_bytes=1 << 20)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("outrider.v1.VerifierService", {"Verify": handler}),)
    )
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def test_notices_are_no_silence() -> None:
    """Who waits in a queue for longer than the silence that is borne, and is told so meanwhile, waits on."""
    silence, pause = 3.0, 0.1
    notices = [
        verifier_service_pb2.Notice(kind=verifier_service_pb2.NOTICE_KIND_QUEUED, message="all places are taken"),
        verifier_service_pb2.Notice(kind=3),  # type: ignore[arg-type]  # of another version
    ]

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        await context.write(verifier_service_pb2.VerifyResponse(opened=OPENED))
        await context.read()
        for number in range(round(1.2 * silence / pause)):
            await asyncio.sleep(pause)
            await context.write(verifier_service_pb2.VerifyResponse(notice=notices[number % 2]))
        verdict = speculation_pb2.Verdict(
            round=1, base_length=3, token_ids=[7], status=speculation_pb2.VERDICT_STATUS_JUDGED
        )
        await context.write(verifier_service_pb2.VerifyResponse(verdict=verdict))
        await context.read()

    async with serving(verify) as address:
        replica = Replica(address, max_message_bytes=1 << 20, silence=silence)
        sequence = record()
        lease = replica.open(sequence, timeout=60.0)
        await lease.stream.open()
        sequence.decode(1)
        await lease.stream.send()
        assert list((await lease.stream.verdict()).token_ids) == [7]
        lease.cancel()


async def test_an_answer_that_is_no_message_is_no_verifier() -> None:
    """Bytes that pass every frame, and are nothing that the contract knows."""

    async def verify(_: Any, context: Any) -> None:
        await context.read()
        await context.write(b"\xff\xff\xff")
        await asyncio.sleep(10)

    async with serving(verify, to_bytes=bytes) as address:
        error = await refusal(address)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_VERIFIER")
    assert "could not parse" in error.message


async def test_our_own_cancel_stays_a_cancel() -> None:
    async with peer() as address:
        replica = Replica(address, max_message_bytes=1 << 20, silence=30.0)
        lease = replica.open(record(), timeout=None)
        opening = asyncio.create_task(lease.stream.open())
        await asyncio.sleep(0.1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
