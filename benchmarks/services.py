"""Outrider as a contender: a draft service and a verifier service as two processes on loopback, asked over gRPC."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.contenders import Contender, Run, Task, check_length, digest
from outrider.cli.processes import (
    ServiceError,
    ServiceProcess,
    halves,
    processors,
    service_environment,
    terminated_as_interrupted,
)
from outrider.client import Client, Completion

# Named, so that the figures do not depend on what a request with a seed gets where it names no rule.
RULE = "block"
# One text at a time is asked for; room for more would only be memory.
_MAX_SEQUENCES = 2
_METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Processes:
    """How the two services run; `apart`: each on its own half of the processors, as `outrider serve` starts them;
    `on_one`: both on the same one.
    """

    target_dtype: str = "bfloat16"
    target_threads: int = 1
    draft_dtype: str = "bfloat16"
    draft_threads: int = 1
    apart: bool = False
    on_one: bool = False


class RunningPair:
    """Both services of one pair, and a client of theirs, as a context manager that stops them when left.

    For a main thread: inside it SIGTERM interrupts, or else the services would outlive a benchmark that is told to end.

    Attributes:
        start_timeout: seconds until each service must be healthy.
    """

    start_timeout = 300.0

    def __init__(
        self,
        target: Path,
        draft: Path,
        how: Processes,
        max_sequences: int = _MAX_SEQUENCES,
        draft_flags: Sequence[str] = (),
    ) -> None:
        """`draft_flags` are further ones of the draft service."""
        self.how = how
        self._draft_flags = draft_flags
        self._target, self._draft = target, draft
        self._max_sequences = max_sequences
        self._open = ExitStack()
        self._metrics: dict[ServiceProcess, str] = {}
        self.client: Client
        self.verifier: ServiceProcess
        self.draft: ServiceProcess

    def __enter__(self) -> Self:
        how = self.how
        cores = halves(max(how.target_threads, how.draft_threads)) if how.apart else None
        one = frozenset([min(processors())]) if how.on_one else None
        first, second = cores or (one, one)
        with ExitStack() as opening:
            opening.enter_context(terminated_as_interrupted())
            self.verifier = opening.enter_context(
                self._start("verifier_service", self._target, how.target_dtype, how.target_threads, first)
            )
            self.draft = opening.enter_context(
                self._start("draft_service", self._draft, how.draft_dtype, how.draft_threads, second)
            )
            for service in (self.verifier, self.draft):
                service.wait_healthy(self.start_timeout)
                self._metrics[service] = _metrics_address(service)  # now: of a long log only the end is kept
            self.client = opening.enter_context(Client(self.draft.address))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the services; may be called twice."""
        self._open.close()

    def metrics_of(self, service: ServiceProcess) -> dict[str, float]:
        """What one of the two shows of itself now: each sample by its name, summed over labels."""
        with urlopen(self._metrics[service], timeout=_METRICS_TIMEOUT_S) as answer:
            shown = answer.read().decode()
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(shown):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)

    def _start(
        self, module: str, model: Path, dtype: str, threads: int, cores: Collection[int] | None
    ) -> ServiceProcess:
        flags = {
            "--model": str(model),
            "--listen": "127.0.0.1:0",
            "--metrics-listen": "127.0.0.1:0",
            "--device": "cpu",
            "--dtype": dtype,
            "--threads": str(threads),
            "--max-sequences": str(self._max_sequences),
        }
        if module == "draft_service":
            flags["--verifier"] = self.verifier.address
            flags["--speculation"] = "fixed"  # where a run does not name another
            alone = [*self._draft_flags]
        else:  # prompts come again and again, and other contenders run them each time
            alone = ["--no-prefix-cache"]
        return ServiceProcess.start(self._command(module, flags, alone), env=service_environment(threads), cores=cores)

    def _command(self, module: str, flags: dict[str, str], alone: Sequence[str]) -> list[str]:
        """What stands after `python -m`; `alone` are flags without a value, or with theirs behind them."""
        return [module, *(part for flag in flags.items() for part in flag), *alone]


def _metrics_address(service: ServiceProcess) -> str:
    for line in service.log_lines():
        if line.startswith("{") and (entry := json.loads(line)).get("event") == "metrics":
            return str(entry["address"])
    raise ServiceError(f"{service.name} does not say where it shows its metrics", service.log_lines())


class OverGrpc(Contender):
    """`Generate` of a running pair. With `gamma` 0 the target writes alone, by `Decode`."""

    def __init__(self, pair: RunningPair, gamma: int) -> None:
        self.gamma = gamma
        self._pair = pair

    def write(self, task: Task) -> Run:
        begin = time.perf_counter()
        completion = self._pair.client.complete(
            list(task.token_ids),
            max_new_tokens=task.new_tokens,
            ignore_eos=True,
            temperature=task.temperature,
            seed=task.seed,
            rule=RULE,
            gamma=self.gamma,
        )
        return run_of(completion, time.perf_counter() - begin, task)

    def settings(self) -> dict[str, Any]:
        how = asdict(self._pair.how)
        if self.gamma:
            return how | {"gamma": self.gamma, "rule": RULE}
        return {"dtype": how["target_dtype"], "threads": how["target_threads"]}


def run_of(completion: Completion, seconds: float, task: Task) -> Run:
    """What one text took, by the clock of who asked and by what the services say.

    Raises:
        WrongLength: it came out shorter or longer than asked for.
    """
    check_length("Outrider", len(completion.token_ids), task)
    told = completion.statistics
    return Run(
        seconds=seconds,
        tokens=len(completion.token_ids),
        rounds=told.num_rounds,
        drafted=told.num_draft_tokens,
        accepted=told.num_accepted_tokens,
        alpha=told.alpha if told.num_draft_tokens else None,
        digest=digest(completion.token_ids),
        phases=phases(completion, seconds),
    )


def phases(completion: Completion, seconds: float) -> dict[str, float]:
    """Where the time of one text went, from what the services say of it. Drafting and emitting may overlap."""
    told = completion.timings
    draft, verdict = told.draft_us / 1e6, told.verdict_us / 1e6
    at_verifier = {"queue": told.queue_us / 1e6, "forward": told.forward_us / 1e6, "verify": told.verify_us / 1e6}
    return (
        {"draft": draft, "wire": verdict - sum(at_verifier.values())}
        | at_verifier
        | {"other": seconds - draft - verdict}
    )
