"""Metrics of the front, for /metrics: its requests, and the texts that it had written."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.client import Chunk, Event, Finished, Queued, Started
from outrider.service.best_effort import Component
from outrider.service.metrics import Collected, TextMetrics, VllmMetrics, internal_errors

HTTP_METRICS = Component("http_metrics")

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class FrontMetrics:
    """Used on the event loop only.

    Attributes:
        shows_vllm: whether some of them are shown under vLLM's names, too.
    """

    def __init__(self, paths: Sequence[str], *, shows_vllm: bool) -> None:
        """`paths` are those that are counted by name; others could be any."""
        self.shows_vllm = shows_vllm
        self._paths = frozenset(paths)
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(Collected(internal_errors))
        self._running = Gauge("outrider_http_requests_running", "HTTP requests in progress.", registry=self._registry)
        self._ended = Counter(
            "outrider_http_requests",
            "HTTP requests by path and status; 499: the client has gone.",
            ("path", "status"),
            registry=self._registry,
        )
        self._texts = TextMetrics(self._registry, "outrider_http_", "texts")
        self._counts = {"running": 0, "waiting": 0}  # of texts
        self._shown: VllmMetrics | None = None

    @HTTP_METRICS.quiet
    def request_began(self) -> None:
        self._running.inc()

    @HTTP_METRICS.quiet
    def request_ended(self, path: str, status: int) -> None:
        self._running.dec()
        self._ended.labels(path if path in self._paths else "other", str(status)).inc()

    @contextmanager
    def text(self, began: float, *, is_repeat: bool = False, is_joined: bool = False) -> "Iterator[TextWatch]":
        """A text, for as long as the context is open.

        Args:
            began: when its request arrived, of `time.monotonic`.
            is_repeat: another text has the same prompt, and counts its tokens.
            is_joined: its events come together, some after a second: see `Options.joined_responses`.
        """
        watch = TextWatch(self._texts, self._counts, began, is_repeat=is_repeat, is_joined=is_joined)
        try:
            yield watch
        finally:
            watch.ends()

    def show(self, model: str | None) -> str:
        """All of them in the text format of Prometheus. Those with vLLM's names need the name of the model."""
        if self.shows_vllm and self._shown is None and model is not None:
            self._shown = shown = VllmMetrics(self._registry, model)
            self._texts.show_vllm(shown)
            counts = self._counts
            shown.gauge("num_requests_running", "Texts that a draft service writes.", lambda: counts["running"])
            shown.gauge("num_requests_waiting", "Texts that no service has begun.", lambda: counts["waiting"])
        return generate_latest(self._registry).decode()


DIRECT = "outrider.send"
"""Key of a scope: what sends to the connection, past all middleware. Of a stream only the beginning concerns those."""
GONE = 499
"""Status of a request whose client closed the connection."""
ENDED = "outrider.ended"
"""Key of a scope: the status of a stream that failed, or whose client left, after it began with 200."""


class RequestCounter:
    """The middleware that counts requests. Around the whole application, so that refused ones count as well."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = GONE  # until the answer begins

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope[DIRECT] = send
        self._metrics.request_began()
        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.request_ended(scope["path"], scope.get(ENDED, status))


class TextWatch:
    """Metrics of one text. No method raises."""

    def __init__(
        self, texts: TextMetrics, counts: dict[str, int], began: float, *, is_repeat: bool, is_joined: bool
    ) -> None:
        self._texts = texts
        self._counts = counts
        self._began = began
        self._is_repeat = is_repeat
        self._is_joined = is_joined
        self._last: float | None = None  # when the last tokens came
        self._prompt = 0  # its tokens
        self._tokens = 0
        self._state = ""
        # A service reports a queue at once, and the begin of a joined text with its tokens.
        self._become("running" if is_joined else "waiting")

    @HTTP_METRICS.quiet
    def take(self, event: Event) -> None:
        if isinstance(event, Chunk):  # most events are chunks
            if event.token_ids:
                self._become("running")
                self._take_tokens(len(event.token_ids))
        elif isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, Queued):
            self._become("waiting")
        elif isinstance(event, Started):
            self._prompt = len(event.prompt_token_ids)
            self._become("running")

    @HTTP_METRICS.quiet
    def ends(self) -> None:
        """The text has ended, one way or another: what came of one that was cancelled, or failed, counts as well."""
        self._become("")
        self._texts.ended(prompt=0 if self._is_repeat else self._prompt, generated=self._tokens)

    def _become(self, state: str) -> None:
        if state != self._state:
            if self._state:
                self._counts[self._state] -= 1
            if state:
                self._counts[state] += 1
            self._state = state

    def _take_tokens(self, count: int) -> None:
        self._tokens += count
        if self._is_joined:  # its end tells when they were written
            return
        now = time.monotonic()
        if self._last is None:
            self._texts.first_token.observe(now - self._began)
        else:
            self._texts.next_tokens(now - self._last, count)
        self._last = now

    def _finish(self, end: Finished) -> None:
        statistics, timings = end.statistics, end.timings
        self._prompt = end.usage.prompt_tokens
        seconds = time.monotonic() - self._began
        self._texts.whole.observe(seconds)
        if self._is_joined and self._tokens:
            after_first = (timings.total_us - timings.time_to_first_token_us) / 1e6
            self._texts.first_token.observe(seconds - after_first)
            self._texts.next_tokens(after_first, self._tokens - 1)
        self._texts.judged(statistics.num_drafts, statistics.num_draft_tokens, statistics.num_accepted_tokens_per_pos)
