"""Write the shipped clips: held-out voices as WAV files, and `clips.jsonl` with their texts. Needs espeak-ng.

python -m models.speech.clips
"""

import argparse
import json
import random
import tempfile
import wave
from pathlib import Path

import numpy as np

from models.speech.phrases import LANGUAGES
from models.speech.synthesis import RATE, Clip, make_bank, make_clip
from models.speech.train import HERE

LONG_SECONDS = 12.5


def write_wave(path: Path, samples: np.ndarray) -> None:
    """16-bit PCM, one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())


def write_clip(folder: Path, name: str, clip: Clip) -> str:
    """Write the file, without the silence at its end; returns the line of `clips.jsonl` that describes it."""
    last = clip.segments[-1].end or 0.0
    write_wave(folder / name, clip.samples[: round((last + 0.2) * RATE)])
    segments = [
        {"begin": segment.begin, "end": segment.end, "words": " ".join(segment.words)} for segment in clip.segments
    ]
    row = {"file": name, "language": clip.language, "text": clip.text(clip.language), "segments": segments}
    return json.dumps(row, ensure_ascii=False)


def main() -> None:
    """Two short clips in each language and one that takes several windows."""
    parser = argparse.ArgumentParser(description="Write the shipped clips. Needs espeak-ng.")
    parser.add_argument("--out", type=Path, default=HERE / "clips")
    parser.add_argument("--seed", default="clips")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(arguments.seed)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        bank = make_bank(Path(folder), 1200, True, lambda chance: chance.choice(LANGUAGES))
        for language in LANGUAGES:
            part = {key: orders for key, orders in bank.items() if key[0] == language}
            lines += [write_clip(arguments.out, f"{language}-{n}.wav", make_clip(part, chance)) for n in (1, 2)]
        english = {key: orders for key, orders in bank.items() if key[0] == "en"}
        lines.append(write_clip(arguments.out, "en-long.wav", make_clip(english, chance, seconds=LONG_SECONDS)))
    (arguments.out / "clips.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} clips in {arguments.out}")


if __name__ == "__main__":
    main()
