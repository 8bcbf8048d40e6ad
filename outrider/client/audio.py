"""Reads speech for a model: decodes, mixes down to one channel, resamples, and turns it into 16-bit samples.

Needs the extra `audio`. The packages are imported when audio is read, and not before.
"""

import io
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from outrider.client.errors import refused, typed
from outrider.rpc.errors import failed_precondition
from protos.outrider.v1 import input_pb2, model_pb2

MISSING = "speech needs the packages numpy, soundfile and soxr: pip install -e '.[audio]'"

FRAME_S = 0.01
"""Seconds of one frame of a model's features."""

# At most so many samples in a block, of all channels, and seconds: a small file may have 255 channels, or a sample a
# second, which resampling makes 16,000.
_BLOCK_SAMPLES, _BLOCK_S = 1 << 18, 30
_FULL_SCALE = 1 << 15
# Of floats, whose full scale is 1. Larger values are no such floats.
_LARGEST = 16.0
# More channels mean that an array has its axes the other way round.
_MOST_CHANNELS = 64


class Array(Protocol):
    """An array of numpy, or a value that numpy can turn into one."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


AudioSource: TypeAlias = "str | os.PathLike[str] | bytes | Array | Samples"


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Speech of one channel, as it is sent.

    Attributes:
        values: an array of numpy, `[n]`, of little-endian 16-bit integers.
        sample_rate: samples a second.
    """

    values: Any
    sample_rate: int

    @property
    def frames(self) -> int:
        """Whole frames of features; at least 1."""
        return max(1, len(self.values) // self._frame_size)

    @property
    def seconds(self) -> float:
        return len(self.values) / self.sample_rate

    def part(self, begin: int, frames: int) -> "Samples":
        """The samples of these frames."""
        size = self._frame_size
        return Samples(self.values[begin * size : (begin + frames) * size], self.sample_rate)

    def to_message(self) -> input_pb2.Audio:
        return input_pb2.Audio(
            samples=self.values.tobytes(), format=input_pb2.AUDIO_FORMAT_S16LE, sample_rate=self.sample_rate
        )

    @property
    def _frame_size(self) -> int:
        return max(1, round(self.sample_rate * FRAME_S))


def speech_encoder(model: model_pb2.ModelInfo) -> model_pb2.EncoderInfo:
    """The encoder of a model that takes speech.

    Raises:
        FailedPrecondition: it takes none.
    """
    if model.encoder.kind != model_pb2.ENCODER_KIND_SPEECH:
        message = (
            f"{model.name} has no speech encoder, and takes text; call the draft service of a pair of speech models"
        )
        raise typed(failed_precondition("UNSPECIFIED", message))
    return model.encoder


def read_samples(
    audio: AudioSource,
    sample_rate: int | None,
    target_rate: int,
    check_seconds: Callable[[float], object] = lambda seconds: None,
) -> Samples:
    """Reads audio: one channel, at `target_rate`. It blocks: call it in a thread.

    Args:
        audio: a path, the bytes of a file, or an array; `[n]` or `[n, channels]`, floats with full scale 1, or integers
            of 8 bits (without sign), 16 or 32.
        sample_rate: of an array. A file has its own.
        target_rate: samples a second, as the model takes them.
        check_seconds: called with the seconds that are decoded so far, again and again: a header need not say how many
            follow. What it raises ends the reading.

    Raises:
        ImportError: the extra `audio` is not installed.
        InvalidRequest: the audio cannot be read, or it is empty.
    """
    if isinstance(audio, Samples):
        return audio
    np = package("numpy")
    if isinstance(audio, str | os.PathLike | bytes | bytearray | memoryview):
        if sample_rate is not None:
            raise refused("sample_rate", "sample_rate is set; leave it out for a file, which has its own")
        blocks = _blocks_of_file(audio)
    else:
        blocks = _blocks_of_array(np, audio, sample_rate)
    samples = bytearray()  # hours of audio are in memory once: joining blocks would take twice the space
    for block in _converted(np, blocks, target_rate, check_seconds):
        samples += block.tobytes()
    if not samples:
        raise refused("audio", f"audio has no samples at {target_rate} a second; at least 1 is needed")
    return Samples(np.frombuffer(samples, "<i2"), target_rate)


def features_message(features: Array) -> input_pb2.LogMelFeatures:
    """Features `[mels, frames]` as a message.

    Raises:
        ImportError: numpy is not installed.
        ValueError: they have another shape, or are not numbers.
    """
    values = package("numpy").asarray(features, dtype="<f4")
    if values.ndim != 2:
        raise ValueError(f"features have the shape {list(values.shape)}; it must be [mels, frames]")
    mels, frames = values.shape
    return input_pb2.LogMelFeatures(values=values.tobytes(), mels=mels, frames=frames)


# ----------------------------------------------------------------------------------------------------------- blocks

# Samples a second, and the samples of one block: float32 [n, channels].
_Block: TypeAlias = "tuple[int, Any]"


def _blocks_of_file(audio: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Iterator[_Block]:
    soundfile = package("soundfile")
    try:
        if isinstance(audio, str | os.PathLike):
            name = f"'{os.fspath(audio)}'"
            stream: Any = Path(audio).open("rb")  # noqa: SIM115  # closed below
            if not stream.seekable():  # a pipe, as of <(ffmpeg ...): libsndfile seeks
                with stream:
                    stream = io.BytesIO(stream.read())
        else:
            name, stream = "its bytes", io.BytesIO(audio)
        with stream, _reader(soundfile)(stream) as file:
            size = _block_frames(file.samplerate, file.channels)
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                yield file.samplerate, block
    except OSError as error:
        raise refused("audio", f"audio: cannot read {name}: {error.strerror or error}") from error
    except soundfile.LibsndfileError as error:
        raise refused(
            "audio", f"audio: cannot decode {name}: {error.error_string.rstrip('.')}; give WAV, FLAC, OGG or MP3"
        ) from error
    except TypeError as error:  # soundfile needs the format of a name that ends in .raw
        raise refused("audio", f"audio: cannot decode {name}: it has no header; give WAV, FLAC, OGG or MP3") from error


def _reader(soundfile: ModuleType) -> Any:
    """`SoundFile` that does not seek after each block: a seek to the end of a file of unknown length fails."""

    class Reader(soundfile.SoundFile):  # type: ignore[name-defined]
        def seekable(self) -> bool:
            return False

    return Reader


def _blocks_of_array(np: ModuleType, audio: Array, sample_rate: int | None) -> Iterator[_Block]:
    if sample_rate is None:
        raise refused("sample_rate", "sample_rate is not set; audio as an array needs it")
    try:
        rate = operator.index(sample_rate)
    except TypeError:
        rate = 0
    if not 0 < rate < 1 << 31:
        raise refused(
            "sample_rate", f"sample_rate is {sample_rate!r}; it must be a positive integer, in samples a second"
        )
    array = np.asarray(audio)
    if array.ndim not in (1, 2) or (array.ndim == 2 and not 1 <= array.shape[1] <= _MOST_CHANNELS):
        shape = "×".join(map(str, array.shape))
        raise refused("audio", f"audio has the shape {shape}; it must be [samples] or [samples, channels]")
    kind = array.dtype.name
    if kind not in ("float16", "float32", "float64", "uint8", "int16", "int32"):
        raise refused(
            "audio", f"audio has the type {kind}; it must be float16, float32, float64, uint8, int16 or int32"
        )
    channels = 1 if array.ndim == 1 else array.shape[1]
    size = _block_frames(rate, channels)
    for begin in range(0, len(array), size):
        block = array[begin : begin + size].reshape(-1, channels)
        if kind.startswith("int"):
            block = block / -float(np.iinfo(array.dtype).min)
        elif kind == "uint8":
            block = (block - 128.0) / 128.0
        yield rate, block.astype("float32")


def _block_frames(rate: int, channels: int) -> int:
    return max(1, min(_BLOCK_SAMPLES // channels, _BLOCK_S * rate))


def _converted(
    np: ModuleType, blocks: Iterator[_Block], target_rate: int, check_seconds: Callable[[float], object]
) -> Iterator[Any]:
    """The blocks as 16-bit integers of one channel, at the target's rate."""
    resampler, seconds = None, 0.0
    for rate, block in blocks:
        seconds += len(block) / rate
        check_seconds(seconds)
        largest = np.abs(block).max()
        if not largest <= _LARGEST:
            found = (
                f"a sample of {largest:g}; at most {_LARGEST:g}, and full scale is 1"
                if largest == largest
                else "a sample that is NaN; samples must be finite"
            )
            raise refused("audio", f"audio has {found}")
        mono = block.mean(axis=1, dtype="float32")
        if rate != target_rate:
            resampler = resampler or package("soxr").ResampleStream(rate, target_rate, 1, dtype="float32")
            mono = resampler.resample_chunk(mono)
        yield _to_integers(np, mono)
    if resampler is not None:
        yield _to_integers(np, resampler.resample_chunk(np.zeros(0, "float32"), last=True))


def _to_integers(np: ModuleType, values: Any) -> Any:
    return np.clip(np.rint(values * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype("<i2")


def package(name: str) -> ModuleType:
    """Imports a package of the extra `audio`.

    Raises:
        ImportError: it is not installed, or the library that it loads is missing.
    """
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: soundfile without its library
        raise ImportError(MISSING, name=name) from error
