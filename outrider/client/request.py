"""Builds a `GenerateRequest`. Refuses values that protobuf cannot hold; the service checks the rest."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from reprlib import repr as short_repr
from typing import Any, TypeAlias, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from outrider.client.audio import Array, AudioSource, features_message
from outrider.client.errors import refused
from outrider.client.events import AcceptanceRule, Drafter, SpeculationPolicy
from outrider.client.mirror import Named
from protos.outrider.v1 import draft_service_pb2


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    name: str = ""  # of the author; empty: none. Only some chat templates show it


# Plain text, or a conversation, oldest message first, as `Message` or {"role": ..., "content": ...}; or token ids.
TextOrMessages: TypeAlias = str | Sequence[Message | Mapping[str, str]]
Prompt: TypeAlias = TextOrMessages | Sequence[int]


class CommonOptions(TypedDict, total=False):
    """The options of every request. Ranges and meanings are those of the contract (`GenerateRequest`,
    `SamplingParams`). An option that is not given has its neutral value: without options the text has the target's own
    distribution.
    """

    # How much
    max_new_tokens: int
    fill_context: bool  # write until the context is full, or `max_new_tokens` if given
    min_new_tokens: int
    n: int  # independent samples
    time_limit: float  # seconds; the text ends after them
    # The distribution
    temperature: float  # 0 takes the most probable token
    top_k: int
    top_p: float
    min_p: float
    seed: int  # equal seeds give equal texts, unless a rule is given; see `rule`
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    banned_token_ids: Sequence[int]
    rule: AcceptanceRule | str  # default: `coupled` with a seed, else the service's default
    lenience: float  # below 1 is lossy
    sigmoid_scales: tuple[float, float]  # alpha and beta of the lossy rule `sigmoid`
    # The end
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # Speculation and reports
    gamma: int  # tokens of a proposal, or the most if `speculation` is not `fixed`; 0: target alone
    speculation: SpeculationPolicy | str  # chooses gamma; default: `fixed` with `gamma`, else the service's
    max_entropy: float  # nats: a proposal ends before a token whose draft distribution has more
    draft_temperature: float  # of the draft; default: the service's, else `temperature`
    tokens_per_pass: int  # of the drafter `parallel`: tokens drafted in one pass of the draft model
    outcome_cache: bool  # draft for likely verdicts ahead of time; default: the service's
    drafter: Drafter | str  # one that the service has; default: the service's
    report_rounds: bool
    report_probabilities: bool  # p and q of drafted tokens, in the reports of rounds
    logprobs: int  # log-probabilities of each token and of the N most probable ones
    prompt_logprobs: int  # the same for the tokens of the prompt
    keep_special_tokens: bool
    joined_responses: bool  # events come together, once a second and at the end; `complete` asks for it
    request_id: str
    metadata: Mapping[str, str]  # gRPC metadata of each call, such as `traceparent` and `tracestate`
    required_features: Sequence[str]
    template_arguments: Mapping[str, Any]  # variables of the chat template, for messages
    decoder_prompt_token_ids: Sequence[int]  # of an encoder–decoder model; default: the model's own
    # To continue another call
    committed_token_ids: Sequence[int]
    held_tokens: int  # of the last `Chunk`: committed tokens without delivered text
    weights_fingerprint: str
    cache_salt: str
    # Privacy of sizes and times; see docs/explanation/privacy.md
    frame_bytes: int  # every response has this size
    frame_pace: float  # seconds from one response to the next
    fixed_size_rounds: bool  # so have the messages between the services


class Options(CommonOptions, total=False):
    """`CommonOptions`, and those of speech."""

    audio: AudioSource  # in place of a prompt: a path, the bytes of a file, or an array with its `sample_rate`
    sample_rate: int
    features: Array  # in place of a prompt: the model's own log-Mel features, [mels, frames]
    language: str  # of the speech
    task: str  # `transcribe` or `translate`
    timestamps: bool


class TokenizeOptions(TypedDict, total=False):
    """The options of `tokenize`."""

    add_special_tokens: bool | None  # of a text: those that the tokenizer adds by default; default: yes
    template_arguments: Mapping[str, Any] | None  # see `CommonOptions`


Setter: TypeAlias = Callable[[draft_service_pb2.GenerateRequest, Any], None]


def build(prompt: Prompt | None, options: Mapping[str, Any]) -> draft_service_pb2.GenerateRequest:
    """Builds the request. Its `audio` is `Samples`.

    Raises:
        InvalidRequest: a value that protobuf cannot hold, for example a negative token id; with the field.
        TypeError: an unknown option.
    """
    known = Options.__annotations__.keys()
    unknown = options.keys() - known
    if unknown:
        name = min(unknown)
        near = get_close_matches(name, known, n=1)
        raise TypeError(
            f"there is no option {name}; " + (f"did you mean {near[0]}?" if near else "outrider.client.Options has all")
        )
    request = draft_service_pb2.GenerateRequest()
    inputs = {"prompt": prompt, "audio": options.get("audio"), "features": options.get("features")}
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        raise refused("prompt", f"{found}; give exactly one of prompt, audio and features")
    if prompt is not None:
        _carry(request, "prompt", prompt)
    for name, value in options.items():
        if value is not None:
            _carry(request, name, value)
    return request


def build_tokenize(prompt: TextOrMessages, options: TokenizeOptions) -> draft_service_pb2.TokenizeRequest:
    """Builds the request.

    Raises:
        InvalidRequest: a value that protobuf cannot hold.
        TypeError: an unknown option.
    """
    if unknown := options.keys() - TokenizeOptions.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)}; outrider.client.request.TokenizeOptions has all")
    found = draft_service_pb2.GenerateRequest()
    _carry(found, "prompt", prompt)
    if (arguments := options.get("template_arguments")) is not None:
        _carry(found, "template_arguments", arguments)
    if found.HasField("token_ids"):
        raise refused("prompt", f"prompt is {short_repr(prompt)}; it must be text or a list of messages")
    request = draft_service_pb2.TokenizeRequest(add_special_tokens=options.get("add_special_tokens"))
    if found.HasField("chat"):
        request.chat.CopyFrom(found.chat)
    else:
        request.text = found.text
    return request


def build_detokenize(token_ids: Sequence[int], keep_special_tokens: bool) -> draft_service_pb2.DetokenizeRequest:
    """Builds the request.

    Raises:
        InvalidRequest: a token id that protobuf cannot hold.
    """
    try:
        return draft_service_pb2.DetokenizeRequest(token_ids=token_ids, keep_special_tokens=keep_special_tokens)
    except (TypeError, ValueError) as error:
        text = f"token_ids is {short_repr(token_ids)}; it must be a list of token ids ({_TOKEN_IDS})"
        raise refused("token_ids", text) from error


def _carry(request: draft_service_pb2.GenerateRequest, name: str, value: Any) -> None:
    setter, expected, feature = _SETTERS.get(name, (partial(_set_field, name), "", ""))
    if value is False and expected == _BOOL:  # its message, and the feature, would be required for nothing
        return
    try:
        setter(request, value)
    except UnicodeEncodeError as error:  # Python reads an argument that is not UTF-8 as lone surrogates
        raise refused(name, f"{name} is {short_repr(value)}; it must be {_STRING}") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"{name} is {short_repr(value)}; it must be {expected}" if expected else str(error)
        raise refused(name, text) from error
    if feature:
        require(request, feature)


_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_TOKEN_IDS = f"integers from 0 to {2**32 - 1}"
_UINT32, _BOOL, _STRING = f"an integer from 0 to {2**32 - 1}", "True or False", "text that UTF-8 can encode"
_EXPECTED = {
    FieldDescriptor.CPPTYPE_UINT32: _UINT32,
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: _BOOL,
    FieldDescriptor.CPPTYPE_STRING: _STRING,
}

# Fields that a service needs the feature of the same name for. An older one would ignore them in silence.
_FEATURES = ("fill_context", "held_tokens", "report_probabilities")


def _set_field(name: str, request: draft_service_pb2.GenerateRequest, value: Any) -> None:
    """Sets the field of this name, in the request, its `sampling` or its `speculation`."""
    parts = (request, request.sampling, request.speculation)
    message, field = next((part, found) for part in parts if (found := part.DESCRIPTOR.fields_by_name.get(name)))
    try:
        if field.is_repeated:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        expected = _EXPECTED[field.cpp_type]
        expected = f"a list, each element {expected}" if field.is_repeated else expected
        raise ValueError(f"{name} is {short_repr(value)}; it must be {expected}") from error
    if name in _FEATURES and value:
        require(request, name)


def _set_prompt(request: draft_service_pb2.GenerateRequest, prompt: Prompt) -> None:
    items: Any = prompt
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(items, Sequence) and items and all(isinstance(item, Message | Mapping) for item in items):
        for message in items:
            request.chat.messages.append(_chat_message(message))
        if any(each.name for each in request.chat.messages):
            require(request, "message_names")
    else:
        request.token_ids.SetInParent()
        try:
            request.token_ids.ids.extend([items] if isinstance(prompt, bytes) else items)  # bytes are no token ids
        except (TypeError, ValueError) as error:
            expected = f"text, a list of token ids ({_TOKEN_IDS}) or a list of messages"
            raise ValueError(f"prompt is {short_repr(prompt)}; it must be {expected}") from error


def _chat_message(message: Any) -> draft_service_pb2.ChatMessage:
    if isinstance(message, Message):
        message = asdict(message)
    missing = {"role", "content"} - message.keys()
    if missing:
        raise ValueError(f"a message has no {' and no '.join(sorted(missing))}; give each message a role and a content")
    return draft_service_pb2.ChatMessage(
        role=message["role"], content=message["content"], name=message.get("name") or ""
    )


def _part(message: str, field: str, kind: type[Named] | None = None) -> Setter:
    """Sets a field of a message in the request, an enum of this kind or a value as it is."""

    def setter(request: draft_service_pb2.GenerateRequest, value: Any) -> None:
        setattr(getattr(request, message), field, value if kind is None else kind(value).number)

    return setter


def _seconds(path: str) -> Setter:
    """Sets a duration, at this path in the request."""
    return lambda request, value: attrgetter(path)(request).FromTimedelta(timedelta(seconds=value))


def _set_sample_rate(request: draft_service_pb2.GenerateRequest, value: int) -> None:
    raise ValueError(f"sample_rate is {value!r}; leave it out: only audio as an array needs it")


def _set_stop(request: draft_service_pb2.GenerateRequest, value: str | Sequence[str]) -> None:
    request.stop.extend([value] if isinstance(value, str) else value)


def _set_template_arguments(request: draft_service_pb2.GenerateRequest, value: Mapping[str, Any]) -> None:
    if not request.HasField("chat"):
        raise ValueError("template_arguments is given; only messages have a chat template")
    try:
        request.chat.template_arguments = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"template_arguments is {short_repr(value)}; it must be a mapping of names to values of JSON"
        raise ValueError(text) from error


def _check_metadata(request: draft_service_pb2.GenerateRequest, value: Mapping[str, str]) -> None:
    for key, text in value.items():
        is_reserved = key == "authorization" or key.startswith("grpc-") or key.endswith("-bin")
        if is_reserved or not _METADATA_KEY.fullmatch(key) or not (text.isascii() and text.isprintable()):
            raise ValueError


def _set_logit_bias(request: draft_service_pb2.GenerateRequest, value: Mapping[int, float]) -> None:
    for token_id, bias in value.items():
        request.sampling.logit_bias.add(token_id=token_id, bias=bias)


def _set_sigmoid(request: draft_service_pb2.GenerateRequest, value: tuple[float, float]) -> None:
    request.sampling.sigmoid.alpha, request.sampling.sigmoid.beta = value


def require(request: draft_service_pb2.GenerateRequest, feature: str) -> None:
    """A service without the feature then refuses the request; otherwise it would ignore the field."""
    if feature not in request.required_features:
        request.required_features.append(feature)


def _one_of(kind: type[Named]) -> str:
    return f"one of {', '.join(each.value for each in kind if each.value != 'unspecified')}"


# Of options without a field of the same name and type: the setter, the expected value (for errors without a text), and
# the feature that the service must have.
_SETTERS: dict[str, tuple[Setter, str, str]] = {
    "prompt": (_set_prompt, "", ""),
    "metadata": (  # of the call, not of the request
        _check_metadata,
        "a mapping of names (of a-z, 0-9, '_', '-' and '.'; not 'authorization', 'grpc-...' or '...-bin') to printable "
        "ASCII",
        "",
    ),
    "time_limit": (_seconds("time_limit"), "a number of seconds", ""),
    "template_arguments": (_set_template_arguments, "", "template_arguments"),
    "logit_bias": (_set_logit_bias, f"a mapping of token ids ({_TOKEN_IDS}) to numbers", ""),
    "rule": (_part("sampling", "rule", AcceptanceRule), _one_of(AcceptanceRule), ""),
    "sigmoid_scales": (_set_sigmoid, "a pair of numbers, alpha and beta", ""),
    "stop": (_set_stop, "text or a list of texts", ""),
    "speculation": (_part("speculation", "policy", SpeculationPolicy), _one_of(SpeculationPolicy), ""),
    "drafter": (_part("speculation", "drafter", Drafter), _one_of(Drafter), ""),
    "logprobs": (_part("logprobs", "top_n"), _UINT32, ""),
    "prompt_logprobs": (_part("prompt_logprobs", "top_n"), _UINT32, "prompt_logprobs"),
    "frame_bytes": (_part("emission", "frame_bytes"), _UINT32, "emission"),
    "frame_pace": (_seconds("emission.pace"), "a number of seconds", "emission"),
    "fixed_size_rounds": (_part("speculation", "fixed_size"), _BOOL, "fixed_rounds"),
    "audio": (lambda request, value: request.audio.CopyFrom(value.to_message()), "", "encoder"),
    "sample_rate": (_set_sample_rate, "", ""),
    "features": (lambda request, value: request.features.CopyFrom(features_message(value)), "", "encoder"),
    "decoder_prompt_token_ids": (
        lambda request, value: request.decoder_prompt_token_ids.extend(value),
        f"a list of token ids ({_TOKEN_IDS})",
        "encoder",
    ),
    "language": (_part("transcription", "language"), _STRING, "encoder"),
    "task": (_part("transcription", "task"), _STRING, "encoder"),
    "timestamps": (_part("transcription", "timestamps"), _BOOL, "encoder"),
}
