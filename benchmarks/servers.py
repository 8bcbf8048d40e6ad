"""Who serves many requests at once, Outrider and transformers' continuous batching; and the figures of one run.

A closed loop has a number of streams, each of which asks for its next text when one has ended. In an open loop requests
come at set times, whatever became of those before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks.contenders import Task, Unavailable, WrongLength, load_model, sampling
from benchmarks.harness import Json
from benchmarks.services import RULE, Services, await_
from outrider.client import AsyncClient, Chunk, Finished, Overloaded

_TIMEOUT_S = 600.0
# A page is what the cache of continuous batching gives out at once; page and pass sizes cannot be found out by
# themselves on a CPU, where transformers asks psutil for the free memory.
_PAGE_TOKENS = 64
_PASS_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request among many. Times are seconds since the run began.

    Attributes:
        due: when it was asked for; in the open loop, when it was to be.
        stamps: when each piece came, and how many tokens it held. Tokens of one piece come at once.
        refused: whether it was turned away for want of room; then nothing came.
        rounds: passes of the target over it, where the contender tells.
        proposals: rounds that held a drafted token.
        drafted: tokens proposed in them.
        alpha: mean chance of acceptance over the positions that were tested; None where nothing was drafted.
    """

    due: float
    stamps: tuple[tuple[float, int], ...] = ()
    refused: bool = False
    rounds: int = 0
    proposals: int = 0
    drafted: int = 0
    alpha: float | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.stamps)

    @property
    def end(self) -> float:
        return self.stamps[-1][0] if self.stamps else self.due


Outcome = tuple[list[Served], dict[str, float]]
"""All requests of a run, and what the contender itself tells of it: passes, processor time."""


def checked(name: str, tasks: Sequence[Task], served: list[Served]) -> list[Served]:
    """The same, where none is missing and each that was not refused has its length; else raises `WrongLength`."""
    if len(served) != len(tasks):
        raise WrongLength(f"{name} served {len(served)} requests of {len(tasks)}")
    for task, each in zip(tasks, served, strict=True):
        if not each.refused and each.tokens != task.new_tokens:
            raise WrongLength(f"{name} wrote {each.tokens} tokens of text {task.prompt}, not {task.new_tokens}")
    return served


# --------------------------------------------------------------------------------------------------- Outrider


class OutriderServer:
    """Many calls of `Generate` at once, over one channel."""

    def __init__(self, services: Services, **options: Any) -> None:
        self._services = services
        self._options = {"rule": RULE, "ignore_eos": True, **options}

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
        served = await_(self._driven(len(tasks), drive))
        costs = {name: value - before[name] for name, value in self._shown().items()}
        return checked("Outrider", tasks, served), costs

    async def _driven(self, count: int, drive: Callable[[_Run], Awaitable[None]]) -> list[Served]:
        # A request that is turned away is counted, not tried again.
        async with AsyncClient(self._services.draft.address, timeout=_TIMEOUT_S, retry=False) as client:
            await client.get_model()
            run = _Run(client, self._options)
            await drive(run)
            return [run.served[number] for number in range(count)]

    def _shown(self) -> dict[str, float]:
        services = self._services
        verifier, draft = services.metrics_of(services.verifier), services.metrics_of(services.draft)
        return {
            "passes": verifier.get("outrider_verify_seconds_count", 0.0),
            "verifier_cpu_seconds": verifier.get("process_cpu_seconds_total", 0.0),
            "draft_cpu_seconds": draft.get("process_cpu_seconds_total", 0.0),
        }


class _Run:
    def __init__(self, client: AsyncClient, options: Json) -> None:
        self.served: dict[int, Served] = {}
        self._client = client
        self._options = options
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    async def write(self, number: int, task: Task, due: float) -> None:
        """Asks for one text, which was due at `due`, and takes in what comes."""
        stamps: list[tuple[float, int]] = []
        self.served[number] = Served(due, refused=True)
        # Without a seed, as most requests come: those with one share no acceptance statistics under `block`.
        options: Any = self._options | {"max_new_tokens": task.new_tokens, "temperature": task.temperature}
        try:
            async for event in self._client.generate(list(task.token_ids), **options):
                if isinstance(event, Chunk) and event.token_ids:
                    stamps.append((self.now(), len(event.token_ids)))
                elif isinstance(event, Finished):
                    statistics = event.statistics
                    self.served[number] = Served(
                        due,
                        tuple(stamps),
                        rounds=statistics.num_rounds,
                        proposals=statistics.num_drafts,
                        drafted=statistics.num_draft_tokens,
                        alpha=statistics.alpha if statistics.num_draft_tokens else None,
                    )
        except Overloaded:
            pass


# ----------------------------------------------------------------------------------------------- transformers


class ContinuousBatching:
    """`generate_batch` on the target alone, in a closed loop."""

    def __init__(self, target: Path, *, threads: int, longest: int) -> None:
        """`longest`: tokens of a sequence, its text included.

        Raises:
            Unavailable: this transformers has none.
        """
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # what fails is reported here
        try:
            from transformers.generation import ContinuousBatchingConfig
        except ImportError as error:
            raise Unavailable(f"this transformers has no continuous batching: {error}") from error
        self._how: Json = {"threads": threads, "page_tokens": _PAGE_TOKENS, "pass_tokens": _PASS_TOKENS}
        self._config: Any = ContinuousBatchingConfig
        self._model = load_model(target)
        self._longest = longest

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        torch.set_num_threads(self._how["threads"])
        try:
            results = self._model.generate_batch(
                [list(task.token_ids) for task in tasks],
                generation_config=sampling(tasks[0]),
                continuous_batching_config=self._room(tasks[0].seed, streams),
                record_timestamps=True,
            )
        except Exception as error:  # whatever it is, the others are still to be measured
            raise Unavailable(f"continuous batching failed: {type(error).__name__}: {error}") from error
        found = list(results.values())  # in the order of the prompts
        errors = [result.error for result in found if result.error is not None]
        if errors or len(found) < len(tasks):  # it logs what goes wrong and returns the rest
            raise Unavailable(f"continuous batching answered {len(found)} of {len(tasks)} requests: {errors[:1]}")
        began = min(result.created_time for result in found)
        # All are there from the start, as the interface asks. A stream asks for its next text when one of its texts
        # ends, which is when this one leaves the queue.
        return checked("transformers", tasks, [_served(each, began, each.lifespan[0] - began) for each in found]), {}

    def settings(self) -> Json:
        return self._how

    def _room(self, seed: int, requests: int) -> Any:
        pages = -(-self._longest // _PAGE_TOKENS) + 1
        return self._config(
            page_size=_PAGE_TOKENS,
            num_blocks=requests * pages,
            max_batch_tokens=_PASS_TOKENS,
            max_requests_per_batch=requests,
            allow_block_sharing=False,
            seed=seed,
        )


def _served(result: Any, began: float, due: float) -> Served:
    return Served(due, tuple((stamp - began, 1) for stamp in result.timestamps), rounds=len(result.timestamps))


Server = OutriderServer | ContinuousBatching


# ---------------------------------------------------------------------------------------------------- figures


def figures(outcome: Outcome) -> Json:
    """One run. Times in milliseconds; a figure that nothing was measured of is None.

    - `ttft_ms`: from when a request was due to its first token.
    - `tpot_ms`: of each text, the time from its first to its last piece over its tokens but one.
    - `piece_ms`: from one piece of a text to the next: how long a reader sees nothing new.
    - `gamma`: drafted tokens over all rounds, those of `Decode` included. `decode_share`: of the rounds, those.
    - `rounds_per_pass`: verdicts over calls of `verify`: how full passes are.
    - `verifier_cpu_us`, `draft_cpu_us`: processor time of each service a token, prompts included.
    """
    served, costs = outcome
    answered = [each for each in served if not each.refused]
    tokens = sum(each.tokens for each in answered)
    seconds = max((each.end for each in answered), default=0.0) - min(each.due for each in served)
    rounds, drafted = sum(each.rounds for each in answered), sum(each.drafted for each in answered)
    per_token = [(each.end - each.stamps[0][0]) / (each.tokens - 1) for each in answered if each.tokens > 1]
    pieces = [at - before for each in answered for (before, _), (at, _) in pairwise(each.stamps)]
    return {
        "requests": len(served),
        "refused": len(served) - len(answered),
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "requests_per_second": len(answered) / seconds if seconds > 0 else 0.0,
        "ttft_ms": percentiles(each.stamps[0][0] - each.due for each in answered),
        "tpot_ms": percentiles(per_token),
        "piece_ms": percentiles(pieces),
        "alpha": harness.alpha_of([{"alpha": each.alpha, "drafted": each.drafted} for each in answered]),
        "gamma": drafted / rounds if drafted else None,
        "decode_share": 1 - sum(each.proposals for each in answered) / rounds if drafted else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "rounds_per_pass": rounds / costs["passes"] if costs.get("passes") else None,
        **{
            f"{name}_cpu_us": 1e6 * costs[f"{name}_cpu_seconds"] / tokens if tokens and costs else None
            for name in ("verifier", "draft")
        },
    }


def percentiles(seconds: Iterable[float]) -> Json | None:
    """The 50th, 95th and 99th, in milliseconds, between neighbours in proportion; None of nothing."""
    known = list(seconds)
    if not known:
        return None
    return {f"p{percent}": 1e3 * float(np.percentile(known, percent)) for percent in (50, 95, 99)}
