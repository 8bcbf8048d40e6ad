"""What the front knows of the pair behind it: its description, its name, and the texts of its tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from outrider.client import AsyncClient, AsyncTranscription, Event, OutriderError, Prompt
from outrider.client.audio import Samples
from outrider.environment import served_name
from outrider.http.metrics import FrontMetrics
from protos.outrider.v1 import draft_service_pb2 as pb

# A pair may be replaced by another one, behind the same address.
KNOWN_FOR_S = 30.0
# Probes may come often.
_AVAILABLE_FOR_S = 0.5
# A service that is there answers within this time. A text then has its own time to wait for one.
ANSWERS_WITHIN_S = 2.0
# Texts are fetched in pieces: services limit the tokens of a call to those of a sequence.
_LARGEST_PIECE = 1024


class Pair:
    """The pair of one client's services. For one event loop.

    Attributes:
        framing: options of every text that hide its token counts from the network; none: they are not hidden.
    """

    def __init__(
        self, client: AsyncClient, metrics: FrontMetrics, *, name: str | None = None, framing: Mapping[str, Any]
    ) -> None:
        """`name` is the model's name for callers. Default: that of the target."""
        self.client = client
        self.framing = dict(framing)
        self._metrics = metrics
        self.since = int(time.time())
        self._name = name
        self._found: pb.DraftServiceGetModelResponse | None = None
        self._when = -KNOWN_FOR_S  # a service described itself
        self._asking: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[dict[int, str]] | None = None  # of the texts of all tokens
        self._texts: dict[int, str] = {}

    @property
    def hides_sizes(self) -> bool:
        """Whether texts come in messages of a fixed size or at a fixed pace, without reports on single tokens."""
        return not self.framing.keys().isdisjoint(("frame_bytes", "frame_pace"))

    @property
    def known(self) -> pb.DraftServiceGetModelResponse:
        """The description, once `describe` has returned."""
        assert self._found is not None
        return self._found

    async def generate(
        self, prompt: Prompt | None, *, began: float, timeout: float, is_repeat: bool = False, **options: Any
    ) -> AsyncGenerator[Event, None]:
        """`AsyncClient.generate` with the framing, and with metrics.

        Args:
            began: see `FrontMetrics.text`.
            is_repeat: see `FrontMetrics.text`.
            options: of the client.
        """
        generated = self.client.generate(prompt, timeout=timeout, **{**options, **self.framing})
        is_joined = bool(options.get("joined_responses"))
        with self._metrics.text(began, is_repeat=is_repeat, is_joined=is_joined) as watch:
            async with aclosing(generated) as events:
                async for event in events:
                    watch.take(event)
                    yield event

    def transcribe(self, audio: Samples, *, timeout: float, **options: Any) -> AsyncTranscription:
        """`AsyncClient.transcribe` with the framing, and with metrics: each window is a text."""

        def generate(**of_window: Any) -> AsyncGenerator[Event, None]:
            return self.generate(None, began=time.monotonic(), **of_window)

        return AsyncTranscription(self.client, audio, timeout, options, generate)

    async def describe(self) -> None:
        """Makes the pair `known` as it was at most `KNOWN_FOR_S` ago, or longer while no service answers.

        Raises:
            OutriderError: no service has answered yet.
        """
        if self._found is None:
            await self._renew()
        elif time.monotonic() - self._when >= KNOWN_FOR_S:
            await self.is_available()

    async def is_available(self) -> bool:
        """Whether a draft service answers within `ANSWERS_WITHIN_S`, or has just done so."""
        if time.monotonic() - self._when < _AVAILABLE_FOR_S:
            return True
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await self._renew()
        except (OutriderError, TimeoutError):
            return False
        return True

    async def _renew(self) -> None:
        """Asks for the description, once for all that wait."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            found = await self.client.get_model()
        finally:
            self._asking = None
        if self._found is not None and self._found.target.vocabulary_fingerprint != found.target.vocabulary_fingerprint:
            self._texts = {}
        self._found, self._when = found, time.monotonic()

    @property
    def name(self) -> str:
        """The model's name for callers."""
        return self._name or served_name(self.known.target.name)

    @property
    def is_known(self) -> bool:
        """Whether a service has described itself."""
        return self._found is not None

    @property
    def paths(self) -> dict[str, str]:
        """Names of models that a message of a service may hold, with those to show instead."""
        if self._found is None:
            return {}
        names = {each.name: served_name(each.name) for each in (self._found.target, self._found.model) if each.name}
        return {name: shown for name, shown in names.items() if name != shown}

    @property
    def most_tokens(self) -> int:
        """Of one sequence: prompt and output."""
        return self.known.model.limits.max_sequence_tokens

    @property
    def most_calls(self) -> int:
        """Calls of one request that make sense at the same time."""
        return max(1, self.known.model.limits.max_sequences)

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
            OutriderError: the service refuses the tokens, or does not answer.
        """
        return (await self.client.detokenize(ids)).text

    async def texts_of(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each token by itself: a table of at least these. Texts are fetched once; those of the whole
        vocabulary if sizes of messages are hidden, since the sizes of these calls depend on the tokens.

        Raises:
            OutriderError: the service refuses a token, or does not answer.
        """
        texts = self._texts
        missing = sorted({token for token in ids if token not in texts})
        if missing and self.hides_sizes:
            if self._fetching is None:
                self._fetching = asyncio.create_task(self._fetch_all())
            return await asyncio.shield(self._fetching)
        await self._fetch(missing, texts)
        return texts

    async def _fetch_all(self) -> dict[int, str]:
        """Once for all that wait; what an earlier try fetched is kept."""
        texts = self._texts
        try:
            await self._fetch([token for token in range(self.known.target.vocab_size) if token not in texts], texts)
        finally:
            self._fetching = None
        return texts

    async def _fetch(self, tokens: Sequence[int], texts: dict[int, str]) -> None:
        size = min(_LARGEST_PIECE, self.most_tokens)
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            found = await self.client.detokenize(piece)
            texts.update(zip(piece, found.token_texts, strict=True))
