"""Speech is decoded, mixed down, resampled and sent as 16-bit samples; other values are refused."""

import io
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.client import FailedPrecondition, InvalidRequest
from outrider.client.audio import Samples, read_samples, speech_encoder
from protos.outrider.v1 import input_pb2, model_pb2
from tests.project.tree import ROOT

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

RATE = 16_000


def sine(frequency: float, rate: int, seconds: float = 1.0) -> Any:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)


def file(samples: Any, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=kind, subtype=subtype)
    return written.getvalue()


def streamed(flac: bytes) -> bytes:
    """The file as an encoder writes it to a pipe: its header does not say how many samples follow."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


def assert_is_sine(samples: Samples, frequency: float, amplitude: float, tolerance: float = 1e-3) -> None:
    """It is the sine, but for the edges."""
    values = samples.values / 2**15
    expected = 2 * amplitude * sine(frequency, RATE, len(values) / RATE)
    assert samples.sample_rate == RATE
    assert np.abs(values - expected)[200:-200].max() < tolerance


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_a_stereo_file_becomes_one_channel_at_the_models_rate(rate: int) -> None:
    """Left the sine, right twice as loud: the mean has 0.75 of 1. Nothing moves in time."""
    left = sine(440, rate)
    stereo = np.stack([left, 2 * left], axis=1) * 0.98
    samples = read_samples(file(stereo, rate), None, RATE)
    assert samples.values.dtype == "<i2"
    assert len(samples.values) == RATE
    assert samples.seconds == 1.0
    assert_is_sine(samples, 440, 0.75 * 0.98)


def test_a_tone_that_the_models_rate_cannot_hold_vanishes() -> None:
    """11 kHz at 44.1 kHz would fold to 5 kHz."""
    values = read_samples(sine(11_000, 44_100), 44_100, RATE).values
    assert np.abs(values[400:-400]).max() <= 2


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_24"), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS"), ("MP3", None)]
)
def test_formats_of_files(kind: str, subtype: str | None, tmp_path: Path) -> None:
    """The same from bytes, from a path, and from its name."""
    written = file(sine(440, 44_100), 44_100, kind, subtype)
    path = tmp_path / "tone"
    path.write_bytes(written)
    samples = read_samples(written, None, RATE)
    assert 0.99 < samples.seconds < 1.1
    if kind in ("WAV", "FLAC"):
        assert_is_sine(samples, 440, 0.5)
    spectrum = np.abs(np.fft.rfft(samples.values[2000:12000]))
    assert spectrum.argmax() * RATE / 10_000 == pytest.approx(440, abs=2)
    for other in (path, str(path)):
        assert (read_samples(other, None, RATE).values == samples.values).all()


def test_arrays_of_every_type_are_the_same_samples() -> None:
    tone = sine(440, RATE, 0.25)
    expected = read_samples(tone, RATE, RATE).values
    integers = np.rint(tone * 2**15).astype("int16")
    arrays = [tone.astype("float32"), tone[:, None], np.stack([tone, tone], axis=1), integers]
    arrays.append(integers.astype("int32") * 2**16)
    for array in arrays:
        assert (read_samples(array, RATE, RATE).values == expected).all()
    coarse = np.rint(tone * 128 + 128).astype("uint8")
    assert np.abs(read_samples(coarse, RATE, RATE).values - expected.astype(int)).max() <= 128


def test_a_long_file_is_read_in_blocks_without_a_seam() -> None:
    """40 s at 22.05 kHz: four blocks."""
    samples = read_samples(file(sine(441, 22_050, 40.0), 22_050), None, RATE)
    assert len(samples.values) == 40 * RATE
    assert_is_sine(samples, 441, 0.5)


@pytest.mark.parametrize(
    ("rate", "channels", "seconds"),
    [(RATE, 1, 1200), pytest.param(RATE, 255, 10, id="many channels"), pytest.param(20, 1, 1200, id="few samples")],
)
def test_long_audio_is_in_memory_once(rate: int, channels: int, seconds: int) -> None:
    """An HTTP front with 1 GiB takes two hours of it three times, which are 220 MiB each."""
    written = file(np.zeros((seconds * rate, channels), "int16"), rate)
    tracemalloc.start()
    try:
        values = read_samples(written, None, RATE).values
        assert tracemalloc.get_traced_memory()[1] < 1.25 * values.nbytes + 16e6
    finally:
        tracemalloc.stop()
    assert len(values) == seconds * RATE


@pytest.mark.parametrize("seconds", [1.0, 40.0])
def test_a_file_of_unknown_length_is_read_to_its_end(seconds: float) -> None:
    written = file(sine(440, RATE, seconds), RATE, "FLAC")
    values = read_samples(streamed(written), None, RATE).values
    assert (values == read_samples(written, None, RATE).values).all()


def test_a_pipe_is_read_as_a_file(tmp_path: Path) -> None:
    """As `outrider transcribe <(ffmpeg ...)` names one."""
    pipe, written = tmp_path / "pipe", file(sine(440, 44_100), 44_100)
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(written,))
    writer.start()
    values = read_samples(pipe, None, RATE).values
    writer.join()
    assert (values == read_samples(written, None, RATE).values).all()


class TooLong(Exception):
    pass


def at_most(most: float) -> Callable[[float], None]:
    def check(seconds: float) -> None:
        if seconds > most:
            raise TooLong

    return check


def test_reading_ends_where_its_caller_refuses_the_seconds() -> None:
    """Its own rate counts: one of 1 sample a second would become 16,000 times as many."""
    for written in (file(sine(440, RATE, 2.5), RATE), streamed(file(sine(440, RATE, 2.5), RATE, "FLAC"))):
        assert read_samples(written, None, RATE, at_most(2.5)).seconds == 2.5
        with pytest.raises(TooLong):
            read_samples(written, None, RATE, at_most(2.25))
    with pytest.raises(TooLong):
        read_samples(file(np.zeros(1 << 18), 1), None, RATE, at_most(60))


def test_full_scale_neither_wraps_nor_overflows() -> None:
    values = read_samples(np.array([1.0, -1.0, 1.5, -1.5, 0.0]), RATE, RATE).values
    assert values.tolist() == [32767, -32768, 32767, -32768, 0]


def test_samples_are_sent_as_16_bits_and_cut_at_frames() -> None:
    samples = read_samples(np.arange(400, dtype="int16"), RATE, RATE)
    assert samples.to_message() == input_pb2.Audio(
        samples=np.arange(400, dtype="<i2").tobytes(), format=input_pb2.AUDIO_FORMAT_S16LE, sample_rate=RATE
    )
    assert samples.frames == 2
    assert samples.part(1, 9).values.tolist() == list(range(160, 400))
    assert Samples(samples.values[:3], RATE).frames == 1


@pytest.mark.parametrize(
    ("audio", "rate", "field", "message"),
    [
        ("no/such.wav", None, "audio", "cannot read 'no/such.wav': No such file or directory"),
        (ROOT, None, "audio", "Is a directory"),
        (b"", None, "audio", "cannot decode its bytes"),
        (b"this is no audio at all", None, "audio", "cannot decode its bytes"),
        (file(np.zeros(0), RATE), None, "audio", "audio has no samples"),
        (file(sine(440, RATE), RATE), 8_000, "sample_rate", "leave it out for a file, which has its own"),
        (np.zeros(0), RATE, "audio", "audio has no samples"),
        (file(np.zeros(1), 44_100), None, "audio", "audio has no samples at 16000 a second"),
        (np.zeros(9), None, "sample_rate", "audio as an array needs it"),
        (np.zeros(9), 0, "sample_rate", "sample_rate is 0"),
        (np.zeros(9), "16k", "sample_rate", "sample_rate is '16k'"),
        (np.zeros((2, 400)), RATE, "audio", "has the shape 2×400; it must be [samples] or [samples, channels]"),
        (np.zeros((2, 2, 2)), RATE, "audio", "has the shape 2×2×2"),
        (np.zeros(9, "int64"), RATE, "audio", "has the type int64"),
        (np.array([0.0, np.nan]), RATE, "audio", "a sample that is NaN"),
        (np.array([0.0, np.inf]), RATE, "audio", "a sample of inf"),
        (np.array([0.0, 900.0]), RATE, "audio", "a sample of 900; at most 16, and full scale is 1"),
    ],
)
def test_what_is_no_audio_is_refused(audio: Any, rate: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as caught:
        read_samples(audio, rate, RATE)
    assert caught.value.field == field


def test_a_file_without_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.raw"
    path.write_bytes(bytes(100))
    with pytest.raises(InvalidRequest, match="cannot decode"):
        read_samples(path, None, RATE)


def test_a_missing_package_names_the_extra() -> None:
    """Whichever of them it is. The client itself is imported without any."""
    program = (
        "import sys, outrider.cli; from outrider.client.audio import read_samples\n"
        "names = 'soxr', 'soundfile', 'numpy'\n"
        "assert not sys.modules.keys() & set(names)\n"
        "for name in names:\n"
        "    before, sys.modules[name] = sys.modules.get(name), None\n"
        "    try:\n"
        f"        read_samples({file(np.zeros(99), 8_000)!r}, None, 16000)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "    sys.modules.pop(name) if before is None else sys.modules.update({name: before})\n"
        f"print(len(read_samples({file(np.zeros(99), 8_000)!r}, None, 16000).values))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    error = "speech needs the packages numpy, soundfile and soxr: pip install -e '.[audio]'\n"
    assert (done.stdout, done.stderr) == (3 * error + "198\n", "")


@pytest.mark.parametrize("encoder", [None, model_pb2.EncoderInfo(kind=model_pb2.ENCODER_KIND_TEXT)])
def test_a_model_without_a_speech_encoder_is_named(encoder: model_pb2.EncoderInfo | None) -> None:
    model = model_pb2.ModelInfo(name="t5", encoder=encoder)
    with pytest.raises(FailedPrecondition, match="t5 has no speech encoder, and takes text; call the draft service"):
        speech_encoder(model)
