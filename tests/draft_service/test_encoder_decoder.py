"""Encoder–decoder drafts: proposals of the engine after any verdict, with branches and preemption; and what both
services tell, check and do of encoders.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from draft_service.drafters.engine import DraftEngine
from outrider.runtime.kv_cache import BLOCK_TOKENS
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, wait_healthy
from tests.draft_service.calls import ProposeStream, generate, sampling
from tests.draft_service.engines import Driver, engine_of, running, sequence
from tests.encoder_decoders import (
    DE,
    EN,
    FIRST_TIMESTAMP,
    FRAMES,
    MAX_TOKENS,
    MELS,
    MODELS,
    NOISE,
    POSITIONS,
    RATE,
    START,
    Pair,
    V,
    decoder_prompt,
    features,
    generated,
    inputs,
    loaded,
    logits_of,
    noise,
    save,
    serving_all,
)
from tests.verifier_service.streams import Stream, error_of, opening

GAMMA, ROUNDS = 4, 6


@pytest.mark.parametrize(("name", "is_short"), [("t5", False), *((name, True) for name in MODELS)])
def test_proposals_are_the_models_likeliest_tokens(name: str, is_short: bool) -> None:
    """Four sequences in turns; verdicts accept any number of tokens. With few blocks two of them hold any."""
    coin = random.Random(3)
    own_inputs = inputs(name, 4)
    blocks = 2 * (max(-(-each.shape[-1] // BLOCK_TOKENS) for each in own_inputs) + 1)
    how: dict[str, Any] = {"blocks": blocks} if is_short else {}
    with running(engine_of(loaded(name), vocab_size=V, max_length=64, **how)) as engine:
        assert isinstance(engine, DraftEngine)
        drivers = [Driver(engine, sequence(temperature=0.0, prompt=[START], encoder_input=each)) for each in own_inputs]
        texts, committed = [[START] for _ in drivers], [list[int]() for _ in drivers]
        for _ in range(ROUNDS):
            for driver, own in zip(drivers, committed, strict=True):
                driver.request(GAMMA, own)
            for index, driver in enumerate(drivers):
                drafted = driver.result().token_ids
                text = texts[index]
                rows = logits_of(name, own_inputs[index], [*text, *drafted])
                assert drafted == rows[len(text) - 1 : -1].argmax(-1).tolist()
                accepted = coin.randint(0, GAMMA)
                committed[index] = [*drafted[:accepted], coin.randrange(V)]
                texts[index] += committed[index]
        for driver in drivers:
            driver.close()
    engine.cache.reset()
    engine.model_runner.pool.check_integrity()
    assert engine.model_runner.pool.used_blocks == 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    with serving_all(tmp_path_factory.mktemp("pairs")) as pairs:
        yield pairs


@pytest.fixture(params=["t5", "whisper"])
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def prompt_of(name: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The prompt of a request, which is token ids or audio as floats, and the encoder's input."""
    if name == "whisper":
        samples = noise(0.5)
        floats = (samples / 2**15).astype("<f4").tobytes()
        audio = input_pb2.Audio(samples=floats, format=input_pb2.AUDIO_FORMAT_F32LE, sample_rate=RATE)
        return {"audio": audio}, torch.from_numpy(features(samples))
    ids = inputs(name, 3)[2]
    return {"token_ids": {"ids": ids.tolist()}}, ids


def test_what_the_services_say_of_their_encoders(pair: Pair) -> None:
    expected = model_pb2.EncoderInfo(
        kind=model_pb2.ENCODER_KIND_TEXT, max_positions=POSITIONS, decoder_prompt_token_ids=[START]
    )
    if pair.name == "whisper":
        expected = model_pb2.EncoderInfo(
            kind=model_pb2.ENCODER_KIND_SPEECH, max_positions=FRAMES // 2, mels=MELS, frames=FRAMES, sample_rate=RATE,
            decoder_prompt_token_ids=decoder_prompt("whisper"), first_timestamp_token_id=FIRST_TIMESTAMP,
        )  # fmt: skip
    with grpc.insecure_channel(pair.draft.address) as channel:
        answer = DraftServiceStub(channel).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    for model in (answer.target, answer.model):
        assert model.encoder == expected
        assert "encoder" in model.features


def test_propose_drafts_for_an_encoders_input(pair: Pair) -> None:
    prompt, encoder_input = prompt_of(pair.name)
    own = decoder_prompt(pair.name)
    expected = generated(pair.name, encoder_input, 3, own, NOISE)
    with grpc.insecure_channel(pair.draft.address) as channel, ProposeStream(channel) as stream:
        stream.open(own, sampling=sampling(0.0, seed=1), encoder_input=input_pb2.EncoderInput(**prompt))
        stream.take()
        stream.advance(1, len(own), [], gamma=3)
        assert list(stream.take().proposal.token_ids)[: len(expected)] == expected


def test_reports_of_rounds_count_the_output_alone(pair: Pair) -> None:
    """Not the tokens of the encoder's input, which are no tokens of the sequence."""
    prompt, _ = prompt_of(pair.name)
    speculation = draft_service_pb2.SpeculationParams(gamma=2, report_rounds=True)
    message = draft_service_pb2.GenerateRequest(
        **prompt, sampling=sampling(0.0, seed=1), max_new_tokens=12, ignore_eos=True, speculation=speculation
    )
    with grpc.insecure_channel(pair.draft.address) as channel:
        (sample,) = generate(channel, message).samples
    at = 0
    for report in sample.rounds:
        assert report.output_length == at
        at += report.accepted + 1
    assert at == len(sample.ids) == 12


def test_a_service_without_draft_model_serves_a_pair(pair: Pair) -> None:
    """Its generation config and its tokenizer come from a folder."""
    prompt, encoder_input = prompt_of(pair.name)
    language: dict[str, Any] = {"transcription": {"language": "de"}} if pair.name == "whisper" else {}
    expected = generated(pair.name, encoder_input, 40, decoder_prompt(pair.name, language=DE if language else EN))
    with Cluster() as cluster:
        service = cluster.draft(pair.verifier, model=pair.target, flags="--drafter lookup")
        wait_healthy(service)
        message = draft_service_pb2.GenerateRequest(
            **prompt, **language, sampling=sampling(0.0, seed=1), max_new_tokens=40
        )
        with grpc.insecure_channel(service.address) as channel:
            assert generate(channel, message).samples[0].ids == expected


def audio(samples: bytes | list[float] = b"\0\0", **fields: Any) -> dict[str, Any]:
    """A second at most; bytes are samples of 16 bits."""
    raw = samples if isinstance(samples, bytes) else np.array(samples, "<f4").tobytes()
    given = {"samples": raw, "format": S16 if isinstance(samples, bytes) else F32, "sample_rate": RATE, **fields}
    return {"audio": input_pb2.Audio(**given)}


def log_mel(value: float = 0.0, **fields: Any) -> dict[str, Any]:
    """One of the values is not 0."""
    values = np.zeros((MELS, FRAMES), "<f4")
    values[3, 5] = value
    given = {"values": values.tobytes(), "mels": MELS, "frames": FRAMES, **fields}
    return {"features": input_pb2.LogMelFeatures(**given)}


def ids(*tokens: int) -> dict[str, Any]:
    return {"token_ids": {"ids": tokens}}


S16, F32 = input_pb2.AUDIO_FORMAT_S16LE, input_pb2.AUDIO_FORMAT_F32LE
TAKES_TEXT, TAKES_SPEECH = "takes text: set (text or )?token_ids", "takes speech: set audio or features"
Refused = tuple[str, dict[str, Any], str, str]
REFUSED_INPUTS: list[Refused] = [
    ("t5", audio(), "audio", f"is set; the model's encoder {TAKES_TEXT}"),
    ("t5", log_mel(), "features", f"is set; the model's encoder {TAKES_TEXT}"),
    ("t5", ids(), "token_ids.ids", "the prompt is empty; at least 1 token|has 0 tokens; .* takes 1 to 96"),
    ("t5", ids(*[EN] * (POSITIONS + 1)), "token_ids.ids", "has 97 tokens; the model's encoder takes 1 to 96"),
    ("t5", ids(EN, V), "token_ids.ids", rf"\[1\] is {V}; token ids must be below {V}"),
    ("whisper", ids(EN), "token_ids", f"is set; the model's encoder {TAKES_SPEECH}"),
    ("whisper", audio(sample_rate=44_100), "audio.sample_rate", "is 44100; the model takes 16000 .*: resample"),
    ("whisper", audio(format=9), "audio.format", r"is 9; .* one of AUDIO_FORMAT_S16LE \(1\), AUDIO_FORMAT_F32LE \(2\)"),
    ("whisper", audio(b""), "audio.samples", "is empty; at least 1 sample"),
    ("whisper", audio(b"123"), "audio.samples", "has 3 bytes; it must be a multiple of 2"),
    ("whisper", audio(bytes(2 * RATE + 2)), "audio.samples", r"has 16001 samples .* at most 16000 \(1 s\)"),
    ("whisper", audio([0.5, 16.5]), "audio.samples", r"\[1\] is 16.5; it must lie in \[-16, 16\]"),
    ("whisper", audio([math.nan]), "audio.samples", r"\[0\] is nan; it must lie in \[-16, 16\]"),
    ("whisper", log_mel(math.nan), "features.values", r"\[305\] is nan; it must lie in \[-100, 100\]"),
    ("whisper", log_mel(-100.5), "features.values", r"\[305\] is -100.5; it must lie in \[-100, 100\]"),
    ("whisper", log_mel(mels=80), "features.mels", "is 80; it must be 20"),
    ("whisper", log_mel(frames=3000), "features.frames", "is 3000; it must be 100"),
    ("whisper", log_mel(values=b"1234"), "features.values", "has 4 bytes; it must have 8000: .* 20 mels in 100 frames"),
]
REFUSED_PROMPTS: list[Refused] = [
    ("t5", {}, "prompt", f"is not set; the model's encoder {TAKES_TEXT}"),
    ("t5", {"text": ""}, "text", "the prompt is empty; at least 1 token"),
    ("t5", {"text": "a" * (POSITIONS + 1)}, "text", "has 97 tokens; the model's encoder takes 1 to 96"),
    ("t5", {"chat": {"messages": [{"role": "user", "content": "a"}]}}, "chat", "is set; .* takes no conversation"),
    ("t5", {"text": "a", "prompt_logprobs": {}}, "prompt_logprobs", "is set; a model with an encoder does not score"),
    ("t5", {"text": "a", "transcription": {}}, "transcription", "is set; the model's encoder takes text"),
    ("t5", {"text": "a", "decoder_prompt_token_ids": [V]}, "decoder_prompt_token_ids", rf"\[0\] is {V}; .* below {V}"),
    ("whisper", {}, "prompt", f"is not set; the model's encoder {TAKES_SPEECH}"),
    ("whisper", {"text": "a"}, "text", f"is set; the model's encoder {TAKES_SPEECH}"),
    ("whisper", audio() | {"transcription": {"language": "fr"}}, "transcription.language", "is 'fr'; .* offers de, en"),
    ("whisper", audio() | {"transcription": {"task": "sing"}}, "transcription.task", "is 'sing'; .* offers transcribe"),
    ("whisper", audio() | {"decoder_prompt_token_ids": [START] * MAX_TOKENS}, "decoder_prompt_token_ids",
     "has 80 tokens; at most 79, so that it and the output have at most 80"),
]  # fmt: skip


def check_refusal(call: Any, field: str, words: str) -> None:
    error = error_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.metadata["field"] == field
    assert re.search(rf"^{re.escape(field)}(:| |\[).*", error.message)
    assert re.search(words, error.message), error.message


@pytest.mark.parametrize(("name", "fields", "field", "words"), [*REFUSED_INPUTS, *REFUSED_PROMPTS])
def test_generate_refuses_an_input(
    pairs: Callable[[str], Pair], name: str, fields: dict[str, Any], field: str, words: str
) -> None:
    message = draft_service_pb2.GenerateRequest(sampling=sampling(1.0, seed=1), max_new_tokens=4, **fields)
    with grpc.insecure_channel(pairs(name).draft.address) as channel:
        check_refusal(DraftServiceStub(channel).Generate(message, timeout=60), field, words)


@pytest.mark.parametrize(("name", "fields", "field", "words"), [*REFUSED_INPUTS, ("whisper", None, "", "is not set")])
def test_verify_and_propose_refuse_an_input(
    pairs: Callable[[str], Pair], name: str, fields: dict[str, Any] | None, field: str, words: str
) -> None:
    """They do not rely on the checks of `Generate`."""
    given: dict[str, Any] = {} if fields is None else {"encoder_input": input_pb2.EncoderInput(**fields)}
    field = f"encoder_input.{field}".rstrip(".")
    message = verifier_service_pb2.OpenSequence(**given)
    message.MergeFrom(opening([START]))
    with grpc.insecure_channel(pairs(name).verifier.address) as channel, Stream(channel) as verify:
        verify.open(message)
        check_refusal(verify.call, field, words)
    with grpc.insecure_channel(pairs(name).draft.address) as channel, ProposeStream(channel) as propose:
        propose.open([START], sampling=sampling(1.0, seed=1), **given)
        check_refusal(propose.call, field, words)


def test_the_target_alone_writes_inputs_that_are_too_long_for_the_draft(
    pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """The log says so at the start, and of each request."""
    own, config = save("t5", tmp_path / "draft", NOISE), tmp_path / "draft" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_positions": 16}))
    with Cluster() as cluster:
        service = cluster.draft(pairs("t5").verifier, model=own)
        wait_healthy(service)
        drafters = []
        with grpc.insecure_channel(service.address) as channel:
            for length in (16, 17):
                tokens = inputs("t5", 4)[3][:length]
                message = draft_service_pb2.GenerateRequest(
                    **ids(*tokens.tolist()), sampling=sampling(0.0, seed=1), max_new_tokens=12, request_id=str(length)
                )
                result = generate(channel, message)
                assert result.samples[0].ids == generated("t5", tokens, 12)
                drafters.append(result.started.drafter)
        assert drafters == [draft_service_pb2.DRAFTER_MODEL, draft_service_pb2.DRAFTER_NONE]
        (warned,) = service.logged("the draft's encoder takes shorter inputs than the target's")
        assert (warned["level"], warned["draft"], warned["target"], warned["unit"]) == (
            "warning",
            16,
            POSITIONS,
            "tokens",
        )
        (alone,) = service.logged("the draft's encoder does not take the input")
        assert (alone["request_id"], alone["effect"]) == ("17", "the target writes without a draft")
        assert alone["reason"] == "token_ids.ids has 17 tokens; the model's encoder takes 1 to 16"


def test_the_target_alone_writes_if_the_drafts_input_fails(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    tokens = inputs("t5", 4)[3][:16]
    with Cluster() as cluster:
        service = cluster.draft(pairs("t5").verifier, model=save("t5", tmp_path, NOISE), fault="encoder_input_raises")
        wait_healthy(service)
        message = draft_service_pb2.GenerateRequest(
            **ids(*tokens.tolist()), sampling=sampling(0.0, seed=1), max_new_tokens=12
        )
        with grpc.insecure_channel(service.address) as channel:
            result = generate(channel, message)
        assert result.samples[0].ids == generated("t5", tokens, 12)
        assert result.started.drafter == draft_service_pb2.DRAFTER_NONE
        assert service.count("outrider_internal_errors_total", component="draft_input") == 1


def test_a_causal_model_refuses_an_encoders_input(draft: grpc.Channel) -> None:
    with ProposeStream(draft) as stream:
        stream.open([1], encoder_input=input_pb2.EncoderInput(token_ids={"ids": [1]}))
        assert error_of(stream.call).metadata["field"] == "encoder_input"
