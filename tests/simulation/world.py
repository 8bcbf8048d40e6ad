"""A world of one draft service, some verifiers and some clients: what happens to it follows from its seed alone.

Services are the real ones down to the model: servicers, streams, engine, scheduler, KV pool, failover, request loop.
Their network, clock and models are ours (`network`, `clock`, `models`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import grpc
import structlog

from draft_service.drafters.base import Kind
from draft_service.drafters.guard import PROBE, GuardedDrafter
from draft_service.drafters.none import NoDrafter
from draft_service.failover import FailoverBudget, Verifiers
from draft_service.metrics import FailoverMetrics, RequestMetrics
from draft_service.replicas import Replicas
from draft_service.request import derive_seed
from draft_service.service import DraftService, Pair
from draft_service.settings import DraftSettings
from draft_service.speculation import GammaController
from outrider.rpc.errors import from_rpc_error
from outrider.service.best_effort import COMPONENTS
from outrider.service.metrics import Metrics
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2
from tests.simulation.clients import ClientPlan, Letters, Pipeliner, Received
from tests.simulation.clock import FaultAtAwait, simulated_time
from tests.simulation.models import (
    EOS,
    VOCABULARY,
    Oracle,
    Text,
    TokenDrafter,
    Violation,
    require,
)
from tests.simulation.network import EOF, Host, Network
from tests.simulation.plan import BLOCK, COUPLED, MAX_TOKENS, TOKENWISE, Plan, draw_plan
from tests.simulation.verifier import Verifier
from verifier_service.request import FEATURES
from verifier_service.settings import VerifierSettings

HORIZON = 2_000.0  # seconds after which a world that has not ended hangs
SLOW_READS = 12  # of a client that reads slowly; then it has caught up
TRACE_LINES = 40  # of a seed that failed
PIPELINER_SEED = 1 << 40  # no request has it
OK, INTERNAL = grpc.StatusCode.OK, grpc.StatusCode.INTERNAL


_UNREGISTERED = cast("Metrics", SimpleNamespace(registry=None))


@cache
def _request_metrics() -> RequestMetrics:
    """One for all seeds: nothing that a service does hangs on them, and making them takes long."""
    return RequestMetrics(_UNREGISTERED)


class _Metrics(FailoverMetrics):
    def __init__(self) -> None:
        pass

    def switched(self, reason: str) -> None:
        """Not counted."""

    def paused(self, seconds: float) -> None:
        require(seconds >= 0, f"a pause of {seconds} s")


class _Channel:
    """In the place of `RenewedChannel`: the verifier at an address of this world."""

    world: World

    def __init__(self, address: str, *_: Any, **__: Any) -> None:
        self._host = next(each for each in self.world.verifiers if each.address == address)

    def begin(self, start: Callable[[Any], Any]) -> Any:
        def verify(*, timeout: float | None = None, **_: Any) -> Any:
            return self.world.network.call(self._host, "Verify", timeout=timeout)

        def get_model(request: Any, *, timeout: float | None = None) -> Any:
            return self.world.network.call(self._host, "GetModel", request, timeout=timeout)

        return start(SimpleNamespace(Verify=verify, GetModel=get_model))

    async def close(self) -> None:
        """Nothing is left open."""


# --- the world


def _model(name: str, max_sequences: int) -> model_pb2.ModelInfo:
    return model_pb2.ModelInfo(
        name=name,
        weights_fingerprint="f" * 16,
        vocabulary_fingerprint="v" * 16,
        vocab_size=VOCABULARY,
        logits_size=VOCABULARY,
        context_length=MAX_TOKENS,
        eos_token_ids=[EOS],
        protocol_version=1,
        noise_version=1,
        features=FEATURES,
        rules=[TOKENWISE, BLOCK, COUPLED],
        default_rule=BLOCK,
        limits=model_pb2.Limits(
            max_gamma=8,
            max_support=16,
            max_message_bytes=1 << 22,
            max_sequences=max_sequences,
            max_sequence_tokens=MAX_TOKENS,
            max_outstanding=8,
            max_samples=4,
            max_stop_strings=4,
            max_stop_string_chars=16,
            max_stop_token_ids=8,
        ),
    )


class World:
    """Everything of one seed.

    Attributes:
        outcomes: by request, how it ended.
        trace: what happened, in order.
    """

    def __init__(self, plan: Plan, loop: Any) -> None:
        self.plan = plan
        self.loop = loop
        self.chance = random.Random(plan.seed ^ 0x5EED)
        self.trace: list[str] = []
        self.steps = 0
        self.oracle = Oracle()
        self.outcomes: dict[str, grpc.StatusCode] = {}
        self.network = Network(loop, self.chance, latency=plan.latency, window=self.chance.choice((2, 16, 64)))
        self.model = _model("target", plan.max_sequences)
        self.verifier_settings = VerifierSettings.model_construct(
            max_sequences=plan.max_sequences, max_waiting=plan.max_waiting, idle_timeout=60.0, slow_client_timeout=30.0
        )
        self.poisoned = frozenset(
            derive_seed(client.message.sampling.seed, 0) for client in plan.clients if client.name in plan.poisoned
        )
        self.oracle.texts[PROBE.seed] = Text(list(PROBE.prompt), 0, False, frozenset(), MAX_TOKENS)
        for client in plan.clients:
            self._know(client)
        self.faulted: FaultAtAwait | None = None
        self.struck = ""  # the task that a fault at an await was in
        self._tasks = 0

    def _know(self, client: ClientPlan) -> None:
        message = client.message
        for index in range(message.n):
            seed = derive_seed(message.sampling.seed, index)
            is_greedy = message.sampling.temperature == 0
            draws = not is_greedy and message.sampling.rule != COUPLED
            stops = frozenset(() if message.ignore_eos else (EOS,))
            self.oracle.texts[seed] = Text(
                list(message.token_ids.ids), 0 if is_greedy else seed, draws, stops, message.max_new_tokens
            )

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time() - 1000:9.4f} {text}")

    # -------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> None:
        """Runs all of it, and checks what is left.

        Raises:
            Violation: something is wrong.
        """
        async with asyncio.timeout(HORIZON):
            await self._begin()
            if self.plan.fault_at is not None:
                self.loop.set_task_factory(self._make_task)
            faults = [asyncio.ensure_future(self._disturb(*fault)) for fault in self.plan.faults]
            clients = [asyncio.ensure_future(self._pipeline(*self.plan.pipeliner))] if self.plan.pipeliner else []
            clients += [asyncio.ensure_future(self._serve(client)) for client in self.plan.clients]
            await asyncio.gather(*clients)
            for fault in faults:
                fault.cancel()
            await asyncio.gather(*faults, return_exceptions=True)
            self._raise_first()
            for verifier in self.verifiers:
                verifier.thaw()
            await asyncio.sleep(150.0)  # what was cut off without a word is given up by now
            self._check_end()
            await self._end()

    async def _begin(self) -> None:
        self.verifiers = [Verifier(number, self) for number in range(self.plan.verifiers)]
        addresses = [verifier.address for verifier in self.verifiers]
        self.replicas = Replicas(addresses, max_message_bytes=1 << 22, silence=30.0)
        self.budget = FailoverBudget(4)
        draft = _model("draft", self.plan.draft_sequences)
        target = await self.replicas.match(draft)
        settings = DraftSettings.model_construct(
            model="draft",
            max_sequences=self.plan.draft_sequences,
            max_waiting=self.plan.max_waiting,
            speculation="adaptive",
            max_samples=4,
        )
        self.drafter = TokenDrafter(self.oracle, self.plan.habits, self.chance)
        guarded = GuardedDrafter(self.drafter, timeout=1.0, vocab_size=VOCABULARY, max_support=16)
        self.draft = DraftService(settings, _UNREGISTERED, Tracing())
        drafters = {Kind.MODEL: guarded, Kind.NONE: NoDrafter()}
        verifiers = Verifiers(self.replicas, self.budget, 30.0, _Metrics())
        pair = Pair(
            drafters, Kind.MODEL, GammaController(_UNREGISTERED), verifiers, cast("Any", Letters()), draft, target
        )
        self.draft.attach(pair)
        self.front = Host("draft", self.network)
        self.front.methods = {"Generate": self.draft.Generate}

    async def _end(self) -> None:
        self.replicas.close()
        for verifier in self.verifiers:
            verifier.running.cancel()
        await asyncio.sleep(0.01)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        require(not left, f"tasks are left: {sorted(_name(task.get_coro()) for task in left)}")

    # ------------------------------------------------------------------------------------------------------ disturbance

    async def _disturb(self, at: float, what: str, which: int, lasts: float) -> None:
        verifier = self.verifiers[which]
        await asyncio.sleep(at)
        if not verifier.is_up:
            return
        self.note(f"{verifier.name} {what} {lasts:g}")
        match what:
            case "die" | "vanish":
                verifier.stop(silently=what == "vanish")
            case "freeze":
                verifier.freeze()
            case "cut":
                verifier.cut()
            case "drain":
                await verifier.drain(lasts)
            case "lose":
                verifier.loses_model = True
            case "hang":
                verifier.runner.broken = 1.0  # every pass fails
        await asyncio.sleep(lasts)
        self.note(f"{verifier.name} is back")
        if verifier.is_frozen:
            verifier.thaw()
        verifier.runner.broken = self.plan.broken_steps
        verifier.loses_model = False
        verifier.restart()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Has the n-th task of the services' requests fail at its m-th await."""
        assert self.plan.fault_at is not None
        number, wait, is_error = self.plan.fault_at
        if _name(coroutine) in _OF_REQUESTS:
            self._tasks += 1
            if self._tasks == number:
                is_error = is_error or _name(coroutine) != "Context.serve"  # nobody else cancels what a request made
                error = RuntimeError("a fault at an await") if is_error else None
                self.struck = f"{_name(coroutine)} at its await {wait}: {error or 'cancelled'}"
                self.faulted = FaultAtAwait(coroutine, wait, error)
                coroutine = _run(self.faulted)
        return asyncio.Task(coroutine, loop=loop, **options)

    # ---------------------------------------------------------------------------------------------------------- clients

    async def _serve(self, plan: ClientPlan) -> None:
        await asyncio.sleep(plan.at)
        call = self.network.call(self.front, "Generate", plan.message, timeout=plan.timeout)
        if plan.cancel_after is not None:
            self.loop.call_later(plan.cancel_after, call.cancel)
        received = Received(plan, self.oracle)
        reason, code, slow_reads = "", OK, SLOW_READS if plan.reads_slowly else 0
        try:
            while (response := await call.read()) is not EOF:
                received.take(response)
                if (slow_reads := slow_reads - 1) >= 0:
                    await asyncio.sleep(plan.reads_slowly)
        except grpc.aio.AioRpcError as error:
            code, reason = error.code(), str(from_rpc_error(error))
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
        self.outcomes[plan.name] = code
        self.note(f"{plan.name} {code.name} {reason} {received.summary}")
        if code is OK:
            received.check_whole()
        elif code is INTERNAL and not self._is_struck:
            require("STEP_FAILED" in reason, f"{plan.name} ended with {reason}")
            require(code in self._allowed(plan), f"{plan.name} ended with {reason}")
        else:
            require(code in self._allowed(plan), f"{plan.name} ended with {code.name} {reason}")

    async def _pipeline(self, which: int, limit: int, most_rounds: int) -> None:
        code, seed = grpc.StatusCode, PIPELINER_SEED
        self.oracle.texts[seed] = Text([3, 1, 4], 0, False, frozenset([EOS]), limit)
        pipeliner = Pipeliner(self.oracle, self.chance, seed, limit)
        call = self.network.call(self.verifiers[which], "Verify")
        try:
            is_over = await pipeliner.run(call, most_rounds=most_rounds)
            status, reason = await call.code(), ""
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            status, reason = await call.code(), await call.details()
        self.note(f"pipeliner {status.name} {reason} {len(pipeliner.committed)}")
        if status is OK:
            require(not is_over or self.oracle.texts[seed].is_whole, "the pipeliner's text was ended before its end")
            require(is_over or most_rounds < 100, "the pipeliner's text has no end")
            return
        allowed = {code.RESOURCE_EXHAUSTED} if self.plan.kind == "full" else set()
        if self.plan.faults or self.plan.broken_steps or self._is_struck:
            allowed |= {code.UNAVAILABLE, code.INTERNAL, code.UNKNOWN, code.CANCELLED, code.DEADLINE_EXCEEDED}
        require(status in allowed, f"the pipeliner ended with {status.name} {reason}")

    @property
    def _is_struck(self) -> bool:
        """Whether some await has failed, as planned."""
        return self.faulted is not None and self.faulted.has_struck

    def _allowed(self, plan: ClientPlan) -> set[grpc.StatusCode]:
        """The statuses other than OK that a request may come to."""
        code = grpc.StatusCode
        allowed = set()
        if plan.cancel_after is not None:
            allowed.add(code.CANCELLED)
        if plan.timeout is not None:
            allowed |= {code.DEADLINE_EXCEEDED, code.UNAVAILABLE}
        if plan.reads_slowly > 10:
            allowed.add(code.DEADLINE_EXCEEDED)
        if self.plan.kind == "wild" or self.plan.broken_steps:
            allowed |= {code.UNAVAILABLE, code.INTERNAL}
        if plan.name in self.plan.poisoned:
            allowed |= {code.INTERNAL, code.UNAVAILABLE}
        if self.plan.draft_sequences < 64:
            allowed.add(code.RESOURCE_EXHAUSTED)
        if self._is_struck:
            allowed |= {code.INTERNAL, code.CANCELLED, code.UNAVAILABLE}
        return allowed

    # ----------------------------------------------------------------------------------------------------------- checks

    def _raise_first(self) -> None:
        if Violation.found:
            raise AssertionError(Violation.found[0])

    def _check_end(self) -> None:
        for verifier in self.verifiers:
            if verifier.is_up:
                verifier.check_idle()
        limit = self.draft.limit
        require(not limit.running, f"{limit.running} sequences run at the draft service")
        require(not limit.waiting, f"{limit.waiting} sequences wait at the draft service")
        require(self.drafter.num_open == 0, f"{self.drafter.num_open} sequences are open at the drafter")
        for replica in self.replicas.all():
            require(replica.num_open == 0, f"{replica.num_open} sequences are counted at {replica.address}")
        tokens = self.budget.tokens
        require(0 <= tokens <= 4, f"the failover budget holds {tokens}")
        for component in COMPONENTS.values():
            require(component.errors == 0, f"component {component.name} has failed {component.errors} times")
        self._raise_first()


_OF_REQUESTS = frozenset(
    ("Context.serve", "GenerateCall._produce", "GenerateCall._write", "VerifyStream._read", "VerifyStream._watch")
)


async def _run(awaitable: Any) -> Any:
    return await awaitable


def _name(coroutine: Any) -> str:
    return str(getattr(coroutine, "__qualname__", coroutine))


# --- seeds


@dataclass(frozen=True)
class Outcome:
    """What became of a seed: `problem` is empty where all was well."""

    seed: int
    kind: str
    problem: str
    trace: tuple[str, ...]
    codes: tuple[str, ...]
    steps: int

    def __str__(self) -> str:
        """The problem, with a short trace and how to see it again."""
        head = f"seed {self.seed} ({self.kind}): {self.problem or 'all is well'}"
        return "\n".join((head, *self.trace[-TRACE_LINES:], f"again: python -m tests.simulation --seed {self.seed}"))


def simulate(seed: int, plan: Plan | None = None) -> Outcome:
    """Run one seed. The same seed gives the same trace, to the digit."""
    plan = plan or draw_plan(seed)
    Violation.found.clear()
    for component in COMPONENTS.values():
        component.errors = 0
    problem = ""
    with simulated_time() as loop, _quiet() as errors, _in_memory():
        state = random.getstate()
        random.seed(seed)
        world = _Channel.world = World(plan, loop)
        loop.set_exception_handler(
            lambda _, context: errors.append(str(context.get("exception") or context["message"]))
        )
        try:
            loop.run_until_complete(world.run())
        except TimeoutError:
            problem = f"the world has not ended: {_tasks(loop)}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            random.setstate(state)
            _clear(loop)
    problem = next(iter(Violation.found), problem)
    if world._is_struck:
        world.note(world.struck)
    codes = tuple(f"{name} {code.name}" for name, code in sorted(world.outcomes.items()))
    return Outcome(seed, plan.kind, problem, (*world.trace, *errors[:5]), codes, world.steps)


@contextmanager
def _in_memory() -> Iterator[None]:
    with (
        patch("draft_service.replicas.RenewedChannel", _Channel),
        patch("draft_service.service.RequestMetrics", lambda _: _request_metrics()),
    ):
        yield


def _tasks(loop: Any) -> list[str]:
    return sorted(_name(task.get_coro()) for task in asyncio.all_tasks(loop))


def _clear(loop: Any) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Yields the errors that are logged, in place of showing them."""
    errors: list[str] = []

    def note(_: Any, __: str, event: MutableMapping[str, Any]) -> Any:
        errors.append(" ".join(f"{name}={value}" for name, value in event.items())[:2000])
        raise structlog.DropEvent

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")

    before, logger, handler = structlog.get_config(), logging.getLogger("outrider"), Handler(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(40))
    try:
        yield errors
    finally:
        structlog.configure(**before)
        logger.removeHandler(handler)
        logger.propagate = True
