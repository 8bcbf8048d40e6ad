"""/v1/chat/completions, the routes about tokens, and those about the front, over a real socket."""

from typing import Any

import httpx
import pytest

from outrider.client import Client, InvalidRequest
from tests.outrider.http.conftest import TEMPLATE, Post, near, plain, stream

QUESTION = "write a function"
PROMPT = f"# user: {QUESTION}\n# assistant:"


def test_a_conversation_goes_through_the_models_template(chat: Post, ours: Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    wanted = ours.complete(messages, temperature=0, max_new_tokens=24)
    assert wanted.text == ours.complete(PROMPT, temperature=0, max_new_tokens=24).text
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = chat(QUESTION, temperature=0, **{limit: 24})
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
        assert choice["finish_reason"] == "length"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
    parts = [{"type": "text", "text": "write"}, {"type": "text", "text": "a function"}]
    assert chat(parts, max_tokens=1)["usage"]["prompt_tokens"] > 0


def test_the_name_of_an_author_reaches_the_template(http: httpx.Client, ours: Client) -> None:
    message = {"role": "user", "content": QUESTION, "name": "Ada"}
    found = http.post("/tokenize", json={"messages": [message]}).json()["tokens"]
    assert ours.detokenize(found).text == f"# user Ada: {QUESTION}\n# assistant:"
    answer = http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == len(found)
    assert http.post("/tokenize", json={"messages": [message | {"name": None}]}).json()["tokens"] == list(
        ours.tokenize(PROMPT).token_ids
    )


def test_arguments_reach_the_template(http: httpx.Client, chat: Post, ours: Client) -> None:
    messages, arguments = [{"role": "user", "content": QUESTION}], {"mood": "brief"}
    body = {"messages": messages, "chat_template_kwargs": arguments}
    found = http.post("/tokenize", json=body).json()["tokens"]
    assert ours.detokenize(found).text == f"# user: {QUESTION}\n# assistant (briefly):"
    assert list(ours.tokenize(messages, template_arguments=arguments).token_ids) == found
    wanted = ours.complete(messages, template_arguments=arguments, temperature=0, max_new_tokens=8)
    assert list(wanted.started.prompt_token_ids) == found
    answer = chat(QUESTION, chat_template_kwargs=arguments, temperature=0, max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == wanted.text
    without = http.post("/tokenize", json={"messages": messages, "chat_template_kwargs": {}})
    assert without.json()["tokens"] == list(ours.tokenize(messages).token_ids)
    with pytest.raises(InvalidRequest, match="template_arguments is given; only messages have a chat template"):
        ours.complete("a text", template_arguments=arguments)
    with pytest.raises(InvalidRequest, match="template_arguments is no JSON object"):
        ours.tokenize(messages, template_arguments={"mood": "\ud800"})  # half a character
    with pytest.raises(TypeError, match="there is no option template_argument;"):
        ours.tokenize(messages, template_argument=arguments)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tools": []}, "chat_template_kwargs has tools, which the service gives itself"),
        ({"messages": []}, "chat_template_kwargs has messages"),
        ({"add_generation_prompt": False}, "chat_template_kwargs has add_generation_prompt"),
        ({"bos_token": "x"}, "chat_template_kwargs has bos_token"),
        ({"mood": "m" * 16_384}, "chat_template_kwargs has 16396 characters; at most 16384"),
        ({"mood": 3}, "the model's chat template rejects messages: unsupported operand"),
        ([1], "chat_template_kwargs is [1]; it must be a valid dictionary"),
    ],
)
def test_a_wrong_argument_of_the_template_is_refused(http: httpx.Client, arguments: Any, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": arguments, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == ("messages" if "rejects" in words else "chat_template_kwargs")


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 16}], ids=["to the end", "with a limit"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_beyond_the_context_is_refused_as_openai_does(
    http: httpx.Client, ours: Client, path: str, limit: dict[str, int]
) -> None:
    """By this code, or by these words, libraries decide to shorten a conversation."""
    context, text = ours.get_model().model.limits.max_sequence_tokens, " 1 2" * 600
    field, prompt = ("messages", [{"role": "user", "content": text}]) if "chat" in path else ("prompt", text)
    answer = http.post(path, json={field: prompt, **limit})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert f"this model's maximum context length is {context} tokens" in error["message"]
    answer = http.post(
        path, json={field: [{"role": "user", "content": "x" * 10**5}] if "chat" in path else "x" * 10**5}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "has 100000 bytes" in error["message"] or "has 100004 bytes" in error["message"]
    assert error["message"].endswith("(maximum context length is exceeded)")


def test_an_output_beyond_the_context_is_refused_as_openai_does(http: httpx.Client, ours: Client) -> None:
    context = ours.get_model().model.limits.max_sequence_tokens
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": context})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert f"this model's maximum context length is {context} tokens" in error["message"]


def test_without_a_limit_the_text_may_fill_the_context(chat: Post, ours: Client) -> None:
    context = ours.get_model().model.limits.max_sequence_tokens
    answer = chat(QUESTION, temperature=0, stop="\n")
    assert answer["choices"][0]["finish_reason"] == "stop"
    per_repeat = len(ours.tokenize("x " * 100).token_ids) / 100
    answer = chat("x " * int((context - 30) / per_repeat), seed=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == context
    answer = chat("x", seed=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == context


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(http: httpx.Client, chat: Post) -> None:
    fields = {"messages": [{"role": "user", "content": QUESTION}], "seed": 5, "max_tokens": 32, "n": 2}
    wanted = chat(QUESTION, seed=5, max_tokens=32, n=2)
    texts, reasons, begun = ["", ""], [None, None], set()
    for event in stream(http, "/v1/chat/completions", **fields):
        assert event["object"] == "chat.completion.chunk"
        (choice,) = event["choices"]
        index, delta = choice["index"], choice["delta"]
        assert (delta.get("role") == "assistant") == (index not in begun)
        begun.add(index)
        assert reasons[index] is None
        texts[index] += delta.get("content", "")
        reasons[index] = choice["finish_reason"]
    assert texts == [choice["message"]["content"] for choice in wanted["choices"]]
    assert reasons == [choice["finish_reason"] for choice in wanted["choices"]]


def test_logprobs_name_each_token_with_its_bytes(http: httpx.Client, chat: Post, ours: Client) -> None:
    wanted = ours.complete(PROMPT, temperature=0, max_new_tokens=16, logprobs=2).samples[0].logprobs
    choice = chat(QUESTION, temperature=0, max_tokens=16, logprobs=True, top_logprobs=2)["choices"][0]
    found = choice["logprobs"]["content"]
    assert [each["logprob"] for each in found] == near([each.token.raw for each in wanted])
    for one, other in zip(found, wanted, strict=True):
        assert [top["logprob"] for top in one["top_logprobs"]] == near([top.raw for top in other.top])
    assert "".join(each["token"] for each in found) == choice["message"]["content"]
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in found)
    fields = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
    parts = stream(http, "/v1/chat/completions", **fields, logprobs=True, top_logprobs=2)
    logprobs = [part["choices"][0]["logprobs"] for part in parts]
    streamed = [entry for each in logprobs if each for entry in each["content"]]
    assert [each["token"] for each in streamed] == [each["token"] for each in found]
    assert [each["logprob"] for each in streamed] == near([each["logprob"] for each in found])


def test_part_of_a_character_has_no_bytes(chat: Post, ours: Client) -> None:
    """Its text is U+FFFD, whose bytes are others."""
    part = next(i for i, text in enumerate(ours.detokenize(range(512)).token_texts) if text == "\ufffd")
    fields = {"max_tokens": 1, "logprobs": True, "top_logprobs": 1, "logit_bias": {str(part): 100}, "temperature": 0}
    (entry,) = chat(QUESTION, **fields)["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", None)
    (top,) = entry["top_logprobs"]
    assert bytes(top["bytes"]).decode() == top["token"]


def test_a_model_without_a_template_refuses_a_conversation(draft_address: str) -> None:
    from tests.outrider.http.conftest import running_front

    with running_front(draft_address) as url:
        answer = plain.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_chat_template"


# ------------------------------------------------------------------------------------------------------------ tokens


def test_tokens_of_a_text_and_back(http: httpx.Client, ours: Client) -> None:
    text = "def f(x):\n    return 'é…'\n"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == list(ours.tokenize(text).token_ids)
    assert (found["count"], len(found["token_strs"])) == (len(found["tokens"]), len(found["tokens"]))
    assert found["max_model_len"] == ours.get_model().model.limits.max_sequence_tokens
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    end = ours.get_model().model.eos_token_ids[0]
    whole = ours.detokenize([*found["tokens"], end], keep_special_tokens=True).text
    assert http.post("/detokenize", json={"tokens": [*found["tokens"], end]}).json() == {"prompt": whole}
    assert len(whole) > len(text)
    longer = http.post("/tokenize", json={"prompt": " 1 2" * 600}).json()
    assert longer["count"] == len(longer["tokens"]) == 2400 > longer["max_model_len"]
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": QUESTION}]}).json()
    assert chat["tokens"] == list(ours.tokenize(PROMPT).token_ids)
    assert chat["token_strs"] is None


def test_the_tokenizers_configuration(http: httpx.Client) -> None:
    found = http.get("/tokenizer_info").json()
    assert found["tokenizer_class"]
    assert found["chat_template"] == TEMPLATE
    assert found["eos_token"] == "<|endoftext|>"


# --------------------------------------------------------------------------------------------------------- the front


def test_models_health_version_and_metrics(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == "target"
    assert http.get("/v1/models/target").json() == card
    assert http.get("/v1/models/other/name").json()["error"]["code"] == "model_not_found"
    assert http.get("/health").status_code == 200
    assert set(http.get("/version").json()) == {"version"}
    text = http.get("/metrics").text
    assert 'outrider_http_requests_total{path="/v1/models",status="200"} ' in text
    assert "outrider_http_requests_running " in text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/nothing", 404)])
def test_wrong_routes_answer_in_openais_form(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_after_an_internal_error_the_connection_ends(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the answer says, so that a client sends no further request there."""

    def broken() -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("outrider.http.app.installed_version", broken)
    answer = http.get("/version")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.headers["connection"] == "close"
