"""The door of a server: who calls is asked for its name and its token, and for how much it may ask.

Health is open to all that get as far as here, since it says only whether to come; reflection is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc

from outrider.rpc import errors
from outrider.rpc.errors import RequestError
from outrider.rpc.identity import AllowedClients, address_of, names_of
from outrider.rpc.rate import ClientLimits
from outrider.rpc.tokens import Tokens
from outrider.rpc.wrapping import Context, Handler, wrapped

_logger = logging.getLogger(__name__)

_OPEN_TO_ALL = "/grpc.health."
_ABOUT_THE_SERVER = "/grpc.reflection."
# A line about a call that was turned away; whoever tries in a loop fills no disk.
_SECONDS_PER_LINE = 1.0


class Door(grpc.aio.ServerInterceptor):
    """Server interceptor; put it before all others, so that who may not come in learns nothing else."""

    def __init__(
        self,
        *,
        allowed: AllowedClients | None = None,
        tokens: Tokens | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        """
        Args:
            allowed: names that a client's certificate must have; None: none is asked for.
            tokens: one of which each call must bear; None: none is asked for.
            limits: of each client, known by its token, else by its certificate, else by its address. Calls that stream
                count, as one sequence each unless they say how many: they are what costs.
        """
        self._allowed = allowed
        self._tokens = tokens
        self._limits = limits
        self._next_line = 0.0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        if handler is None or method.startswith(_OPEN_TO_ALL):
            return handler
        metadata = tuple(handler_call_details.invocation_metadata or ())
        counts = bool(handler.response_streaming) and not method.startswith(_ABOUT_THE_SERVER)

        @asynccontextmanager
        async def around(context: Context) -> AsyncIterator[None]:
            with ExitStack() as inside:
                try:
                    name = self._name(context, metadata)
                    if counts and self._limits is not None:
                        inside.enter_context(self._limits.enter(name))
                except RequestError as error:
                    self._note(method, context, error)
                    await errors.abort(context, error)
                yield

        return wrapped(handler, around)

    def _name(self, context: Context, metadata: Any) -> str:
        """Who calls, as its limits know it.

        Raises:
            RequestError: UNAUTHENTICATED or PERMISSION_DENIED: it may not.
        """
        known: Any = context.auth_context()
        name = self._allowed.check(known) if self._allowed is not None else next(iter(names_of(known)), "")
        token = self._tokens.check(metadata) if self._tokens is not None else ""
        return token or name or address_of(context.peer())

    def _note(self, method: str, context: Context, error: RequestError) -> None:
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _SECONDS_PER_LINE
            _logger.warning(
                "%s from %s was turned away: %s: %s", method, context.peer(), error.code.name, error.message
            )
