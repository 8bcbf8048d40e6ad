"""The routes of the front, as an ASGI application."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from reprlib import repr as short_repr
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.client import AsyncClient, Message, OutriderError
from outrider.client.errors import typed
from outrider.environment import installed_version
from outrider.http import playground
from outrider.http.answers import DONE, ChatForm, CompletionForm, Form, tokens_of, usage_field
from outrider.http.errors import HIDES_SIZES, ApiError, invalid, of_service, unsupported
from outrider.http.generation import Call, Generation
from outrider.http.metrics import DIRECT, ENDED, GONE, TEXT_TYPE, FrontMetrics, RequestCounter
from outrider.http.pair import Pair
from outrider.http.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    conversation,
    parse,
    read_json,
)
from outrider.http.security import Guard
from outrider.http.settings import ServerSettings
from outrider.http.transcription import AudioInMemory, read_form, transcribe
from outrider.rpc.auth import ClientLimits, Tokens, count_sequences
from outrider.rpc.errors import RequestError

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,100}", re.ASCII)
_TRACE = {
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]{1,100})?"),
    "tracestate": re.compile(r"[ -~]{1,512}"),
}


def create_app(
    client: AsyncClient, settings: ServerSettings, keys: Tokens | None, limits: ClientLimits | None
) -> ASGIApp:
    """The application in front of `client`, which its caller closes. `keys` and `limits` are those of `Guard`."""
    front = Front(client, settings)
    middleware = [Middleware(Guard, settings=settings, keys=keys, limits=limits)]
    kinds = (ApiError, ClientDisconnect, OutriderError, RequestError, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(kinds, front.failed)
    app: ASGIApp = Starlette(routes=front.routes, middleware=middleware, exception_handlers=handlers)
    if settings.cors_origins:
        # Around the keys, as a preflight request carries none, and around Starlette's own answer to an internal error.
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients add their own, as x-stainless-lang of openai-js
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestCounter(app, front.metrics)


class Front:
    """The endpoints."""

    def __init__(self, client: AsyncClient, settings: ServerSettings) -> None:
        self._settings = settings
        self.routes = self._routes()
        self.metrics = FrontMetrics([route.path for route in self.routes], shows_vllm=settings.vllm_metrics)
        self._pair = Pair(client, self.metrics, name=settings.model, framing=settings.framing)
        self._audio = AudioInMemory()

    def _routes(self) -> list[Route]:
        routes = [
            Route("/metrics", self.show_metrics),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/v1/models", _cancellable(self.models)),
            Route("/v1/models/{model:path}", _cancellable(self.model)),
            Route("/v1/completions", _cancellable(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", _cancellable(self.chat), methods=["POST"]),
            Route("/v1/audio/transcriptions", self.transcriptions, methods=["POST"]),
            Route("/tokenize", _cancellable(self.tokenize), methods=["POST"]),
            Route("/detokenize", _cancellable(self.detokenize), methods=["POST"]),
            Route("/tokenizer_info", _cancellable(self.tokenizer_info)),
        ]
        if self._settings.playground and not self._settings.framing:
            routes += [Route(path, playground.page) for path in playground.FILES]
            routes.append(Route(playground.GENERATE, _cancellable(self.playground), methods=["POST"]))
        else:
            routes += [Route(path, self.no_playground) for path in playground.FILES]
        return routes

    # -------------------------------------------------------------------------------------------------------- text

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, read_json(await request.body()))
        body.check()
        await self._check_model(body.model)
        prompts = body.prompts(most=self._settings.max_samples, longest=self._pair.most_tokens)
        self._check_samples(body.n, len(prompts))
        options = body.options()
        options["max_new_tokens"] = max(1, body.max_tokens)
        if body.echo and body.logprobs is not None:
            if self._pair.hides_sizes:
                raise unsupported("echo", f"echo with logprobs is off: {HIDES_SIZES}")
            options["prompt_logprobs"] = body.logprobs
        calls = [
            Call(prompt, options | seed, body.echo, not body.max_tokens, is_repeat=i > 0)
            for prompt in prompts
            for i, seed in enumerate(body.seeds())
        ]
        names = {"max_new_tokens": "max_tokens", "text": "prompt", "prompt_logprobs": "echo"}
        return await self._answer(request, body, CompletionForm, calls, names)

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, read_json(await request.body()))
        body.check()
        messages = conversation(body.messages)
        await self._check_model(body.model)
        self._check_samples(body.n, 1)
        options = body.options() | {"template_arguments": body.chat_template_kwargs or None}
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        names = {"max_new_tokens": limit, "logprobs.top_n": "top_logprobs", "chat": "messages", "prompt": "messages"}
        if body.most_tokens is not None:
            options["max_new_tokens"] = body.most_tokens
        else:
            options["fill_context"] = True  # as OpenAI has it
        calls = [Call(messages, options | seed, is_repeat=i > 0) for i, seed in enumerate(body.seeds())]
        return await self._answer(request, body, ChatForm, calls, names)

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        kind: type[Form],
        calls: Sequence[Call],
        names: dict[str, str],
    ) -> Response:
        fingerprint = self._pair.known.target.weights_fingerprint
        given = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(given):
            given = ""
        form = kind(given or uuid.uuid4().hex, self._pair.name, fingerprint, body.stop_token_ids or ())
        request_id, metadata = given or form.id, _trace_context(request)
        for number, call in enumerate(calls):
            call.options["request_id"] = request_id if len(calls) == 1 else f"{request_id}-{number}"
            call.options["metadata"] = metadata
        generation = Generation(self._pair, calls, self._settings.timeout)
        has_logprobs = body.top_logprobs_asked is not None
        headers = {"x-request-id": request_id}
        explain = partial(self._explained, names=names, headers=headers)
        try:
            if not body.stream:
                choices = await generation.whole()
                entries = (entry for parts in choices for part in parts for entry in part.entries)
                texts = await self._pair.texts_of(tokens_of(entries)) if has_logprobs else {}
                whole = form.whole(choices, generation.tally, texts, has_logprobs=has_logprobs)
                return Response(whole, media_type="application/json", headers=headers)
            events = self._events(body, form, generation, has_logprobs=has_logprobs)
            first = await anext(events, b"")  # the status is known once the first text is there
        except OutriderError as error:
            raise explain(error) from error
        return _Stream(first, events, headers, explain)

    async def _events(
        self, body: CompletionRequest | ChatRequest, form: Form, generation: Generation, *, has_logprobs: bool
    ) -> AsyncGenerator[bytes, None]:
        """The events of an answer, each with all that came at once."""
        always, begun, tally = body.wants_usage_always, set[int](), generation.tally
        usage = ',"usage":null' if body.wants_usage else ""
        async with aclosing(generation.parts()) as parts:
            async for index, text, entries, finished in parts:
                out = ""
                if index not in begun:
                    begun.add(index)
                    if choice := form.begin(index):
                        out = form.event(choice, usage_field(tally) if always else usage)
                if always:
                    usage = usage_field(tally)
                if text or entries:
                    logprobs = "null"
                    if has_logprobs:
                        texts = await self._pair.texts_of(tokens_of(entries))
                        logprobs = json.dumps(form.logprobs(index, text, entries, texts))
                    out += form.event(form.part(index, text, logprobs), usage)
                if finished is not None:
                    out += form.event(form.end(index, finished), usage)
                yield out.encode()
        if body.wants_usage:
            yield form.event("", usage_field(tally, with_metrics=True)).encode()
        yield DONE

    async def transcriptions(self, request: Request) -> Response:
        form = await read_form(request)
        work = transcribe(
            form, _trace_context(request), self._pair, self._settings.timeout, self._check_model, self._audio
        )
        return await _unless_gone(request.receive, work)

    async def playground(self, request: Request) -> Response:
        """POST /playground/generate."""
        body = parse(playground.PlaygroundRequest, read_json(await request.body()))
        await self._check_model(None)
        events = playground.events(self._pair, body, self._settings.timeout)
        explain = partial(self._explained, names={"max_new_tokens": "max_tokens", "text": "prompt"})
        try:
            first = await anext(events, b"")
        except OutriderError as error:
            raise explain(error) from error
        return _Stream(first, events, {}, explain)

    async def no_playground(self, request: Request) -> Response:
        """GET of a file of the playground where it is off."""
        text = "the playground is off on this server (--no-http-playground)"
        if self._settings.framing:
            text = "the playground is off: its stream names every round, and this server hides them (--frame-bytes)"
        raise ApiError(404, text, code="not_found")

    # ------------------------------------------------------------------------------------------------------ tokens

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, as vLLM has it."""
        body = parse(TokenizeRequest, read_json(await request.body()))
        await self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give exactly one of prompt and messages")
        prompt: str | Sequence[Message] = body.prompt if body.prompt is not None else conversation(body.messages or [])
        found = await self._pair.client.tokenize(
            prompt, add_special_tokens=body.add_special_tokens, template_arguments=body.chat_template_kwargs or None
        )
        return _json(
            {
                "count": len(found.token_ids),
                "max_model_len": self._pair.most_tokens,
                "tokens": list(found.token_ids),
                "token_strs": list(found.token_texts) if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize, as vLLM has it."""
        body = parse(DetokenizeRequest, read_json(await request.body()))
        await self._check_model(body.model)
        found = await self._pair.client.detokenize(body.tokens, keep_special_tokens=True)
        return _json({"prompt": found.text})

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info, as vLLM has it: the fields of a tokenizer's configuration."""
        found = await self._pair.client.tokenizer()
        info: dict[str, Any] = {"tokenizer_class": found.tokenizer_class}
        if found.chat_template:
            info["chat_template"] = found.chat_template
        for token in found.special_tokens:
            if token.name == "additional_special_tokens":
                info.setdefault(token.name, []).append(token.text)
            else:
                info[token.name] = token.text
        return _json(info)

    # ------------------------------------------------------------------------------------------------ the front itself

    async def models(self, request: Request) -> Response:
        await self._pair.describe()
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        await self._check_model(request.path_params["model"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """GET /health: whether a draft service answers."""
        if await self._pair.is_available():
            return _json({"status": "ok"})
        raise ApiError(503, "no draft service is available; try again later", headers={"retry-after": "1"})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics: the requests of this front, and its texts."""
        if self.metrics.shows_vllm and not self._pair.is_known:
            await self._pair.is_available()  # for the name of the model
        shown = self.metrics.show(self._pair.name if self._pair.is_known else None)
        return Response(shown, headers={"content-type": TEXT_TYPE})

    async def version(self, request: Request) -> Response:
        return _json({"version": installed_version()})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._pair.name,
            "object": "model",
            "created": self._pair.since,
            "owned_by": "outrider",
            "root": self._pair.name,
            "parent": None,
            "max_model_len": self._pair.most_tokens,
        }

    async def _check_model(self, name: str | None) -> None:
        await self._pair.describe()
        if name is not None and name != self._pair.name:
            message = f"there is no model {short_repr(name)}; this server has {self._pair.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check_samples(self, n: int, prompts: int) -> None:
        most = self._settings.max_samples
        if n * prompts > most:
            text = f"n is {n} and prompt has {prompts} prompts: {n * prompts} texts; at most {most} in one request"
            raise invalid("n" if n > most else "prompt", text)
        count_sequences("n", n * prompts)

    async def failed(self, request: Request, error: Exception) -> Response:
        """The answer to a request that ended with an error."""
        match error:
            case ApiError():
                failure = error
            case ClientDisconnect():
                return Response(status_code=GONE)  # for the count; no client is left to read it
            case OutriderError():
                names = {"/tokenize": {"text": "prompt"}, "/detokenize": {"token_ids": "tokens"}}
                failure = self._explained(error, names.get(request.url.path, {}))
            case RequestError():  # of this process: of the limits of a client
                failure = of_service(typed(error))
            case HTTPException():  # no such route, or no such method there
                text = f"{request.method} {request.url.path}: {error.detail}"
                code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
                failure = ApiError(error.status_code, text, code=code, headers=error.headers)
            case _:  # Starlette raises it again, and uvicorn then closes the connection
                text = "internal error; the server's log has the cause"
                failure = ApiError(500, text, headers={"connection": "close"})
        return failure.response()

    def _explained(self, error: OutriderError, names: dict[str, str], headers: Mapping[str, str] = {}) -> ApiError:
        failure = of_service(error, names=names, models=self._pair.paths)
        failure.headers |= headers
        return failure


def _trace_context(request: Request) -> dict[str, str]:
    """The headers of W3C Trace Context, as far as they are valid and short: gRPC limits the size of metadata."""
    found = {name: ",".join(request.headers.getlist(name)) for name in _TRACE}
    return {name: text for name, text in found.items() if _TRACE[name].fullmatch(text)}


# ---------------------------------------------------------------------------------------------------------- streams


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":  # the body has been read
        pass


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client closes the connection first.

    Raises:
        ApiError: the server stops, and the grace of answers in progress is over: uvicorn cancels them.
        ClientDisconnect: the client did.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    except asyncio.CancelledError:
        text = "the server stops; try again later"
        raise ApiError(503, text, code="unavailable", headers={"retry-after": "1"}) from None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _cancellable(endpoint: Callable[[Request], Coroutine[Any, Any, Response]]) -> Callable[..., Awaitable[Response]]:
    """The endpoint, which is cancelled if the client closes the connection."""

    async def run(request: Request) -> Response:
        await request.body()  # kept; a disconnect comes after it
        return await _unless_gone(request.receive, endpoint(request))

    return run


class _Stream(Response):
    """An answer as server-sent events. Closes its generator, whatever ends it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        explain: Callable[[OutriderError], ApiError],
    ) -> None:
        self.status_code = 200
        self.background = None
        # A proxy that collects what it passes on would undo the streaming.
        self.init_headers(headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._events = events
        self._explain = explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = scope.get(DIRECT, send)
        try:
            await _unless_gone(receive, self._write(send))
        except ClientDisconnect:
            scope[ENDED] = GONE
        except (ApiError, OutriderError) as error:
            # Without [DONE]: the text has not ended.
            failure = error if isinstance(error, ApiError) else self._explain(error)
            scope[ENDED] = failure.status
            await send({"type": "http.response.body", "body": b"data: " + failure.body() + b"\n\n"})
        except Exception:
            scope[ENDED] = 500
            raise
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")
