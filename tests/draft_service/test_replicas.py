"""Which verifiers there are, and which one a sequence gets: names, models, load, refusals, and those that come back.

The peers are gRPC servers of the test's own that say what they run, and no more. DNS is the one thing that is put in
its place (`Resolve`): a test asks no network.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from draft_service.replicas import Lease, Replica, Replicas
from outrider.rpc.channel import Lookup, Resolver, look_up
from outrider.rpc.errors import RequestError
from outrider.rpc.server import bind, create_server
from outrider.service.model_info import check_target
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2, verifier_service_pb2_grpc

MODEL = model_pb2.ModelInfo(
    weights_fingerprint="a" * 64,
    vocabulary_fingerprint="v",
    protocol_version=1,
    noise_version=1,
    features=["decode", "resume"],
    rules=[sampling_pb2.ACCEPTANCE_RULE_TOKENWISE, sampling_pb2.ACCEPTANCE_RULE_BLOCK],
    limits=model_pb2.Limits(max_gamma=16, max_sequence_tokens=100),
)

several_loopbacks = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 without being told")


def other(**fields: Any) -> model_pb2.ModelInfo:
    model = model_pb2.ModelInfo()
    model.CopyFrom(MODEL)
    for name, value in fields.items():
        setattr(model, name, value)
    return model


class Peer(verifier_service_pb2_grpc.VerifierServiceServicer):
    """Says what it runs."""

    def __init__(self, model: model_pb2.ModelInfo) -> None:
        self._model = model

    async def GetModel(self, request: Any, context: Any) -> verifier_service_pb2.VerifierServiceGetModelResponse:
        return verifier_service_pb2.VerifierServiceGetModelResponse(model=self._model)

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        raise NotImplementedError  # the stubs ask for it; replicas are chosen by what they say


@asynccontextmanager
async def peer(model: model_pb2.ModelInfo = MODEL, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = create_server(max_message_bytes=1 << 20)
    verifier_service_pb2_grpc.add_VerifierServiceServicer_to_server(Peer(model), server)
    address = bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@asynccontextmanager
async def found(names: Sequence[str], lookup: Lookup = look_up, *, look_again: float = 60.0) -> AsyncIterator[Replicas]:
    """The replicas, not matched yet."""
    replicas = Replicas(names, max_message_bytes=1 << 20, silence=5.0, look_again=look_again, lookup=lookup)
    try:
        yield replicas
    finally:
        replicas.close()


def lease(replica: Replica) -> Lease:
    """A lease without a stream."""
    return Lease(replica, Mock(draining=False))


def chosen(replicas: Replicas, times: int = 60) -> Counter[str]:
    return Counter(replica.address if (replica := replicas.choose()) else "" for _ in range(times))


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  # many things may make it so
            await asyncio.sleep(0.02)


# --------------------------------------------------------------------------------------------------------------- names


def table(entries: Mapping[str, Sequence[str] | OSError]) -> Callable[[str, int], Any]:
    """A resolver that knows these hosts; what the mapping holds may change."""

    async def resolve(host: str, port: int) -> list[str]:
        found = entries[host]
        if isinstance(found, OSError):
            raise found
        return [f"{address}:{port}" for address in found]

    return resolve


async def test_a_name_stands_for_all_its_addresses_and_an_address_for_itself() -> None:
    resolve = table({"verifiers": ["10.0.0.1", "10.0.0.2", "10.0.0.1"], "more": ["10.0.0.2", "10.0.0.3"]})
    resolver = Resolver(["verifiers:5", "10.0.0.9:6", "[::1]:7", "more:5", "unix:/run/v.sock"], resolve)
    assert await resolver.resolve() == {
        "10.0.0.1:5": "verifiers:5",
        "10.0.0.2:5": "verifiers:5",
        "10.0.0.9:6": "10.0.0.9:6",
        "[::1]:7": "[::1]:7",
        "10.0.0.3:5": "more:5",
        "unix:/run/v.sock": "unix:/run/v.sock",
    }
    assert resolver.may_change
    assert not Resolver(["10.0.0.9:6", "[::1]:7", "unix:/run/verifier.sock"]).may_change


async def test_a_verifier_of_both_families_is_one_replica() -> None:
    """And stays the one it was, whatever comes first the next time. One of the other family alone is found as well."""
    both = ["fd00::1", "fd00::2", "10.0.0.1", "10.0.0.2"]
    entries = {"verifiers": [f"[{ip}]" if ":" in ip else ip for ip in both], "new": ["10.0.0.3"]}
    resolver = Resolver(["verifiers:5", "new:5"], table(entries))
    taken = ["[fd00::1]:5", "[fd00::2]:5", "10.0.0.3:5"]
    assert list(await resolver.resolve()) == taken
    entries["verifiers"] = entries["verifiers"][::-1]
    assert sorted(await resolver.resolve()) == sorted(taken)


@pytest.mark.parametrize("failure", [OSError("no such name"), []])
async def test_a_name_that_cannot_be_resolved_keeps_its_addresses(failure: Any) -> None:
    entries: dict[str, Any] = {"verifiers": ["10.0.0.1"]}
    resolver = Resolver(["verifiers:5"], table(entries))
    before = await resolver.resolve()
    entries["verifiers"] = failure
    assert await resolver.resolve() == before
    entries["verifiers"] = ["10.0.0.2"]
    assert list(await resolver.resolve()) == ["10.0.0.2:5"]


async def test_the_system_resolves_names_as_every_program_has_them_resolved() -> None:
    assert "127.0.0.1:5" in await look_up("localhost", 5)
    with pytest.raises(OSError, match=r"."):
        await look_up("no.such.name.invalid", 5)


@several_loopbacks
async def test_what_a_name_stands_for_is_looked_up_again_and_the_new_one_is_used() -> None:
    entries: dict[str, Any] = {"verifiers": ["127.0.0.1"]}
    async with peer() as first:
        port = first.rpartition(":")[2]
        async with (
            peer(listen=f"127.0.0.2:{port}") as second,
            found([f"verifiers:{port}"], table(entries), look_again=0.1) as replicas,
        ):
            await replicas.match(MODEL)
            assert chosen(replicas).keys() == {first}
            entries["verifiers"] = ["127.0.0.2"]
            await until(lambda: chosen(replicas, 1).keys() == {second})
            assert [each.address for each in replicas.all()] == [second]


@several_loopbacks
async def test_names_are_looked_up_at_once_where_a_verifier_is_lost() -> None:
    entries: dict[str, Any] = {"verifiers": ["127.0.0.1"]}
    async with peer() as first:
        port = first.rpartition(":")[2]
        async with (
            peer(listen=f"127.0.0.2:{port}") as second,
            found([f"verifiers:{port}"], table(entries), look_again=600.0) as replicas,
        ):
            await replicas.match(MODEL)
            entries["verifiers"] = ["127.0.0.2"]
            await asyncio.sleep(0.2)
            replica = replicas.choose()
            assert replica is not None
            assert replica.address == first
            lease(replica).failed("gone")
            await until(lambda: chosen(replicas, 1).keys() == {second})


# -------------------------------------------------------------------------------------------------------------- models


async def test_the_first_named_that_answers_says_what_the_target_is_and_others_are_left_out() -> None:
    async with peer() as good, peer(other(weights_fingerprint="b" * 64)) as odd, found([good, odd]) as replicas:
        assert await replicas.match(MODEL) == MODEL
        assert chosen(replicas) == {good: 60}
        assert [each.status for each in replicas.all()] == ["closed", "mismatched"]
        assert "its weights is bbbbbbbbbbbbbbbb; the target's is aaaaaaaaaaaaaaaa" in replicas.all()[1].mismatch


async def test_a_verifier_that_comes_later_is_used() -> None:
    async with peer() as first:
        async with peer() as later:
            pass
        async with found([later, first]) as replicas:
            await replicas.match(MODEL)
            assert chosen(replicas) == {first: 60}
            async with peer(listen=later):
                await until(lambda: len(chosen(replicas)) == 2)


async def test_one_where_a_round_has_failed_is_chosen_only_where_there_is_no_other() -> None:
    async with peer() as first, peer() as second, found([first, second]) as replicas:
        await replicas.match(MODEL)
        await until(lambda: len(chosen(replicas)) == 2)
        failed, other = replicas.all()
        assert {replicas.choose(failed=[failed]) for _ in range(60)} == {other}
        assert replicas.choose(failed=[failed, other]) is not None


async def test_an_unexpected_error_of_a_probe_does_not_end_probing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peer() as address, found([address]) as replicas:
        await replicas.match(MODEL)
        (replica,) = replicas.all()
        errors, ask = [ValueError("a bug"), ValueError("a bug")], replica.ask

        async def broken() -> model_pb2.ModelInfo:
            if errors:
                raise errors.pop()
            return await ask()

        monkeypatch.setattr(replica, "ask", broken)
        lease(replica).failed("gone")
        assert replicas.choose() is None
        await until(lambda: replicas.choose() is not None)
        assert not errors


async def test_where_all_answer_and_none_forms_a_pair_there_is_no_waiting() -> None:
    odd = other(vocabulary_fingerprint="w")
    async with peer(odd) as one, peer(odd) as two, found([one, two]) as replicas:
        with pytest.raises(RequestError, match="vocabularies") as caught:
            await replicas.match(MODEL)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (MODEL, ""),
        (other(weights_fingerprint="b"), "weights"),
        (other(vocabulary_fingerprint="w"), "vocabulary"),
        (other(noise_version=2), "noise version is 2; the target's is 1"),
        (model_pb2.ModelInfo(), "weights"),
    ],
)
def test_who_can_stand_in_for_the_target(model: model_pb2.ModelInfo, says: str) -> None:
    assert says in check_target(model, MODEL)
    assert bool(says) == bool(check_target(model, MODEL))


def test_who_takes_less_than_the_target_cannot_stand_in() -> None:
    smaller = other()
    smaller.limits.max_gamma = 8
    assert check_target(smaller, MODEL) == "its max_gamma is 8; the first verifier's is 16"
    assert check_target(MODEL, smaller) == ""
    poorer = other()
    del poorer.features[:]
    assert check_target(poorer, MODEL) == "its features lack decode, resume"


# ------------------------------------------------------------------------------------------------------------ choosing


def told(replica: Replica, running: int, waiting: int = 0) -> None:
    """Has the replica hear of its load, as by a verdict."""
    claim = lease(replica)
    claim.succeeded(speculation_pb2.VerifierLoad(running=running + 1, waiting=waiting))
    claim.cancel()


async def test_the_less_loaded_is_chosen_and_equals_share() -> None:
    async with peer() as one, peer() as two, peer() as three, found([one, two, three]) as replicas:
        await replicas.match(MODEL)
        await until(lambda: len(chosen(replicas)) == 3)
        counts = chosen(replicas, 600)
        assert all(100 < counts[address] < 300 for address in (one, two, three)), counts
        busy, idle, middling = replicas.all()
        told(busy, running=9, waiting=3)
        told(middling, running=5)
        counts = chosen(replicas, 600)
        assert counts[busy.address] == 0
        assert counts[idle.address] > counts[middling.address] > 100, "of two at random, lest all run to one"


async def test_sequences_of_ours_count_at_once_and_what_others_had_there_is_forgotten() -> None:
    async with peer() as one, peer() as two, found([one, two]) as replicas:
        await replicas.match(MODEL)
        first, second = replicas.all()
        for _ in range(20):
            replica = replicas.choose()
            assert replica is not None
            lease(replica)
        assert (first.num_open, second.num_open) == (10, 10)
        told(first, running=50)
        assert first.load() > second.load()
        first._load_time -= 1000.0
        assert first.load() == second.load()


async def test_who_refuses_is_left_alone_for_as_long_as_it_said_where_another_one_does_not() -> None:
    async with peer() as one, peer() as two, found([one, two]) as replicas:
        await replicas.match(MODEL)
        first, second = replicas.all()
        await until(lambda: second.has_target)
        lease(first).refused(40.0)
        assert chosen(replicas) == {second.address: 60}
        lease(second).refused(60.0)
        assert "" not in chosen(replicas), "who comes anew asks all the same, and is told by the verifier itself"
        assert replicas.choose(proven=True) is None


async def test_a_sequence_that_is_refused_by_all_waits_for_the_first_that_is_free_again_and_no_longer_than_it_may() -> (
    None
):
    async with peer() as one, peer() as two, found([one, two]) as replicas:
        await replicas.match(MODEL)
        first, second = replicas.all()
        await until(lambda: second.has_target)
        started = time.monotonic()
        assert await replicas.wait(started + 50.0, {first: started + 60.0, second: started + 70.0}) is None
        assert time.monotonic() - started < 25.0, "nobody is free in time, and that is known at once"
        started = time.monotonic()
        assert await replicas.wait(started + 50.0, {first: started + 0.4, second: started + 60.0}) is first
        assert 0.4 <= time.monotonic() - started < 25.0


async def test_all_that_wait_are_served_when_a_verifier_comes_back() -> None:
    async with peer() as address:
        pass
    async with found([address]) as replicas:
        async with peer(listen=address):
            await replicas.match(MODEL)
            (replica,) = replicas.all()
        lease(replica).failed("gone")
        assert replicas.choose() is None

        async def begin() -> None:
            found = await replicas.wait(time.monotonic() + 60.0)
            assert found is not None
            claim = lease(found)
            await asyncio.sleep(0.01)
            claim.succeeded(speculation_pb2.VerifierLoad(running=1))

        waiting = [asyncio.create_task(begin()) for _ in range(10)]
        await asyncio.sleep(0.3)
        assert not any(each.done() for each in waiting)
        async with peer(listen=address):
            await asyncio.gather(*waiting)
        assert replica.num_open == 11


async def test_where_all_run_another_model_by_now_nobody_waits() -> None:
    async with peer() as address, found([address]) as replicas:
        await replicas.match(MODEL)
        (replica,) = replicas.all()
        lease(replica).mismatched("other weights")
        started = time.monotonic()
        assert await replicas.wait(started + 50.0) is None
        assert time.monotonic() - started < 25.0
