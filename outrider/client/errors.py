"""What a call can raise."""

from __future__ import annotations

import grpc

from outrider.rpc.errors import UNSPECIFIED, RequestError, from_rpc_error


class OutriderError(Exception):
    """A request failed.

    `code` is the gRPC status code; `reason` a name of `ErrorReason` without its prefix (UNSPECIFIED where no server of
    ours spoke); `metadata` holds the numbers, and `field` the field they belong to, or None. `retry_after` is when the
    server thinks another try worth it, in seconds; None where it did not say. `tries` has how often each address was
    called, where the client has given up or the time was over, and `delivered_tokens` what had come by then.
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
        self.tries: dict[str, int] = {}
        self.delivered_tokens = 0

    @property
    def is_passing(self) -> bool:
        """Whether another try may help: the service is away, drains, or has no room now."""
        if self.code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # not where a message is too large, which gRPC says so too
            return self.reason in ("OVERLOADED", "IDLE")
        return self.code is grpc.StatusCode.UNAVAILABLE

    @property
    def field(self) -> str | None:
        return self.metadata.get("field")

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidRequest(OutriderError):
    """The request is wrong for any service: INVALID_ARGUMENT."""


class FailedPrecondition(OutriderError):
    """The request is sound, but this pair cannot serve it: FAILED_PRECONDITION."""


class PairMismatch(FailedPrecondition):
    """Draft and target share no vocabulary, or a resumed request met other weights."""


class Overloaded(OutriderError):
    """No room now, or more asked for than this client may, also after retries: RESOURCE_EXHAUSTED."""


class Unauthenticated(OutriderError):
    """The call carried no token that the server takes, or the client showed no certificate: UNAUTHENTICATED."""


class PermissionDenied(OutriderError):
    """The server knows who calls, and does not admit it: PERMISSION_DENIED."""


class Unavailable(OutriderError):
    """No server answers, it drains, or its verifier is away, also after retries: UNAVAILABLE."""


class DeadlineExceeded(OutriderError):
    """The call's `timeout` passed: DEADLINE_EXCEEDED."""


class Internal(OutriderError):
    """The server failed: INTERNAL. Its log has the rest."""


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


def typed(error: grpc.RpcError | RequestError, timeout: float | None = None) -> OutriderError:
    """The error of its type; codes that have none of their own come as `OutriderError` itself.

    `timeout` is the call's, in seconds: where it passed, gRPC's own text does not say what it was.
    """
    found = error if isinstance(error, RequestError) else from_rpc_error(error)
    kind = _BY_CODE.get(found.code, OutriderError)
    if found.reason == "PAIR_MISMATCH":
        kind = PairMismatch
    message = found.message
    if kind is DeadlineExceeded and found.reason == UNSPECIFIED and timeout is not None:
        message = f"the call did not end within its timeout of {timeout:g} s"
    return kind(message, code=found.code, reason=found.reason, metadata=found.metadata, retry_after=found.retry_after)
