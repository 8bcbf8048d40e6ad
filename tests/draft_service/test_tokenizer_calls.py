"""`Tokenize`, `Detokenize` and `GetTokenizer`: as transformers and `Generate` do it, with limits and clear errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from draft_service.tokenizer_calls import MAX_CALLS, TokenizerThread, tokenize
from outrider.cli.processes import ServiceProcess
from outrider.client import AsyncClient, Client, InvalidRequest, Message
from outrider.rpc.errors import RequestError, from_rpc_error
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import load_tokenizer
from protos.outrider.v1 import draft_service_pb2, model_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Service
from tests.draft_service.oracle import decode, encode
from tests.draft_service.pairs import TEMPLATE, unserved_pair
from tests.project.tree import ROOT

TEXT = "def read_lines(path, encoding=None):  # Zeilen, größer\n"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(pair_process: Service) -> Iterator[Client]:
    with Client(pair_process.address) as made:
        yield made


def test_a_text_has_the_tokens_of_the_tokenizer_and_of_generate(client: Client) -> None:
    found = client.tokenize(TEXT)
    assert list(found.token_ids) == encode(TEXT)
    assert len(found.token_texts) == len(found.token_ids)
    assert found.token_texts[0] == "def"
    assert client.complete(TEXT, max_new_tokens=1).started.prompt_token_ids == found.token_ids
    assert client.tokenize(TEXT, add_special_tokens=False).token_ids == found.token_ids, "the demo tokenizer adds none"
    assert client.tokenize("").token_ids == ()


def test_messages_have_the_tokens_of_the_chat_template(client: Client) -> None:
    found = client.tokenize(CHAT)
    assert "".join(found.token_texts) == "system: Be brief.\nuser: Hi\nassistant:"
    assert client.complete(CHAT, max_new_tokens=1).started.prompt_token_ids == found.token_ids
    assert client.tokenize([Message("user", "Hi")], add_special_tokens=False).token_ids


def test_tokens_have_their_text_back(client: Client) -> None:
    ids = [*encode(TEXT), 0]
    special = decode([0], skip_special=False)
    assert special.startswith("<|")
    assert client.detokenize(ids).text == TEXT
    assert client.detokenize(ids, keep_special_tokens=True).text == TEXT + special
    texts = client.detokenize(ids).token_texts
    assert texts[-1] == special
    assert texts[:-1] == client.tokenize(TEXT).token_texts
    assert client.detokenize([]).text == ""


def test_the_tokenizer_is_described(client: Client, draft_process: ServiceProcess) -> None:
    found = client.tokenizer()
    assert found.chat_template == TEMPLATE
    assert found.tokenizer_class
    special = {each.name: (each.text, each.id) for each in found.special_tokens}
    assert special["eos_token"] == (decode([special["eos_token"][1]], skip_special=False), special["eos_token"][1])
    with Client(draft_process.address) as plain:
        assert plain.tokenizer().chat_template == ""


async def test_the_asynchronous_client_has_the_same_methods(pair_process: Service) -> None:
    async with AsyncClient(pair_process.address) as client:
        found = await client.tokenize(TEXT)
        assert (await client.detokenize(found.token_ids)).text == TEXT
        assert (await client.tokenizer()).chat_template == TEMPLATE


def _error(channel: grpc.Channel, method: str, message: Any) -> RequestError:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(DraftServiceStub(channel), method)(message, timeout=60)
    return from_rpc_error(caught.value)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("Tokenize", {}, "prompt", "prompt is not set; set text or chat"),
    (
        "Tokenize",
        {"text": "x" * 32_737},
        "text",
        "text has 32737 bytes; at most 32736, since a prompt has",
    ),
    ("Tokenize", {"chat": {}}, "chat.messages", "chat.messages is empty"),
    ("Tokenize", {"chat": {"messages": [{"content": "x"}]}}, "chat.messages[0].role", "role is empty"),
    (
        "Tokenize",
        {"chat": {"messages": [{"role": "tool", "content": "x"}]}},
        "chat.messages",
        "chat template rejects chat.messages: tools are not allowed",
    ),
    (
        "Tokenize",
        {"chat": {"messages": [{"role": "user", "content": "x"}]}, "add_special_tokens": True},
        "add_special_tokens",
        "the chat template adds special tokens",
    ),
    ("Detokenize", {"token_ids": [1, 2048]}, "token_ids", "token_ids[1] is 2048; token ids must be below 2048"),
    ("Detokenize", {"token_ids": [1] * 1025}, "token_ids", "token_ids has 1025 tokens; at most 1024"),
]


@pytest.mark.parametrize(("method", "fields", "field", "words"), REFUSED)
def test_bad_input_is_refused_with_field_and_numbers(
    draft: grpc.Channel, method: str, fields: dict[str, Any], field: str, words: str
) -> None:
    error = _error(draft, method, getattr(draft_service_pb2, f"{method}Request")(**fields))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["field"] == field
    assert words in error.message


def test_a_model_without_template_takes_no_messages(draft_address: str) -> None:
    message = draft_service_pb2.TokenizeRequest(chat={"messages": [{"role": "user", "content": "x"}]})
    with grpc.insecure_channel(draft_address) as channel:
        error = _error(channel, "Tokenize", message)
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")


@pytest.mark.parametrize("prompt", [[1, 2], 7, "half a \ud800 character"])
def test_the_client_refuses_what_is_no_prompt(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.tokenize(prompt)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match=r"token_ids is \[-1\]; it must be a list of token ids"):
        client.detokenize([-1])


async def test_too_many_calls_at_once_are_refused() -> None:
    thread, gate = TokenizerThread(), asyncio.Event()
    loop = asyncio.get_running_loop()
    blocked = [asyncio.create_task(thread.run(lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()))]
    blocked += [asyncio.create_task(thread.run(lambda: True)) for _ in range(MAX_CALLS - 1)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match=f"64 calls .* at most {MAX_CALLS}") as caught:
        await thread.run(lambda: True)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    blocked[-1].cancel()  # its work still counts until it has run
    await asyncio.sleep(0)
    with pytest.raises(RequestError):
        await thread.run(lambda: True)
    gate.set()
    assert all(await asyncio.gather(*blocked[:-1]))
    assert await thread.run(lambda: True)


def test_special_tokens_of_a_text_are_left_out_on_request() -> None:
    """With the tokenizer of the translation pair, which ends a text, and the limit of its encoder."""
    tokenizer = load_tokenizer(ModelSource(str(ROOT / "models" / "translation" / "target")))
    target = model_pb2.ModelInfo(
        vocab_size=2000, encoder=model_pb2.EncoderInfo(kind=model_pb2.ENCODER_KIND_TEXT, max_positions=4)
    )
    draft = model_pb2.ModelInfo(limits=model_pb2.Limits(max_sequence_tokens=1024, max_message_bytes=50))
    pair = unserved_pair(tokenizer, draft, target)

    def ids(**fields: Any) -> list[int]:
        request = draft_service_pb2.TokenizeRequest(**fields)
        return list(tokenize(request, pair, None).token_ids)

    whole = ids(text="a b")
    assert ids(text="a b", add_special_tokens=True) == whole
    assert ids(text="a b", add_special_tokens=False) == whole[:-1]
    assert len(ids(text="a b a b")) == 7, "more than the encoder takes: the answer says how long a text is"
    with pytest.raises(RequestError, match="text has 10 tokens, and the answer 54 bytes; at most 50 "):
        ids(text="a b a b a b")
    with pytest.raises(RequestError, match="takes no conversation"):
        ids(chat={"messages": [{"role": "user", "content": "a"}]})
