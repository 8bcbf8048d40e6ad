"""Texts from a draft service, many at once: when each token came, and where the time went.

In a closed loop each stream asks for its next text when one has ended. In an open loop requests are sent at set times.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.client import AsyncClient, Chunk, Finished, Overloaded, Prompt, Statistics, Timings
from outrider.client.events import RoundTimings

PHASES = ("draft", "wire", "queue", "forward", "verify")
"""Where the time of a round goes, as the services measure it; `wire` is the rest of the way to a verdict."""


def phase_seconds(times: Timings | RoundTimings) -> dict[str, float]:
    """Seconds of each of `PHASES`, of all rounds of a text or of one."""
    at_verifier = times.queue_us + times.forward_us + times.verify_us
    microseconds = (times.draft_us, times.verdict_us - at_verifier, times.queue_us, times.forward_us, times.verify_us)
    return {phase: each / 1e6 for phase, each in zip(PHASES, microseconds, strict=True)}


def judged_tokens(statistics: Statistics) -> int:
    """Drafted tokens that the target judged: at each position at most those accepted before it. α is their mean."""
    before = (statistics.num_drafts, *statistics.num_accepted_tokens_per_pos)
    return sum(map(min, statistics.num_draft_tokens_per_pos, before))


def target_passes(statistics: Statistics, tokens: int) -> int:
    """Passes of the target over a text of so many tokens: each writes one token beyond the accepted ones.

    A verdict on several tokens of a `Decode` is several passes. The last proposal may have no token beyond.
    """
    return max(statistics.num_rounds, tokens - statistics.num_accepted_tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """One text as its client saw it. Times are seconds since the run began.

    Attributes:
        due: when it was to be requested.
        stamps: when each piece came, and its tokens, which come at once.
        refused: the service was full; there is no text.
        finished: the last event; None if refused, or if another server wrote the text.
    """

    due: float
    stamps: tuple[tuple[float, int], ...] = ()
    refused: bool = False
    finished: Finished | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.stamps)

    @property
    def end(self) -> float:
        return self.stamps[-1][0] if self.stamps else self.due

    @property
    def seconds_to_first(self) -> float | None:
        """Time from when it was due to its first piece; None without a piece."""
        return self.stamps[0][0] - self.due if self.stamps else None

    @property
    def seconds_per_token(self) -> float | None:
        """Time per token after the first piece; None without a second one."""
        if len(self.stamps) < 2:
            return None
        return (self.end - self.stamps[0][0]) / (self.tokens - self.stamps[0][1])

    @property
    def statistics(self) -> Statistics | None:
        return None if self.finished is None else self.finished.statistics

    @property
    def rounds(self) -> int:
        """Passes of the target over it."""
        return len(self.stamps) if self.statistics is None else self.statistics.num_rounds

    @property
    def drafted(self) -> int:
        """Tokens that were proposed."""
        return 0 if self.statistics is None else self.statistics.num_draft_tokens

    @property
    def alpha(self) -> float | None:
        """Mean chance of acceptance over the judged tokens; None if nothing was drafted."""
        return self.statistics.alpha if self.statistics is not None and self.drafted else None


Item = TypeVar("Item")
Result = TypeVar("Result")

Request = tuple[Prompt | None, Mapping[str, Any]]
"""A prompt, or None for speech, and the options of the client."""


async def for_each(items: Sequence[Item], work: Callable[[Item], Awaitable[Result]], at_once: int) -> list[Result]:
    """Return the results of work on all items, on so many at once. The first error ends all of it."""
    results: dict[int, Result] = {}
    todo = iter(enumerate(items))

    async def worker() -> None:
        for number, item in todo:
            results[number] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [results[number] for number in range(len(items))]


async def serve(
    client: AsyncClient,
    requests: Sequence[Request],
    streams: int,
    due: Sequence[float] | None = None,
    *,
    report: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Write all texts, so many at once, and return them in the order of the requests.

    Args:
        requests: one for each text.
        streams: of the closed loop; for an open loop, as many as there are requests.
        due: seconds from the start, in ascending order, before which a request is not sent.
        report: called after each text.

    Raises:
        OutriderError: a request failed, other than by a full service without retries.
    """
    began = time.perf_counter()

    async def write(number: int) -> Served:
        at = time.perf_counter() - began
        if due is not None:
            await asyncio.sleep(due[number] - at)
            at = due[number]
        served = await _write(client, requests[number], began, at)
        report()
        return served

    return await for_each(range(len(requests)), write, streams)


async def _write(client: AsyncClient, request: Request, began: float, due: float) -> Served:
    prompt, options = request
    stamps: list[tuple[float, int]] = []
    finished: Finished | None = None
    given: Any = options
    try:
        async for event in client.generate(prompt, **given):
            if isinstance(event, Chunk) and event.token_ids:
                stamps.append((time.perf_counter() - began, len(event.token_ids)))
            elif isinstance(event, Finished):
                finished = event
    except Overloaded:
        return Served(due, refused=True)
    return Served(due, tuple(stamps), finished=finished)
