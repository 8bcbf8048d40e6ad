"""Calls of one request as the parts of its answer: text and log-probabilities of each choice, as they come.

Each choice is a call of its own, since a call with one sample continues at another service if its own is lost.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from outrider.client import (
    Chunk,
    Event,
    Finished,
    Message,
    PositionLogprobs,
    PromptLogprobs,
    Started,
    Statistics,
)
from outrider.http.pair import Pair

Entry: TypeAlias = "tuple[int, PositionLogprobs | None]"
"""A token with its log-probabilities; the first token of a prompt has none."""


@dataclass(slots=True)
class Call:
    """One choice of an answer.

    Attributes:
        options: of `AsyncClient.generate`.
        echo: begin with the prompt.
        without_output: generate one token, the fewest that a service can, and drop it.
        is_repeat: another choice has the same prompt, and counts its tokens.
    """

    prompt: str | Sequence[int] | Sequence[Message]
    options: dict[str, Any]
    echo: bool = False
    without_output: bool = False
    is_repeat: bool = False

    @property
    def wants_logprobs(self) -> bool:
        return "logprobs" in self.options


class Part(NamedTuple):
    """More of one choice. Its last part has `finished`."""

    choice: int
    text: str
    entries: Sequence[Entry]
    finished: Finished | None


@dataclass(slots=True)
class Tally:
    """Tokens of a request: those of its usage, and those of its speculation."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    longest: int = 0

    def usage(self) -> dict[str, Any]:
        """As OpenAI has it. A drafted token counts as a prediction."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }

    def metrics(self) -> dict[str, Any] | None:
        """As vLLM reports speculation for each request, and AIPerf reads it; None if nothing was drafted.

        The histogram has an entry for each count from 0 to `num_spec_tokens`: AIPerf takes no other one.
        """
        if not self.drafts:
            return None
        reached = [self.drafts, *self.accepted_at]
        reached += [0] * (self.longest + 2 - len(reached))
        histogram = [reached[i] - reached[i + 1] for i in range(self.longest + 1)]
        found = {
            "mean_acceptance_length": 1 + self.accepted / self.drafts,
            "draft_acceptance_rate": self.accepted / max(1, self.drafted),
            "acceptance_histogram": histogram,
            "num_spec_steps": self.drafts,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self.longest,
        }
        return {"speculative_decoding": found}

    def add(self, statistics: Statistics) -> None:
        """Adds those of one sample."""
        self.drafts += statistics.num_drafts
        self.drafted += statistics.num_draft_tokens
        self.accepted += statistics.num_accepted_tokens
        at = statistics.num_accepted_tokens_per_pos
        self.accepted_at += [0] * (len(at) - len(self.accepted_at))
        for position, count in enumerate(at):
            self.accepted_at[position] += count
        self.longest = max(self.longest, len(statistics.num_draft_tokens_per_pos))


class Generation:
    """The calls of one request.

    Attributes:
        tally: so far.
    """

    def __init__(self, pair: Pair, calls: Sequence[Call], timeout: float) -> None:
        """`timeout` is in seconds, for all calls together."""
        self.tally = Tally()
        self._pair = pair
        self._calls = calls
        self._began = time.monotonic()
        self._end = self._began + timeout

    async def whole(self) -> list[list[Part]]:
        """All parts of each choice.

        Raises:
            OutriderError: a call failed.
        """
        for call in self._calls:
            call.options["joined_responses"] = True
        found: list[list[Part]] = [[] for _ in self._calls]
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                found[part.choice].append(part)
        return found

    def parts(self) -> AsyncGenerator[Part, None]:
        """Parts of all choices as they come. Closing it cancels the calls.

        Raises:
            OutriderError: a call failed.
        """
        choices = [_Choice(self._pair, call, self.tally, number) for number, call in enumerate(self._calls)]
        return self._of_one(choices[0]) if len(choices) == 1 else self._of_several(choices)

    async def _of_one(self, choice: "_Choice") -> AsyncGenerator[Part, None]:
        async with aclosing(self._begin(choice.call)) as events:
            async for event in events:
                if (part := choice.take(event)) is not None:
                    yield await choice.echoed(part) if choice.echoes else part

    async def _of_several(self, choices: "Sequence[_Choice]") -> AsyncGenerator[Part, None]:
        arrived: asyncio.Queue[tuple[_Choice, Event | Exception | None]] = asyncio.Queue(maxsize=len(choices))
        gate = asyncio.Semaphore(self._pair.most_calls)

        async def feed(choice: _Choice) -> None:
            try:
                async with gate, aclosing(self._begin(choice.call)) as events:
                    async for event in events:
                        await arrived.put((choice, event))
                await arrived.put((choice, None))
            except Exception as error:
                await arrived.put((choice, error))

        tasks = [asyncio.create_task(feed(choice)) for choice in choices]
        try:
            left = len(tasks)
            while left:
                choice, found = await arrived.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                elif (part := choice.take(found)) is not None:
                    yield await choice.echoed(part) if choice.echoes else part
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, call: Call) -> AsyncGenerator[Event, None]:
        left = max(0.001, self._end - time.monotonic())
        return self._pair.generate(
            call.prompt, began=self._began, timeout=left, is_repeat=call.is_repeat, **call.options
        )


class _Choice:
    """One choice under way.

    Attributes:
        call: that writes it.
        echoes: the prompt is yet to come before its text.
    """

    def __init__(self, pair: Pair, call: Call, tally: Tally, number: int) -> None:
        self.call = call
        self.echoes = call.echo
        self._pair = pair
        self._tally = tally
        self._number = number
        self._ids: Sequence[int] = ()  # of the prompt
        self._prompt: list[Entry] = []
        self._waiting: list[Entry] = []  # of tokens that a stop string may still cut
        self._held = 0  # tokens so far that it may still cut

    def take(self, event: Event) -> Part | None:
        """The text and the entries that the event completes; None: there is nothing to show."""
        if isinstance(event, Chunk):  # most events are chunks
            return self._take_chunk(event)
        match event:
            case Finished():
                return Part(self._number, "", self._end(event), event)
            case PromptLogprobs():
                self._prompt += zip(self._ids[event.first_position :], event.logprobs, strict=False)
            case Started():
                self._ids = event.prompt_token_ids
                self._prompt = [(self._ids[0], None)] if self._ids else []
                self._tally.prompt_tokens += 0 if self.call.is_repeat else len(self._ids)
        return None

    async def echoed(self, part: Part) -> Part:
        """The first part, with the prompt before it."""
        self.echoes = False
        prompt = self.call.prompt
        before = prompt if isinstance(prompt, str) else await self._pair.text_of(self._ids)
        entries = [*self._prompt, *part.entries] if self.call.wants_logprobs else ()
        return part._replace(text=before + part.text, entries=entries)

    def _take_chunk(self, chunk: Chunk) -> Part | None:
        text = chunk.text
        entries: Sequence[Entry] = ()
        if self.call.without_output:
            text = ""
        else:
            self._tally.completion_tokens += len(chunk.token_ids) + self._held - chunk.held_tokens
            self._held = chunk.held_tokens
            if self.call.wants_logprobs:
                self._waiting += zip(chunk.token_ids, chunk.logprobs, strict=False)
                entries = self._release(chunk.held_tokens)
        return Part(self._number, text, entries, None) if text or entries or self.echoes else None

    def _end(self, end: Finished) -> Sequence[Entry]:
        tally = self._tally
        tally.add(end.statistics)
        if not self.call.is_repeat:
            # Of an encoder–decoder model only the end counts the input of the encoder.
            tally.prompt_tokens += end.usage.prompt_tokens - len(self._ids)
            tally.cached_tokens += end.usage.cached_tokens
        if not self.call.without_output:
            tally.completion_tokens += self._held - end.cut_tokens
        return self._release(end.cut_tokens)

    def _release(self, kept: int) -> Sequence[Entry]:
        """The entries of all waiting tokens but the last `kept`."""
        count = max(0, len(self._waiting) - kept)
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        return released
