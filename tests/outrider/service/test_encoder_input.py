"""Inputs of encoders: every check names the field and its numbers, and features are those of transformers."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from outrider.rpc.errors import RequestError
from outrider.runtime.encoder_decoder import SPEECH, TEXT, EncoderInfo
from outrider.runtime.errors import CheckpointError
from outrider.service.encoder_input import (
    EncoderInputs,
    check_opening_input,
    check_size,
    check_values,
    misfit,
    smallest_input,
)
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2, verifier_service_pb2

MELS, FRAMES, RATE = 20, 100, 16_000
SECOND = RATE * FRAMES // 100
S16, F32 = input_pb2.AUDIO_FORMAT_S16LE, input_pb2.AUDIO_FORMAT_F32LE
TEXT_MODEL = model_pb2.ModelInfo(
    vocab_size=50, encoder=model_pb2.EncoderInfo(kind=model_pb2.ENCODER_KIND_TEXT, max_positions=8)
)
SPEECH_MODEL = model_pb2.ModelInfo(
    vocab_size=50,
    encoder=model_pb2.EncoderInfo(
        kind=model_pb2.ENCODER_KIND_SPEECH, max_positions=FRAMES // 2, mels=MELS, frames=FRAMES, sample_rate=RATE
    ),
)
INFO = EncoderInfo(SPEECH, FRAMES // 2, 1, mels=MELS, frames=FRAMES)


def tokens(*ids: int) -> input_pb2.EncoderInput:
    return input_pb2.EncoderInput(token_ids=input_pb2.EncoderTokens(ids=ids))


def audio(samples: np.ndarray | bytes = b"\0\0", **fields: Any) -> input_pb2.EncoderInput:
    """Audio of the format that the samples have; 16 bits by default."""
    is_float = isinstance(samples, np.ndarray) and samples.dtype == np.float32
    raw = samples if isinstance(samples, bytes) else samples.tobytes()
    given = {"samples": raw, "format": F32 if is_float else S16, "sample_rate": RATE, **fields}
    return input_pb2.EncoderInput(audio=input_pb2.Audio(**given))


def features(values: np.ndarray | None = None, **fields: Any) -> input_pb2.EncoderInput:
    values = np.zeros((MELS, FRAMES), np.float32) if values is None else values
    given = {"values": values.astype("<f4").tobytes(), "mels": MELS, "frames": FRAMES, **fields}
    return input_pb2.EncoderInput(features=input_pb2.LogMelFeatures(**given))


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.reason == "INVALID_FIELD"
    return caught.value


@pytest.mark.parametrize(
    ("model", "message", "field", "numbers"),
    [
        (TEXT_MODEL, input_pb2.EncoderInput(), "prompt", ["not set", "takes text: set token_ids"]),
        (TEXT_MODEL, audio(), "e.audio", ["takes text: set token_ids"]),
        (TEXT_MODEL, features(), "e.features", ["takes text"]),
        (TEXT_MODEL, tokens(), "e.token_ids.ids", ["0 tokens", "1 to 8"]),
        (TEXT_MODEL, tokens(*range(9)), "e.token_ids.ids", ["9 tokens", "1 to 8"]),
        (TEXT_MODEL, tokens(3, 50), "e.token_ids.ids", ["[1] is 50"]),
        (SPEECH_MODEL, input_pb2.EncoderInput(), "prompt", ["not set", "takes speech: set audio or features"]),
        (SPEECH_MODEL, tokens(3), "e.token_ids", ["takes speech: set audio or features"]),
        (SPEECH_MODEL, audio(b""), "e.audio.samples", ["empty", "at least 1 sample"]),
        (SPEECH_MODEL, audio(b"123"), "e.audio.samples", ["3 bytes", "a multiple of 2"]),
        (SPEECH_MODEL, audio(b"123456", format=F32), "e.audio.samples", ["6 bytes", "a multiple of 4"]),
        (SPEECH_MODEL, audio(format=0), "e.audio.format", ["is 0", "S16LE (1)", "F32LE (2)"]),
        (SPEECH_MODEL, audio(format=9), "e.audio.format", ["is 9"]),
        (SPEECH_MODEL, audio(sample_rate=44_100), "e.audio.sample_rate", ["44100", "16000", "resample"]),
        (SPEECH_MODEL, audio(sample_rate=0), "e.audio.sample_rate", ["is 0", "16000"]),
        (SPEECH_MODEL, audio(bytes(2 * SECOND + 2)), "e.audio.samples", ["16001 samples", "at most 16000 (1 s)"]),
        (SPEECH_MODEL, audio(bytes(4 * SECOND + 4), format=F32), "e.audio.samples", ["16001", "16000"]),
        (SPEECH_MODEL, features(mels=80), "e.features.mels", ["80", "20"]),
        (SPEECH_MODEL, features(frames=3000), "e.features.frames", ["3000", "100"]),
        (SPEECH_MODEL, features(values=np.zeros(MELS * FRAMES - 1)), "e.features.values", ["7996", "8000"]),
    ],
)
def test_an_invalid_input_is_refused_with_field_and_numbers(
    model: model_pb2.ModelInfo, message: input_pb2.EncoderInput, field: str, numbers: list[str]
) -> None:
    error = refusal(lambda: check_size(message, model, prefix="e."))
    assert error.metadata["field"] == field
    assert not [number for number in (field, *numbers) if number not in error.message], error.message
    if message.WhichOneof("kind"):
        assert misfit(message, model) == refusal(lambda: check_size(message, model)).message


@pytest.mark.parametrize(
    ("make", "bad", "field", "most"),
    [
        (audio, math.nan, "e.audio.samples", 16),
        (audio, math.inf, "e.audio.samples", 16),
        (audio, -16.1, "e.audio.samples", 16),
        (features, math.nan, "e.features.values", 100),
        (features, -math.inf, "e.features.values", 100),
        (features, 100.1, "e.features.values", 100),
    ],
)
def test_a_bad_value_is_named_with_its_index(
    make: Callable[[np.ndarray], input_pb2.EncoderInput], bad: float, field: str, most: int
) -> None:
    values = np.full(MELS * FRAMES, -most, np.float32)
    check_values(make(values), prefix="e.")
    values[7] = bad
    check_size(make(values), SPEECH_MODEL)
    error = refusal(lambda: check_values(make(values), prefix="e."))
    assert error.metadata["field"] == field
    assert error.metadata["index"] == "7"
    assert f"{field}[7] is {bad:g}; it must lie in [-{most}, {most}]" in error.message


@pytest.mark.parametrize("kind", [verifier_service_pb2.OpenSequence, draft_service_pb2.OpenDraft])
def test_an_opening_has_an_input_if_and_only_if_the_model_has_an_encoder(kind: Any) -> None:
    plain = model_pb2.ModelInfo(vocab_size=50)
    check_opening_input(kind(), plain)
    check_opening_input(kind(encoder_input=tokens(3)), TEXT_MODEL)
    check_opening_input(kind(encoder_input=audio()), SPEECH_MODEL)
    error = refusal(lambda: check_opening_input(kind(encoder_input=tokens(3)), plain))
    assert error.metadata["field"] == "encoder_input"
    assert "the model has no encoder" in error.message
    for fields in ({}, {"encoder_input": input_pb2.EncoderInput()}):
        error = refusal(partial(check_opening_input, kind(**fields), TEXT_MODEL))
        assert error.metadata["field"] == "encoder_input"
    error = refusal(lambda: check_opening_input(kind(encoder_input=tokens(50)), TEXT_MODEL))
    assert error.metadata["field"] == "encoder_input.token_ids.ids"


def speech(seconds: float) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 0.2, int(RATE * seconds)).astype(np.float32)


@pytest.mark.parametrize("seconds", [1 / RATE, 0.4, 1.0])
@pytest.mark.parametrize("bits", [16, 32])
def test_features_are_those_of_transformers(seconds: float, bits: int) -> None:
    samples = speech(seconds)
    if bits == 16:
        sent = np.round(np.clip(samples, -1, 32767 / 32768) * 32768).astype("<i2")
        samples = (sent / 32768).astype(np.float32)
        message = audio(sent)
    else:
        message = audio(samples)
    check_size(message, SPEECH_MODEL)
    check_values(message)
    found = EncoderInputs(INFO).tensor(message)
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features[0]
    assert (found.shape, found.dtype) == ((MELS, FRAMES), torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mels", [80, 128])
def test_features_of_thirty_seconds_by_the_settings_of_a_folder(tmp_path: Path, mels: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=mels)
    extractor.save_pretrained(tmp_path)
    samples = speech(30)
    found = EncoderInputs(EncoderInfo(SPEECH, 1500, 1, mels=mels, frames=3000), tmp_path).tensor(audio(samples))
    expected = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_features_and_tokens_are_sent_as_they_are() -> None:
    values = np.random.default_rng(1).normal(size=(MELS, FRAMES)).astype(np.float32)
    assert EncoderInputs(INFO).tensor(features(values)).equal(torch.from_numpy(values))
    found = EncoderInputs(EncoderInfo(TEXT, 8, 1)).tensor(tokens(5, 0, 49))
    assert found.equal(torch.tensor([5, 0, 49]))
    assert found.dtype == torch.int64


@pytest.mark.parametrize("model", [TEXT_MODEL, SPEECH_MODEL])
def test_the_smallest_input_passes_the_checks(model: model_pb2.ModelInfo) -> None:
    message = smallest_input(model.encoder)
    check_size(message, model)
    check_values(message)
    assert misfit(message, model) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feature_size": 80}, "80 mel bands; it must have 20"),
        ({"chunk_length": 30}, "3000 frames; it must have 100"),
        ({"sampling_rate": 8000, "hop_length": 80}, "8000 samples a second; it must have 16000"),
        ({"dither": 0.1}, "0.1 dither; it must have 0"),
    ],
)
def test_an_extractor_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    settings = {"feature_size": MELS, "chunk_length": 1, **changes}
    WhisperFeatureExtractor(**settings).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        EncoderInputs(INFO, tmp_path)


def test_thirty_seconds_fit_into_a_message_of_the_default_limit() -> None:
    longest = audio(np.zeros(30 * RATE, np.float32))
    assert verifier_service_pb2.OpenSequence(encoder_input=longest).ByteSize() < 2 << 20
