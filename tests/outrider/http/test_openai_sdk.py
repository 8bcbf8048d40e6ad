"""OpenAI's own client, sync, async and streaming, against a real front."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from outrider.client import Client
from tests.cluster import Service
from tests.outrider.http.conftest import near, running_front

QUESTION: Any = [{"role": "user", "content": "write a function"}]
PROMPT = "def area(radius):\n"


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["target"]
    assert sdk.models.retrieve("target").owned_by == "outrider"
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_completions(sdk: openai.OpenAI, ours: Client) -> None:
    wanted = ours.complete(PROMPT, seed=4, max_new_tokens=32, logprobs=2)
    done = sdk.completions.create(model="target", prompt=PROMPT, seed=4, max_tokens=32, logprobs=2)
    assert done.choices[0].text == wanted.text
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.token_logprobs == near([each.token.raw for each in wanted.samples[0].logprobs])
    assert done.usage is not None
    assert done.usage.completion_tokens == wanted.usage.completion_tokens
    streamed = sdk.completions.create(model="target", prompt=PROMPT, seed=4, max_tokens=32, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == wanted.text


def test_chat(sdk: openai.OpenAI, ours: Client) -> None:
    wanted = ours.complete(QUESTION, seed=4, max_new_tokens=32)
    done = sdk.chat.completions.create(model="target", messages=QUESTION, seed=4, max_completion_tokens=32)
    assert done.choices[0].message.content == wanted.text
    assert done.usage is not None
    assert done.usage.completion_tokens_details is not None
    assert done.usage.completion_tokens_details.accepted_prediction_tokens == wanted.statistics.num_accepted_tokens
    assert done.model_extra is not None
    assert "speculative_decoding" in done.model_extra["metrics"]


def test_a_streamed_chat_with_usage_and_logprobs(sdk: openai.OpenAI, ours: Client) -> None:
    wanted = ours.complete(QUESTION, seed=4, max_new_tokens=32, logprobs=1)
    parts = list(
        sdk.chat.completions.create(
            model="target",
            messages=QUESTION,
            seed=4,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
            extra_body={"top_k": -1, "ignore_eos": False},
        )
    )
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == wanted.usage.completion_tokens
    choices = [part.choices[0] for part in parts[:-1]]
    assert "".join(choice.delta.content or "" for choice in choices) == wanted.text
    assert choices[0].delta.role == "assistant"
    tokens = [each.logprob for choice in choices if choice.logprobs for each in choice.logprobs.content or []]
    assert tokens == near([each.token.raw for each in wanted.samples[0].logprobs])


def test_the_stream_helper_of_the_sdk(sdk: openai.OpenAI, ours: Client) -> None:
    """Which takes a text that its length ends for an error."""
    wanted = ours.complete(QUESTION, seed=4, stop="\n")
    with sdk.chat.completions.stream(model="target", messages=QUESTION, seed=4, stop="\n") as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == wanted.text


async def test_many_async_calls_at_once(url: str, ours: Client) -> None:
    import asyncio

    wanted = [ours.complete(PROMPT, seed=seed, max_new_tokens=16).text for seed in range(4)]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            stream = await client.completions.create(
                model="target", prompt=PROMPT, seed=seed, max_tokens=16, stream=True
            )
            return "".join([part.choices[0].text async for part in stream])

        assert await asyncio.gather(*map(one, range(4))) == wanted


def test_errors_become_the_sdks_exceptions(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="target", prompt=PROMPT, top_p=0)
    assert (caught.value.param, caught.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="target", messages=QUESTION, extra_body={"tools": [{"type": "function"}]})
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="gpt-4", prompt=PROMPT)


def test_no_service_is_an_error_of_the_server(chat_draft: Service) -> None:
    with (
        running_front("127.0.0.1:1", retry_timeout=0.1) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(model="target", prompt=PROMPT)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    assert "127.0.0.1" not in str(caught.value)
