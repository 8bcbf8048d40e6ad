"""The playground: a static page, and texts with the origin and the probabilities of each token."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import resources
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from outrider.client import Chunk, Finished, Round, Started
from outrider.environment import served_name
from outrider.http.pair import Pair
from outrider.http.requests import Body

GENERATE = "/playground/generate"

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/playground.css": ("playground.css", "text/css; charset=utf-8"),
    "/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
}
"""The files of the page, by path; no other path reads a file."""

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class PlaygroundRequest(Body):
    """The body of POST /playground/generate. Fields without a value are left to the service."""

    prompt: str
    max_tokens: int = Field(128, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = Field(None, ge=0, lt=2**64)
    gamma: int | None = Field(None, ge=1)
    alone: bool = False  # the target alone

    def options(self) -> dict[str, Any]:
        """The options of the client."""
        options = self.model_dump(include={"temperature", "top_p", "top_k", "seed", "gamma"}, exclude_none=True)
        options |= {"max_new_tokens": self.max_tokens, "report_rounds": True, "report_probabilities": True}
        return options | ({"gamma": 0} if self.alone else {})


async def page(request: Request) -> Response:
    """GET of a file of the page."""
    name, media_type = FILES[request.url.path]
    content = (resources.files(__package__) / "page" / name).read_bytes()
    return Response(content, media_type=media_type, headers=_HEADERS)


async def events(pair: Pair, body: PlaygroundRequest, timeout: float) -> AsyncGenerator[bytes, None]:
    """The events of one text, for the page alone: they may change with it.

    Raises:
        OutriderError: the service refused the request, or failed.
    """
    began, tokens = time.monotonic(), 0
    generated = pair.generate(body.prompt, began=began, timeout=timeout, **body.options())
    async with aclosing(generated) as received:
        async for event in received:
            if isinstance(event, Started):
                models = {"target": pair.name, "draft": served_name(pair.known.model.name)}
                yield _event("started", **models, rule=event.rule.value, drafter=event.drafter.value)
            elif isinstance(event, Chunk):
                tokens += len(event.token_ids)
                origins = [origin.value for origin in event.origins]
                rounds = [_round(each) for each in event.rounds]
                yield _event("chunk", tokens=event.token_texts, origins=origins, rounds=rounds)
            elif isinstance(event, Finished):
                rate = tokens / max(time.monotonic() - began, 1e-9)
                yield _event("finished", reason=event.finish_reason.value, tokens_per_second=rate)


def _round(each: Round) -> dict[str, Any]:
    times = each.timings
    return {
        "number": each.round,
        "at": each.output_length,
        "drafted": each.drafted_texts,
        "accepted": each.accepted,
        "p": each.target_probabilities,
        "q": each.draft_probabilities,
        "beta": each.beta,
        "start_us": each.draft_start_us,
        "sent_us": each.sent_us,
        "verdict_us": times.verdict_us,
        "queue_us": times.queue_us,
        "forward_us": times.forward_us,
        "verify_us": times.verify_us,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: " + json.dumps({"type": kind, **fields}).encode() + b"\n\n"
