"""The exceptions of calls."""

import grpc

from outrider.rpc.errors import UNSPECIFIED, ConnectionFailure, RequestError, from_rpc_error, invalid_field
from outrider.rpc.tls import speaks_tls


class OutriderError(Exception):
    """A request failed.

    Attributes:
        code: gRPC status code.
        reason: a name of `ErrorReason` without its prefix; UNSPECIFIED if the status is not from an Outrider server.
        metadata: the numbers of the message; `field` is the field that they belong to, or None.
        retry_after: seconds until a retry may succeed; None if unknown.
        is_wrong_transport: whether one side speaks TLS and the other plaintext, so that no retry can help.
        tries: attempts at each address, after the client's last one.
        delivered_tokens: tokens delivered before the failure.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str,
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.is_wrong_transport = False
        self.tries: dict[str, int] = {}
        self.delivered_tokens = 0

    @property
    def is_transient(self) -> bool:
        """Whether a retry may help, here or elsewhere: the service is unreachable, drains, or is full."""
        if self.code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC itself uses this code for messages over the limit
            return self.reason in ("OVERLOADED", "IDLE")
        return self.code is grpc.StatusCode.UNAVAILABLE

    @property
    def field(self) -> str | None:
        return self.metadata.get("field")

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidRequest(OutriderError):
    """The request is invalid: INVALID_ARGUMENT. `field` is the field."""


class FailedPrecondition(OutriderError):
    """The request is valid, but this pair cannot serve it: FAILED_PRECONDITION."""


class PairMismatch(FailedPrecondition):
    """Draft and target have different vocabularies, or a resumed request met other weights."""


class Overloaded(OutriderError):
    """The service is full, or this client is above its limit, also after retries: RESOURCE_EXHAUSTED."""


class Unauthenticated(OutriderError):
    """The call has no valid token, or the client no certificate: UNAUTHENTICATED."""


class PermissionDenied(OutriderError):
    """The client is authenticated, and not allowed: PERMISSION_DENIED."""


class Unavailable(OutriderError):
    """No server answers, it drains, or no verifier is reachable, also after retries: UNAVAILABLE."""


class DeadlineExceeded(OutriderError):
    """The call's `timeout` passed: DEADLINE_EXCEEDED."""


class Internal(OutriderError):
    """The server failed: INTERNAL. Its log has the traceback."""


_BY_CODE: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNKNOWN: Internal,
}


def typed(error: RequestError, timeout: float | None = None) -> OutriderError:
    """The error as the subclass of its code; `OutriderError` for other codes. `timeout` of the call, in seconds, is for
    the message.
    """
    kind = PairMismatch if error.reason == "PAIR_MISMATCH" else _BY_CODE.get(error.code, OutriderError)
    message = error.message
    if kind is DeadlineExceeded and error.reason == UNSPECIFIED and timeout is not None:
        message = f"the call did not end within its timeout of {timeout:g} s; raise it, or set time_limit"
    return kind(message, code=error.code, reason=error.reason, metadata=error.metadata, retry_after=error.retry_after)


def refused(field: str, message: str) -> OutriderError:
    """An `InvalidRequest` of the client itself."""
    return typed(invalid_field(field, message))


async def explained(error: grpc.RpcError, address: str, timeout: float | None, *, uses_tls: bool) -> OutriderError:
    """`typed`, and advice if TLS is why the connection failed."""
    found = from_rpc_error(error)
    failure, connection = typed(found, timeout), found.connection
    if uses_tls and connection is ConnectionFailure.NO_TLS:
        failure.is_wrong_transport = True
        failure.message += "; leave out --tls and --tls-ca (in Python, tls=TLS(...))"
    elif connection is ConnectionFailure.UNTRUSTED:
        failure.message += "; check --tls-ca (in Python, TLS(ca=...))"
    elif connection is ConnectionFailure.OTHER_NAME:
        failure.message += "; give --tls-name (in Python, TLS(name=...))"
    elif not uses_tls and connection is ConnectionFailure.CLOSED and await speaks_tls(address):
        failure.is_wrong_transport = True
        failure.message = f"the service at {address} requires TLS; give --tls-ca or --tls (in Python, tls=TLS(...))"
    return failure
