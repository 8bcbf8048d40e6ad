"""Requests of vLLM's gRPC contract as requests of ours, and the names of fields in errors the other way.

A field that we cannot carry is refused by name.
"""

import re
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.rpc.errors import RequestError, invalid_field, outside
from outrider.service.sampling import MAX_TOP_LOGPROBS
from protos.outrider.v1 import draft_service_pb2, sampling_pb2

_OF_REQUEST = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
_OF_TOKENIZED = frozenset({"input_ids", "original_text"})
_OF_SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "max_tokens", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos", "n", "logprobs",
        "prompt_logprobs", "seed", "logit_bias",
        # They change text only, and responses have tokens.
        "spaces_between_special_tokens", "include_stop_str_in_output",
    }
)  # fmt: skip

_NAMES = {
    "max_new_tokens": "sampling_params.max_tokens",
    "min_new_tokens": "sampling_params.min_tokens",
    "logprobs.top_n": "sampling_params.logprobs",
    "prompt_logprobs": "sampling_params.prompt_logprobs",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "token_ids.ids": "tokenized.input_ids",
    "sampling.": "sampling_params.",
    "n": "sampling_params.n",
    "prompt": "tokenized.input_ids",
    "stop": "sampling_params.stop",
}
"""Fields of our requests, with their names in vLLM's."""
_WORDS = ("n", "prompt", "stop")  # texts have these as words: they are names at the beginning only
_OUR_NAME = re.compile(
    rf"(?<![\w.])(?:{'|'.join(re.escape(name) for name in _NAMES if name not in _WORDS)})|^(?:{'|'.join(_WORDS)})(?!\w)"
)


def translated(request: Any) -> draft_service_pb2.GenerateRequest:
    """Our request for a `vllm.GenerateRequest`. It may still be out of our limits.

    Raises:
        RequestError: INVALID_ARGUMENT: a field that we cannot carry is set.
    """
    _check_fields(request, "", _OF_REQUEST)
    _check_fields(request.tokenized, "tokenized.", _OF_TOKENIZED)
    params = request.sampling_params
    _check_fields(params, "sampling_params.", _OF_SAMPLING)
    ours = draft_service_pb2.GenerateRequest(
        request_id=request.request_id,
        fill_context=True,  # without a maximum, or with a larger one, vLLM writes until the context ends
        sampling=_sampling(params),
        min_new_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        keep_special_tokens=not params.skip_special_tokens,
    )
    match request.WhichOneof("input"):
        case "tokenized":
            ours.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            ours.text = request.text
        case _:
            raise invalid_field("tokenized", "tokenized is not set, nor is text; set one of them")
    if params.HasField("max_tokens"):
        ours.max_new_tokens = params.max_tokens
    if params.n:  # 0 is unset
        ours.n = params.n
    if params.HasField("logprobs"):
        ours.logprobs.top_n = _top_n("sampling_params.logprobs", params.logprobs)
    if params.HasField("prompt_logprobs"):
        ours.prompt_logprobs.top_n = _top_n("sampling_params.prompt_logprobs", params.prompt_logprobs)
    return ours


def _check_fields(message: Message, path: str, carried: frozenset[str]) -> None:
    """Refuses fields that we cannot carry, and those that only a newer contract has."""
    for descriptor, value in message.ListFields():
        name = path + descriptor.name
        is_only_rank = descriptor.name == "data_parallel_rank" and not value
        if descriptor.name not in carried and not is_only_rank:
            raise invalid_field(name, f"{name} is set, and Outrider does not support it: unset it")
    unknown_fields: Any = UnknownFieldSet(message)
    for unknown in unknown_fields:
        kind, number = message.DESCRIPTOR.full_name, unknown.field_number
        raise invalid_field(
            path.rstrip(".") or "request",
            f"field number {number} of {kind} is set, and this service does not know it: unset it",
            number=number,
        )


def _sampling(params: Any) -> sampling_pb2.SamplingParams:
    ours = sampling_pb2.SamplingParams(
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    if params.HasField("temperature"):
        ours.temperature = params.temperature
    if params.top_p:  # 0 is unset, here and in the next one
        ours.top_p = params.top_p
    if params.repetition_penalty:
        ours.repetition_penalty = params.repetition_penalty
    if params.HasField("seed"):
        ours.seed = params.seed % 2**64  # theirs may be negative
    for token, bias in sorted(params.logit_bias.items()):
        if token < 0:
            raise invalid_field(
                "sampling_params.logit_bias",
                f"sampling_params.logit_bias has the token {token}; token ids are at least 0",
                given=token,
            )
        ours.logit_bias.add(token_id=token, bias=bias)
    return ours


def _top_n(name: str, given: int) -> int:
    if not 0 <= given <= MAX_TOP_LOGPROBS:  # -1 stands for all tokens
        raise outside(name, given, 0, MAX_TOP_LOGPROBS)
    return given


def renamed(error: RequestError) -> RequestError:
    """The error with the names of fields that vLLM's requests have."""

    def theirs(text: str) -> str:
        return _OUR_NAME.sub(lambda found: _NAMES[found[0]], text)

    metadata = {**error.metadata, "field": theirs(error.metadata["field"])} if "field" in error.metadata else {}
    return RequestError(
        error.code, error.reason, theirs(error.message), metadata or error.metadata, retry_after=error.retry_after
    )
