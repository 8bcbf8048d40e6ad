"""Speech by espeak-ng (Debian's package of that name): orders in many voices, and clips put together from them.

A bank holds single orders. A clip is one voice's orders with pauses and noise, as long as the model hears.
"""

# ruff: noqa: SIM905 - lists of words, as they are easiest to read

import io
import random
import shutil
import subprocess
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from models.speech.phrases import phrase, spoken

RATE = 16_000
SECONDS = 5
SHARD = 400  # orders in one file of a bank

_ACCENTS = {"en": ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-gbclan", "en-us"), "de": ("de",)}
_VARIANTS = "m1 m2 m3 m4 m6 m7 f1 f2 f4 max adam Alex Alicia Andy Gene steph Michael Denis Mario Lee".split()
_HELD_OUT_ACCENTS = {"en": ("en-us", "en-gb", "en-gb-x-rp"), "de": ("de",)}
_HELD_OUT_VARIANTS = "m5 m8 f3 f5 linda john paul Marco".split()


@dataclass(frozen=True)
class Order:
    """One order as it was said: its English words, its language, its voice, its samples (int16, 16 kHz)."""

    words: tuple[str, ...]
    language: str
    voice: str
    samples: np.ndarray


@dataclass(frozen=True)
class Segment:
    """An order in a clip, with begin and end in seconds; no end where the clip cuts it off."""

    words: tuple[str, ...]
    begin: float
    end: float | None


@dataclass(frozen=True)
class Clip:
    """One clip: samples (float32, 16 kHz), and the words in it."""

    samples: np.ndarray
    language: str
    segments: tuple[Segment, ...]

    def text(self, language: str) -> str:
        """The words up to the end of the clip, in `language`."""
        return " ".join(spoken(segment.words, language) for segment in self.segments if segment.end is not None)


Bank = dict[tuple[str, str], list[Order]]  # by language and voice


def say(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """Samples (int16, 16 kHz) of espeak-ng saying `text`, silence at both ends left out."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise SystemExit("espeak-ng is missing; on Debian and Ubuntu: apt-get install espeak-ng")
    command = [program, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    done = subprocess.run(command, check=True, capture_output=True)
    with wave.open(io.BytesIO(done.stdout)) as file:
        rate = file.getframerate()
        frames = np.frombuffer(done.stdout[44:], dtype="<i2")  # written to a pipe, the header knows no length
    samples = resample_poly(frames.astype(np.float64), RATE // 50, rate // 50)
    loud = np.flatnonzero(np.abs(samples) > 200)
    if not len(loud):
        raise ValueError(f"espeak-ng said nothing for {text!r} in voice {voice}")
    return np.clip(np.round(samples[loud[0] : loud[-1] + 1]), -32768, 32767).astype(np.int16)


def make_bank(folder: Path, orders: int, held_out: bool, language_of: Callable[[random.Random], str]) -> Bank:
    """A bank of so many orders, in the voices for training or in those held out; kept in `folder`, shard by shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range((orders + SHARD - 1) // SHARD):
        path = folder / f"{shard:04d}.npz"
        if path.exists():
            continue
        chance = random.Random(f"{held_out} {shard}")
        made = [_order(chance, held_out, language_of(chance)) for _ in range(min(SHARD, orders - shard * SHARD))]
        lengths = np.array([len(order.samples) for order in made])
        facts = np.array([[" ".join(order.words), order.language, order.voice] for order in made])
        fresh = folder / "fresh.npz"
        np.savez(fresh, samples=np.concatenate([order.samples for order in made]), lengths=lengths, facts=facts)
        fresh.replace(path)
        print(f"{folder.name}: {min(orders, (shard + 1) * SHARD):,} of {orders:,} orders said", flush=True)
    return _load(folder)


def _order(chance: random.Random, held_out: bool, language: str) -> Order:
    words = phrase(chance)
    accents = (_HELD_OUT_ACCENTS if held_out else _ACCENTS)[language]
    voice = f"{chance.choice(accents)}+{chance.choice(_HELD_OUT_VARIANTS if held_out else _VARIANTS)}"
    samples = say(spoken(words, language), voice, chance.randint(140, 220), chance.randint(25, 75))
    return Order(words, language, voice, samples)


def _load(folder: Path) -> Bank:
    bank: Bank = {}
    for path in sorted(folder.glob("[0-9]*.npz")):
        with np.load(path) as shard:
            begins = np.concatenate([[0], np.cumsum(shard["lengths"])])
            samples = shard["samples"]
            for index, (words, language, voice) in enumerate(shard["facts"].tolist()):
                part = samples[begins[index] : begins[index + 1]]
                bank.setdefault((language, voice), []).append(Order(tuple(words.split()), language, voice, part))
    return bank


def make_clip(bank: Bank, chance: random.Random, cut: bool = False, seconds: float = SECONDS) -> Clip:
    """Orders in one voice, noise over them. With `cut`, the clip ends in the middle of an order that did not fit."""
    voices = sorted(bank)
    language = chance.choice(sorted({language for language, _ in voices}))
    orders = bank[chance.choice([voice for voice in voices if voice[0] == language])]
    total = int(seconds * RATE)
    samples = np.zeros(total, dtype=np.float32)
    segments: list[Segment] = []
    at = int(chance.uniform(0.02, 0.8) * RATE)
    limit = chance.uniform(0.5, 1.0) * total if not cut else total  # some clips end in silence
    while at < limit:
        order = chance.choice(orders)
        end = at + len(order.samples)
        if end > total and (not cut or total - at < 0.3 * RATE):
            break
        samples[at:end] = order.samples[: total - at] / 32768.0
        segments.append(Segment(order.words, at / RATE, end / RATE if end <= total else None))
        at = end + int(chance.uniform(0.25, 0.9) * RATE)
    return Clip(_noisy(samples, chance), language, tuple(segments))


def _noisy(samples: np.ndarray, chance: random.Random) -> np.ndarray:
    """White or low noise, 15 to 45 dB under the speech, and another loudness."""
    noise = np.random.default_rng(chance.getrandbits(64)).standard_normal(len(samples)).astype(np.float32)
    if chance.random() < 0.5:
        noise = np.convolve(noise, np.full(8, 8**-0.5, dtype=np.float32), mode="same")
    power = float(np.sqrt(np.square(samples).sum() / max(1, np.count_nonzero(samples))))
    level = power * 10 ** (-chance.uniform(15, 45) / 20)
    mixed: np.ndarray = (samples + level * noise) * np.float32(chance.uniform(0.3, 1.0))
    return np.clip(mixed, -1.0, 1.0).astype(np.float32)
