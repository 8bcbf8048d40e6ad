"""What the client library sends, held against the contract. No service is asked."""

import math
from typing import Any

import pytest

from outrider.client import (
    InvalidRequest,
    Message,
    Options,
)
from outrider.client.request import build
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import sampling_pb2

EVERY_OPTION: Options = {
    "max_new_tokens": 9,
    "min_new_tokens": 2,
    "n": 3,
    "time_limit": 1.5,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.25,
    "min_p": 0.125,
    "seed": 2**64 - 1,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.5,
    "frequency_penalty": 2.5,
    "logit_bias": {7: -4.0},
    "banned_token_ids": [5, 6],
    "rule": "block",
    "lenience": 0.75,
    "sigmoid_scales": (-1.0, 1.0),
    "stop": ["\n\n", "END"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "gamma": 0,
    "drafter": "lookup",
    "draft_temperature": 0.5,
    "outcome_cache": False,
    "speculation": "adaptive",
    "max_entropy": 1.5,
    "report_rounds": True,
    "logprobs": 0,
    "keep_special_tokens": True,
    "request_id": "me",
    "required_features": ["tree"],
    "committed_token_ids": [8, 9],
    "held_tokens": 1,
    "weights_fingerprint": "ab",
    "cache_salt": "a tenant",
    "frame_bytes": 512,
    "frame_pace": 0.25,
    "fixed_size_rounds": True,
}


def test_every_option_reaches_the_wire() -> None:
    assert EVERY_OPTION.keys() == Options.__annotations__.keys()
    request = build("x", EVERY_OPTION)
    assert request == pb.GenerateRequest(
        text="x",
        request_id="me",
        committed_token_ids=[8, 9],
        held_tokens=1,
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5,
            top_k=20,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-1.5,
            frequency_penalty=2.5,
            logit_bias=[sampling_pb2.LogitBias(token_id=7, bias=-4.0)],
            banned_token_ids=[5, 6],
            rule=sampling_pb2.ACCEPTANCE_RULE_BLOCK,
            lenience=0.75,
            sigmoid=sampling_pb2.SigmoidScales(alpha=-1.0, beta=1.0),
        ),
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[3],
        stop=["\n\n", "END"],
        ignore_eos=True,
        n=3,
        logprobs=sampling_pb2.LogprobsParams(top_n=0),
        time_limit={"seconds": 1, "nanos": 500_000_000},
        speculation=pb.SpeculationParams(
            gamma=0,
            report_rounds=True,
            drafter=pb.DRAFTER_LOOKUP,
            draft_temperature=0.5,
            outcome_cache=False,
            policy=pb.SPECULATION_POLICY_ADAPTIVE,
            max_entropy=1.5,
            fixed_size=True,
        ),
        keep_special_tokens=True,
        required_features=["tree", "held_tokens", "emission", "fixed_rounds"],
        weights_fingerprint="ab",
        cache_salt="a tenant",
        emission=pb.EmissionPrivacy(frame_bytes=512, pace={"nanos": 250_000_000}),
    )

    unset = {field.name for field in request.DESCRIPTOR.fields} - {field.name for field, _ in request.ListFields()}
    assert unset == {"token_ids", "chat"}, "every field can be set"
    for part in (request.sampling, request.speculation):
        assert len(part.ListFields()) == len(part.DESCRIPTOR.fields)


def test_what_is_left_out_stays_unset() -> None:
    assert build("x", {}) == build("x", {"seed": None, "stop": None}) == pb.GenerateRequest(text="x")
    with pytest.raises(TypeError, match="max_tokens"):
        build("x", {"max_tokens": 3})


def test_a_prompt_is_text_or_tokens_or_messages() -> None:
    assert build("", {}).WhichOneof("prompt") == "text"
    assert list(build([1, 2], {}).token_ids.ids) == [1, 2]
    assert list(build(range(3), {}).token_ids.ids) == [0, 1, 2]
    assert build([], {}).WhichOneof("prompt") == "token_ids"
    chat = [pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u")]
    assert list(build([Message("system", "s"), Message("user", "u")], {}).chat.messages) == chat
    mixed: list[Message | dict[str, str]] = [{"role": "system", "content": "s"}, Message("user", "u")]
    assert list(build(mixed, {}).chat.messages) == chat


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("prompt", [1, -1], {}),
        ("prompt", [1, 2**32], {}),
        ("prompt", [{"role": "user"}], {}),
        ("prompt", "half a \ud800 character", {}),
        ("max_new_tokens", "x", {"max_new_tokens": -1}),
        ("seed", "x", {"seed": 2**64}),
        ("rule", "x", {"rule": "best"}),
        ("stop_token_ids", "x", {"stop_token_ids": [-1]}),
        ("time_limit", "x", {"time_limit": math.inf}),
    ],
)
def test_what_the_wire_cannot_carry_names_its_field(field: str, prompt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, options)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"max_new_tokens": -1}, "max_new_tokens: an integer from 0 to 4294967295 is expected, not -1"),
        ("x", {"temperature": "hot"}, "temperature: a number is expected, not 'hot'"),
        (
            "x",
            {"stop_token_ids": 3},
            "stop_token_ids: a list, each element an integer from 0 to 4294967295, is expected, not 3",
        ),
        (7, {}, "prompt: text, a list of token ids (integers from 0 to 4294967295) or a list of messages is expected"),
    ],
)
def test_a_refusal_names_what_is_accepted(prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, options)
    assert caught.value.message.startswith(message)
