"""Outrider as a contender: a draft service and a verifier service as two processes on loopback, asked over gRPC.

All that a benchmark learns comes from what the services serve: chunks, the statistics and timings at the end of a
text, metrics over HTTP, and verdicts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.contenders import Outcome, Served, Server, Task, Writer, checked, text_run
from benchmarks.deepen import WEIGHTS, cached, digest_of
from benchmarks.harness import CACHE, Json
from outrider.cli.processes import (
    ServiceError,
    ServiceProcess,
    halves,
    processors,
    service_environment,
    terminated_as_interrupted,
)
from outrider.client import AsyncClient, Chunk, Client, Completion, Finished, Overloaded
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2

RULE = "block"
"""Named, so that figures do not depend on what a request with a seed gets where it names no rule."""

APART, ANYWHERE, ONE_CORE = "a core each", "any core", "both on one core"
"""Where the services run: each on its own half of the processors, as `outrider serve` starts them; wherever the system
puts them; both on the same one."""

_TIMEOUT_S = 600.0
_METRICS_TIMEOUT_S = 10.0
# Streams that began together end together: at a half, the first texts have ended and the next have not begun.
_LOOKED_AT = 0.4

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Models:
    """A target and its draft."""

    name: str
    target: Path
    draft: Path

    def document(self) -> Json:
        """What they are, not where they lie."""
        config = json.loads((self.target / "config.json").read_text(encoding="utf-8"))
        return {
            "target": self.target.name,
            "draft": self.draft.name,
            "target_layers": config["num_hidden_layers"],
            "target_mib": round((self.target / WEIGHTS).stat().st_size / 2**20, 1),
            "draft_mib": round((self.draft / WEIGHTS).stat().st_size / 2**20, 1),
            "digests": [digest_of(self.target), digest_of(self.draft)],
        }


def models_of(target: Path, draft: Path, only: str | None, factor: int) -> list[Models]:
    """The demo pair, and the one whose target is `factor` times as deep; `only` one of the two."""
    pairs = [Models("demo", target, draft)] if only != "deepened" else []
    if factor > 1 and only != "demo":
        pairs.append(Models("deepened", cached(target, factor, CACHE), draft))
    return pairs


class Services:
    """Both services of a pair and a client of theirs, as a context manager that stops them when left.

    For a main thread: inside it SIGTERM interrupts, or else the services would outlive a benchmark that is stopped.

    Args:
        target: folder of the target.
        draft: folder of the draft.
        dtype: number format of both.
        threads: of the verifier; the draft has one.
        place: one of `APART`, `ANYWHERE`, `ONE_CORE`.
        max_sequences: sequences at once; room for more would only be memory.
        flags: further flags, by the service's name.
        distant: whether a proxy stands between the two, as `proxy`, which can hold bytes back.
        command: what comes before a service's name on its command line.
        start_timeout: seconds until each service must be healthy.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        *,
        dtype: str = "bfloat16",
        threads: int = 1,
        place: str = APART,
        max_sequences: int = 2,
        flags: Mapping[str, Sequence[str]] | None = None,
        distant: bool = False,
        command: Sequence[str] = (),
        start_timeout: float = 300.0,
    ) -> None:
        self.how: Json = {"dtype": dtype, "threads": threads, "place": place}
        self._models = {"verifier_service": target, "draft_service": draft}
        self._max_sequences = max_sequences
        # Prompts come again and again, and other contenders run them each time.
        self._flags = {"verifier_service": ["--no-prefix-cache"]} if flags is None else flags
        self._distant = distant
        self._before = list(command)
        self._start_timeout = start_timeout
        self._open = ExitStack()
        self._metrics: dict[ServiceProcess, str] = {}
        self.client: Client
        self.verifier: ServiceProcess
        self.draft: ServiceProcess
        self.proxy: Any = None

    def __enter__(self) -> Self:
        threads, place = self.how["threads"], self.how["place"]
        one = frozenset([min(processors())]) if place == ONE_CORE else None
        first, second = (halves(threads) if place == APART else None) or (one, one)
        with ExitStack() as opening:
            opening.enter_context(terminated_as_interrupted())
            self.verifier = opening.enter_context(self._start("verifier_service", threads, first))
            address = self.verifier.address
            if self._distant:
                from tests.proxy import Proxy

                self.proxy = opening.enter_context(Proxy(address))
                address = self.proxy.address
            more = ["--verifier", address, "--speculation", "fixed"]  # where a run does not name another
            self.draft = opening.enter_context(self._start("draft_service", 1, second, *more))
            for service in (self.verifier, self.draft):
                service.wait_healthy(self._start_timeout)
                self._metrics[service] = _metrics_address(service)  # now: of a long log only the end is kept
            self.client = opening.enter_context(Client(self.draft.address))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the services; may be called twice."""
        self._open.close()

    def _start(self, name: str, threads: int, cores: Collection[int] | None, *more: str) -> ServiceProcess:
        flags = {
            "--model": self._models[name],
            "--listen": "127.0.0.1:0",
            "--metrics-listen": "127.0.0.1:0",
            "--dtype": self.how["dtype"],
            "--threads": threads,
            "--max-sequences": self._max_sequences,
        }
        own = self._flags.get(name, ())
        if "--device" not in own:
            flags["--device"] = "cpu"
        command = [*self._before, name, *(str(part) for flag in flags.items() for part in flag), *more, *own]
        return ServiceProcess.start(command, env=service_environment(threads), cores=cores)

    def metrics_of(self, service: ServiceProcess) -> dict[str, float]:
        """What one of the two shows of itself now: each sample by its name, summed over labels."""
        with urlopen(self._metrics[service], timeout=_METRICS_TIMEOUT_S) as answer:
            shown = answer.read().decode()
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(shown):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)


def _metrics_address(service: ServiceProcess) -> str:
    for line in service.log_lines():
        if line.startswith("{") and (entry := json.loads(line)).get("event") == "metrics":
            return str(entry["address"])
    raise ServiceError(f"{service.name} does not say where it shows its metrics", service.log_lines())


def await_(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, on one event loop for all: that of asyncio gRPC must not change."""
    return _runner().run(coroutine)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


# ------------------------------------------------------------------------------------------------- one after another


class OutriderWriter(Writer):
    """`Generate`, one text after another, with `options`; with `gamma=0` the target writes alone, by `Decode`."""

    def __init__(self, services: Services, **options: Any) -> None:
        self._services = services
        self._options = {"rule": RULE, **options}

    def write(self, task: Task) -> Json:
        begin = time.perf_counter()
        done = self._services.client.complete(list(task.token_ids), **_asked(task, self._options))
        return completion_run(done, time.perf_counter() - begin, task)

    def settings(self) -> Json:
        return self._services.how | self._options


def completion_run(done: Completion, seconds: float, task: Task) -> Json:
    """What one text took, by the caller's clock and by what the services say. Drafting and emitting may overlap."""
    statistics, times = done.statistics, done.timings
    phases = {
        "draft": times.draft_us / 1e6,
        "wire": (times.verdict_us - times.queue_us - times.forward_us - times.verify_us) / 1e6,
        "queue": times.queue_us / 1e6,
        "forward": times.forward_us / 1e6,
        "verify": times.verify_us / 1e6,
    }
    return text_run(
        "Outrider",
        task,
        done.token_ids,
        phases,
        seconds=seconds,
        rounds=statistics.num_rounds,
        drafted=statistics.num_draft_tokens,
        accepted=statistics.num_accepted_tokens,
        alpha=statistics.alpha if statistics.num_draft_tokens else None,
    )


def _asked(task: Task, options: Mapping[str, Any]) -> Any:
    return {
        "max_new_tokens": task.new_tokens, "ignore_eos": True, "temperature": task.temperature, "seed": task.seed,
        **options,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- many at once


class OutriderServer(Server):
    """Many calls of `Generate` at once, over one channel."""

    def __init__(self, services: Services, **options: Any) -> None:
        self._services = services
        self._options = {"rule": RULE, **options}

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        async def drive(run: _Run) -> None:
            left = deque(enumerate(tasks))

            async def stream() -> None:
                while left:
                    number, task = left.popleft()
                    await run.write(number, task, run.now())

            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(stream())

        return self._outcome(tasks, drive)

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        async def drive(run: _Run) -> None:
            async with asyncio.TaskGroup() as group:
                for number, (task, at) in enumerate(zip(tasks, due, strict=True)):
                    await asyncio.sleep(at - run.now())
                    group.create_task(run.write(number, task, at))

        return self._outcome(tasks, drive)

    def settings(self) -> Json:
        return self._services.how | self._options

    def _outcome(self, tasks: Sequence[Task], drive: Callable[[_Run], Awaitable[None]]) -> Outcome:
        before = self._shown()
        served, kv_usage = await_(self._driven(tasks, drive))
        costs = {name: value - before[name] for name, value in self._shown().items()}
        return checked("Outrider", tasks, served), costs | ({} if kv_usage is None else {"kv_usage": kv_usage})

    async def _driven(
        self, tasks: Sequence[Task], drive: Callable[[_Run], Awaitable[None]]
    ) -> tuple[list[Served], float | None]:
        # A request that is turned away is counted, not tried again.
        async with AsyncClient(self._services.draft.address, timeout=_TIMEOUT_S, retry=False) as client:
            await client.get_model()
            run = _Run(client, tasks, self._options, self._kv_usage)
            await drive(run)
            return [run.served[number] for number in range(len(tasks))], run.kv_usage

    def _kv_usage(self) -> float:
        shown = self._services.metrics_of(self._services.verifier)
        return shown["outrider_kv_blocks_used"] / shown["outrider_kv_blocks"]

    def _shown(self) -> dict[str, float]:
        services = self._services
        verifier, draft = services.metrics_of(services.verifier), services.metrics_of(services.draft)
        return {
            "passes": verifier.get("outrider_verify_seconds_count", 0.0),
            "verifier_cpu_seconds": verifier.get("process_cpu_seconds_total", 0.0),
            "draft_cpu_seconds": draft.get("process_cpu_seconds_total", 0.0),
        }


class _Run:
    """One run: its clock, and what has been served so far."""

    def __init__(
        self, client: AsyncClient, tasks: Sequence[Task], options: Mapping[str, Any], look: Callable[[], float]
    ) -> None:
        self.served: dict[int, Served] = {}
        self.kv_usage: float | None = None
        self._client = client
        self._options = options
        self._look = look
        self._until_look = round(_LOOKED_AT * sum(task.new_tokens for task in tasks))
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    async def write(self, number: int, task: Task, due: float) -> None:
        """Asks for one text, which was due at `due`, and takes in what comes."""
        stamps: list[tuple[float, int]] = []
        self.served[number] = Served(due, refused=True)
        try:
            async for event in self._client.generate(list(task.token_ids), **_asked(task, self._options)):
                if isinstance(event, Chunk) and event.token_ids:
                    stamps.append((self.now(), len(event.token_ids)))
                    before, self._until_look = self._until_look, self._until_look - len(event.token_ids)
                    if before > 0 >= self._until_look:
                        self.kv_usage = await asyncio.to_thread(self._look)
                elif isinstance(event, Finished):
                    statistics = event.statistics
                    self.served[number] = Served(
                        due,
                        tuple(stamps),
                        rounds=statistics.num_rounds,
                        proposals=statistics.num_drafts,
                        drafted=statistics.num_draft_tokens,
                        accepted=statistics.num_accepted_tokens,
                        alpha=statistics.alpha if statistics.num_draft_tokens else None,
                    )
        except Overloaded:
            pass


# --------------------------------------------------------------------------------------- straight at the verifier


class VerifyStream:
    """One sequence at a verifier, driven by hand. `commit` tells it what the text has become."""

    def __init__(self, call: Any, name: str, prompt: Sequence[int]) -> None:
        self.length = len(prompt)
        self._call = call
        self._name = name
        self._hash = PrefixHash(prompt)
        self._asked = 0
        self._seen = 0

    @classmethod
    async def open(cls, stub: Any, name: str, prompt: Sequence[int], new_tokens: int, **sampling: Any) -> Self:
        """An open sequence that ignores end-of-sequence ids; the stub belongs to a channel of `grpc.aio`."""
        stream = cls(stub.Verify(timeout=_TIMEOUT_S), name, prompt)
        opening = verifier_service_pb2.OpenSequence(
            prompt_token_ids=prompt,
            sampling=sampling_pb2.SamplingParams(**sampling),
            max_new_tokens=new_tokens,
            ignore_eos=True,
        )
        await stream._send(open=opening)
        await stream._call.read()
        return stream

    async def propose(self, tokens: Sequence[int], *, coupled: bool = False) -> None:
        """Asks for a round of tokens that the draft was sure of; under `coupled` no q travels at all."""
        sure = speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
        q = [] if coupled else [sure for _ in tokens]
        await self._send(proposal=speculation_pb2.Proposal(token_ids=tokens, distributions=q, **self._round()))

    async def decode(self, tokens: int) -> None:
        """Asks for so many tokens of the target alone."""
        await self._send(decode=verifier_service_pb2.Decode(num_tokens=tokens, **self._round()))

    async def verdict(self) -> speculation_pb2.Verdict:
        """The next verdict."""
        while True:
            reply: verifier_service_pb2.VerifyResponse = await self._call.read()
            if reply.WhichOneof("kind") == "verdict":
                self._seen = reply.verdict.round
                return reply.verdict

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        self._hash.extend(tokens)
        self.length += len(tokens)

    def cancel(self) -> None:
        """The sequence is done with."""
        self._call.cancel()

    def _round(self) -> Json:
        self._asked += 1
        return {
            "round": self._asked, "base_length": self.length, "prefix_hash": self._hash.digest(),
            "seen_round": self._seen,
        }  # fmt: skip

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id=self._name, **kind))
