"""Measure the translation pair on held-out sentences: acceptance rates, and how many translations are right.

    python -m models.translation.measure

It prints a table, then one JSON document. Float32 on the shipped weights.
"""

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5ForConditionalGeneration

from models.encoder_decoder import Written, acceptance, edits, report, write
from models.translation.language import Pair, canonical, is_right, pairs, translations
from models.translation.train import HERE, LONGEST, batch

ROWS = 256


def load(folder: Path) -> T5ForConditionalGeneration:
    """The shipped weights, as they are, in float32."""
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def scores(tokenizer: PreTrainedTokenizerFast, written: Written, rows: list[Pair]) -> dict[str, float]:
    """The share of right translations, and wrong words per word of the nearest right translation."""
    texts = [tokenizer.decode(ids).strip() for ids in written.texts()]
    wrong = words = 0
    for text, pair in zip(texts, rows, strict=True):
        nearest = min(
            (edits(canonical(text).split(), right.split()), len(right.split())) for right in translations(pair.sentence)
        )
        wrong, words = wrong + nearest[0], words + nearest[1]
    right = sum(is_right(text, pair.sentence) for text, pair in zip(texts, rows, strict=True))
    return {"right": right / len(rows), "word_error_rate": wrong / words}


def measure(target_folder: Path, draft_folder: Path, rows: int = ROWS) -> dict[str, object]:
    """Everything the model card states, as plain data."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target, draft = load(target_folder), load(draft_folder)
    sentences = list(itertools.islice(pairs("measure", held_out=True), rows))
    inputs, _ = batch(tokenizer, sentences)
    prompt = torch.zeros(rows, 1, dtype=torch.long)
    alphas, quality = [], {}
    for temperature in (1.0, 0.0):
        written = write(target, inputs, prompt, LONGEST, temperature, tokenizer.eos_token_id)
        alphas.append(acceptance(draft, inputs, written, temperature))
        quality[f"target at T={temperature:g}"] = scores(tokenizer, written, sentences)
    written = write(draft, inputs, prompt, LONGEST, 0.0, tokenizer.eos_token_id)
    quality["draft at T=0"] = scores(tokenizer, written, sentences)
    return {
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "acceptance": alphas,
        "quality": quality,
    }


def main() -> None:
    """Print the table, then the JSON document."""
    parser = argparse.ArgumentParser(description="Measure the translation pair.")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--draft", type=Path, default=HERE / "draft")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"held-out sentences (default {ROWS})")
    arguments = parser.parse_args()
    result = measure(arguments.target, arguments.draft, arguments.rows)
    print(report(result["acceptance"]))  # type: ignore[arg-type]
    for name, row in result["quality"].items():  # type: ignore[attr-defined]
        print(f"{name:<16}{row['right']:8.1%} right{row['word_error_rate']:8.2%} of words wrong")
    print(json.dumps(result, indent=2, default=asdict))


if __name__ == "__main__":
    main()
