"""Measure the speech pair on voices it never heard: acceptance rates, word error rate, how far timestamps are off.

    python -m models.speech.measure

It needs espeak-ng, prints a table, then one JSON document. Float32 on the shipped weights.
"""

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoTokenizer, PreTrainedTokenizerFast, WhisperForConditionalGeneration

from models.encoder_decoder import Written, acceptance, edits, report, write
from models.measure import Acceptance
from models.speech.phrases import LANGUAGES
from models.speech.synthesis import Clip, make_bank, make_clip
from models.speech.tokens import LONGEST, STEP, decoder_prompt
from models.speech.train import HERE, features_of

ROWS = 256


class Member:
    """A shipped model in float32 with its features."""

    def __init__(self, folder: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor = AutoFeatureExtractor.from_pretrained(folder)

    def inputs(self, clips: list[Clip]) -> dict[str, Tensor]:
        """The encoder's input."""
        return {"input_features": features_of(self.extractor, clips)}


def word_error_rate(tokenizer: PreTrainedTokenizerFast, written: Written, clips: list[Clip], task: str) -> float:
    """Wrong, missing and extra words, per word that was said."""
    wrong = words = 0
    for ids, clip in zip(written.texts(), clips, strict=True):
        right = clip.text("en" if task == "translate" else clip.language).split()
        wrong, words = wrong + edits(tokenizer.decode(ids).split(), right), words + len(right)
    return wrong / words


def timestamp_error(tokenizer: PreTrainedTokenizerFast, written: Written, clips: list[Clip]) -> float:
    """Mean distance in seconds between timestamps written and true ones, over clips with as many as there are."""
    first = tokenizer.convert_tokens_to_ids("<|0.00|>")
    distances: list[float] = []
    for ids, clip in zip(written.texts(), clips, strict=True):
        times = [(id_ - first) * STEP for id_ in ids if id_ >= first]
        right = [time for segment in clip.segments for time in (segment.begin, segment.end) if time is not None]
        if len(times) == len(right):
            distances += [abs(time - other) for time, other in zip(times, right, strict=True)]
    return sum(distances) / max(1, len(distances))


def write_all(
    member: Member,
    tokenizer: PreTrainedTokenizerFast,
    clips: list[Clip],
    temperature: float,
    task: str = "transcribe",
    timestamps: bool = False,
) -> Written:
    """The member's texts of `clips`, whose languages are given."""
    prompt = torch.tensor([decoder_prompt(tokenizer, clip.language, task, timestamps) for clip in clips])
    most = LONGEST - prompt.shape[1]
    return write(member.model, member.inputs(clips), prompt, most, temperature, tokenizer.eos_token_id)


def measure(target_folder: Path, draft_folder: Path, clips: list[Clip]) -> dict[str, object]:
    """Everything the model card states, as plain data."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target, draft = Member(target_folder), Member(draft_folder)
    german = [clip for clip in clips if clip.language == "de"]
    alphas: dict[str, list[Acceptance]] = {}
    errors: dict[str, float] = {}
    for timestamps, name in ((False, "text"), (True, "with timestamps")):
        alphas[name] = []
        for temperature in (1.0, 0.0):
            written = write_all(target, tokenizer, clips, temperature, timestamps=timestamps)
            alphas[name].append(acceptance(draft.model, draft.inputs(clips), written, temperature))
            if not timestamps:
                errors[f"target at T={temperature:g}"] = word_error_rate(tokenizer, written, clips, "transcribe")
        if timestamps:
            off = timestamp_error(tokenizer, written, clips)
    written = write_all(target, tokenizer, german, 0.0, task="translate")
    errors["target, German to English"] = word_error_rate(tokenizer, written, german, "translate")
    written = write_all(draft, tokenizer, clips, 0.0)
    errors["draft at T=0"] = word_error_rate(tokenizer, written, clips, "transcribe")
    return {
        "parameters": {"target": target.model.num_parameters(), "draft": draft.model.num_parameters()},
        "acceptance": alphas,
        "word_error_rate": errors,
        "timestamps_off_by_s": off,
    }


def main() -> None:
    """Print the table, then the JSON document."""
    parser = argparse.ArgumentParser(description="Measure the speech pair. Needs espeak-ng.")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--draft", type=Path, default=HERE / "draft")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"clips (default {ROWS})")
    arguments = parser.parse_args()
    chance = random.Random("measure")
    with tempfile.TemporaryDirectory() as folder:
        bank = make_bank(Path(folder), 800, True, lambda chance: chance.choice(LANGUAGES))
        clips = [make_clip(bank, chance) for _ in range(arguments.rows)]
        result = measure(arguments.target, arguments.draft, clips)
    for name, rows in result["acceptance"].items():  # type: ignore[attr-defined]
        print(f"{name}\n{report(rows)}")
    for name, rate in result["word_error_rate"].items():  # type: ignore[attr-defined]
        print(f"{name:<28}{rate:8.2%} of words wrong")
    print(f"timestamps are off by {result['timestamps_off_by_s']:.3f} s")
    print(json.dumps(result, indent=2, default=asdict))


if __name__ == "__main__":
    main()
