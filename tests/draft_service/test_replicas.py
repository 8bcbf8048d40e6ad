"""The choice of a verifier for a sequence: models, load, refusals, circuit breakers, DNS."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

import draft_service.replicas
from draft_service import circuit_breaker
from draft_service.circuit_breaker import FIRST_PAUSE, LONGEST_PAUSE, TRIAL_SECONDS, Breaker, State
from draft_service.replicas import Replica, Replicas, translate
from outrider.rpc.channel import Lookup, look_up
from outrider.service.model_info import check_target
from protos.outrider.v1 import model_pb2, sampling_pb2, speculation_pb2
from tests.draft_service.verifiers import connect, fake_verifier

FIELDS: dict[str, Any] = {
    "weights_fingerprint": "a" * 64,
    "vocabulary_fingerprint": "v",
    "protocol_version": 1,
    "noise_version": 1,
    "features": ["decode", "resume"],
    "rules": [sampling_pb2.ACCEPTANCE_RULE_TOKENWISE, sampling_pb2.ACCEPTANCE_RULE_BLOCK],
    "limits": model_pb2.Limits(max_gamma=16, max_sequence_tokens=100),
}
MODEL = model_pb2.ModelInfo(**FIELDS)


def other(**fields: Any) -> model_pb2.ModelInfo:
    return model_pb2.ModelInfo(**FIELDS | fields)


def verifier(model: model_pb2.ModelInfo = MODEL, listen: str = "127.0.0.1:0") -> Any:
    return fake_verifier(model=model, listen=listen)


@asynccontextmanager
async def found(*names: str, lookup: Lookup = look_up) -> AsyncIterator[Replicas]:
    """The replicas, matched with a draft."""
    replicas = Replicas(names, connect, timeout=5.0, resolve_interval=600.0, lookup=lookup)
    try:
        await replicas.match(MODEL)
        yield replicas
    finally:
        replicas.close()


def report_load(replica: Replica, running: int) -> None:
    """Set the load as a verdict does."""
    replica.succeeded(replica.breaker.begin(), speculation_pb2.VerifierLoad(running=running))


def chosen(replicas: Replicas, times: int = 60) -> Counter[str]:
    return Counter(replica.address if (replica := replicas.choose()) else "" for _ in range(times))


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.02)


def failed_call(code: grpc.StatusCode, details: str) -> grpc.RpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


async def test_the_target_is_lost_once_all_verifiers_have_had_another_one_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    async with verifier() as one, verifier() as two, found(one, two) as replicas:
        monkeypatch.setattr(draft_service.replicas, "_LOST_POLL", 0.01)
        monkeypatch.setattr(draft_service.replicas, "time", SimpleNamespace(monotonic=lambda: now))
        first, second = replicas.all()
        waiting = asyncio.create_task(replicas.lost_target(30.0))

        async def is_lost_after(seconds: float) -> bool:
            nonlocal now
            for step in (0.0, seconds):
                now += step
                await asyncio.sleep(0.1)  # some polls
            return waiting.done()

        first.mismatched("its limits are lower")
        assert not await is_lost_after(60.0), "the second one has the target"
        second.mismatched("its limits are lower, too")
        assert not await is_lost_after(29.0)
        second.probed(MODEL, "")  # an earlier version is back
        assert not await is_lost_after(60.0)
        second.mismatched("its limits are lower, too")
        second.num_open = 1
        assert not await is_lost_after(60.0), "it still runs a sequence"
        second.num_open = 0
        assert await is_lost_after(31.0)
        assert await waiting == "its limits are lower"


@pytest.mark.parametrize(
    ("why", "advice"),
    [
        ("Hostname Verification Check failed.", "--verifier-tls-name"),
        ("CERTIFICATE_VERIFY_FAILED", "--verifier-tls-ca"),
    ],
)
def test_an_unfit_certificate_of_a_verifier_is_an_error_that_names_the_flag(why: str, advice: str) -> None:
    details = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:50052: {why}"
    assert translate(failed_call(grpc.StatusCode.UNAVAILABLE, details), "a:1").message.endswith(advice)


@pytest.mark.parametrize(
    ("code", "flag"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "--verifier-token-file"),
        (grpc.StatusCode.PERMISSION_DENIED, "--allow-client-san"),
    ],
)
def test_a_verifier_that_does_not_admit_the_service_is_logged_with_the_flag(code: grpc.StatusCode, flag: str) -> None:
    with capture_logs() as logged:
        translate(failed_call(code, "no"), "a:1")
    (line,) = logged
    assert flag in line["action"]


@pytest.mark.parametrize(("template", "is_logged"), [("", False), ("t", True)])
async def test_a_target_with_another_chat_template_is_logged(template: str, is_logged: bool) -> None:
    """Chats are rendered by the draft's; here it has none."""
    async with verifier(other(chat_template_fingerprint=template)) as address:
        with capture_logs() as logged:
            async with found(address):
                pass
    assert [each["event"] for each in logged].count("the target has another chat template") == is_logged


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 by default")
async def test_a_name_is_resolved_again_when_a_verifier_is_lost() -> None:
    """An error of a lookup ends only that one."""
    addresses, failures = ["127.0.0.1"], list[RuntimeError]()

    async def lookup(host: str, port: int) -> list[str]:
        if failures:
            raise failures.pop()
        return [f"{address}:{port}" for address in addresses]

    async with verifier() as first:
        port = first.rpartition(":")[2]
        async with (
            verifier(listen=f"127.0.0.2:{port}") as second,
            found(f"verifiers:{port}", lookup=lookup) as replicas,
        ):
            assert chosen(replicas).keys() == {first}
            addresses[:] = ["127.0.0.2"]
            (gone,) = replicas.all()
            failures.append(RuntimeError("can't start new thread"))
            gone.failed(gone.breaker.begin(), "gone")
            await until(lambda: not failures)
            replicas._resolve_now.set()
            await until(lambda: chosen(replicas, 1).keys() == {second})
            assert [each.address for each in replicas.all()] == [second]


async def test_verifiers_that_differ_from_the_first_or_do_not_answer_are_not_used() -> None:
    """A line of the log has the reason of each, once."""
    odd_model, absent = other(weights_fingerprint="b" * 64), "127.0.0.1:1"
    with capture_logs() as lines:
        async with verifier() as good, verifier(odd_model) as odd, found(good, odd, absent) as replicas:
            assert replicas.target == MODEL
            assert chosen(replicas) == {good: 60}
            assert [each.status for each in replicas.all()] == ["ready", "mismatched", "unknown"]
            breaker = replicas.all()[2].breaker
            await until(lambda: breaker.epoch > 1)
    reasons = [(line["verifier"], line["status"], line["reason"]) for line in lines if "reason" in line]
    assert [each[:2] for each in reasons] == [(odd, "mismatched"), (absent, "unknown")]
    assert "connection refused" in reasons[1][2]
    words = "its weights fingerprint is bbbbbbbbbbbbbbbb; it must be the first verifier's, aaaaaaaaaaaaaaaa"
    assert words in reasons[0][2]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            other(weights_fingerprint="b"),
            "its weights fingerprint is b; it must be the first verifier's, aaaaaaaaaaaaaaaa: weights",
        ),
        (other(noise_version=2), "its noise version is 2; it must be the first verifier's, 1"),
        (
            other(limits=model_pb2.Limits(max_gamma=8)),
            "its limit max_gamma is 8; it must be at least the first verifier's, 16",
        ),
        (other(features=["decode"]), "it lacks features or rules of the first verifier: resume"),
    ],
)
def test_differences_that_exclude_a_verifier(model: model_pb2.ModelInfo, words: str) -> None:
    assert words in check_target(model, MODEL)
    assert check_target(MODEL, MODEL) == ""


@asynccontextmanager
async def some(count: int) -> AsyncIterator[tuple[Replicas, Sequence[Replica]]]:
    """Usable replicas."""
    async with AsyncExitStack() as stack:
        names = [await stack.enter_async_context(verifier()) for _ in range(count)]
        replicas = await stack.enter_async_context(found(*names))
        await until(lambda: all(each.has_target for each in replicas.all()))
        yield replicas, replicas.all()


async def test_the_less_loaded_replica_is_chosen_and_equal_ones_share() -> None:
    async with some(3) as (replicas, (busy, idle, middling)):
        counts = chosen(replicas, 600)
        assert all(100 < counts[each.address] < 300 for each in replicas.all()), counts
        report_load(busy, running=9)
        report_load(middling, running=5)
        counts = chosen(replicas, 600)
        assert counts[busy.address] == 0
        assert counts[idle.address] > counts[middling.address] > 100, (
            "the better of two at random, so that not all choose one"
        )


async def test_a_replica_that_refuses_is_not_used_until_its_retry_after() -> None:
    async with some(2) as (replicas, (first, second)):
        first.refused(40.0)
        assert chosen(replicas) == {second.address: 60}
        second.refused(60.0)
        assert "" not in chosen(replicas), "a new sequence tries a full verifier anyway"
        assert replicas.choose(proven=True) is None
        now = time.monotonic()
        assert await replicas.wait(now + 50.0, {first: now + 60.0, second: now + 70.0}) is None
        assert time.monotonic() - now < 25.0, "at once: none becomes usable in time"
        assert await replicas.wait(now + 50.0, {first: now + 0.4, second: now + 60.0}) is first
        assert 0.4 <= time.monotonic() - now < 25.0


class TimedBreaker(Breaker):
    """On a fake clock, without jitter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 0.0
        monkeypatch.setattr(circuit_breaker, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(circuit_breaker, "JITTER", 0.0)

    def fail(self) -> float:
        """A failed attempt; returns the pause."""
        self.failed(self.begin())
        assert self.state is State.OPEN
        return self.pause

    def probe(self, *, well: bool) -> float:
        """A probe when due; returns the pause."""
        self.now += self.pause
        self.probed(well=well)
        return self.pause


def test_pauses_double_up_to_the_longest_and_a_success_resets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = TimedBreaker(monkeypatch)
    pauses = [breaker.fail(), *(breaker.probe(well=False) for _ in range(8))]
    assert pauses[:3] == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])
    assert pauses[-1] == LONGEST_PAUSE
    breaker.probe(well=True)
    breaker.succeeded(breaker.begin())
    assert breaker.state is State.CLOSED
    assert breaker.fail() == pytest.approx(FIRST_PAUSE)


def test_open_admits_no_attempt_and_half_open_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = TimedBreaker(monkeypatch)
    assert all(breaker.admits() for _ in range(10))
    breaker.fail()
    breaker.now += 1000.0
    assert not breaker.admits(), "only a successful probe closes it"
    breaker.probe(well=True)
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits()
    trial = breaker.begin()
    assert not breaker.admits()
    breaker.now += TRIAL_SECONDS * 1.01
    assert breaker.admits(), "an unfinished trial blocks the next one only for a while"
    breaker.succeeded(trial)
    assert all(breaker.admits() for _ in range(10))


def test_attempts_begun_before_it_opened_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = TimedBreaker(monkeypatch)
    old, same = breaker.begin(), breaker.begin()
    breaker.fail()
    breaker.failed(same)
    assert breaker.epoch == 1, "concurrent failures are one failure"
    breaker.probe(well=True)
    breaker.succeeded(old)  # the verdict was sent before
    breaker.failed(old)  # and so is its end
    assert breaker.state is State.HALF_OPEN
