"""Outrider under load: many calls of `Generate` at once, over one channel; with γ = 0 the target writes alone.

Everything it tells comes from what the services serve: the stream of chunks, the statistics at its end, metrics over
HTTP, and the load that a verdict carries.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

import grpc

from benchmarks.contenders import Task
from benchmarks.load_contenders import LoadContender, Outcome, Served, check
from benchmarks.loops import run
from benchmarks.services import RULE, RunningPair
from outrider.client import AsyncClient, Chunk, Finished, Overloaded
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub

_TIMEOUT_S = 600.0
_PROBE_TOKENS = 4  # of the whole of a probe's text
# Streams that began together end together: at a half, the first texts have ended and the next have not begun.
_PROBED_AT = 0.4

_VERIFIED = "outrider_verify_seconds"
_PROCESSOR = "process_cpu_seconds_total"


class OutriderUnderLoad(LoadContender):
    """A running pair. `gamma` None leaves γ to the service, 0 lets the target write alone."""

    def __init__(self, pair: RunningPair, gamma: int | None) -> None:
        self.gamma = gamma
        self._pair = pair

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        async def drive(state: _Run) -> None:
            left = deque(enumerate(tasks))

            async def stream() -> None:
                while left:
                    number, task = left.popleft()
                    await state.write(number, task, state.now())

            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(stream())

        return self._outcome(tasks, drive)

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        async def drive(state: _Run) -> None:
            async with asyncio.TaskGroup() as group:
                for number, (task, at) in enumerate(zip(tasks, due, strict=True)):
                    await asyncio.sleep(at - state.now())
                    group.create_task(state.write(number, task, at))

        return self._outcome(tasks, drive)

    def settings(self) -> dict[str, Any]:
        how = asdict(self._pair.how)
        if self.gamma == 0:
            return {"dtype": how["target_dtype"], "threads": how["target_threads"], "apart": how["apart"]}
        return how | {"gamma": "the service's own" if self.gamma is None else self.gamma, "rule": RULE}

    def _outcome(self, tasks: Sequence[Task], drive: Callable[[_Run], Awaitable[None]]) -> Outcome:
        before = self._shown()
        served, load = run(self._driven(tasks, drive))
        after = self._shown()
        told = {name: after[name] - before[name] for name in after}
        if load is not None:
            told |= {"kv_usage": load.kv_usage, "running": load.running, "waiting": load.waiting}
        return check("Outrider", tasks, Outcome(served, told))

    async def _driven(
        self, tasks: Sequence[Task], drive: Callable[[_Run], Awaitable[None]]
    ) -> tuple[list[Served], speculation_pb2.VerifierLoad | None]:
        async with AsyncExitStack() as running:
            # A request that is turned away is counted, not tried again.
            client = await running.enter_async_context(
                AsyncClient(self._pair.draft.address, timeout=_TIMEOUT_S, retry=False)
            )
            probe = await running.enter_async_context(LoadProbe(self._pair.verifier.address))
            await client.get_model()
            state = _Run(client, tasks, self.gamma, probe)
            await drive(state)
            return [state.served[number] for number in range(len(tasks))], state.load

    def _shown(self) -> dict[str, float]:
        verifier, draft = (self._pair.metrics_of(each) for each in (self._pair.verifier, self._pair.draft))
        return {
            "passes": verifier.get(f"{_VERIFIED}_count", 0.0),
            "verify_seconds": verifier.get(f"{_VERIFIED}_sum", 0.0),
            "verifier_cpu_seconds": verifier.get(_PROCESSOR, 0.0),
            "draft_cpu_seconds": draft.get(_PROCESSOR, 0.0),
        }


class _Run:
    """One run: its clock, and what has been served so far."""

    def __init__(self, client: AsyncClient, tasks: Sequence[Task], gamma: int | None, probe: LoadProbe) -> None:
        self.served: dict[int, Served] = {}
        self.load: speculation_pb2.VerifierLoad | None = None
        self._client = client
        self._options: dict[str, Any] = {} if gamma is None else {"gamma": gamma}
        self._probe = probe
        self._until_probe = round(_PROBED_AT * sum(task.new_tokens for task in tasks))
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    async def write(self, number: int, task: Task, due: float) -> None:
        """Asks for one text, which was due at `due`, and takes in what comes."""
        stamps: list[tuple[float, int]] = []
        finished: Finished | None = None
        try:
            async for event in self._client.generate(
                list(task.token_ids),
                max_new_tokens=task.new_tokens,
                ignore_eos=True,
                temperature=task.temperature,
                seed=task.seed,
                rule=RULE,
                **self._options,
            ):
                if isinstance(event, Chunk) and event.token_ids:
                    stamps.append((self.now(), len(event.token_ids)))
                    await self._count(len(event.token_ids))
                elif isinstance(event, Finished):
                    finished = event
        except Overloaded:
            self.served[number] = Served(due, refused=True)
            return
        served = Served(due, tuple(stamps))
        if finished is not None:
            told = finished.statistics
            served = replace(
                served,
                rounds=told.num_rounds,
                proposals=told.num_drafts,
                drafted=told.num_draft_tokens,
                accepted=told.num_accepted_tokens,
                alpha=told.alpha if told.num_draft_tokens else None,
            )
        self.served[number] = served

    async def _count(self, tokens: int) -> None:
        """Asks the verifier how busy it is once, when `_PROBED_AT` of the run's tokens have come."""
        before, self._until_probe = self._until_probe, self._until_probe - tokens
        if before > 0 >= self._until_probe:
            self.load = await self._probe.read()


class LoadProbe:
    """A sequence of its own at the verifier, whose verdict carries how busy it is. One token is one row of one pass."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._tokens = [1]
        self._round = 0
        self._call: Any = None

    async def __aenter__(self) -> Self:
        self._call = VerifierServiceStub(self._channel).Verify(timeout=_TIMEOUT_S)
        await self._send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=self._tokens,
                sampling=sampling_pb2.SamplingParams(temperature=0.0, seed=1),
                max_new_tokens=_PROBE_TOKENS,
                ignore_eos=True,
            )
        )
        await self._call.read()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        await self._channel.close()

    async def read(self) -> speculation_pb2.VerifierLoad:
        """The load that the next pass saw; the probe's own sequence is part of it."""
        self._round += 1
        await self._send(
            decode=verifier_service_pb2.Decode(
                round=self._round,
                base_length=len(self._tokens),
                prefix_hash=PrefixHash(self._tokens).digest(),
                num_tokens=1,
                seen_round=self._round - 1,
            )
        )
        while True:
            reply: verifier_service_pb2.VerifyResponse = await self._call.read()
            if reply.WhichOneof("kind") == "verdict":
                self._tokens += reply.verdict.token_ids
                return reply.verdict.load

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id="probe", **kind))
