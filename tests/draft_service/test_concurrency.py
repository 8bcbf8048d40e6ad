"""The draft service's concurrency limit and queue: order, positions, refusals, retry_after, idle streams."""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from draft_service import service as services
from draft_service.concurrency import POSITION_INTERVAL, ConcurrencyLimit
from draft_service.service import GenerateCall
from draft_service.settings import DraftSettings
from outrider.rpc.errors import RequestError, invalid_field
from outrider.rpc.timeouts import FIRST_GUESS
from protos.outrider.v1 import draft_service_pb2
from tests.fake_clock import fake_clock

CONTENDED_S, IDLE_S = 5.0, 60.0


class Service:
    """A limit, and the calls that run or wait."""

    def __init__(self, maximum: int = 4, max_waiting: int = 256) -> None:
        self.limit = ConcurrencyLimit(maximum, max_waiting=max_waiting, contended_idle_timeout=CONTENDED_S)
        self.begun: list[str] = []
        self.most = 0
        self.positions: dict[str, list[int]] = {}
        self.calls: dict[str, asyncio.Task[None]] = {}

    async def call(self, name: str, count: int = 1, *, seconds: float = 1e6, resumed: bool = False) -> None:
        """One call: wait, run for so many seconds, end."""
        with self.limit.claim(count, resumed=resumed) as claim:
            async for ahead in claim.turn():
                self.positions.setdefault(name, []).append(ahead)
            self.begun.append(name)
            self.most = max(self.most, self.limit.running)
            await asyncio.sleep(seconds)

    async def start(self, name: str, count: int = 1, **how: Any) -> None:
        self.calls[name] = asyncio.create_task(self.call(name, count, **how))
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self.calls[name].cancel()
        await asyncio.gather(self.calls[name], return_exceptions=True)
        await asyncio.sleep(0.001)


@fake_clock
async def test_200_concurrent_calls_run_in_their_order() -> None:
    """Also past a call of many samples."""
    service = Service(64)
    await asyncio.gather(*(service.call(str(i), 33 if i == 90 else 1, seconds=0.7) for i in range(200)))
    assert service.begun == [str(i) for i in range(200)]
    assert service.most == 64
    assert (service.limit.running, service.limit.waiting) == (0, 0)


@fake_clock
async def test_calls_behind_a_cancelled_one_move_up() -> None:
    service = Service(4, max_waiting=6)
    await service.start("runs", 2)
    await service.start("large", 4)
    await service.start("small", 2)
    with pytest.raises(RequestError):
        await service.call("refused")
    assert service.begun == ["runs"]
    await service.leave("large")
    assert service.begun == ["runs", "small"]
    assert (service.limit.running, service.limit.waiting) == (4, 0)


@fake_clock
async def test_each_call_gets_each_of_its_positions_once() -> None:
    service = Service(1)
    for name in ("a", "b", "c", "d"):
        await service.start(name)
    for name in ("a", "b", "c"):
        await asyncio.sleep(10 * POSITION_INTERVAL)
        await service.leave(name)
    assert service.positions == {"b": [0], "c": [1, 0], "d": [2, 1, 0]}


@fake_clock
async def test_a_full_queue_refuses_new_calls_and_admits_some_resumed_ones() -> None:
    service = Service(2, max_waiting=1)
    await service.start("runs", 2)
    await service.start("waits")
    with pytest.raises(
        RequestError, match="the queue is full: 1 sequence in it, 1 more in this call, and at most 1; try"
    ) as caught:
        await service.call("refused")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.metadata == {"given": "1", "waiting": "1", "maximum": "1"}
    await service.start("resumed", 2, resumed=True)
    with pytest.raises(RequestError, match="and at most 3"):
        await service.call("refused", resumed=True)


@fake_clock
async def test_retry_after_depends_on_the_pace_and_not_on_refusals() -> None:
    service = Service(64, max_waiting=128)
    load = [asyncio.create_task(service.call(str(i), seconds=4.0)) for i in range(192)]
    await asyncio.sleep(0.001)

    async def retry_after() -> float | None:
        with pytest.raises(RequestError) as caught:
            await service.call("refused")
        return caught.value.retry_after

    assert {await retry_after() for _ in range(200)} == {FIRST_GUESS}, "without measurements"
    await asyncio.sleep(4.0)  # 64 have ended, and 64 wait: half of them begin in 2 s at this pace
    for i in range(64):
        await service.start(f"more {i}")
    assert await retry_after() == pytest.approx(4.0, rel=0.1)
    for call in load:
        call.cancel()


@fake_clock
async def test_a_drain_refuses_queued_calls_and_finishes_running_ones() -> None:
    service = Service(1)
    await service.start("runs")
    await service.start("queued")
    service.limit.drain()
    with pytest.raises(RequestError) as caught:
        await service.calls["queued"]
    assert caught.value.reason == "DRAINING"
    assert not service.calls["runs"].done()
    assert (service.limit.running, service.limit.waiting) == (1, 0)


async def idle(service: Service) -> tuple[float, RequestError]:
    """Run a call whose client is idle. Return after how many seconds it ends, and its error."""
    loop = asyncio.get_running_loop()
    with service.limit.claim(1) as claim:
        async for _ in claim.turn():
            pass
        begun = loop.time()
        with claim.inactivity_timer(IDLE_S) as timer:
            try:
                await timer.wait_for(asyncio.sleep(1e6))
            except TimeoutError:
                return loop.time() - begun, claim.idle("the stream was silent", "--idle-timeout", timer)
    raise AssertionError


@fake_clock
async def test_only_as_many_idle_streams_end_as_queued_calls_need() -> None:
    service = Service(64)
    streams = [asyncio.create_task(idle(service)) for _ in range(64)]
    await asyncio.sleep(0.001)
    await service.start("waits", 16)
    await asyncio.sleep(4 * CONTENDED_S)
    ended = [stream.result() for stream in streams if stream.done()]
    assert len(ended) == 16
    for seconds, error in ended:
        assert CONTENDED_S <= seconds <= 1.5 * CONTENDED_S
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDLE")
        assert error.retry_after is not None
    assert service.begun == ["waits"]
    for stream in streams:
        stream.cancel()


@pytest.mark.parametrize("samples", [1, 3])
async def test_a_long_prompt_holds_its_places_while_it_is_tokenised(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise any number of them would wait for the threads that tokenise, outside the queue."""
    gate = threading.Event()

    def check(*_: Any) -> None:
        gate.wait(60.0)
        raise invalid_field("text", "text is refused")

    monkeypatch.setattr(services, "check_generate", check)
    limit = ConcurrencyLimit(samples, max_waiting=samples, contended_idle_timeout=CONTENDED_S)
    unused: Any = None

    async def call() -> None:
        settings = DraftSettings.model_validate({"model": "any", "max_samples": samples, "max_sequences": samples})
        made = GenerateCall(unused, limit, settings, unused, metrics=unused, trace=unused)
        await made.run(draft_service_pb2.GenerateRequest(text="x" * 10_000, n=samples))

    calls = [asyncio.create_task(call()) for _ in range(2)]
    await asyncio.sleep(0)
    assert (limit.running, limit.waiting) == (samples, samples)
    with pytest.raises(RequestError, match="the queue is full"):
        await call()
    gate.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [each.message for each in ends if isinstance(each, RequestError)] == ["text is refused"] * 2
    assert (limit.running, limit.waiting) == (0, 0)
