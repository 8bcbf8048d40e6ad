"""One draft service with verifiers and clients, simulated: everything follows from the seed.

Services are real except for the models: servicers, streams, engine, scheduler, KV pool, failover, request loop.
Network, clock and models are simulated (`network`, `models`).
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import grpc
from structlog.testing import capture_logs

from draft_service.drafters.base import DrafterKind
from draft_service.drafters.cheap import NoDrafter
from draft_service.drafters.guard import PROBE, GuardedDrafter
from draft_service.failover import FailoverBudget, Verifiers
from draft_service.metrics import FailoverMetrics, RequestMetrics
from draft_service.pair import Pair
from draft_service.replicas import Replicas
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from draft_service.speculation import GammaController
from outrider.rpc.channel import Metadata
from outrider.rpc.errors import from_rpc_error
from outrider.service.best_effort import COMPONENTS
from outrider.service.metrics import Metrics
from outrider.service.tracing import Tracing
from protos.outrider.v1 import model_pb2
from tests.fake_clock import FakeClockLoop
from tests.simulation.clients import ClientPlan, Letters, Received
from tests.simulation.models import EOS, VIOLATIONS, VOCABULARY, Reference, Text, TokenDrafter, require
from tests.simulation.network import EOF, Call, Host, Network
from tests.simulation.plan import BLOCK, COUPLED, MAX_TOKENS, TOKENWISE, Plan, draw_plan
from tests.simulation.verifier import Verifier
from verifier_service.request import FEATURES
from verifier_service.settings import VerifierSettings

START = 1_000.0  # of the clock: some code uses 0.0 for "never"
TIMEOUT_S = 2_000.0  # simulated seconds; a longer simulation hangs
SLOW_READS = 12  # of a slow client; then it reads at once
TRACE_LINES = 40  # of a failed seed
OK = grpc.StatusCode.OK


class _Unregistered(Metrics):
    def __init__(self) -> None:
        self.registry = cast("Any", None)


_UNREGISTERED = _Unregistered()

_REQUEST_METRICS = RequestMetrics(_UNREGISTERED)  # shared by all seeds, because making it is slow


_FAILOVER_METRICS = cast("FailoverMetrics", SimpleNamespace(switched=lambda reason: None, paused=lambda seconds: None))


class _Channel:
    """In place of `RenewedChannel`: a channel to a simulated verifier."""

    def __init__(self, network: Network, host: Host) -> None:
        self._network, self._host = network, host

    def begin(self, start: Callable[[Any, Metadata], Any]) -> Any:
        def verify(*, timeout: float | None = None, **_: Any) -> Any:
            return Call(self._network, self._host, "Verify", timeout=timeout)

        def get_model(request: Any, *, timeout: float | None = None, **_: Any) -> Any:
            return Call(self._network, self._host, "GetModel", request, timeout=timeout)

        return start(SimpleNamespace(Verify=verify, GetModel=get_model), ())

    async def close(self) -> None:
        """Does nothing."""


class _Loop(FakeClockLoop):
    """A fake clock that also advances a little with each turn, so that early timers do not spin."""

    def _run_once(self) -> None:
        self.now += 1e-7
        super()._run_once()  # type: ignore[misc]  # the only method that runs each turn


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
    """The simulation of one seed.

    Attributes:
        outcomes: status by request.
        trace: events in order.
    """

    def __init__(self, plan: Plan, loop: FakeClockLoop) -> None:
        self.plan = plan
        self.loop = loop
        self.chance = random.Random(plan.seed ^ 0x5EED)
        self.trace: list[str] = []
        self.reference = Reference()
        self.outcomes: dict[str, str] = {}
        self.network = Network(loop, self.chance, latency=plan.latency, window=self.chance.choice((2, 16, 64)))
        self.model = _model("target", plan.max_sequences)
        self.verifier_settings = VerifierSettings.model_construct(
            max_sequences=plan.max_sequences, max_waiting=plan.max_waiting, idle_timeout=60.0, slow_client_timeout=30.0
        )
        self.poisoned = frozenset(client.seed(0) for client in plan.clients if client.name in plan.poisoned)
        self.reference.texts[PROBE.seed] = Text(list(PROBE.prompt), 0, False, frozenset(), MAX_TOKENS)
        for client in plan.clients:
            message = client.message
            is_greedy = message.sampling.temperature == 0
            draws = not is_greedy and message.sampling.rule != COUPLED
            stops = frozenset(() if message.ignore_eos else (EOS,))
            for seed in map(client.seed, range(message.n)):
                salt = 0 if is_greedy else seed
                self.reference.texts[seed] = Text(
                    list(message.token_ids.ids), salt, draws, stops, message.max_new_tokens
                )

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time() - START:9.4f} {text}")

    async def run(self) -> None:
        """Run the simulation, and check the state at its end.

        Raises:
            AssertionError: an invariant is violated.
        """
        async with asyncio.timeout(TIMEOUT_S):
            await self._begin()
            faults = [asyncio.ensure_future(self._disturb(*fault)) for fault in self.plan.faults]
            await asyncio.gather(*map(self._serve, self.plan.clients))
            for fault in faults:
                fault.cancel()
            await asyncio.gather(*faults, return_exceptions=True)
            for verifier in self.verifiers:
                verifier.thaw()
            await asyncio.sleep(150.0)  # calls that vanished silently have ended by now
            self._check_end()
            self.replicas.close()
            for verifier in self.verifiers:
                verifier.running.cancel()
            await asyncio.sleep(0.01)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            require(not left, f"tasks are left: {_names(left)}")

    async def _begin(self) -> None:
        plan = self.plan
        self.verifiers = [Verifier(number, self) for number in range(plan.verifiers)]
        hosts = {verifier.address: verifier for verifier in self.verifiers}

        def connect(address: str, _: str) -> Any:
            return _Channel(self.network, hosts[address])

        self.replicas = Replicas(list(hosts), connect, timeout=30.0)
        self.budget = FailoverBudget(4)
        model = _model("draft", plan.draft_sequences)
        target = await self.replicas.match(model)
        settings = DraftSettings.model_construct(
            model="draft",
            max_sequences=plan.draft_sequences,
            max_waiting=plan.max_waiting,
            speculation="adaptive",
            max_samples=4,
        )
        self.drafter = TokenDrafter(self.reference, plan.habits, self.chance)
        guarded = GuardedDrafter(self.drafter, timeout=1.0, vocab_size=VOCABULARY, max_support=16)
        drafters = {DrafterKind.MODEL: guarded, DrafterKind.NONE: NoDrafter()}
        verifiers = Verifiers(self.replicas, self.budget, 30.0, _FAILOVER_METRICS)
        controller, letters = GammaController(_UNREGISTERED), cast("Any", Letters())
        self.draft = DraftService(settings, _UNREGISTERED, Tracing())
        self.draft.attach(Pair(drafters, DrafterKind.MODEL, controller, verifiers, letters, model, target))
        self.front = Host("draft", self.network)
        self.front.methods = {"Generate": self.draft.Generate}

    async def _disturb(self, at: float, fault: str, which: int, lasts: float) -> None:
        verifier = self.verifiers[which]
        await asyncio.sleep(at)
        if not verifier.is_up:
            return
        self.note(f"{verifier.name} {fault} {lasts:g}")
        match fault:
            case "die" | "vanish":
                verifier.stop(silently=fault == "vanish")
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
        verifier.thaw()
        verifier.runner.broken = self.plan.broken_steps
        verifier.loses_model = False
        if not verifier.methods:
            verifier.start()

    async def _serve(self, plan: ClientPlan) -> None:
        await asyncio.sleep(plan.at)
        call = Call(self.network, self.front, "Generate", plan.message, timeout=plan.timeout)
        if plan.cancel_after is not None:
            self.loop.call_later(plan.cancel_after, call.cancel)
        received = Received(plan, self.reference)
        reason, code, slow_reads = "", OK, SLOW_READS if plan.reads_slowly else 0
        try:
            while (response := await call.read()) is not EOF:
                received.add(response)
                if (slow_reads := slow_reads - 1) >= 0:
                    await asyncio.sleep(plan.reads_slowly)
        except grpc.aio.AioRpcError as error:
            code, reason = error.code(), str(from_rpc_error(error))
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
        self.outcomes[plan.name] = code.name
        self.note(f"{plan.name} {code.name} {reason} {received.summary}")
        if code is OK:
            received.check_whole()
        else:
            require(code.name in self._allowed(plan), f"{plan.name} ended with {code.name} {reason}")
            require(code.name != "INTERNAL" or "STEP_FAILED" in reason, f"{plan.name} ended with {reason}")

    def _allowed(self, plan: ClientPlan) -> set[str]:
        """The statuses other than OK that a request may have."""
        allowed = set()
        if plan.cancel_after is not None:
            allowed.add("CANCELLED")
        if plan.timeout is not None:
            allowed |= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
        if plan.reads_slowly > 10:
            allowed.add("DEADLINE_EXCEEDED")
        if self.plan.kind == "wild" or self.plan.broken_steps or plan.name in self.plan.poisoned:
            allowed |= {"UNAVAILABLE", "INTERNAL"}
        if self.plan.draft_sequences < 64:
            allowed.add("RESOURCE_EXHAUSTED")
        return allowed

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
        require(0 <= self.budget.tokens <= 4, f"the failover budget holds {self.budget.tokens}")
        for component in COMPONENTS.values():
            require(component.errors == 0, f"component {component.name} has failed {component.errors} times")


@dataclass(frozen=True)
class Outcome:
    """The result of a seed: `problem` is empty without a violation; `codes` are statuses by request."""

    seed: int
    kind: str
    problem: str
    trace: tuple[str, ...]
    codes: dict[str, str]

    def __str__(self) -> str:
        """The problem, the end of the trace, and the command that repeats it."""
        head = f"seed {self.seed} ({self.kind}): {self.problem or 'no error'}"
        return "\n".join((head, *self.trace[-TRACE_LINES:], f"again: python -m tests.simulation --seed {self.seed}"))


def simulate(seed: int, plan: Plan | None = None) -> Outcome:
    """Run one seed. The trace is reproducible."""
    plan = plan or draw_plan(seed)
    VIOLATIONS.clear()
    for component in COMPONENTS.values():
        component.errors = 0
    problem = ""
    with _simulated() as loop, capture_logs() as logged:
        random.seed(seed)
        world = World(plan, loop)
        try:
            loop.run_until_complete(world.run())
        except TimeoutError:
            problem = f"the simulation has not ended: {_names(asyncio.all_tasks(loop))}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.01))
    errors = [str(entry)[:2000] for entry in logged if entry["log_level"] in ("error", "critical")]
    problem = next(iter(VIOLATIONS), problem)
    return Outcome(seed, plan.kind, problem, (*world.trace, *errors[:5]), world.outcomes)


@contextmanager
def _simulated() -> Iterator[FakeClockLoop]:
    """An event loop on a fake clock. Until the block ends, `time` shows that clock to the whole process."""
    loop, state = _Loop(), random.getstate()
    loop.now = START
    loop.set_exception_handler(lambda _, context: None)
    with ExitStack() as stack:
        for name in ("monotonic", "perf_counter", "time"):
            stack.enter_context(patch(f"time.{name}", loop.time))
            stack.enter_context(patch(f"time.{name}_ns", lambda: int(loop.now * 1e9)))
        stack.enter_context(patch("draft_service.service.RequestMetrics", lambda _: _REQUEST_METRICS))
        logging.disable()
        try:
            yield loop
        finally:
            logging.disable(logging.NOTSET)
            random.setstate(state)
            asyncio.set_event_loop(None)
            loop.close()


def _names(tasks: Any) -> list[str]:
    return sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in tasks)
