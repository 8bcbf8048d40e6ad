"""Bodies of requests: their fields, their checks, and the options of a call that they ask for.

Ranges that depend on the model are left to the services. A field that OpenAI or vLLM has and that this server does not
carry out is refused by name, unless its value asks for nothing: `tools: []`, `response_format: {"type": "text"}`.
"""

import json
from reprlib import repr as short_repr
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from outrider.client import Message
from outrider.http.errors import ApiError, invalid, of_validation, too_long, unsupported
from outrider.seeds import derive_seed

Prompt: TypeAlias = str | list[int]

# Checked up to the first wrong element: an error of each would take minutes for a large body.
_Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
_TokenIds: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
_Parts: TypeAlias = Annotated[list[dict[str, Any]], Field(fail_fast=True)]

MOST_TOP_LOGPROBS = 20
# Messages and their parts. Each takes 10 µs, in which no other request is served; a body may hold 600,000.
_MOST_MESSAGES = 10_000
_MOST_BIASES = 1024  # as the contract has it
_MOST_DIGITS = 20  # of a token id; Python refuses to read thousands

Neutral: TypeAlias = dict[str, tuple[Any, ...]]
"""The values of fields that ask for nothing; null is always one."""

_ANY = object()  # whatever the value is, the text stays the same
_NEUTRAL: Neutral = {
    # OpenAI
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": (_ANY,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (_ANY,),
    "prediction": (),
    "prompt_cache_key": (_ANY,),
    "prompt_cache_options": (_ANY,),
    "prompt_cache_retention": (_ANY,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (_ANY,),
    "service_tier": ("auto", "default"),
    "store": (_ANY,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": (_ANY,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "include_reasoning": (_ANY,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_REASONS = {
    "chat_template": "the template is the model's own",
    "tools": "this server calls no tools",
    "tool_choice": "this server calls no tools",
    "response_format": "this server does not constrain the text",
    "structured_outputs": "this server does not constrain the text",
}


class Body(BaseModel):
    """A body, or an object in one: without unknown fields, and without values of other types.

    Attributes:
        neutral: of fields that it does not have.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, value: Any) -> Any:
        """Drops unknown fields but the first, of which alone an error is shown: pydantic makes one of each. Drops null,
        which stands for a missing field.
        """
        if not isinstance(value, dict):
            return value
        known = cls.model_fields.keys()
        given = {name: each for name, each in value.items() if each is not None}
        unknown = next((name for name in given if name not in known), None)
        return {name: each for name, each in given.items() if name in known or name == unknown}


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


# Fields that are options of the client, with the same values.
_AS_GIVEN = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "stop_token_ids", "ignore_eos", "cache_salt",
)  # fmt: skip


class _TextRequest(Body):
    """What both forms of a request for text have."""

    neutral: ClassVar[Neutral] = _NEUTRAL

    model: str | None = None
    n: int = Field(1, ge=1, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | _Texts | None = None
    stop_token_ids: _TokenIds | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None

    @field_validator("logit_bias", mode="wrap")
    @classmethod
    def _token_ids(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Checks up to the first wrong entry, as for lists."""
        if isinstance(value, dict) and len(value) > _MOST_BIASES:
            raise ValueError(f"logit_bias has {len(value)} entries; at most {_MOST_BIASES}")
        for key, bias in value.items() if isinstance(value, dict) else ():
            if type(bias) not in (int, float) or not abs(bias) < 2**64:
                check({key: bias})
            if not (key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS):
                raise ValueError(f"logit_bias has the key {short_repr(key)}; keys are token ids, as text")
        return check(value)

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many alternatives of each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def seeds(self) -> list[dict[str, int]]:
        """The option `seed` of each of the `n` samples; equal to those of one call with `n`."""
        if self.seed is None:
            return [{}] * self.n
        return [{"seed": derive_seed(self.seed % 2**64, i)} for i in range(self.n)]

    def options(self) -> dict[str, Any]:
        """The options of each sample, without its seed and the number of tokens."""
        found = {name: getattr(self, name) for name in _AS_GIVEN} | {
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "logit_bias": {int(key): bias for key, bias in (self.logit_bias or {}).items()} or None,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "min_new_tokens": self.min_tokens,
            "keep_special_tokens": not self.skip_special_tokens,
            "logprobs": self.top_logprobs_asked,
        }
        return {name: value for name, value in found.items() if value is not None}

    def check(self) -> None:
        """Checks fields that depend on others.

        Raises:
            ApiError: one does not fit the others.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is set; it needs stream: true")


class CompletionRequest(_TextRequest):
    """Body of /v1/completions."""

    neutral: ClassVar[Neutral] = _NEUTRAL | {"add_special_tokens": (True,)}

    prompt: Any
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=0, lt=2**31)

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs

    def prompts(self, *, most: int, longest: int) -> list[Prompt]:
        """The prompts: one text, one list of token ids, or several of one kind.

        Args:
            most: prompts of a request.
            longest: tokens of a prompt.

        Raises:
            ApiError: `prompt` is none of these, or has more. Long lists are not read: that would hold up all requests.
        """
        value = self.prompt
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if type(value[0]) is not int and len(value) > most:
                raise invalid("prompt", f"prompt has {len(value)} prompts; at most {most} in one request")
            for each in [value] if type(value[0]) is int else value:
                if isinstance(each, list) and len(each) > longest:
                    raise too_long("prompt", len(each), longest)
            if all(isinstance(each, str) for each in value):
                return value
            if _are_token_ids(value):
                return [value]
            if all(isinstance(each, list) and each and _are_token_ids(each) for each in value):
                return value
        expected = "text, a list of texts, a list of token ids, or a list of such lists"
        raise invalid("prompt", f"prompt is {short_repr(value)}; it must be {expected}, none of them empty")

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", f"best_of is {self.best_of} and n is {self.n}; leave best_of out")
        if not self.max_tokens and not self.echo:
            raise invalid("max_tokens", "max_tokens is 0; it must be at least 1, unless echo is true")


class ChatMessage(Body):
    """One message of a conversation."""

    neutral: ClassVar[Neutral] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning": (),
        "reasoning_content": (),
        "refusal": (),
        "tool_call_id": (),
        "tool_calls": ([],),
    }

    role: str = Field(min_length=1)
    content: str | _Parts
    name: str | None = None

    def message(self, number: int) -> Message:
        """The message with its parts as one text.

        Raises:
            ApiError: a part is not text.
        """
        if isinstance(self.content, str):
            return Message(self.role, self.content, self.name or "")
        texts = []
        for i, part in enumerate(self.content):
            param = f"messages[{number}].content[{i}]"
            if part.get("type") != "text":
                kind = short_repr(part.get("type"))
                raise unsupported(param, f"{param} is of the type {kind}; this server takes text only")
            more = [name for name in part.keys() - {"type", "text"} if part[name] is not None]
            if more or not isinstance(part.get("text"), str):
                raise invalid(param, f"{param} must have a text, and nothing beside type and text")
            texts.append(part["text"])
        return Message(self.role, "\n".join(texts), self.name or "")


class ChatRequest(_TextRequest):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[Neutral] = {
        **{name: neutral for name, neutral in _NEUTRAL.items() if name != "chat_template_kwargs"},
        "add_special_tokens": (False,),
        "echo": (False,),
    }

    messages: list[Any] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

    @property
    def top_logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", f"top_logprobs is {self.top_logprobs}; it needs logprobs: true")


def conversation(messages: list[Any]) -> list[Message]:
    """The messages of a body.

    Raises:
        ApiError: there are too many, or one is malformed or has what this server does not take.
    """
    contents = (each.get("content") if isinstance(each, dict) else None for each in messages)
    count = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if count > _MOST_MESSAGES:
        raise invalid("messages", f"messages has {count} messages and parts; at most {_MOST_MESSAGES}")
    return [parse(ChatMessage, each, f"messages[{i}].").message(i) for i, each in enumerate(messages)]


_OF_TEMPLATES = ("add_generation_prompt", "chat_template", "continue_final_message", "tools")


class TokenizeRequest(Body):
    """Body of /tokenize."""

    neutral: ClassVar[Neutral] = {name: _NEUTRAL[name] for name in _OF_TEMPLATES}

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: _TokenIds


AnyBody = TypeVar("AnyBody", bound=Body)


def read_json(data: bytes) -> Any:
    """The value of a body.

    Raises:
        ApiError: it is not JSON.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {why}", code="invalid_json") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def parse(kind: type[AnyBody], value: Any, prefix: str = "") -> AnyBody:
    """The body, checked field by field. `prefix` comes before the names of its fields, in errors.

    Raises:
        ApiError: a field is unknown, unsupported or out of its range.
    """
    if not isinstance(value, dict):
        name = prefix.removesuffix(".") or "the body"
        raise invalid(name if prefix else None, f"{name} is {short_repr(value)}; it must be an object")
    given = dict(value)
    for name, neutral in kind.neutral.items():
        if given.get(name) is not None:
            _check_neutral(prefix + name, name, given.pop(name), neutral)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        failure = of_validation(error.errors(include_url=False)[0], kind.model_fields.keys())
        if prefix:
            failure.message = failure.message.replace(failure.param or "", f"{prefix}{failure.param}", 1)
            failure.param = f"{prefix}{failure.param}"
        raise failure from None


def _check_neutral(param: str, name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if _ANY in neutral or value in neutral:
        return
    why = _REASONS.get(name, "this server does not support it")
    raise unsupported(param, f"{param} is {short_repr(value)}; {why}: leave it out")


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(each) is int and 0 <= each < 2**32 for each in values)
