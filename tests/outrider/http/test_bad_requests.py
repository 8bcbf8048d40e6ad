"""What the front does not take is refused with OpenAI's error: the field by name, the value, and the limit."""

from typing import Any

import grpc
import httpx
import pytest
from pydantic import ValidationError

from outrider.client import InvalidRequest
from outrider.environment import served_name
from outrider.http import errors
from outrider.http.errors import ApiError, of_service
from outrider.http.requests import Body, ChatMessage, CompletionRequest, DetokenizeRequest, parse

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
BASE: dict[str, dict[str, Any]] = {COMPLETION: {"prompt": "x"}, CHAT: {"messages": MESSAGES}}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETION, {"prompt": None}, "prompt", "missing"),
        (COMPLETION, {"prompt": 3}, "prompt", "list of token ids"),
        (COMPLETION, {"prompt": []}, "prompt", "empty"),
        (COMPLETION, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETION, {"prompt": ["x", 3]}, "prompt", "list of texts"),
        (COMPLETION, {"prompt": [1, -1]}, "prompt", "-1"),
        (COMPLETION, {"prompt": [True]}, "prompt", "True"),
        (COMPLETION, {"prompt": [2**32 - 1]}, "prompt", str(2**32 - 1)),
        (COMPLETION, {"prompt": ""}, "prompt", "empty"),
        # Of lists that are too long no element is read.
        (COMPLETION, {"prompt": [[-1]] * 9}, "prompt", "9 prompts; at most 8"),
        (COMPLETION, {"prompt": [0, *[-1] * 5000]}, "prompt", "5001 tokens; at most 1024"),
        (COMPLETION, {"prompt": [[0, *[-1] * 5000]]}, "prompt", "5001 tokens; at most 1024"),
        (COMPLETION, {"logit_bias": {str(i): "x" for i in range(1025)}}, "logit_bias", "1025 entries; at most 1024"),
        (COMPLETION, {"n": 2**31}, "n", "less than"),
        (COMPLETION, {"max_tokens": -1}, "max_tokens", "-1"),
        (COMPLETION, {"max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETION, {"max_tokens": 10**6}, "max_tokens", "1000000"),
        (COMPLETION, {"max_tokens": "5"}, "max_tokens", "integer"),
        (COMPLETION, {"n": 0}, "n", "0"),
        (COMPLETION, {"n": 9}, "n", "at most 8"),
        (COMPLETION, {"n": 3, "prompt": ["x"] * 3}, "prompt", "9 texts; at most 8"),
        (COMPLETION, {"temperature": -0.5}, "temperature", "-0.5"),
        (COMPLETION, {"temperature": "hot"}, "temperature", "hot"),
        (COMPLETION, {"top_p": 0}, "top_p", "0"),
        (COMPLETION, {"top_p": 1.5}, "top_p", "1.5"),
        (COMPLETION, {"top_k": -2}, "top_k", "-2"),
        (COMPLETION, {"min_p": 2}, "min_p", "2"),
        (COMPLETION, {"repetition_penalty": 0}, "repetition_penalty", "0"),
        (COMPLETION, {"frequency_penalty": 101}, "frequency_penalty", "101"),
        (COMPLETION, {"presence_penalty": -101}, "presence_penalty", "-101"),
        (COMPLETION, {"seed": 2**64}, "seed", "less than"),
        (COMPLETION, {"seed": 1.5}, "seed", "1.5"),
        (COMPLETION, {"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETION, {"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        (COMPLETION, {"logit_bias": {"1" * 5000: 1}}, "logit_bias", "token ids"),
        (COMPLETION, {"logit_bias": {"5": 101}}, "logit_bias", "101"),
        (COMPLETION, {"stop": ["x"] * 100}, "stop", "100"),
        (COMPLETION, {"stop": ""}, "stop", "0"),
        (COMPLETION, {"stop": 5}, "stop", "5"),
        (COMPLETION, {"logprobs": 21}, "logprobs", "21"),
        (COMPLETION, {"logprobs": True}, "logprobs", "true"),
        (COMPLETION, {"best_of": 2}, "best_of", "leave best_of out"),
        (COMPLETION, {"suffix": "end"}, "suffix", "leave it out"),
        (COMPLETION, {"stream": "yes"}, "stream", "yes"),
        (COMPLETION, {"stream_options": {"include": True}}, "stream_options.include", "no field"),
        (COMPLETION, {"stream_options": {"include-usage": True}}, "stream_options.include-usage", "no field"),
        (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (CHAT, {"stream_options": {}}, "stream_options", "stream: true"),
        (COMPLETION, {"tempreature": 1}, "tempreature", "did you mean temperature"),
        (COMPLETION, {"guided_json": {}}, "guided_json", "no field"),
        (COMPLETION, {"messages": MESSAGES}, "messages", "no field"),
        (COMPLETION, {"response_format": {"type": "json_object"}}, "response_format", "constrain"),
        (CHAT, {"messages": []}, "messages", "must have at least 1"),
        (CHAT, {"messages": ["hello"]}, "messages[0]", "object"),
        (CHAT, {"messages": MESSAGES * 10_001}, "messages", "10001 messages and parts; at most 10000"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}]},
            "messages",
            "at most 10000",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "must have at least 1"),
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content", "5"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages", "tools are not allowed"),
        (CHAT, {"messages": [{**MESSAGES[0], "tool_calls": [1]}]}, "messages[0].tool_calls", "leave it out"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
            "messages[0].content[0]",
            "text only",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "calls no tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "calls no tools"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "the model's own"),
        (CHAT, {"chat_template_kwargs": {"documents": [1]}}, "chat_template_kwargs", "leave it out"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens", "1000000"),
        (CHAT, {"echo": True}, "echo", "leave it out"),
        (CHAT, {"n": 9}, "n", "at most 8"),
        (CHAT, {"model": "gpt-4"}, "model", "'target'"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_wrong_field_is_named(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str, *, streamed: bool
) -> None:
    if streamed and ("stream" in fields or "stream_options" in fields):
        pytest.skip("has a stream of its own")
    body = {**BASE[path], **fields, **({"stream": True} if streamed else {})}
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert error["param"] == param, error
    assert words in error["message"], error
    assert error["code"]
    assert "/" not in error["message"].replace("text/", ""), "a path"
    assert "sampling." not in error["message"]
    assert "_new_tokens" not in error["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"prompt": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt":"x","seed":' + b"9" * 9999 + b"}",
    ],
    ids=["empty", "cut", "list", "text", "NaN", "not UTF-8", "deep", "a number of many digits"],
)
def test_a_body_that_is_no_object_of_json_is_refused(http: httpx.Client, data: bytes) -> None:
    answer = http.post(COMPLETION, content=data)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


MANY = 100_000
UNKNOWN = {f"tempreature{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, UNKNOWN | {"prompt": "x"}, "tempreature0"),
        (CompletionRequest, {"prompt": "x", "stream_options": UNKNOWN}, "stream_options.tempreature0"),
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}, "stop"),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * MANY}, "stop_token_ids[0]"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): float("inf") for i in range(MANY)}}, "logit_bias"),
        (ChatMessage, {"role": "user", "content": [1] * MANY}, "content"),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}, "tokens[0]"),
    ],
    ids=["fields", "nested", "stop", "stop_token_ids", "biases", "infinite", "content", "tokens"],
)
def test_a_large_wrong_body_costs_little(
    monkeypatch: pytest.MonkeyPatch, kind: type[Body], body: dict[str, Any], param: str
) -> None:
    """It is checked up to its first problem: the event loop answers no one else meanwhile."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() <= 2, "one of each branch of a union"
    searched: list[str] = []

    def search(word: str, *arguments: Any, **options: Any) -> list[str]:
        searched.append(word)
        return []

    monkeypatch.setattr(errors, "get_close_matches", search)
    with pytest.raises(ApiError) as refused:
        parse(kind, body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(refused.value.message) < 200
    assert len(searched) <= 1


def test_a_message_shows_the_beginning_of_a_name(http: httpx.Client) -> None:
    answer = http.post(COMPLETION, json={"prompt": "x", "x" * 10**6: 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "x" * 59 + "…")
    assert error["message"] == f"there is no field {error['param']}"


def test_null_in_a_part_of_a_message_is_no_value(http: httpx.Client) -> None:
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": None}
    answer = http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_values_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    neutral = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "logit_bias": {},
        "stop": None,
        "best_of": None,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "top_k": -1,
        "reasoning_effort": "none",
        "moderation": None,
        "prompt_cache_options": {"mode": "explicit"},
        "stream": True,
        "stream_options": {"include_usage": None, "anything": None},
    }
    for path, base in BASE.items():
        body = base | {name: value for name, value in neutral.items() if path == COMPLETION or name != "best_of"}
        answer = http.post(path, json=body | {"max_tokens": 2})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_routes_about_tokens_name_the_field_too(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_a_text_pair_takes_no_speech(http: httpx.Client) -> None:
    answer = http.post("/v1/audio/transcriptions", files={"file": ("x.wav", b"RIFF")}, data={"model": "target"})
    assert answer.status_code == 404
    assert "speech" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/srv/models/mine", "mine"),
        ("./mine/", "mine"),
        ("~/mine", "mine"),
        ("a/b/c", "c"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("mine", "mine"),
    ],
)
def test_a_name_shows_no_path(name: str, shown: str) -> None:
    assert served_name(name) == shown
    error = InvalidRequest(f"{name} has no speech encoder", code=grpc.StatusCode.INVALID_ARGUMENT, reason="UNSPECIFIED")
    assert of_service(error, models={name: shown}).message == f"{shown} has no speech encoder"


def test_a_name_that_is_echoed_is_cut(http: httpx.Client) -> None:
    answer = http.post(COMPLETION, json={"prompt": "x", "model": "m" * 100_000})
    assert answer.status_code == 404
    assert len(answer.text) < 500


def test_an_error_of_grpc_itself_is_not_shown() -> None:
    error = InvalidRequest("x", code=grpc.StatusCode.RESOURCE_EXHAUSTED, reason="UNSPECIFIED")
    error.message = "CLIENT: Sent message larger than max (22500049 vs. 16777216)"
    shown = of_service(error)
    assert (shown.status, shown.code) == (413, "request_too_large")
    assert "22500049" not in shown.message
