"""A simulated verifier: servicer, stream, engine and scheduler are real, process and model are not."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from outrider.rpc.errors import draining, to_status
from outrider.runtime.errors import ModelLost
from outrider.runtime.prefix_cache import PrefixCache
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2
from tests.simulation.models import VIOLATIONS, TokenPool, TokenRunner, require
from tests.simulation.network import Host, Status
from tests.simulation.plan import MAX_TOKENS
from verifier_service.engine import Drain, Message, VerifierEngine
from verifier_service.scheduler import TargetWork
from verifier_service.service import VerifierService

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimulatedEngine(VerifierEngine):
    """The real engine without its thread."""

    def __init__(self, packed: Any, model: model_pb2.ModelInfo, *, linger: float) -> None:
        self.posted = asyncio.Event()
        super().__init__(packed, model, max_batch_tokens=16, max_linger=linger)

    def post(self, message: Message) -> None:
        super().post(message)
        self.posted.set()


class Verifier(Host):
    """A verifier's process, which can die and start again."""

    def __init__(self, number: int, world: World) -> None:
        self.address = f"10.0.0.{number + 1}:1"
        super().__init__(f"v{number}", world.network)
        self.world = world
        self.loses_model = False
        self.start()

    def start(self) -> None:
        plan, world = self.world.plan, self.world
        self.pool = TokenPool(blocks=plan.blocks, max_length=MAX_TOKENS, block_tokens=4)
        loaded = SimpleNamespace(device=torch.device("cpu"), encoder=None, generation_rules=None)
        packed = SimpleNamespace(
            pool=self.pool,
            loaded=loaded,
            max_length=MAX_TOKENS,
            allocate_for_trial=self.pool.allocate,
            prefix_cache=partial(PrefixCache, self.pool),
        )
        self.engine = SimulatedEngine(packed, world.model, linger=plan.linger)
        self.runner = TokenRunner(self.pool, world.reference, world.chance)
        self.engine.target_runner = cast("Any", self.runner)
        self.engine.prepare()
        self.runner.broken, self.runner.poisoned = plan.broken_steps, world.poisoned
        self.service = VerifierService(world.verifier_settings, cast("Any", _NoMetrics()), Tracing())
        self.service.attach(self.engine, world.model)
        self.methods = {"Verify": self.service.Verify, "GetModel": self.service.GetModel}
        self.cancel_status = None
        self.running = asyncio.ensure_future(self._run(self.engine))

    @property
    def is_up(self) -> bool:
        return bool(self.methods)

    def stop(self, *, silently: bool = False) -> None:
        self.running.cancel()
        self.die(silently=silently)

    async def drain(self, grace: float) -> None:
        """Drain as the service does: refuse new sequences, notify the others, then cancel the rest."""
        status = to_status(draining())

        async def refuse(_: Any, context: Any) -> None:
            await context.abort_with_status(status)

        self.methods = {"Verify": refuse, "GetModel": refuse}
        self.engine.post(Drain())
        await asyncio.sleep(grace)
        self.cancel_status = Status(status.code, status.details, tuple(status.trailing_metadata))
        for call in list(self.calls):
            call.serving.cancel()
        await asyncio.sleep(0.05)
        self.stop()

    async def _run(self, engine: SimulatedEngine) -> None:
        """The engine's loop. Each step takes some time."""
        try:
            while True:
                await self.thawed()
                engine.posted.clear()
                work, seconds = engine.next_work()
                engine.flush()
                if work:
                    await asyncio.sleep(self.world.chance.uniform(1e-3, 1e-2))
                    await self.thawed()
                    if self.loses_model:
                        raise ModelLost("planned")
                    engine.step(work)
                    engine.flush()
                    self._check_step(engine, work)
                elif seconds != 0:
                    try:
                        async with asyncio.timeout(seconds):
                            await engine.posted.wait()
                    except TimeoutError:
                        pass
        except ModelLost:  # the service ends too, and its sequences continue elsewhere
            self.world.note(f"{self.name} has lost its model")
            self.loses_model = False
            self.die()
        except Exception as error:
            VIOLATIONS.append(f"the engine of {self.name} ended: {type(error).__name__}: {error}")
            self.die()

    def _check_step(self, engine: SimulatedEngine, work: Any) -> None:
        """Check invariant 5 and the pool."""
        self.pool.check_integrity()
        verified = {id(item.sequence) for item in cast("list[TargetWork]", work) if item.round is not None}
        for sequence in engine.scheduler.running:
            if sequence.slot is None:
                continue
            held, committed = self.pool.held(sequence.slot), sequence.tokens
            name = f"{self.name} {sequence.sequence_id}"
            require(held == committed[: len(held)], f"{name}: the cache holds {held}, committed are {committed}")
            if sequence.finished:
                continue
            missing = len(committed) - len(held)
            is_right = missing == 1 if id(sequence) in verified else missing >= 1
            require(is_right, f"{name}: {len(held)} tokens in the cache, {len(committed)} committed")

    def check_idle(self) -> None:
        """Check that no sequence is left."""
        scheduler = self.engine.scheduler
        left = [each.sequence_id for each in (*scheduler.running, *scheduler.waiting)]
        require(not left, f"{self.name} still has {left}")
        require(self.pool.used_blocks == 0, f"{self.name} holds {self.pool.used_blocks} blocks")
        require(not self.pool._slots, f"{self.name} has slots that no sequence has: {list(self.pool._slots)}")
        inside = self.service._limit._inside
        require(inside == 0, f"{self.name} counts {inside} sequences inside")


class _NoMetrics:
    def ended(self, status: str) -> None:
        pass
