"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}, with the HTTP status of a gRPC status.

What a caller can change is passed on, in the names of HTTP fields. Of all other failures the caller learns the kind;
addresses, paths and causes go to the log.
"""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import grpc
from starlette.responses import Response

from outrider.client import OutriderError
from outrider.rpc.errors import UNSPECIFIED

_logger = logging.getLogger("outrider.http")

# Seconds, where no service named any.
RETRY_AFTER_S = 1

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request failed. `param` is the field, `code` a name for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body of the answer, and the data of an event in a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


HIDES_SIZES = "this server hides the sizes of its messages (--frame-bytes, --frame-pace)"


def unsupported(param: str, message: str) -> ApiError:
    """A field or a value that this server does not have."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def invalid(param: str | None, message: str) -> ApiError:
    """A value out of its range."""
    return ApiError(400, message, param=param, code="invalid_value")


# ------------------------------------------------------------------------------------------------------- of services

# Statuses whose message is for the operator, with the text for the caller.
_HIDDEN = {
    grpc.StatusCode.UNAVAILABLE: (503, "no draft service is available; try again later"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "the request took longer than the server's time limit; ask for less"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "the draft service does not have this call; it is of an older version"),
    grpc.StatusCode.UNAUTHENTICATED: (502, "the draft service refused this server's credentials"),
    grpc.StatusCode.PERMISSION_DENIED: (502, "the draft service refused this server's credentials"),
}
# Fields of the contract under the names of HTTP, in messages and as `param`.
_NAMES = {
    r"sampling\.(\w+)": r"\1",
    r"speculation\.(\w+)": r"\1",
    r"chat\.messages": "messages",
    r"(chat\.)?template_arguments": "chat_template_kwargs",
    r"token_ids\.ids": "prompt",
    r"min_new_tokens": "min_tokens",
}
# Fields of prompts: with a maximum, the error is about their length.
_PROMPTS = frozenset({"prompt", "text", "chat", "chat.messages", "token_ids.ids"})
_TOO_LONG = "maximum context length"


def too_long(param: str, tokens: int, most: int) -> ApiError:
    """A prompt has more tokens than the context."""
    text = f"{param} has {tokens} tokens; at most {most}, this model's {_TOO_LONG}"
    return ApiError(400, text, param=param, code="context_length_exceeded")


def of_service(
    error: OutriderError, *, names: Mapping[str, str] | None = None, models: Mapping[str, str] | None = None
) -> ApiError:
    """The error of a call as HTTP has it.

    Args:
        error: of the client.
        names: further fields of the contract, with their names in this request.
        models: names of models that may be paths, with those to show instead.
    """
    code = error.code
    if code not in _SHOWN:
        status, message = _HIDDEN.get(code, (500, "internal error; the server's log has the cause"))
        _logger.warning("a request failed with %d: %s", status, error)
        headers = {"retry-after": _seconds(error.retry_after)} if status == 503 else {}
        return ApiError(status, message, code=_code(error), headers=headers)
    # A name that is a common word is a field at the beginning alone.
    own = {re.escape(name) if re.search(r"[._]", name) else f"^{name}": shown for name, shown in (names or {}).items()}
    table = _NAMES | own
    message = _renamed(error.message, table)
    for path, shown in (models or {}).items():
        message = message.replace(path, shown)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.is_transient:
        # The client has added its tries, with the addresses of services.
        message = message.partition("; tries at ")[0]
        return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": _seconds(error.retry_after)})
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.reason == UNSPECIFIED:  # of gRPC itself
        _logger.warning("a request failed with 413: %s", error)
        text = "the request is larger than a message between the services may be; shorten it"
        return ApiError(413, text, code="request_too_large")
    if error.reason == "PAIR_MISMATCH":
        _logger.warning("a request failed with 503: %s", error)
        return ApiError(503, "draft and target do not match at the moment; try again later", code=_code(error))
    param = None if error.field is None else _renamed(error.field, table).partition("[")[0]
    if "max_sequence_tokens" in error.metadata or (error.field in _PROMPTS and "maximum" in error.metadata):
        if _TOO_LONG not in message:  # libraries look for these words, or for this code
            message = f"{message} ({_TOO_LONG} is exceeded)"
        return ApiError(400, message, param=param, code="context_length_exceeded")
    return ApiError(400, message, param=param, code=_code(error))


_SHOWN = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
)


def _renamed(text: str, table: Mapping[str, str]) -> str:
    for pattern, shown in table.items():
        text = re.sub(rf"(?<![\w.]){pattern}(?!\w)", shown, text)
    return text


def _code(error: OutriderError) -> str:
    return error.code.name.lower() if error.reason == UNSPECIFIED else error.reason.lower()


def _seconds(retry_after: float | None) -> str:
    return str(max(RETRY_AFTER_S, math.ceil(retry_after or 0)))


# ----------------------------------------------------------------------------------------------- of pydantic's errors


# Characters of a value or of a field's name that a message shows.
_MOST_SHOWN = 60


def of_validation(problem: Mapping[str, Any], known: Collection[str]) -> ApiError:
    """A problem of a body. An unknown field is shown with the nearest of the `known` ones."""
    param = _path(problem["loc"])
    match problem["type"]:
        case "missing":
            return ApiError(400, f"{param} is missing; it is required", param=param, code="missing_required_parameter")
        case "extra_forbidden":
            *place, name = problem["loc"]
            param = f"{_path(place)}.{_cut(name)}" if place else param
            near = () if place else get_close_matches(param, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return unsupported(param, f"there is no field {param}{hint}")
        case "value_error":  # of our own, with the value
            return invalid(param, str(problem["msg"]).removeprefix("Value error, "))
    expected = re.sub(r"^\w+ should ", "", str(problem["msg"]))  # "Input should", "List should"
    return invalid(param, f"{param} is {_as_json(problem['input'])}; it must {expected}")


def _as_json(value: Any) -> str:
    """The beginning of a value's JSON; the rest is not encoded."""
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _MOST_SHOWN:
            return _cut(text)
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content`; without the names of a union's branches, which pydantic adds."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = _cut(part)
        elif part.isidentifier() and part not in ("str", "int", "float", "list", "bool", "dict"):
            path += f".{_cut(part)}"
    return path
