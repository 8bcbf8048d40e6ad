"""The speech pair's clips have their texts, its transcripts are Whisper's, and its script makes a pair and resumes."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.speech.measure import Member
from models.speech.phrases import LANGUAGES, phrase
from models.speech.synthesis import RATE, SECONDS, Bank, Clip, Order, Segment, make_bank, make_clip
from models.speech.tokens import LONGEST, decoder_prompt, make_tokenizer, transcript
from models.speech.train import make_pair

needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


@pytest.fixture(scope="module")
def bank() -> Bank:
    """Orders as tones: a word a tone."""
    chance = random.Random(1)
    orders: Bank = {}
    for index in range(24):
        words, language = phrase(chance), LANGUAGES[index % 2]
        times = np.arange(RATE // 4) / RATE
        tones = [8000 * np.sin(2 * np.pi * (300 + sum(map(ord, word))) * times) for word in words]
        order = Order(words, language, "tones", np.concatenate(tones).astype(np.int16))
        orders.setdefault((language, "tones"), []).append(order)
    return orders


def test_clips_follow_from_the_seed_and_hold_what_they_say(bank: Bank) -> None:
    for seed in range(40):
        clip, again = (make_clip(bank, random.Random(seed), cut=seed % 2 == 0) for _ in range(2))
        assert np.array_equal(clip.samples, again.samples)
        assert len(clip.samples) == SECONDS * RATE
        assert np.abs(clip.samples).max() <= 1.0
        loudness, silent = np.abs(clip.samples), np.ones(len(clip.samples), dtype=bool)
        for segment in clip.segments:
            silent[int(segment.begin * RATE) : int((segment.end or SECONDS) * RATE)] = False
        for segment in clip.segments:
            said = loudness[int(segment.begin * RATE) : int((segment.end or SECONDS) * RATE)]
            assert said.mean() > 3 * loudness[silent].mean()
        assert all(segment.end is not None for segment in clip.segments[:-1])


def test_transcripts_are_in_whispers_order(bank: Bank) -> None:
    made = make_tokenizer()
    clip = Clip(
        np.zeros(SECONDS * RATE, dtype=np.float32),
        "de",
        (Segment(("stop", "now"), 0.5, 1.25), Segment(("open", "door", "five"), 4.2, None)),
    )
    ids = decoder_prompt(made, "de") + transcript(made, clip, "transcribe", timestamps=False)
    head = "<|startoftranscript|><|de|>"
    assert made.decode(ids) == f"{head}<|transcribe|><|notimestamps|> halte jetzt<|endoftext|>"
    ids = decoder_prompt(made, "de", "translate", True) + transcript(made, clip, "translate", timestamps=True)
    # 1.25 s lies between two timestamps; Python rounds halves to even.
    assert made.decode(ids) == f"{head}<|translate|><|0.50|> stop now<|1.24|><|4.20|><|endoftext|>"
    rows = [make_clip(bank, random.Random(seed)) for seed in range(100)]
    assert max(len(transcript(made, row, "transcribe", True)) for row in rows) + 4 <= LONGEST


@pytest.mark.slow  # the pair of `test_translation_pair` is made in every run
def test_a_quick_run_makes_a_pair_and_another_run_goes_on(
    bank: Bank, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, minutes = tmp_path / "work", {"target": 0.002, "draft": 0.002}
    work.mkdir()
    make_pair((bank, bank), work, tmp_path, minutes)
    for member, mels in (("target", 80), ("draft", 40)):
        made = Member(tmp_path / member)
        assert (made.model.config.num_mel_bins, made.extractor.feature_size) == (mels, mels)
    (work / "draft.json").unlink()
    capsys.readouterr()
    make_pair((bank, bank), work, tmp_path, minutes)
    again = capsys.readouterr().out
    assert "resumed at" in again
    assert "shallow" not in again


@needs_espeak
def test_espeak_speaks_every_order_in_held_out_voices(tmp_path: Path) -> None:
    made = make_bank(tmp_path, 12, True, lambda chance: chance.choice(LANGUAGES))
    again = make_bank(tmp_path, 12, True, lambda chance: chance.choice(LANGUAGES))
    orders = [order for group in made.values() for order in group]
    assert len(orders) == 12
    assert all(0.2 * RATE < len(order.samples) < 0.9 * RATE * len(order.words) for order in orders)
    assert all(
        np.array_equal(one.samples, other.samples)
        for key in made
        for one, other in zip(made[key], again[key], strict=True)
    )
