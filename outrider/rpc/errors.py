"""Errors on the wire: a status code with a `google.rpc.ErrorInfo`, there and back again.

It knows codes, reasons and metadata. It does not know who raises them, nor what a caller does about them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.outrider.v1 import model_pb2

DOMAIN = "outrider"
UNSPECIFIED = "UNSPECIFIED"

# The message travels twice, once percent-encoded, and a peer takes some 8 KB of trailing metadata in all.
_MAX_MESSAGE_CHARS = 500
_MAX_VALUE_CHARS = 200

_PREFIX = "ERROR_REASON_"
_REASONS = frozenset(value.name.removeprefix(_PREFIX) for value in model_pb2.ErrorReason.DESCRIPTOR.values)

_logger = logging.getLogger(__name__)

Servicer = TypeVar("Servicer", bound=Callable[..., Any])


class RequestError(Exception):
    """One request cannot go on; its server and every other request can.

    `reason` is a name of `ErrorReason` without its prefix; `metadata` names the field and the numbers.

    Raises:
        ValueError: `reason` is not a name of the contract.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str] | None = None):
        if reason not in _REASONS:
            raise ValueError(f"{reason!r} is not an ErrorReason of the contract: {', '.join(sorted(_REASONS))}")
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        return f"{self.code.name} ({self.reason}): {self.message}"


# ------------------------------------------------------------------------------------------------------- factories


def invalid_field(field: str, message: str, **numbers: object) -> RequestError:
    """A field is out of its range: INVALID_ARGUMENT. `numbers` are what was given and what is allowed."""
    metadata = {"field": field, **_texts(numbers)}
    text = message if field in message else f"{field}: {message}"
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", text, metadata)


def out_of_order(message: str) -> RequestError:
    """A message came before, or after, its time: INVALID_ARGUMENT."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_ORDER", message)


def wrong_base(message: str, **numbers: object) -> RequestError:
    """A round speaks of a prefix that the sequence never had: INVALID_ARGUMENT."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "WRONG_BASE", message, _texts(numbers))


def failed_precondition(reason: str, message: str, **metadata: object) -> RequestError:
    """The request is sound, but not for this server: UNKNOWN_FEATURE, PAIR_MISMATCH or NO_CHAT_TEMPLATE."""
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason, message, _texts(metadata))


def overloaded(message: str, **metadata: object) -> RequestError:
    """No room now: RESOURCE_EXHAUSTED. Worth another try later."""
    return RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", message, _texts(metadata))


def draining() -> RequestError:
    """The server finishes what it has and takes no more: UNAVAILABLE. Worth another try elsewhere."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is draining; try another one")


def unavailable(reason: str, message: str) -> RequestError:
    """Somebody who is needed does not answer: UNAVAILABLE, with NO_VERIFIER or DRAINING."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, reason, message)


def idle(message: str, **numbers: object) -> RequestError:
    """A stream stayed silent too long: DEADLINE_EXCEEDED."""
    return RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE", message, _texts(numbers))


def internal(reason: str, message: str) -> RequestError:
    """Our own fault: INTERNAL, with BAD_LOGITS or INTERNAL."""
    return RequestError(grpc.StatusCode.INTERNAL, reason, message)


def _texts(values: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


# -------------------------------------------------------------------------------------------------------- to the wire


def to_status(error: RequestError) -> grpc.Status:
    """The error as a status with its `ErrorInfo`; long texts are cut to what trailing metadata carries."""
    info = error_details_pb2.ErrorInfo(
        domain=DOMAIN,
        reason=error.reason,
        metadata={name: _cut(value, _MAX_VALUE_CHARS) for name, value in error.metadata.items()},
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(
        code=error.code.value[0],
        message=_cut(error.message, _MAX_MESSAGE_CHARS),
        details=[detail],
    )
    return rpc_status.to_status(status)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends the call with this error. Raises `grpc.aio.AbortError`, which no servicer may swallow."""
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort_with_status returned")


# ------------------------------------------------------------------------------------------------------ from the wire


def from_rpc_error(error: grpc.RpcError) -> RequestError:
    """What a failed call says, of `grpc.aio` and of the blocking API alike.

    Statuses that no server of ours made (a refused connection, a passed deadline) come back with the reason
    UNSPECIFIED; so do reasons that only a newer contract knows.
    """
    call = cast("Any", error)
    code = cast("grpc.StatusCode", call.code())
    info = _error_info(call)
    message = call.details() or code.name
    if info is None:
        return RequestError(code, UNSPECIFIED, message)
    reason = info.reason if info.reason in _REASONS else UNSPECIFIED
    return RequestError(code, reason, message, dict(info.metadata))


def _error_info(call: Any) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # a proxy rewrote the code or the message: then the details do not speak of this status
        return None
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


# ------------------------------------------------------------------------------------------------------- the one place


def guarded(method: Servicer) -> Servicer:
    """Wraps a servicer method, which is `async def` and returns, yields or writes its answers: the one place where
    exceptions become statuses.

    `RequestError` ends the call with its own code. A cancelled call passes through, and so does an abort under way.
    Anything else is logged with its trace and told to the client as INTERNAL, without its text.

    Raises:
        TypeError: the method is neither a coroutine function nor an async generator function.
    """
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                # Closed here and now, so that what the servicer frees is free when the client learns of the end.
                async with aclosing(method(self, request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await _end(context, method, error)

        return cast("Servicer", stream)
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def unary(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await method(self, request, context)
            except Exception as error:
                await _end(context, method, error)

        return cast("Servicer", unary)
    raise TypeError(f"{method.__qualname__} is neither a coroutine function nor an async generator function")


async def _end(context: grpc.aio.ServicerContext[Any, Any], method: Callable[..., Any], error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, RequestError):
        await abort(context, error)
    if isinstance(error, asyncio.InvalidStateError | grpc.aio.UsageError) and context.done():
        raise error  # the client left while we wrote to it: nobody is there to be told
    _logger.error("%s failed", method.__qualname__, exc_info=error)
    await abort(context, internal("INTERNAL", "internal error; the server's log has the rest"))
