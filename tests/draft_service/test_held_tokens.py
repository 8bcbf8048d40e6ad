"""Tokens are told when they are committed, their text when it is safe: after any chunk a request goes on, nothing lost.

Against real services. Of a tokenizer's pieces that end inside a character `test_output` has more.
"""

from typing import Any

import grpc
import pytest

from protos.outrider.v1 import draft_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service import oracle
from tests.draft_service.calls import BLOCK, PROMPT, TOKENWISE, generate, request, sampling, write

IDS = oracle.encode(PROMPT)
TOKENS = 14

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": sampling(0.0)},
    "coupled": {"sampling": sampling(1.0, seed=4)},
    "tokenwise": {"sampling": sampling(1.0, seed=4, rule=TOKENWISE)},
    "block": {"sampling": sampling(1.0, seed=4, rule=BLOCK)},
}


def chunks_of(draft: grpc.Channel, message: draft_service_pb2.GenerateRequest) -> list[draft_service_pb2.GenerateChunk]:
    responses = DraftServiceStub(draft).Generate(message, timeout=30)
    return [response.chunk for response in responses if response.WhichOneof("event") == "chunk"]


ENDS = ("limit", "stop string", "stop token")


@pytest.mark.parametrize(
    ("name", "end"),
    [(name, end) for i, name in enumerate(LAWS) for j, end in enumerate(ENDS) if (i + j) % 3],
)
def test_after_any_chunk_it_goes_on_with_the_same_tokens(draft: grpc.Channel, name: str, end: str) -> None:
    """Also where the text of tokens is held, for it may become a stop string, and where the end alone is lost.

    Under `tokenwise` and `block` too: at a draft service of the same kind, and with a fixed γ, a round that nobody was
    told of is drawn again by the same numbers (invariant 2). Each law ends in two of three ways.
    """
    options: dict[str, Any] = {"gamma": 3, "max_new_tokens": TOKENS, "ignore_eos": True, **LAWS[name]}
    free = write(draft, IDS, **options)
    middle = len(free.text) // 2
    options["stop"] = [free.text[2:middle] + "\0", free.text[middle:] + "\0"]
    if end == "stop string":
        options["stop"].append(free.text[middle : middle + 9])
    elif end == "stop token":
        last = max(free.ids, key=free.ids.index)  # the one that comes first latest
        options["stop_token_ids"] = [last]
    whole = write(draft, IDS, **options)
    assert max(whole.held) >= 4
    told, text, held = list[int](), "", 0
    for chunk in chunks_of(draft, request(IDS, **options)):
        before = len(told) - held
        told, held = [*told, *chunk.token_ids], chunk.held_tokens
        if len(told) - held > before:
            text += chunk.text
        else:
            assert not chunk.text or end == "stop string", "a part of a token's text, at the end alone"
        shown = told[: len(told) - held]
        if end == "stop token" and shown[-1:] == [last]:
            shown.pop()  # it has no text
        assert text == oracle.decode(IDS + shown)[len(PROMPT) :]
        if len(told) == TOKENS and not held:
            break  # nothing is missing, and to ask for it would be refused
        rest = write(draft, IDS, committed_token_ids=told, held_tokens=held, **options)
        assert text + rest.text == whole.text
        assert told[: len(whole.ids)] + rest.ids == whole.ids
        assert (rest.reason, rest.end.stop, rest.end.stop_token_id) == (
            whole.reason,
            whole.end.stop,
            whole.end.stop_token_id,
        )
        assert rest.end.usage.completion_tokens == max(0, len(whole.ids) - len(told))
    assert told[: len(whole.ids)] == whole.ids


def test_half_a_character_is_told_and_goes_on(draft: grpc.Channel) -> None:
    first, second = (oracle.byte_token(byte) for byte in "é".encode())
    law = sampling(0.0, seed=1, logit_bias=[{"token_id": first, "bias": 100.0}])
    (chunk,) = chunks_of(draft, request(IDS, gamma=0, sampling=law, max_new_tokens=1))[:1]
    assert (list(chunk.token_ids), chunk.text, chunk.held_tokens) == ([first], "", 1)
    law = sampling(0.0, seed=1, logit_bias=[{"token_id": second, "bias": 100.0}])
    rest = write(draft, IDS, sampling=law, committed_token_ids=[first], held_tokens=1, max_new_tokens=2)
    assert (rest.ids, rest.text) == ([second], "é")


def test_no_more_can_be_held_than_there_are(draft: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(draft, request(IDS, committed_token_ids=[5], held_tokens=2, max_new_tokens=4))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "held_tokens is 2; at most the 1 committed_token_ids" in (caught.value.details() or "")
