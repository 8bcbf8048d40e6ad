"""Errors on the wire: a status code with a `google.rpc.ErrorInfo`, and a `RetryInfo` if a retry may help."""

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import unquote

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
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

Servicer = TypeVar("Servicer", bound=Callable[..., Awaitable[Any]])
Detail = TypeVar("Detail", bound=Message)


class ConnectionFailure(Enum):
    """Why a connection failed."""

    REFUSED = "nothing listens at {address} (connection refused)"
    NO_SOCKET = "there is no socket {address}"
    NO_TLS = "the service at {address} does not speak TLS, and this call does"
    UNTRUSTED = "the certificate of the service at {address} is not from a trusted CA ({text})"
    OTHER_NAME = "the certificate of the service at {address} does not have the name that was called"
    CLOSED = "the service at {address} closed the connection; it may require TLS, or a client certificate"


class RequestError(Exception):
    """One request cannot continue; its server and all other requests can.

    `reason` is a name of `ErrorReason` without its prefix; `metadata` names the field and the numbers; `retry_after` is
    seconds until a retry may succeed; None if unknown. `connection` is why a connection failed, if gRPC tells.

    Raises:
        ValueError: `reason` is not a name of the contract.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        metadata: Mapping[str, object] | None = None,
        *,
        retry_after: float | None = None,
    ):
        if reason not in _REASONS:
            raise ValueError(f"{reason!r} is not an ErrorReason of the contract: {', '.join(sorted(_REASONS))}")
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = {name: str(value) for name, value in (metadata or {}).items()}
        self.retry_after = retry_after
        self.connection: ConnectionFailure | None = None

    def __str__(self) -> str:
        return f"{self.code.name} ({self.reason}): {self.message}"


# ------------------------------------------------------------------------------------------------------- factories


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages: `1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def invalid_field(field: str, message: str, **numbers: object) -> RequestError:
    """A field is out of its range: INVALID_ARGUMENT. `numbers` are the given value and the limits."""
    text = message if field in message else f"{field}: {message}"
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", text, {"field": field, **numbers})


def above_limit(field: str, given: int, most: int, advice: str = "", *, noun: str = "") -> RequestError:
    """A number is too large, or with `noun` a count of these: INVALID_ARGUMENT. `advice` ends the message."""
    text = f"has {counted(given, noun)}" if noun else f"is {given}"
    return invalid_field(field, f"{field} {text}; at most {most}{advice}", given=given, maximum=most)


def outside(field: str, given: int, least: int, most: int, advice: str = "", *, noun: str = "") -> RequestError:
    """As `above_limit`, for a number that must be `least` to `most`."""
    text = f"has {counted(given, noun)}; it must have" if noun else f"is {given}; it must be"
    return invalid_field(field, f"{field} {text} {least} to {most}{advice}", given=given, minimum=least, maximum=most)


def out_of_order(message: str) -> RequestError:
    """A message in the wrong order: INVALID_ARGUMENT."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_ORDER", message)


def wrong_base(message: str, **numbers: object) -> RequestError:
    """A round refers to a prefix that the sequence never had: INVALID_ARGUMENT."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "WRONG_BASE", message, numbers)


def failed_precondition(reason: str, message: str, **metadata: object) -> RequestError:
    """The request is valid, but this server cannot serve it: UNKNOWN_FEATURE, PAIR_MISMATCH or NO_CHAT_TEMPLATE."""
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata)


def overloaded(message: str, *, retry_after: float | None = None, **metadata: object) -> RequestError:
    """No capacity now: RESOURCE_EXHAUSTED. Retry later, in `retry_after` seconds if given."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return RequestError(code, "OVERLOADED", message, metadata, retry_after=retry_after)


def unauthenticated(message: str) -> RequestError:
    """The caller did not authenticate: UNAUTHENTICATED."""
    return RequestError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", message)


def permission_denied(message: str, **metadata: object) -> RequestError:
    """The caller is authenticated, and not allowed: PERMISSION_DENIED."""
    return RequestError(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", message, metadata)


def draining() -> RequestError:
    """The server finishes its calls and accepts no new ones: UNAVAILABLE. Retry at another server."""
    return RequestError(
        grpc.StatusCode.UNAVAILABLE, "DRAINING", "the service is shutting down; call another one, or try again later"
    )


def unavailable(reason: str, message: str) -> RequestError:
    """The service cannot serve now, and another one may: UNAVAILABLE."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, reason, message)


def idle(message: str, **numbers: object) -> RequestError:
    """A stream was idle for too long: DEADLINE_EXCEEDED."""
    return RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "IDLE", message, numbers)


def yielded(message: str, *, retry_after: float, **numbers: object) -> RequestError:
    """A stream was idle while others waited in the queue: RESOURCE_EXHAUSTED. Retry later."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return RequestError(code, "IDLE", message, numbers, retry_after=retry_after)


def internal(reason: str, message: str) -> RequestError:
    """The server failed: INTERNAL, with BAD_LOGITS, STEP_FAILED or INTERNAL."""
    return RequestError(grpc.StatusCode.INTERNAL, reason, message)


# -------------------------------------------------------------------------------------------------------- to the wire


def to_status(error: RequestError) -> grpc.Status:
    """The error as a status with its details; long texts are cut to fit into trailing metadata."""
    info = error_details_pb2.ErrorInfo(
        domain=DOMAIN,
        reason=error.reason,
        metadata={name: _cut(value, _MAX_VALUE_CHARS) for name, value in error.metadata.items()},
    )
    details = [_packed(info)]
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after))
        details.append(_packed(retry))
    status = status_pb2.Status(
        code=error.code.value[0], message=_cut(error.message, _MAX_MESSAGE_CHARS), details=details
    )
    return rpc_status.to_status(status)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends the call with this error. Raises `grpc.aio.AbortError`, which no servicer may swallow.

    Raises `asyncio.CancelledError` if the call ends before its status is sent: gRPC would log any other error as a
    failure of the server.
    """
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort_with_status returned")


async def write(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Writes a message to the client. Raises `asyncio.CancelledError` if the call has ended, as `abort` does."""
    try:
        await context.write(message)
    except (grpc.aio.InternalError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise asyncio.CancelledError from error


# ------------------------------------------------------------------------------------------------------ from the wire


def from_rpc_error(error: grpc.RpcError) -> RequestError:
    """The error of a failed call, of `grpc.aio` or of the blocking API.

    The reason is UNSPECIFIED if the status is not from an Outrider server (a refused connection, a passed deadline), or
    if only a newer contract has it.
    """
    call = cast("Any", error)
    code = cast("grpc.StatusCode", call.code())
    message, connection = _readable(call.details() or code.name)
    details = _details(call)
    retry = _find(details, error_details_pb2.RetryInfo)
    retry_after = None if retry is None else retry.retry_delay.ToTimedelta().total_seconds()
    info = _find(details, error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        failure = RequestError(code, UNSPECIFIED, message, retry_after=retry_after)
        failure.connection = connection
        return failure
    reason = info.reason if info.reason in _REASONS else UNSPECIFIED
    return RequestError(code, reason, message, info.metadata, retry_after=retry_after)


_NOT_CONNECTED = re.compile(r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:)?(\S+): (.*)", re.DOTALL)
_NOT_RESOLVED = re.compile(r"errors resolving (\S+): .*?([^:\[\]]+)\]?$", re.DOTALL)
_CONNECTION_FAILURES = {
    "Connection refused": ConnectionFailure.REFUSED,
    "No such file or directory": ConnectionFailure.NO_SOCKET,
    "WRONG_VERSION_NUMBER": ConnectionFailure.NO_TLS,
    "CERTIFICATE_VERIFY_FAILED": ConnectionFailure.UNTRUSTED,
    "Hostname Verification Check failed": ConnectionFailure.OTHER_NAME,
    "Socket closed": ConnectionFailure.CLOSED,
}
"""By a part of gRPC's text."""


def _readable(text: str) -> tuple[str, ConnectionFailure | None]:
    """The text of a failed connection in plain words, where the cause is a frequent one."""
    if found := _NOT_RESOLVED.match(text):
        return f"cannot resolve the host of {found[1]}: {found[2].strip()}", None
    if found := _NOT_CONNECTED.match(text):
        for part, failure in _CONNECTION_FAILURES.items():
            if part in found[2]:
                why = found[2].removesuffix(": OK").rpartition(": ")[2]
                return failure.value.format(address=unquote(found[1]), text=why), failure
    return text, None


def _details(call: Any) -> Sequence[any_pb2.Any]:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # a proxy rewrote the code or the message: the details belong to another status
        return ()
    return () if status is None else status.details


def _find(details: Sequence[any_pb2.Any], kind: type[Detail]) -> Detail | None:
    found = kind()
    for detail in details:
        if detail.Unpack(found):  # False if it is of another type
            return found
    return None


# The details of a call in `grpc.aio` after a write that met its end. They replace those of the call's own status: for a
# moment if that had not arrived, and for good if it had.
_WRITE_FAILED = "Internal error from Core"
# How often, and how far apart, to check for a status that has not arrived.
_CHECKS, _SECONDS_PER_CHECK = 50, 0.01


class Ending:
    """Keeps the status of a call when it ends. Make it before the first write."""

    def __init__(self, call: Any) -> None:
        """`call` is a call of `grpc.aio`, of any kind."""
        self._call = call
        self._noted: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    async def status(self) -> grpc.aio.AioRpcError:
        """The status of a call that has ended, or is about to: waits for it. It may be OK."""
        for _ in range(_CHECKS):
            if self._noted is not None:
                return self._noted
            if (details := await self._call.details()) != _WRITE_FAILED:
                break
            await asyncio.sleep(_SECONDS_PER_CHECK)
        details = await self._call.details()
        return _error(await self._call.code(), await self._call.trailing_metadata(), details)

    def _note(self, call: Any) -> None:
        """Called while the status is being set: a moment later a failed write may have replaced it."""
        if self._noted is not None:
            return
        code, details, trailing = (_at_once(read()) for read in (call.code, call.details, call.trailing_metadata))
        if code is not None and trailing is not None and details != _WRITE_FAILED:
            self._noted = _error(code, trailing, details)


def _error(code: grpc.StatusCode, trailing: grpc.aio.Metadata, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; None if it would have to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    return None


# ------------------------------------------------------------------------------------------------------- statuses


def guarded(method: Servicer) -> Servicer:
    """Wraps a servicer method, which returns its response or writes its responses. Exceptions become statuses here, and
    nowhere else.

    `RequestError` ends the call with its own code. A cancelled call passes through, and so does an abort under way.
    Anything else is logged with its trace; the client gets INTERNAL without its text.
    """

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except RequestError as error:
            # gRPC keeps the abort and its frames in a cycle until the next garbage collection: not the request too.
            error.__traceback__ = None
            del request
            await abort(context, error)
        except Exception as error:
            _logger.error("%s failed", method.__qualname__, exc_info=error)
            await abort(context, internal("INTERNAL", "internal error; the service's log has the cause"))

    return cast("Servicer", call)


CUT = "the service ends the call"
"""The argument of the `CancelledError` of a call that the service ends with UNAVAILABLE."""


@contextmanager
def outcome(record: Callable[[str], None]) -> Iterator[None]:
    """Calls `record` with the status of a call when the block ends: OK, CANCELLED by the client, or of an error."""
    status = "CANCELLED"
    try:
        yield
        status = "OK"
    except asyncio.CancelledError as error:
        if CUT in error.args:
            status = "UNAVAILABLE"
        raise
    except Exception as error:
        status = error.code.name if isinstance(error, RequestError) else "INTERNAL"
        raise
    finally:
        record(status)
