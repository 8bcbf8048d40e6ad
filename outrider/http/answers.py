"""Answers as JSON and as server-sent events, in the forms of completions and of chat.

An event is put together from text: on the way of each chunk there is no model of a body and no dictionary.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any, ClassVar

from outrider.client import Finished, FinishReason, PositionLogprobs, TokenLogprob
from outrider.client.texts import parts_of_tokens
from outrider.http.generation import Entry, Part, Tally

# JSON has no infinity. vLLM's number for a token that cannot come.
LEAST_LOGPROB = -9999.0

DONE = b"data: [DONE]\n\n"

_REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_LIMIT: "length",
}

Texts = Mapping[int, str]
"""The text of each token by itself."""


class Form(ABC):
    """The form of one answer. Text of a choice goes through it in order.

    Attributes:
        object_whole: name of the whole answer's type.
        object_part: that of an event's.
    """

    prefix: ClassVar[str]
    object_whole: ClassVar[str]
    object_part: ClassVar[str]

    def __init__(self, request_id: str, model: str, fingerprint: str, stop_token_ids: Collection[int]) -> None:
        """`stop_token_ids` are those of the request."""
        self._stop_token_ids = frozenset(stop_token_ids)
        self.id = f"{self.prefix}-{request_id}"
        self._about = {
            "id": self.id,
            "object": self.object_whole,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }
        about = json.dumps(self._about | {"object": self.object_part})
        self._head = f'data: {about[:-1]}, "choices": ['

    # ------------------------------------------------------------------------------------------------------- events

    def begin(self, index: int) -> str:
        """The choice of an event before a choice's first one; empty: there is none."""
        return ""

    @abstractmethod
    def part(self, index: int, text: str, logprobs: str) -> str:
        """The choice of an event: more text."""

    @abstractmethod
    def end(self, index: int, finished: Finished) -> str:
        """The choice of the event that ends it."""

    def event(self, choice: str, usage: str = "") -> str:
        """An event with one choice, or with none if it is empty. `usage` is further fields."""
        return f"{self._head}{choice}]{usage}}}\n\n"

    # -------------------------------------------------------------------------------------------------------- whole

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """One choice of the whole answer."""

    def whole(self, choices: Sequence[Sequence[Part]], tally: Tally, texts: Texts, *, has_logprobs: bool) -> bytes:
        """The whole answer. Each choice is the list of its parts."""
        found = []
        for index, parts in enumerate(choices):
            text = "".join(part.text for part in parts)
            entries = [entry for part in parts for entry in part.entries]
            logprobs = self.logprobs(index, text, entries, texts) if has_logprobs else None
            finished = parts[-1].finished
            assert finished is not None
            found.append(self.choice(index, text, logprobs) | self._ending(finished))
        body = self._about | {"choices": found, "usage": tally.usage()}
        if (metrics := tally.metrics()) is not None:
            body["metrics"] = metrics
        return json.dumps(body).encode()

    def _ending(self, finished: Finished) -> dict[str, Any]:
        reason = _REASONS.get(finished.finish_reason, "stop")
        # vLLM's name for the stop string or the stop token of the request that ended the text; null: the model's end.
        stop: str | int | None = finished.stop
        if stop is None and finished.stop_token_id in self._stop_token_ids:
            stop = finished.stop_token_id
        return {"finish_reason": reason, "stop_reason": stop}

    @abstractmethod
    def logprobs(self, index: int, text: str, entries: Sequence[Entry], texts: Texts) -> dict[str, Any]:
        """The log-probabilities of a choice's next text."""


class CompletionForm(Form):
    """Of /v1/completions."""

    prefix = "cmpl"
    object_whole = "text_completion"
    object_part = "text_completion"

    def __init__(self, request_id: str, model: str, fingerprint: str, stop_token_ids: Collection[int]) -> None:
        super().__init__(request_id, model, fingerprint, stop_token_ids)
        self._lengths: dict[int, int] = {}  # characters of each choice so far

    def part(self, index: int, text: str, logprobs: str) -> str:
        return f'{{"index":{index},"text":{quote(text)},"logprobs":{logprobs},"finish_reason":null}}'

    def end(self, index: int, finished: Finished) -> str:
        ending = json.dumps(self._ending(finished))
        return f'{{"index":{index},"text":"","logprobs":null,{ending[1:]}'

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs}

    def logprobs(self, index: int, text: str, entries: Sequence[Entry], texts: Texts) -> dict[str, Any]:
        """Lists with one element for each token. Alternatives with the same text count once, with the highest value."""
        tokens = [texts[token] for token, _ in entries]
        offsets, position = [], self._lengths.get(index, 0)
        self._lengths[index] = position + len(text)
        for length in map(len, parts_of_tokens(text, tokens)):
            offsets.append(position)
            position += length
        return {
            "tokens": tokens,
            "token_logprobs": [None if found is None else _value(found.token) for _, found in entries],
            "top_logprobs": [None if found is None else _by_text(found, texts) for _, found in entries],
            "text_offset": offsets,
        }


class ChatForm(Form):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_part = "chat.completion.chunk"

    def begin(self, index: int) -> str:
        delta = '{"role":"assistant","content":""}'
        return f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'

    def part(self, index: int, text: str, logprobs: str) -> str:
        delta = f'{{"content":{quote(text)}}}'
        return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":null}}'

    def end(self, index: int, finished: Finished) -> str:
        ending = json.dumps(self._ending(finished))
        return f'{{"index":{index},"delta":{{}},"logprobs":null,{ending[1:]}'

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs}

    def logprobs(self, index: int, text: str, entries: Sequence[Entry], texts: Texts) -> dict[str, Any]:
        return {"content": [_chat_entry(found, texts) for _, found in entries if found is not None], "refusal": None}


def usage_field(tally: Tally, *, with_metrics: bool = False) -> str:
    """The field `usage` of an event, and `metrics` of the last one."""
    metrics = tally.metrics() if with_metrics else None
    more = "" if metrics is None else f',"metrics":{json.dumps(metrics)}'
    return f',"usage":{json.dumps(tally.usage())}{more}'


def tokens_of(entries: Iterable[Entry]) -> set[int]:
    """The tokens whose texts the entries need."""
    found = set()
    for token, logprobs in entries:
        found.add(token)
        if logprobs is not None:
            found.update(each.token_id for each in logprobs.top)
    return found


def _value(logprob: TokenLogprob) -> float:
    return max(logprob.raw, LEAST_LOGPROB)


def _by_text(found: PositionLogprobs, texts: Texts) -> dict[str, float]:
    by_text: dict[str, float] = {}
    for each in (*found.top, found.token):
        text, value = texts[each.token_id], _value(each)
        by_text[text] = max(value, by_text.get(text, value))
    return by_text


def _chat_entry(found: PositionLogprobs, texts: Texts) -> dict[str, Any]:
    return {**_chat_token(found.token, texts), "top_logprobs": [_chat_token(each, texts) for each in found.top]}


def _chat_token(logprob: TokenLogprob, texts: Texts) -> dict[str, Any]:
    text = texts[logprob.token_id]
    # Part of a character has U+FFFD in its place; its bytes are not known here.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _value(logprob), "bytes": known}
