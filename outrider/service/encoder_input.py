"""Inputs of encoders: checks the messages, and computes the tensors that encoders take.

Each check raises a `RequestError`, INVALID_ARGUMENT.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.rpc.errors import RequestError, counted, invalid_field
from outrider.runtime.encoder_decoder import SPEECH, EncoderInfo
from outrider.runtime.errors import CheckpointError
from outrider.service.sampling import check_token_ids
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2, verifier_service_pb2

SAMPLE_RATE, FRAME_SAMPLES = 16_000, 160
"""Samples a second, and samples of a frame of features: 10 ms."""

MAX_SAMPLE, MAX_FEATURE = 16.0, 100.0
"""The largest magnitudes of a sample and of a feature."""

_FORMATS: dict[int, np.dtype[Any]] = {
    input_pb2.AUDIO_FORMAT_S16LE: np.dtype("<i2"),
    input_pb2.AUDIO_FORMAT_F32LE: np.dtype("<f4"),
}
_FULL_SCALE = 32768.0  # of S16LE
_FEATURES = np.dtype("<f4")
# Files of transformers with the settings of a feature extractor.
_EXTRACTOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Values are checked and features computed here: 30 s of audio take 7 ms. One core each: with a second pool of OpenMP
# threads beside the engine's they took 55 ms. Threads that torch knows already keep their number of cores.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="encoder-input", initializer=torch.set_num_threads, initargs=(1,))


# -------------------------------------------------------------------------------------------------------------- checks


def check_opening_input(
    opening: verifier_service_pb2.OpenSequence | draft_service_pb2.OpenDraft, model: model_pb2.ModelInfo
) -> None:
    """Checks `encoder_input` of an opening. It must be set if the model has an encoder, and only then."""
    name = "encoder_input"
    if not model.HasField("encoder"):
        if opening.HasField(name):
            raise invalid_field(name, f"{name} is set; the model has no encoder: unset it")
        return
    check_size(opening.encoder_input, model, prefix=f"{name}.", missing=name)


def check_size(
    message: input_pb2.EncoderInput, model: model_pb2.ModelInfo, *, prefix: str = "", missing: str = "prompt"
) -> None:
    """Checks the kind of an input, its numbers and its bytes, and token ids. Allocates nothing for audio and features.

    Args:
        model: a model with an encoder.
        prefix: of the names of fields.
        missing: the field to name if there is no input.
    """
    encoder, kind = model.encoder, message.WhichOneof("kind")
    if kind is None:
        raise invalid_field(missing, f"{missing} is not set; {_takes(encoder, prefix)}")
    check_kind(f"{prefix}{kind}", encoder, is_text=kind == "token_ids")
    match kind:
        case "token_ids":
            field, ids = f"{prefix}token_ids.ids", message.token_ids.ids
            check_length(field, len(ids), encoder)
            check_token_ids(field, ids, model.vocab_size)
        case "audio":
            _check_audio(f"{prefix}audio", message.audio, encoder)
        case "features":
            check_feature_shape(f"{prefix}features", message.features, encoder)


def check_kind(field: str, encoder: model_pb2.EncoderInfo, *, is_text: bool) -> None:
    """Refuses text for an encoder of speech, and the reverse."""
    if is_text != (encoder.kind == model_pb2.ENCODER_KIND_TEXT):
        prefix = field.rpartition(".")[0]
        raise invalid_field(field, f"{field} is set; {_takes(encoder, prefix)}")


def _takes(encoder: model_pb2.EncoderInfo, prefix: str) -> str:
    if encoder.kind == model_pb2.ENCODER_KIND_SPEECH:
        return "the model's encoder takes speech: set audio or features"
    return f"the model's encoder takes text: set {'token_ids' if prefix else 'text or token_ids'}"


def check_length(field: str, tokens: int, encoder: model_pb2.EncoderInfo) -> None:
    """Checks the number of tokens of an encoder's input."""
    most = encoder.max_positions
    if not 1 <= tokens <= most:
        raise invalid_field(
            field,
            f"{field} has {counted(tokens, 'token')}; the model's encoder takes 1 to {most}",
            given=tokens,
            maximum=most,
        )


def _check_audio(field: str, audio: input_pb2.Audio, encoder: model_pb2.EncoderInfo) -> None:
    sample = _FORMATS.get(audio.format)
    if sample is None:
        offered = ", ".join(f"{input_pb2.AudioFormat.Name(number)} ({number})" for number in _FORMATS)
        name = f"{field}.format"
        raise invalid_field(name, f"{name} is {audio.format}; it must be one of {offered}", given=audio.format)
    if audio.sample_rate != encoder.sample_rate:
        name = f"{field}.sample_rate"
        raise invalid_field(
            name,
            f"{name} is {audio.sample_rate}; the model takes {encoder.sample_rate} samples a second: resample the "
            "audio",
            given=audio.sample_rate,
            expected=encoder.sample_rate,
        )
    name, given = f"{field}.samples", len(audio.samples)
    if given % sample.itemsize:
        raise invalid_field(
            name,
            f"{name} has {counted(given, 'byte')}; it must be a multiple of {sample.itemsize}, the bytes of a sample",
            given=given,
            sample_bytes=sample.itemsize,
        )
    samples, rate = given // sample.itemsize, encoder.sample_rate
    most = encoder.frames * rate // 100
    if not samples:
        raise invalid_field(name, f"{name} is empty; at least 1 sample is needed", given=0)
    if samples > most:
        raise invalid_field(
            name,
            f"{name} has {samples} samples ({samples / rate:.6g} s); the model takes at most {most} "
            f"({most / rate:.6g} s): send longer audio in several requests",
            given=samples,
            maximum=most,
        )


def check_feature_shape(field: str, features: input_pb2.LogMelFeatures, encoder: model_pb2.EncoderInfo) -> None:
    """Checks the shape of features, and their bytes."""
    for name, given, expected in (("mels", features.mels, encoder.mels), ("frames", features.frames, encoder.frames)):
        if given != expected:
            raise invalid_field(
                f"{field}.{name}",
                f"{field}.{name} is {given}; it must be {expected}, as the model takes it",
                given=given,
                expected=expected,
            )
    name, size = f"{field}.values", len(features.values)
    expected = _FEATURES.itemsize * encoder.mels * encoder.frames
    if size != expected:
        raise invalid_field(
            name,
            f"{name} has {counted(size, 'byte')}; it must have {expected}: 4 for each of {encoder.mels} mels in "
            f"{encoder.frames} frames",
            given=size,
            expected=expected,
        )


def check_values(message: input_pb2.EncoderInput, *, prefix: str = "") -> None:
    """Checks the numbers of an input that passed `check_size`: finite and in their range. Takes up to 2 ms."""
    kind = message.WhichOneof("kind")
    if kind == "audio" and message.audio.format == input_pb2.AUDIO_FORMAT_F32LE:
        _check_range(f"{prefix}audio.samples", _samples(message.audio), MAX_SAMPLE)
    elif kind == "features":
        _check_range(f"{prefix}features.values", np.frombuffer(message.features.values, _FEATURES), MAX_FEATURE)


def _check_range(field: str, values: np.ndarray, most: float) -> None:
    is_valid = np.abs(values) <= most  # also false for NaN
    if not is_valid.all():
        at = int(is_valid.argmin())
        raise invalid_field(
            field,
            f"{field}[{at}] is {values[at]:g}; it must lie in [{-most:g}, {most:g}]",
            index=at,
            given=float(values[at]),
            maximum=most,
        )


def _samples(audio: input_pb2.Audio) -> np.ndarray:
    return np.frombuffer(audio.samples, _FORMATS[audio.format])


def misfit(message: input_pb2.EncoderInput, model: model_pb2.ModelInfo) -> str:
    """Why another model's encoder does not take the input; empty if it does."""
    try:
        check_size(message, model)
    except RequestError as error:
        return error.message
    return ""


# --------------------------------------------------------------------------------------------------------- conversion


class EncoderInputs:
    """Computes the tensors that the encoder of one model takes. Its methods may be called from any thread.

    `folder` is the model's, with the settings of its feature extractor. Without them, or with None, it is Whisper's.

    Raises:
        CheckpointError: the extractor computes other features than the model takes.
    """

    def __init__(self, info: EncoderInfo, folder: Path | None = None) -> None:
        self._extractor = _extractor(info, folder) if info.kind == SPEECH else None

    def tensor(self, message: input_pb2.EncoderInput) -> Tensor:
        """Token ids `[S]` int64, or log-Mel features `[mels, frames]` float32. The message must have been checked."""
        match message.WhichOneof("kind"):
            case "token_ids":
                return torch.tensor(message.token_ids.ids, dtype=torch.int64)
            case "features":
                features = message.features
                values = np.frombuffer(features.values, _FEATURES).reshape(features.mels, features.frames)
                return torch.from_numpy(values.astype(np.float32))
            case _:
                return self._extract(message.audio)

    async def checked_tensor(self, message: input_pb2.EncoderInput, *, prefix: str = "") -> Tensor:
        """`check_values` and `tensor`, off the event loop if they take long."""

        def convert() -> Tensor:
            check_values(message, prefix=prefix)
            return self.tensor(message)

        if message.WhichOneof("kind") == "token_ids":
            return convert()
        return await asyncio.get_running_loop().run_in_executor(_THREADS, convert)

    def _extract(self, audio: input_pb2.Audio) -> Tensor:
        assert self._extractor is not None
        samples = _samples(audio).astype(np.float32)
        if audio.format == input_pb2.AUDIO_FORMAT_S16LE:
            samples /= _FULL_SCALE
        features = self._extractor(samples, sampling_rate=audio.sample_rate, return_tensors="np").input_features[0]
        return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))


def smallest_input(encoder: model_pb2.EncoderInfo) -> input_pb2.EncoderInput:
    """An input for warm-up steps and probes: one token, or silence."""
    if encoder.kind == model_pb2.ENCODER_KIND_TEXT:
        return input_pb2.EncoderInput(token_ids=input_pb2.EncoderTokens(ids=[0]))
    silence = input_pb2.Audio(samples=bytes(2), format=input_pb2.AUDIO_FORMAT_S16LE, sample_rate=encoder.sample_rate)
    return input_pb2.EncoderInput(audio=silence)


def _extractor(info: EncoderInfo, folder: Path | None) -> Any:
    from transformers import WhisperFeatureExtractor  # text models do without

    if folder is not None and any((folder / name).is_file() for name in _EXTRACTOR_FILES):
        try:
            extractor = WhisperFeatureExtractor.from_pretrained(folder)
        except Exception as error:
            raise CheckpointError(f"cannot read the feature extractor of '{folder}': {error}") from error
    else:
        extractor = WhisperFeatureExtractor(feature_size=info.mels)
        extractor.nb_max_frames, extractor.n_samples = info.frames, info.frames * FRAME_SAMPLES
    for name, given, expected in (
        ("mel bands", extractor.feature_size, info.mels),
        ("frames", extractor.nb_max_frames, info.frames),
        ("samples a second", extractor.sampling_rate, SAMPLE_RATE),
        ("samples a frame", extractor.hop_length, FRAME_SAMPLES),
        ("dither", extractor.dither, 0.0),
    ):
        if given != expected:
            raise CheckpointError(
                f"the feature extractor of '{folder}' has {given:g} {name}; it must have {expected:g}: correct "
                "preprocessor_config.json"
            )
    return extractor
