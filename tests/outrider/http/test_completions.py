"""/v1/completions over a real socket: equal to our own client, and in OpenAI's form."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from outrider.client import AsyncClient, Client, Detokenized
from outrider.http.generation import Tally
from outrider.http.metrics import FrontMetrics
from outrider.http.pair import Pair
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.draft_service.oracle import decode
from tests.outrider.http.conftest import Post, near, plain, running_front, stream

PROMPT = "def area(radius):\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 24}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (GREEDY, {"temperature": 0, "max_new_tokens": 24}),
        (SEEDED, {"temperature": 0.9, "seed": 11, "max_new_tokens": 24}),
        (SEEDED | {"n": 2}, {"temperature": 0.9, "seed": 11, "max_new_tokens": 24, "n": 2}),
        (
            SEEDED | {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "top_k": 20},
            {
                "temperature": 0.9,
                "seed": 11,
                "max_new_tokens": 24,
                "repetition_penalty": 1.3,
                "presence_penalty": 0.4,
                "frequency_penalty": 0.2,
                "top_k": 20,
            },
        ),
        (
            SEEDED | {"top_p": 0.8, "min_p": 0.02, "logit_bias": {"300": 3.5, "301": -100}, "ignore_eos": True},
            {
                "temperature": 0.9,
                "seed": 11,
                "max_new_tokens": 24,
                "top_p": 0.8,
                "min_p": 0.02,
                "logit_bias": {300: 3.5, 301: -100.0},
                "ignore_eos": True,
            },
        ),
        (
            SEEDED | {"stop": ["\n\n", "return"]},
            {"temperature": 0.9, "seed": 11, "max_new_tokens": 24, "stop": ["\n\n", "return"]},
        ),
    ],
    ids=["greedy", "seed", "n", "penalties", "filters", "stop"],
)
def test_the_text_is_that_of_our_own_client(
    http: httpx.Client, complete: Post, ours: Client, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    wanted = ours.complete(PROMPT, **options)
    answer = complete(PROMPT, **fields)
    assert [choice["text"] for choice in answer["choices"]] == [sample.text for sample in wanted.samples]
    streamed = [""] * len(wanted.samples)
    for event in stream(http, "/v1/completions", prompt=PROMPT, **fields):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == [sample.text for sample in wanted.samples]


def test_the_answer_has_openais_form(complete: Post, ours: Client) -> None:
    answer = complete(PROMPT, **GREEDY, model="target", user="somebody", store=True, tools=[], suffix=None)
    (choice,) = answer["choices"]
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "target")
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    usage, wanted = answer["usage"], ours.complete(PROMPT, temperature=0, max_new_tokens=24)
    assert usage["prompt_tokens"] == wanted.usage.prompt_tokens
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    details, metrics = usage["completion_tokens_details"], answer["metrics"]["speculative_decoding"]
    assert details["accepted_prediction_tokens"] == metrics["num_accepted_draft_tokens"] > 0
    assert details["rejected_prediction_tokens"] == metrics["num_draft_tokens"] - metrics["num_accepted_draft_tokens"]


def test_the_histogram_of_acceptance_adds_up(complete: Post) -> None:
    found = complete([PROMPT, "import os\n"], max_tokens=48, n=2, seed=3)["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"]
    assert sum(length * count for length, count in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert math.isclose(found["mean_acceptance_length"], 1 + found["num_accepted_draft_tokens"] / sum(histogram))
    assert len(histogram) == found["num_spec_tokens"] + 1


def test_the_histogram_has_an_entry_for_each_count_up_to_gamma() -> None:
    """AIPerf takes no other one; here no proposal of four tokens was accepted whole."""
    found = Tally(drafts=3, drafted=12, accepted=2, accepted_at=[2], longest=4).metrics()
    assert found is not None
    assert found["speculative_decoding"]["acceptance_histogram"] == [1, 2, 0, 0, 0]


def test_the_defaults_are_openais(complete: Post, ours: Client) -> None:
    """16 tokens, and temperature 1: two texts differ. The prompt counts once."""
    answer = complete(PROMPT, n=4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 64
    assert answer["usage"]["prompt_tokens"] == len(ours.tokenize(PROMPT).token_ids)
    assert len({choice["text"] for choice in answer["choices"]}) > 1


def test_prompts_of_all_kinds_are_taken(complete: Post, ours: Client) -> None:
    first, second = ours.tokenize(PROMPT).token_ids, ours.tokenize("import os\n").token_ids
    one, other = (ours.complete(each, temperature=0, max_new_tokens=24).text for each in (PROMPT, "import os\n"))
    for prompt, wanted in (
        (list(first), [one]),
        ([list(first), list(second)], [one, other]),
        ([PROMPT, "import os\n"], [one, other]),
        (["import os\n", PROMPT, "import os\n"], [other, one, other]),
    ):
        answer = complete(prompt, **GREEDY)
        assert [choice["text"] for choice in answer["choices"]] == wanted
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(wanted)))


def test_usage_comes_with_the_last_event_or_with_all(http: httpx.Client) -> None:
    fields = {"prompt": [PROMPT, "import os\n"], "ignore_eos": True, **GREEDY}
    found = stream(http, "/v1/completions", **fields)
    assert all("usage" not in event for event in found)
    found = stream(http, "/v1/completions", **fields, stream_options={"include_usage": True})
    assert all(event["usage"] is None and event["choices"] for event in found[:-1])
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 48
    assert found[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    both = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(http, "/v1/completions", **fields, stream_options=both)
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == 48
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]].count("length") == 2


def test_a_stop_string_ends_the_text_before_it(http: httpx.Client, complete: Post) -> None:
    whole = complete(PROMPT, **GREEDY | {"max_tokens": 60}, logprobs=0)["choices"][0]
    stop = whole["text"][20:24]
    cut = complete(PROMPT, **GREEDY | {"max_tokens": 60}, stop=stop, logprobs=0)["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    count = len(cut["logprobs"]["tokens"])
    assert cut["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:count]
    assert len("".join(cut["logprobs"]["tokens"])) <= len(cut["text"]) + len(stop)
    found = stream(http, "/v1/completions", prompt=PROMPT, stop=stop, logprobs=0, **GREEDY | {"max_tokens": 60})
    parts = [event["choices"][0] for event in found]
    assert "".join(part["text"] for part in parts) == cut["text"]
    tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
    assert tokens == cut["logprobs"]["tokens"]


def test_usage_never_counts_a_token_that_a_stop_string_cuts(http: httpx.Client, complete: Post) -> None:
    whole = complete(PROMPT, **GREEDY)["choices"][0]["text"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(http, "/v1/completions", prompt=PROMPT, stop=whole[10:40], stream_options=options, **GREEDY)
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    assert counts == sorted(counts)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_a_stop_token_of_the_request_is_named(http: httpx.Client, ours: Client, *, is_chat: bool) -> None:
    """The model's own end is not, as in vLLM."""
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    (token,), (end,) = ours.tokenize("\n").token_ids, ours.get_model().target.eos_token_ids
    for forced, stops, named in ((token, [end, token], token), (end, [token], None)):
        fields = {**prompt, **GREEDY, "logit_bias": {str(forced): 100}, "stop_token_ids": stops}
        choice = http.post(path, json=fields).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", named)
        last = stream(http, path, **fields)[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", named)


# ---------------------------------------------------------------------------------------------------- log-probabilities


def test_logprobs_are_those_of_our_own_client(http: httpx.Client, complete: Post, ours: Client) -> None:
    wanted = ours.complete(PROMPT, temperature=0, max_new_tokens=24, logprobs=3).samples[0].logprobs
    choice = complete(PROMPT, **GREEDY, logprobs=3)["choices"][0]
    found = choice["logprobs"]
    assert found["token_logprobs"] == near([each.token.raw for each in wanted])
    assert [max(each.values()) for each in found["top_logprobs"]] == near([each.top[0].raw for each in wanted])
    assert "".join(found["tokens"]) == choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    parts = [
        event["choices"][0]["logprobs"]
        for event in stream(http, "/v1/completions", prompt=PROMPT, **GREEDY, logprobs=3)
    ]
    streamed = {name: [value for part in parts if part for value in part[name]] for name in found}
    assert streamed["tokens"] == found["tokens"]
    assert streamed["text_offset"] == found["text_offset"]
    assert streamed["token_logprobs"] == near(found["token_logprobs"])
    for one, other in zip(streamed["top_logprobs"], found["top_logprobs"], strict=True):
        assert one == near(other)


def test_texts_are_fetched_of_more_tokens_than_one_call_takes() -> None:
    with Cluster() as cluster:
        verifier = cluster.verifier(flags="--max-sequence-tokens 32")
        draft = cluster.draft(verifier)
        wait_healthy(verifier, draft)
        body = {"prompt": PROMPT, "logprobs": 20, "max_tokens": 8, "temperature": 0}
        with running_front(draft.address) as url:
            answer = plain.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert len(set().union(*choice["logprobs"]["top_logprobs"])) > 32


async def test_calls_for_texts_do_not_tell_tokens_where_sizes_are_hidden(chat_draft: Service) -> None:
    asked: list[Sequence[int]] = []

    class Recorded(AsyncClient):
        async def detokenize(self, token_ids: Sequence[int], **options: Any) -> Detokenized:
            asked.append(token_ids)
            return await super().detokenize(token_ids, **options)

    async with Recorded(chat_draft.address) as client:
        pair = Pair(client, FrontMetrics([], shows_vllm=False), name=None, framing={"frame_bytes": 512})
        await pair.describe()
        cancelled = asyncio.create_task(pair.texts_of([9]))
        await asyncio.sleep(0)
        cancelled.cancel()
        for texts in await asyncio.gather(*(pair.texts_of(tokens) for tokens in ([3], [5, 7], []))):
            assert texts is pair._texts
        assert (await pair.texts_of([5]))[5] == decode([5], skip_special=False)
    assert [token for piece in asked for token in piece] == list(range(pair.known.target.vocab_size))


def test_echo_begins_with_null_then_the_prompt_then_one_token(complete: Post, ours: Client) -> None:
    """What lm-eval reads: `token_logprobs[context:-1]`, and the best of `top_logprobs` beside it."""
    ids = list(ours.tokenize(PROMPT).token_ids)
    answer = complete([ids, ids[:1]], echo=True, logprobs=1, max_tokens=1, temperature=0)
    whole, single = (choice["logprobs"] for choice in answer["choices"])
    assert len(whole["token_logprobs"]) == len(ids) + 1
    assert whole["token_logprobs"][0] is None
    assert whole["top_logprobs"][0] is None
    assert all(value <= 0 for value in whole["token_logprobs"][1:])
    assert answer["choices"][0]["text"].startswith(PROMPT)
    # Greedy: the generated token is the best one, with the same float in both places.
    assert whole["token_logprobs"][-1] == max(whole["top_logprobs"][-1].values())
    for value, top in zip(whole["token_logprobs"][1:], whole["top_logprobs"][1:], strict=True):
        assert value <= max(top.values())
        assert value in top.values()
    assert [len(single["token_logprobs"]), single["token_logprobs"][0]] == [2, None]
    scored = ours.complete(ids, prompt_logprobs=1, max_new_tokens=1).prompt_logprobs
    assert whole["token_logprobs"][1:-1] == near([each.token.raw for each in scored])


def test_echo_scores_what_greedy_writes_as_greedy(complete: Post, ours: Client) -> None:
    ids = list(ours.tokenize(PROMPT).token_ids)
    written = list(ours.complete(ids, temperature=0, max_new_tokens=12, ignore_eos=True).token_ids)
    found = complete([ids + written], echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    for i in range(len(ids), len(ids) + len(written)):
        assert found["token_logprobs"][i] == max(found["top_logprobs"][i].values())


def test_the_one_token_after_an_echo_may_be_the_models_end(complete: Post, ours: Client) -> None:
    """It has no text, and counts as the generated token."""
    ids, (end,) = list(ours.tokenize(PROMPT).token_ids), ours.get_model().target.eos_token_ids
    fields = {"logprobs": 1, "max_tokens": 1, "temperature": 0, "logit_bias": {str(end): 100}}
    choice = complete([ids], echo=True, **fields)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
    assert choice["logprobs"]["tokens"][-1] == "<|endoftext|>"
    assert choice["logprobs"]["text_offset"][-1] == len(PROMPT)


def test_echo_without_output(http: httpx.Client, complete: Post, ours: Client) -> None:
    answer = complete(PROMPT, echo=True, logprobs=2, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(ours.tokenize(PROMPT).token_ids)
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    found = stream(http, "/v1/completions", prompt=PROMPT, echo=True, logprobs=2, max_tokens=0)
    assert "".join(event["choices"][0]["text"] for event in found) == PROMPT


def test_echo_precedes_each_choice(http: httpx.Client, complete: Post) -> None:
    answer = complete([PROMPT, "import os\n"], echo=True, n=2, seed=3, max_tokens=4)
    begins = [PROMPT, PROMPT, "import os\n", "import os\n"]
    assert all(choice["text"].startswith(begin) for choice, begin in zip(answer["choices"], begins, strict=True))
    texts = [""] * 4
    for event in stream(http, "/v1/completions", prompt=[PROMPT, "import os\n"], echo=True, n=2, seed=3, max_tokens=4):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
def test_the_services_log_the_callers_request_id_and_trace(
    http: httpx.Client, chat_draft: Service, fields: dict[str, Any]
) -> None:
    given = f"7/caller:{len(fields)}.{next(iter(fields), '')}"
    headers = {"x-request-id": given, "traceparent": f"00-{TRACE}-00f067aa0ba902b7-00", "tracestate": "a=b"}
    answer = http.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **fields}, headers=headers)
    assert answer.headers["x-request-id"] == given
    assert f'"cmpl-{given}"' in answer.text
    names = {given} if "n" not in fields else {f"{given}-0", f"{given}-1"}

    def logged() -> dict[str, Any]:
        lines = chat_draft.logged("generate")
        return {line["request_id"]: line.get("trace_id") for line in lines if line["request_id"] in names}

    wait_until(lambda: logged().keys() == names)
    assert set(logged().values()) == {TRACE}


@pytest.mark.parametrize(
    "header",
    [
        ("x-request-id", "a b"),
        ("x-request-id", '"'),
        ("x-request-id", "x" * 101),
        ("traceparent", "é"),
        ("traceparent", "x" * 20_000),  # more than gRPC takes
        ("tracestate", "a=" + "b" * 20_000),
    ],
    ids=lambda header: f"{header[0]}-{header[1][:4]}-{len(header[1])}",
)
def test_an_id_or_trace_that_the_services_cannot_take_is_left_out(http: httpx.Client, header: tuple[str, str]) -> None:
    name, value = header
    answer = http.post("/v1/completions", json={"prompt": "x", **GREEDY}, headers={name.encode(): value.encode()})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert value not in answer.json()["id"]
