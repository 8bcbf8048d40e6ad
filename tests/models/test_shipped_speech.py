"""The shipped speech pair is as its card says: it transcribes voices it never heard."""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.encoder_decoder import acceptance, edits
from models.speech.measure import Member, word_error_rate, write_all
from models.speech.synthesis import RATE, SECONDS, Clip, Segment
from models.speech.train import HERE
from tests.models.pair_checks import check_token_maps, check_weights, megabytes

TARGET_PARAMETERS, DRAFT_PARAMETERS = 2_051_584, 301_472


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(HERE / "target")


def shipped_clips() -> list[tuple[dict[str, Any], Clip]]:
    rows = [json.loads(line) for line in (HERE / "clips" / "clips.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row, _clip(row)) for row in rows]


def _read_wave(path: Path) -> np.ndarray:
    """The samples of a file that `models.speech.clips` wrote, float32."""
    with wave.open(str(path), "rb") as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return (frames / 32768.0).astype(np.float32)


def _clip(row: dict[str, Any]) -> Clip:
    parts = [Segment(tuple(part["words"].split()), part["begin"], part["end"]) for part in row["segments"]]
    return Clip(_read_wave(HERE / "clips" / row["file"]), row["language"], tuple(parts))


def test_the_shipped_pair_is_as_its_card_says(tokenizer: PreTrainedTokenizerFast) -> None:
    for member, layers, mels, parameters in (("target", 8, 80, TARGET_PARAMETERS), ("draft", 1, 40, DRAFT_PARAMETERS)):
        made = Member(HERE / member)
        config = made.model.config
        assert (config.decoder_layers, config.num_mel_bins, config.max_source_positions) == (layers, mels, 250)
        assert made.model.num_parameters() == parameters
        assert config.vocab_size == len(tokenizer)
        check_weights(HERE / member)
    check_token_maps(HERE)
    assert megabytes(HERE) < 6


def test_the_shipped_pair_transcribes_the_shipped_clips(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.set_num_threads(1)
    target, draft = Member(HERE / "target"), Member(HERE / "draft")
    clips = [clip for _, clip in shipped_clips() if len(clip.samples) <= SECONDS * RATE]
    written = write_all(target, tokenizer, clips, 0.0)
    assert word_error_rate(tokenizer, written, clips, "transcribe") < 0.1
    assert acceptance(draft.model, draft.inputs(clips), written, 0.0).alpha > 0.6


def test_transformers_transcribes_with_the_shipped_generation_config(tokenizer: PreTrainedTokenizerFast) -> None:
    """`generate` finds the language by itself, and writes no timestamps unless it is asked to."""
    torch.set_num_threads(1)
    target = Member(HERE / "target")
    rows, clips = zip(*(each for each in shipped_clips() if len(each[1].samples) <= SECONDS * RATE), strict=True)
    ids = target.model.generate(**target.inputs(list(clips)))
    for row, text in zip(rows, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
        assert text.split() == row["text"].split()


def test_transformers_transcribes_long_audio_in_windows(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.set_num_threads(1)
    target = Member(HERE / "target")
    (row, clip), *others = [(row, clip) for row, clip in shipped_clips() if len(clip.samples) > SECONDS * RATE]
    assert not others
    features = target.extractor(
        clip.samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    segments = target.model.generate(**features, return_timestamps=True, return_segments=True)["segments"][0]
    assert len(segments) == len(clip.segments)
    for written, said in zip(segments, clip.segments, strict=True):
        assert abs(float(written["start"]) - said.begin) < 0.1
        assert abs(float(written["end"]) - (said.end or 0.0)) < 0.1
    first = tokenizer.convert_tokens_to_ids("<|0.00|>")
    text = " ".join(tokenizer.decode([id_ for id_ in part["tokens"].tolist() if id_ < first]) for part in segments)
    # A window that begins within the last sound of a word may write that sound again.
    assert edits(text.split(), row["text"].split()) <= 3
