"""Who may call the front, and how much a request may hold: an ASGI middleware around all routes.

In this order: the Host header, the origin, the key, the client's rate, the size of the body while it is read, and its
time.
"""

import asyncio
import logging
import time
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.client.errors import typed
from outrider.http import playground
from outrider.http.errors import ApiError, of_service
from outrider.http.settings import ServerSettings
from outrider.rpc.auth import ClientLimits, Tokens
from outrider.rpc.channel import ip_address
from outrider.rpc.errors import RequestError

_logger = logging.getLogger("outrider.http")

AUDIO_BYTES = 25 * 1024 * 1024
"""Largest file of a transcription, as OpenAI has it."""
# Of a form beside its file.
_FORM_BYTES = 64 * 1024

# Anyone may ask these: probes and Prometheus carry no key.
_PUBLIC = ("/health", "/metrics", *playground.FILES)
# These start sequences, and count in the limits of a client.
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/audio/transcriptions", playground.GENERATE)
_TRANSCRIPTIONS = "/v1/audio/transcriptions"
# Between two log lines about refused requests: a client that retries in a loop must not fill the disk.
_SECONDS_PER_LINE = 1.0


class Guard:
    """The middleware.

    Args:
        app: behind it.
        settings: of the front.
        keys: None: no key is asked for.
        limits: of each client, by its key, else its address; None: no limit.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keys: Tokens | None, limits: ClientLimits | None
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._limits = limits
        self._next_line = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        with ExitStack() as inside:
            try:
                self._check_host(scope)
                self._check_origin(scope)
                if path not in _PUBLIC:
                    client = self._client(scope)
                    if path in _GENERATING and self._limits is not None:
                        inside.enter_context(self._limits.enter(client))
                receive = self._bounded(scope, receive)
            except ApiError as error:
                return await self._refuse(scope, receive, send, error)
            except RequestError as error:
                return await self._refuse(scope, receive, send, of_service(typed(error)))
            await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """A page whose name was pointed at this machine's address cannot change the Host header of its requests.

        Browsers always send one; probes that speak HTTP/1.0 may leave it out.
        """
        header = _header(scope, b"host")
        if not header and scope["http_version"] == "1.0":
            return
        host = header.rsplit(":", 1)[0] if header.rpartition("]")[2].count(":") else header
        host = host.strip("[]").lower().rstrip(".")
        if host == "localhost" or ip_address(host) is not None:
            return
        for allowed in self._settings.allowed_hosts:
            if allowed in ("*", host) or (allowed.startswith("*.") and host.endswith(allowed[1:])):
                return
        raise ApiError(421, "the Host header is not one of this server's names (--http-allowed-host)", code="host")

    def _check_origin(self, scope: Scope) -> None:
        """Browsers send simple POSTs of any page, without a preflight request, and only hide the answer from it."""
        if scope["method"] != "POST" or _header(scope, b"sec-fetch-site") not in ("cross-site", "same-site"):
            return
        if not {"*", _header(scope, b"origin")} & set(self._settings.cors_origins):
            text = "pages of this origin may not call this server (--http-cors-origin)"
            raise ApiError(403, text, code="origin")

    def _client(self, scope: Scope) -> str:
        """The caller's name in the limits."""
        address = (scope.get("client") or ("", 0))[0]
        if self._keys is None:
            return f"address {address}"
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            return self._keys.check([("authorization", value) for value in given])
        except RequestError:
            text = "the key is not one of this server's" if given else "there is no key"
            text = f"{text}; send one as 'Authorization: Bearer KEY'"
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, text, code="invalid_api_key", headers=headers) from None

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """Counts the body while it is read, and gives it a time."""
        path = scope["path"]
        most = AUDIO_BYTES + _FORM_BYTES if path == _TRANSCRIPTIONS else self._settings.max_body_bytes
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > most:
            raise _too_large(most, length)
        seconds, size, is_whole = self._settings.body_timeout, 0, False
        end = asyncio.get_running_loop().time() + seconds

        async def bounded() -> Message:
            nonlocal size, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {seconds:g} s"
                raise ApiError(408, text, code="timeout", headers={"connection": "close"}) from None
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if size > most:
                raise _too_large(most, f"more than {most}")
            return message

        return bounded

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _SECONDS_PER_LINE
            address = (scope.get("client") or ("", 0))[0]
            _logger.warning("a request from %s was refused: %d: %s", address, error.status, error.message)
        # The body was not read: the connection cannot be used again.
        error.headers.setdefault("connection", "close")
        await error.response()(scope, receive, send)


def _too_large(most: int, given: str) -> ApiError:
    text = f"the body has {given} bytes; at most {most}"
    return ApiError(413, text, code="request_too_large", headers={"connection": "close"})


def _header(scope: Scope, name: bytes) -> str:
    """The value of a header that may come once; empty: it is missing, or there are several."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""
