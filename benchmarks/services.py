"""The services that benchmarks ask, as processes on loopback: a verifier or a pair; and a stream to a verifier.

All that a benchmark learns comes from what the services serve: chunks, the statistics and timings at the end of a
text, metrics over HTTP, and verdicts.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.deepen import WEIGHTS, deepened, digest_of
from benchmarks.harness import CACHE, Json
from outrider.cli.processes import (
    ServiceError,
    ServiceProcess,
    halves,
    processors,
    service_environment,
    terminated_as_interrupted,
)
from outrider.client import Client
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2

RULE = "block"
"""Named, so that figures do not depend on what a request with a seed gets where it names no rule."""

APART, ANYWHERE, ONE_CORE = "a core each", "any core", "both on one core"
"""Where the services run: each on its own half of the processors, as `outrider serve` starts them; wherever the system
puts them; both on the same one."""

# Prompts come again and again, and other contenders run them each time.
NO_PREFIXES = ("--no-prefix-cache",)

_STREAM_S = 600.0
_METRICS_S = 10.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Models:
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
    if only != "demo":
        pairs.append(Models("deepened", deepened(target, factor, CACHE), draft))
    return pairs


def _arguments(service: str, model: Path, flags: Json, more: Sequence[str]) -> list[str]:
    given = {"--model": model, "--listen": "127.0.0.1:0", "--dtype": "bfloat16", "--device": "cpu", **flags}
    if "--device" in more:
        del given["--device"]
    return [service, *(str(part) for flag in given.items() for part in flag), *more]


@contextmanager
def verifier(target: Path, *, max_sequences: int, more: Sequence[str] = ()) -> Iterator[str]:
    """A verifier by itself, on one thread; its address."""
    flags = {"--threads": 1, "--max-sequences": max_sequences}
    arguments = _arguments("verifier_service", target, flags, (*NO_PREFIXES, *more))
    with terminated_as_interrupted(), ServiceProcess.start(arguments, env=service_environment(1)) as service:
        service.wait_healthy(300)
        yield service.address


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
        verifier_flags: further flags of the verifier.
        draft_flags: and of the draft service.
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
        verifier_flags: Sequence[str] = NO_PREFIXES,
        draft_flags: Sequence[str] = (),
        distant: bool = False,
        command: Sequence[str] = (),
        start_timeout: float = 300.0,
    ) -> None:
        self.how: Json = {"dtype": dtype, "threads": threads, "place": place}
        self._models = {"verifier_service": target, "draft_service": draft}
        self._max_sequences = max_sequences
        self._flags = {"verifier_service": verifier_flags, "draft_service": draft_flags}
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
            "--metrics-listen": "127.0.0.1:0",
            "--dtype": self.how["dtype"],
            "--threads": threads,
            "--max-sequences": self._max_sequences,
        }
        arguments = _arguments(name, self._models[name], flags, (*more, *self._flags[name]))
        return ServiceProcess.start([*self._before, *arguments], env=service_environment(threads), cores=cores)

    def metrics_of(self, service: ServiceProcess) -> dict[str, float]:
        """What one of the two shows of itself now: each sample by its name, summed over labels."""
        with urlopen(self._metrics[service], timeout=_METRICS_S) as answer:
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


class VerifyStream:
    """One sequence at a verifier, driven by hand. `commit` tells it what the text has become."""

    def __init__(self, call: Any, prompt: Sequence[int]) -> None:
        self.length = len(prompt)
        self._call = call
        self._hash = PrefixHash(prompt)
        self._asked = 0
        self._seen = 0

    @classmethod
    async def open(cls, stub: Any, prompt: Sequence[int], new_tokens: int, **sampling: Any) -> Self:
        """An open sequence that ignores end-of-sequence ids; the stub belongs to a channel of `grpc.aio`."""
        stream = cls(stub.Verify(timeout=_STREAM_S), prompt)
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
        await self._send(decode=verifier_service_pb2.Decode(num_tokens=tokens, **self._round()))

    async def verdict(self) -> speculation_pb2.Verdict:
        while True:
            reply: verifier_service_pb2.VerifyResponse = await self._call.read()
            if reply.WhichOneof("kind") == "verdict":
                self._seen = reply.verdict.round
                return reply.verdict

    def commit(self, tokens: Sequence[int]) -> None:
        self._hash.extend(tokens)
        self.length += len(tokens)

    def cancel(self) -> None:
        self._call.cancel()

    def _round(self) -> Json:
        self._asked += 1
        return {
            "round": self._asked, "base_length": self.length, "prefix_hash": self._hash.digest(),
            "seen_round": self._seen,
        }  # fmt: skip

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id="benchmark", **kind))
