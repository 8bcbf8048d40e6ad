"""Which verifiers there are, and which one a sequence gets: models, load, refusals, circuit breakers, DNS."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from draft_service.replicas import (
    FIRST_PAUSE,
    JITTER,
    LONGEST_PAUSE,
    TRIAL_SECONDS,
    Breaker,
    Lease,
    Replica,
    Replicas,
    State,
)
from outrider.rpc.channel import Lookup, look_up
from outrider.rpc.errors import RequestError
from outrider.service.model_info import check_target
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2
from tests.draft_service.verifiers import fake_verifier

MODEL = model_pb2.ModelInfo(
    weights_fingerprint="a" * 64,
    vocabulary_fingerprint="v",
    protocol_version=1,
    noise_version=1,
    features=["decode", "resume"],
    rules=[sampling_pb2.ACCEPTANCE_RULE_TOKENWISE, sampling_pb2.ACCEPTANCE_RULE_BLOCK],
    limits=model_pb2.Limits(max_gamma=16, max_sequence_tokens=100),
)


def other(**fields: Any) -> model_pb2.ModelInfo:
    model = model_pb2.ModelInfo()
    model.CopyFrom(MODEL)
    for name, value in fields.items():
        setattr(model, name, value)
    return model


def verifier(model: model_pb2.ModelInfo = MODEL, listen: str = "127.0.0.1:0") -> Any:
    return fake_verifier(model=model, listen=listen)


@asynccontextmanager
async def found(
    *names: str, lookup: Lookup = look_up, look_again: float = 60.0, draft: model_pb2.ModelInfo | None = MODEL
) -> AsyncIterator[Replicas]:
    """The replicas, matched with a draft if there is one."""
    replicas = Replicas(names, max_message_bytes=1 << 20, silence=5.0, look_again=look_again, lookup=lookup)
    try:
        if draft is not None:
            await replicas.match(draft)
        yield replicas
    finally:
        replicas.close()


def lease(replica: Replica) -> Lease:
    """A lease without a stream."""
    return Lease(replica, Mock(draining=False))


def report_load(replica: Replica, running: int, waiting: int = 0) -> None:
    """Has the replica learn its load, as by a verdict."""
    claim = lease(replica)
    claim.succeeded(speculation_pb2.VerifierLoad(running=running + 1, waiting=waiting))
    claim.cancel()


def chosen(replicas: Replicas, times: int = 60) -> Counter[str]:
    return Counter(replica.address if (replica := replicas.choose()) else "" for _ in range(times))


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  # many things may make it so
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------- DNS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 without being told")
@pytest.mark.parametrize("look_again", [0.1, 600.0], ids=["in its time", "at once where a verifier is lost"])
async def test_a_name_is_looked_up_again_and_the_new_address_is_used(look_again: float) -> None:
    addresses = ["127.0.0.1"]

    async def lookup(host: str, port: int) -> list[str]:
        return [f"{address}:{port}" for address in addresses]

    async with verifier() as first:
        port = first.rpartition(":")[2]
        name = f"verifiers:{port}"
        async with (
            verifier(listen=f"127.0.0.2:{port}") as second,
            found(name, lookup=lookup, look_again=look_again) as replicas,
        ):
            assert chosen(replicas).keys() == {first}
            addresses[:] = ["127.0.0.2"]
            if look_again > 60:
                await asyncio.sleep(0.2)
                assert chosen(replicas).keys() == {first}
                lease(replicas.all()[0]).failed("gone")
            await until(lambda: chosen(replicas, 1).keys() == {second})
            assert [each.address for each in replicas.all()] == [second]


# ------------------------------------------------------------------------------------------------------------- models


async def test_the_first_named_that_answers_is_the_target_and_others_are_left_out() -> None:
    odd_model = other(weights_fingerprint="b" * 64)
    async with verifier() as good, verifier(odd_model) as odd, found(good, odd) as replicas:
        assert replicas.target == MODEL
        assert chosen(replicas) == {good: 60}
        assert [each.status for each in replicas.all()] == ["closed", "mismatched"]
        assert "its weights is bbbbbbbbbbbbbbbb; the target's is aaaaaaaaaaaaaaaa" in replicas.all()[1].mismatch


async def test_a_verifier_that_comes_later_is_used() -> None:
    async with verifier() as first:
        async with verifier() as later:
            pass
        async with found(later, first) as replicas:
            assert chosen(replicas) == {first: 60}
            async with verifier(listen=later):
                await until(lambda: len(chosen(replicas)) == 2)


async def test_where_all_answer_and_none_forms_a_pair_there_is_no_waiting() -> None:
    odd = other(vocabulary_fingerprint="w")
    async with verifier(odd) as one, verifier(odd) as two, found(one, two, draft=None) as replicas:
        with pytest.raises(RequestError, match="vocabularies") as caught:
            await replicas.match(MODEL)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_unexpected_error_of_a_probe_does_not_end_probing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with verifier() as address, found(address) as replicas:
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


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (MODEL, ""),
        (other(weights_fingerprint="b"), "its weights is b"),
        (other(vocabulary_fingerprint="w"), "its vocabulary is w"),
        (other(noise_version=2), "its noise version is 2; the target's is 1"),
        (model_pb2.ModelInfo(), "weights"),
    ],
)
def test_who_can_stand_in_for_the_target(model: model_pb2.ModelInfo, says: str) -> None:
    assert says in check_target(model, MODEL)
    assert bool(says) == bool(check_target(model, MODEL))


def test_who_takes_less_than_the_target_cannot_stand_in() -> None:
    smaller, poorer = other(), other()
    smaller.limits.max_gamma = 8
    del poorer.features[:]
    assert check_target(smaller, MODEL) == "its max_gamma is 8; the first verifier's is 16"
    assert check_target(MODEL, smaller) == ""
    assert check_target(poorer, MODEL) == "its features lack decode, resume"


# ----------------------------------------------------------------------------------------------------------- choosing


@asynccontextmanager
async def some(count: int) -> AsyncIterator[tuple[Replicas, Sequence[Replica]]]:
    """So many replicas, all of them usable."""
    async with verifier() as one, verifier() as two, verifier() as three, found(*(one, two, three)[:count]) as replicas:
        await until(lambda: all(each.has_target for each in replicas.all()))
        yield replicas, replicas.all()


async def test_the_less_loaded_is_chosen_and_equals_share() -> None:
    async with some(3) as (replicas, (busy, idle, middling)):
        counts = chosen(replicas, 600)
        assert all(100 < counts[each.address] < 300 for each in replicas.all()), counts
        report_load(busy, running=9, waiting=3)
        report_load(middling, running=5)
        counts = chosen(replicas, 600)
        assert counts[busy.address] == 0
        assert counts[idle.address] > counts[middling.address] > 100, "of two at random, lest all run to one"


async def test_sequences_of_ours_count_at_once_and_what_others_had_there_is_forgotten() -> None:
    async with some(2) as (replicas, (first, second)):
        for _ in range(20):
            replica = replicas.choose()
            assert replica is not None
            lease(replica)
        assert (first.num_open, second.num_open) == (10, 10)
        report_load(first, running=50)
        assert first.load() > second.load()
        first._load_time -= 1000.0
        assert first.load() == second.load()


async def test_one_where_a_round_has_failed_is_chosen_only_where_there_is_no_other() -> None:
    async with some(2) as (replicas, (failed, good)):
        assert {replicas.choose(failed=[failed]) for _ in range(60)} == {good}
        assert replicas.choose(failed=[failed, good]) is not None


async def test_who_refuses_is_left_alone_for_as_long_as_it_said_where_another_one_does_not() -> None:
    async with some(2) as (replicas, (first, second)):
        lease(first).refused(40.0)
        assert chosen(replicas) == {second.address: 60}
        lease(second).refused(60.0)
        assert "" not in chosen(replicas), "who comes anew asks all the same, and is told by the verifier itself"
        assert replicas.choose(proven=True) is None


async def test_a_sequence_that_all_refuse_waits_for_the_first_that_is_free_and_no_longer_than_it_may() -> None:
    async with some(2) as (replicas, (first, second)):
        started = time.monotonic()
        assert await replicas.wait(started + 50.0, {first: started + 60.0, second: started + 70.0}) is None
        assert time.monotonic() - started < 25.0, "nobody is free in time, and that is known at once"
        started = time.monotonic()
        assert await replicas.wait(started + 50.0, {first: started + 0.4, second: started + 60.0}) is first
        assert 0.4 <= time.monotonic() - started < 25.0


async def test_all_that_wait_are_served_when_a_verifier_comes_back() -> None:
    async with verifier() as address:
        pass
    async with found(address, draft=None) as replicas:
        async with verifier(listen=address):
            await replicas.match(MODEL)
            (replica,) = replicas.all()
        lease(replica).failed("gone")
        assert replicas.choose() is None

        async def begin() -> None:
            ready = await replicas.wait(time.monotonic() + 60.0)
            assert ready is not None
            claim = lease(ready)
            await asyncio.sleep(0.01)
            claim.succeeded(speculation_pb2.VerifierLoad(running=1))

        waiting = [asyncio.create_task(begin()) for _ in range(10)]
        await asyncio.sleep(0.3)
        assert not any(each.done() for each in waiting)
        async with verifier(listen=address):
            await asyncio.gather(*waiting)
        assert replica.num_open == 11


async def test_where_all_run_another_model_by_now_nobody_waits() -> None:
    async with some(1) as (replicas, (replica,)):
        lease(replica).mismatched("other weights")
        started = time.monotonic()
        assert await replicas.wait(started + 50.0) is None
        assert time.monotonic() - started < 25.0


# ---------------------------------------------------------------------------------------------------- circuit breaker


class TimedBreaker(Breaker):
    """Its clock is moved by hand, and by default no pause is shortened."""

    def __init__(self, chance: Callable[[], float] = lambda: 0.0) -> None:
        self.now = 0.0
        super().__init__(clock=lambda: self.now, chance=chance)

    def fail(self) -> float:
        """A try that fails; returns the pause."""
        assert self.failed(self.begin())
        return self.pause

    def probe(self, *, well: bool) -> float:
        """A probe when it is due; returns the pause."""
        self.now += self.pause
        self.probed(well=well)
        return self.pause


def test_closed_all_may_try_and_open_nobody() -> None:
    breaker = TimedBreaker()
    assert all(breaker.admits() for _ in range(10))
    breaker.fail()
    assert not breaker.admits()
    breaker.now += 1000.0
    assert not breaker.admits(), "time alone does not mend it: a probe has to go well"


def test_pauses_double_up_to_the_longest_and_a_success_forgets_them() -> None:
    breaker = TimedBreaker()
    pauses = [breaker.fail(), *(breaker.probe(well=False) for _ in range(8))]
    assert pauses[:3] == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])
    assert pauses[-1] == LONGEST_PAUSE
    breaker.probe(well=True)
    assert breaker.succeeded(breaker.begin())
    assert breaker.fail() == pytest.approx(FIRST_PAUSE)


def test_who_answers_probes_and_fails_at_work_is_tried_more_and_more_seldom() -> None:
    breaker = TimedBreaker()
    pauses = []
    for _ in range(6):
        pauses.append(breaker.fail())
        breaker.probe(well=True)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 10 * pauses[0]


def test_jitter_takes_at_most_its_share_and_spreads() -> None:
    draws = random.Random(7)
    pauses = [TimedBreaker(draws.random).fail() for _ in range(200)]
    assert min(pauses) >= FIRST_PAUSE * (1 - JITTER)
    assert max(pauses) <= FIRST_PAUSE
    assert max(pauses) - min(pauses) > 0.8 * JITTER * FIRST_PAUSE


def test_half_open_admits_one_trial_at_a_time() -> None:
    breaker = TimedBreaker()
    breaker.fail()
    breaker.probe(well=True)
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits()
    trial = breaker.begin()
    assert not breaker.admits()
    breaker.now += TRIAL_SECONDS * 1.01
    assert breaker.admits(), "a trial that says nothing keeps nobody out for long"
    assert breaker.succeeded(trial)
    assert all(breaker.admits() for _ in range(10))


def test_many_that_fail_at_once_are_one_failure() -> None:
    breaker = TimedBreaker()
    epochs = [breaker.begin() for _ in range(50)]
    assert [breaker.failed(epoch) for epoch in epochs] == [True] + [False] * 49
    assert breaker.pause == pytest.approx(FIRST_PAUSE)


def test_what_was_begun_before_it_opened_says_nothing_of_it_after() -> None:
    breaker = TimedBreaker()
    old = breaker.begin()
    breaker.fail()
    breaker.probe(well=True)
    assert not breaker.succeeded(old), "a verdict that was on its way is no proof"
    assert not breaker.failed(old), "and its end is none either"
    assert breaker.state is State.HALF_OPEN


def test_whatever_happens_an_open_breaker_admits_nobody_and_pauses_end() -> None:
    """Two thousand random events: the state is one that the last events allow."""
    chance = random.Random(3)
    breaker, epochs = TimedBreaker(random.Random(1).random), [0]
    for _ in range(2000):
        match chance.randrange(5):
            case 0 if breaker.admits():
                epochs.append(breaker.begin())
            case 1:
                breaker.failed(chance.choice(epochs[-20:]))
            case 2:
                breaker.succeeded(chance.choice(epochs[-20:]))
            case 3 if not breaker.pause:
                breaker.probed(well=chance.random() < 0.5)
            case _:
                breaker.now += chance.random()
        assert breaker.pause <= LONGEST_PAUSE
        assert not (breaker.state is State.OPEN and breaker.admits())
        assert breaker.state is not State.CLOSED or breaker.admits()
