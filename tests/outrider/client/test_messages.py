"""The requests that the client library builds are those of the contract."""

import json
import math
from typing import Any

import numpy as np
import pytest

from outrider.client import Chunk, InvalidRequest, Message, Options, TokenOrigin
from outrider.client.audio import Samples
from outrider.client.request import build
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1 import input_pb2, sampling_pb2

# Options with the name and the type of a field: of the request, of its `sampling`, of its `speculation`.
PLAIN: dict[str, Any] = {
    "max_new_tokens": 9,
    "min_new_tokens": 2,
    "n": 3,
    "stop": ["\n\n", "END"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "joined_responses": True,
    "keep_special_tokens": True,
    "request_id": "me",
    "committed_token_ids": [8, 9],
    "fill_context": True,
    "held_tokens": 1,
    "weights_fingerprint": "ab",
    "cache_salt": "a tenant",
}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.25,
    "min_p": 0.125,
    "seed": 2**64 - 1,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.5,
    "frequency_penalty": 2.5,
    "banned_token_ids": [5, 6],
    "lenience": 0.75,
}
SPECULATION: dict[str, Any] = {
    "gamma": 0,
    "draft_temperature": 0.5,
    "outcome_cache": False,
    "tokens_per_pass": 3,
    "max_entropy": 1.5,
    "report_rounds": True,
    "report_probabilities": True,
}
# Of encoder–decoder models, without the inputs that replace a prompt.
DECODER: dict[str, Any] = {
    "decoder_prompt_token_ids": [50258, 50259],
    "language": "en",
    "task": "translate",
    "timestamps": True,
}
INPUTS = {"audio", "features", "sample_rate"}
OTHERS: dict[str, Any] = {
    "time_limit": 1.5,
    "logit_bias": {7: -4.0},
    "rule": "block",
    "sigmoid_scales": (-1.0, 1.0),
    "drafter": "lookup",
    "speculation": "adaptive",
    "logprobs": 0,
    "prompt_logprobs": 2,
    "required_features": ["tree"],
    "frame_bytes": 512,
    "frame_pace": 0.25,
    "fixed_size_rounds": True,
}


def test_every_option_reaches_the_wire() -> None:
    options = {**PLAIN, **SAMPLING, **SPECULATION, **DECODER, **OTHERS}
    assert options.keys() == Options.__annotations__.keys() - INPUTS - {"template_arguments", "metadata"}
    request = build("x", options)
    assert request == pb.GenerateRequest(
        text="x",
        **PLAIN,
        sampling=sampling_pb2.SamplingParams(
            **SAMPLING,
            logit_bias=[sampling_pb2.LogitBias(token_id=7, bias=-4.0)],
            rule=sampling_pb2.ACCEPTANCE_RULE_BLOCK,
            sigmoid=sampling_pb2.SigmoidScales(alpha=-1.0, beta=1.0),
        ),
        speculation=pb.SpeculationParams(
            **SPECULATION,
            drafter=pb.DRAFTER_LOOKUP,
            policy=pb.SPECULATION_POLICY_ADAPTIVE,
            fixed_size=True,
        ),
        logprobs=sampling_pb2.LogprobsParams(top_n=0),
        prompt_logprobs=sampling_pb2.LogprobsParams(top_n=2),
        time_limit={"seconds": 1, "nanos": 500_000_000},
        decoder_prompt_token_ids=[50258, 50259],
        transcription=pb.Transcription(language="en", task="translate", timestamps=True),
        required_features=[
            "fill_context",
            "held_tokens",
            "report_probabilities",
            "encoder",
            "prompt_logprobs",
            "tree",
            "emission",
            "fixed_rounds",
        ],
        emission=pb.EmissionPrivacy(frame_bytes=512, pace={"nanos": 250_000_000}),
    )
    unset = {field.name for field in request.DESCRIPTOR.fields} - {field.name for field, _ in request.ListFields()}
    assert unset == {"token_ids", "chat", "audio", "features"}, "every field can be set"
    for part in (request.sampling, request.speculation):
        assert len(part.ListFields()) == len(part.DESCRIPTOR.fields)


def test_absent_options_stay_unset() -> None:
    assert build("x", {}) == build("x", {"seed": None, "stop": None}) == pb.GenerateRequest(text="x")
    with pytest.raises(TypeError, match="max_tokens"):
        build("x", {"max_tokens": 3})


def test_a_prompt_is_text_or_tokens_or_messages() -> None:
    assert build("", {}).WhichOneof("prompt") == "text"
    assert list(build(range(3), {}).token_ids.ids) == [0, 1, 2]
    assert build([], {}).WhichOneof("prompt") == "token_ids"
    mixed: list[Message | dict[str, str]] = [{"role": "system", "content": "s"}, Message("user", "u", name="Ada")]
    chat = [pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u", name="Ada")]
    assert list(build(mixed, {}).chat.messages) == chat
    assert list(build(mixed, {}).required_features) == ["message_names"], "an older service would drop the name"
    assert not build(mixed[:1], {}).required_features


def test_template_arguments_are_json_of_a_conversation() -> None:
    messages, arguments = [Message("user", "u")], {"enable_thinking": False, "n": 3}
    request = build(messages, {"template_arguments": arguments})
    assert json.loads(request.chat.template_arguments) == arguments
    assert list(request.required_features) == ["template_arguments"]
    for value in ([1, 2], {"a": b"x"}, {"a": math.nan}):
        with pytest.raises(InvalidRequest, match="it must be a mapping of names to values of JSON"):
            build(messages, {"template_arguments": value})
    with pytest.raises(InvalidRequest, match="only messages have a chat template"):
        build("a text", {"template_arguments": arguments})


@pytest.mark.parametrize(
    "metadata",
    [
        {"Traceparent": "00"},
        {"": "x"},
        {"trace-bin": "x"},
        {"grpc-timeout": "1S"},
        {"authorization": "Bearer x"},
        {"tenant": "é"},
        {"tenant": "a\nb"},
        {"tenant": 3},
        "tenant",
    ],
)
def test_metadata_that_grpc_cannot_carry_is_refused(metadata: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"must be a mapping of names .* to printable ASCII") as caught:
        build("x", {"metadata": metadata})
    assert caught.value.field == "metadata"


def test_speech_takes_the_place_of_a_prompt() -> None:
    samples = Samples(np.arange(9, dtype="<i2"), 16_000)
    assert build(None, {"audio": samples}) == pb.GenerateRequest(
        audio=samples.to_message(), required_features=["encoder"]
    )
    features = np.arange(6.0).reshape(2, 3)
    assert build(None, {"features": features, "timestamps": False}) == pb.GenerateRequest(
        features=input_pb2.LogMelFeatures(values=features.astype("<f4").tobytes(), mels=2, frames=3),
        required_features=["encoder"],
    )


@pytest.mark.parametrize(
    ("prompt", "options", "found"),
    [
        (None, {}, "none is"),
        ("x", {"features": [[1.0]]}, "prompt and features are"),
        ("x", {"audio": b""}, "prompt and audio are"),
    ],
)
def test_a_request_has_one_input(prompt: str | None, options: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{found} given; give exactly one of prompt, audio") as caught:
        build(prompt, options)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", [1, -1], ""),
        ("prompt", [1, 2**32], ""),
        ("prompt", [{"role": "user"}], "prompt: a message has no content; give each message a role and a content"),
        ("prompt", "half \ud800", r"prompt is 'half \ud800'; it must be text that UTF-8 can encode"),
        ("prompt", 7, "prompt is 7; it must be text, a list of token ids (integers from 0 to 4294967295) or a"),
        ("prompt", b"x", "prompt is b'x'; it must be text, a list of token ids (integers from 0 to 4294967295) or a"),
        ("max_new_tokens", -1, "max_new_tokens is -1; it must be an integer from 0 to 4294967295"),
        ("seed", 2**64, ""),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("rule", "best", "rule is 'best'; it must be one of tokenwise"),
        ("stop_token_ids", [-1], ""),
        ("stop_token_ids", 3, "stop_token_ids is 3; it must be a list, each element an integer from 0 to"),
        ("time_limit", math.inf, ""),
        ("sample_rate", 16_000, "sample_rate is 16000; leave it out: only audio as an array needs it"),
        ("language", 7, "language is 7; it must be text that UTF-8 can encode"),
        ("timestamps", "yes", "timestamps is 'yes'; it must be True or False"),
        ("decoder_prompt_token_ids", [-1], "decoder_prompt_token_ids is [-1]; it must be a list of token ids (int"),
        ("features", [1.0], "features have the shape [1]; it must be [mels, frames]"),
    ],
)
def test_a_value_that_the_wire_cannot_carry_names_its_field(field: str, value: Any, message: str) -> None:
    prompt, options = (value, {}) if field == "prompt" else (None if field == "features" else "x", {field: value})
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, options)
    assert caught.value.field == field
    assert caught.value.message.startswith(message or field)


def test_values_of_a_newer_service_are_unspecified() -> None:
    """An event has every field of its message, and an enum's number that this client does not know is no error."""
    chunk = pb.GenerateChunk(
        index=2, text="ab", token_ids=[5, 6], origins=["TOKEN_ORIGIN_DRAFT"], token_texts=["a", "b"], held_tokens=1
    )  # fmt: skip
    found = Chunk.of(pb.GenerateChunk.FromString(chunk.SerializeToString() + b"\x22\x01\x63"))  # a second origin: 99
    origins = (TokenOrigin.DRAFT, TokenOrigin.UNSPECIFIED)
    assert found == Chunk(2, "ab", (5, 6), origins, ("a", "b"), (), (), 1)
