"""Make the speech pair from nothing: speech (by espeak-ng), tokenizer, target, draft; goes on where it was stopped.

apt-get install espeak-ng
python -m models.speech.train --work /tmp/speech-pair
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from models.encoder_decoder import IGNORED, SHALLOW_SHARE, WHOLE, save, token_loss, train
from models.speech.phrases import LANGUAGES
from models.speech.synthesis import RATE, SECONDS, Bank, Clip, make_bank, make_clip
from models.speech.tokens import END, LONGEST, START, decoder_prompt, generation_config, make_tokenizer, transcript
from models.training import DEEP, DTYPE, SHALLOW, Schedule, begin_small, deepen, is_made

HERE = Path(__file__).parent
CLIPS = 16  # in a batch
SPELLING = 0.5  # weight of the encoder's own loss
MELS = {"target": 80, "draft": 40}


class Listener(nn.Module):
    """A Whisper with a second head on its encoder, which learns to spell by CTC and is then thrown away.

    It teaches the encoder the words and their times long before attention finds them.
    """

    def __init__(self, whisper: WhisperForConditionalGeneration, text_tokens: int) -> None:
        super().__init__()
        self.whisper = whisper
        self.spelling = nn.Linear(whisper.config.d_model, text_tokens + 1).to(DTYPE)

    def losses(self, features: Tensor, decoder_ids: Tensor, labels: Tensor, said: list[list[int]]) -> list[Tensor]:
        """The decoder's loss per token and the encoder's, on log-Mel `features` `[B, mels, frames]`."""
        encoded = self.whisper.model.encoder(features.to(DTYPE))
        logits = self.whisper(encoder_outputs=encoded, decoder_input_ids=decoder_ids, use_cache=False).logits
        heard = self.spelling(encoded.last_hidden_state).float().log_softmax(dim=-1).transpose(0, 1)
        spelling = functional.ctc_loss(
            heard,
            torch.tensor([id_ for ids in said for id_ in ids]),
            torch.full((len(said),), heard.shape[0]),
            torch.tensor([len(ids) for ids in said]),
            blank=heard.shape[2] - 1,
            zero_infinity=True,
        )
        return [token_loss(logits, labels), spelling]


def feature_extractor(member: str) -> WhisperFeatureExtractor:
    """Whisper's features for clips of `SECONDS`; the draft has half the Mel bands."""
    return WhisperFeatureExtractor(feature_size=MELS[member], sampling_rate=RATE, chunk_length=SECONDS)


def new_model(member: str, tokenizer: PreTrainedTokenizerFast, decoder_layers: int) -> WhisperForConditionalGeneration:
    """A fresh member of the pair."""
    target = member == "target"
    torch.manual_seed(1 if target else 2)
    end, start = tokenizer.convert_tokens_to_ids([END, START])
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=MELS[member],
        d_model=128 if target else 96,
        encoder_layers=4 if target else 1,
        decoder_layers=decoder_layers,
        encoder_attention_heads=4 if target else 3,
        decoder_attention_heads=4 if target else 3,
        encoder_ffn_dim=256 if target else 192,
        decoder_ffn_dim=128,
        max_source_positions=SECONDS * 50,
        max_target_positions=LONGEST,
        dropout=0.0,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    begin_small(model, 0.5)
    return model.to(DTYPE)


def hidden_bands(features: Tensor, generator: torch.Generator) -> Tensor:
    """`features` `[B, mels, frames]` with a band of frequencies and two stretches of time wiped out in each row."""
    rows, mels, frames = features.shape
    for axis, size, widest in ((1, mels, mels // 6), (2, frames, 15), (2, frames, 15)):
        begin = torch.randint(size, (rows, 1), generator=generator)
        width = torch.randint(widest, (rows, 1), generator=generator)
        place = torch.arange(size)
        hidden = (place >= begin) & (place < begin + width)
        features = features.masked_fill(hidden.unsqueeze(2 if axis == 1 else 1), 0.0)
    return features


def features_of(extractor: WhisperFeatureExtractor, clips: list[Clip]) -> Tensor:
    """Log-Mel features `[B, mels, frames]`."""
    waves = [clip.samples for clip in clips]
    return torch.as_tensor(np.asarray(extractor(waves, sampling_rate=RATE, return_tensors="np").input_features))


def lessons(
    tokenizer: PreTrainedTokenizerFast, clips: list[Clip], chance: random.Random
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Decoder ids, labels, and the encoder's spelling. Tasks and timestamps are drawn at random.

    A clip that cuts an order off is written with timestamps: without them the end of the text would be unknown.
    """
    inputs, labels, said = [], [], []
    for clip in clips:
        cut = any(segment.end is None for segment in clip.segments)
        timestamps = cut or chance.random() < 0.4
        task = "translate" if clip.language == "de" and chance.random() < 0.3 else "transcribe"
        prompt = decoder_prompt(tokenizer, clip.language, task, timestamps)
        written = transcript(tokenizer, clip, task, timestamps)
        inputs.append(torch.tensor(prompt + written[:-1]))
        # The language is learnt too, as transformers asks the decoder which one it hears.
        labels.append(torch.tensor([prompt[1], *[IGNORED] * (len(prompt) - 2), *written]))
        said.append(transcript(tokenizer, clip, "transcribe", timestamps=False)[:-1])
    padding = tokenizer.pad_token_id
    ids = pad_sequence(inputs, batch_first=True, padding_value=padding)
    return ids, pad_sequence(labels, batch_first=True, padding_value=IGNORED), said


def learn(
    listener: Listener,
    member: str,
    tokenizer: PreTrainedTokenizerFast,
    banks: tuple[Bank, Bank],
    minutes: float,
    checkpoint: Path,
    schedule: Schedule,
) -> None:
    """Train on clips from the first bank, watch on clips from the second; `checkpoint` names the run."""
    print(f"{checkpoint.stem}: {listener.whisper.num_parameters():,} parameters", flush=True)
    extractor = feature_extractor(member)

    def batch(bank: Bank, seed: str, count: int) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
        chance = random.Random(seed)
        clips = [make_clip(bank, chance, cut=chance.random() < 0.2) for _ in range(count)]
        return features_of(extractor, clips), *lessons(tokenizer, clips, chance)

    def step(number: int, progress: float) -> tuple[Tensor, int]:
        features, ids, labels, said = batch(banks[0], f"{checkpoint.stem} {number}", CLIPS)
        features = hidden_bands(features, torch.Generator().manual_seed(number))
        written, spelling = listener.losses(features, ids, labels, said)
        return written + SPELLING * spelling, int((labels != IGNORED).sum())

    watched = batch(banks[1], "held out", 4 * CLIPS)

    @torch.no_grad()
    def evaluate() -> str:
        written, spelling = listener.losses(*watched)
        return f"held-out voices: {written.item():.4f} nats per token, spelling {spelling.item():.4f}"

    train(listener, minutes, checkpoint, step, evaluate, schedule)
    print(f"{checkpoint.stem}: {evaluate()}", flush=True)


def make(
    member: str, tokenizer: PreTrainedTokenizerFast, banks: tuple[Bank, Bank], work: Path, out: Path, minutes: float
) -> None:
    """Train one member and write it to `out`. The target has eight decoder layers, two at first; the draft has one."""
    end = tokenizer.convert_tokens_to_ids(END)
    first = Listener(new_model(member, tokenizer, 2 if member == "target" else 1), end)
    if member == "draft":
        listener = first
        learn(first, member, tokenizer, banks, minutes, work / "draft.pt", WHOLE)
    else:
        learn(first, member, tokenizer, banks, SHALLOW_SHARE * minutes, work / "shallow.pt", SHALLOW)
        listener = Listener(new_model(member, tokenizer, 8), end)
        deepen(first.whisper, listener.whisper)
        listener.spelling.load_state_dict(first.spelling.state_dict())
        learn(listener, member, tokenizer, banks, (1 - SHALLOW_SHARE) * minutes, work / "deep.pt", DEEP)
    save(listener.whisper, tokenizer, generation_config(tokenizer), out / member)
    feature_extractor(member).save_pretrained(out / member)
    facts = {"minutes": minutes, "parameters": listener.whisper.num_parameters()}
    (work / f"{member}.json").write_text(json.dumps(facts))


def make_pair(banks: tuple[Bank, Bank], work: Path, out: Path, minutes: dict[str, float]) -> None:
    """Train both members, but for those that are done."""
    tokenizer = make_tokenizer()
    for member in ("target", "draft"):
        if not is_made(member, work, out):
            make(member, tokenizer, banks, work, out, minutes[member])


def main(arguments: list[str] | None = None) -> None:
    """Run whatever stages are not yet done."""
    parser = argparse.ArgumentParser(description="Train the speech pair on one core. Needs espeak-ng.")
    parser.add_argument("--work", type=Path, required=True, help="folder for speech and checkpoints (about 0.5 GB)")
    parser.add_argument("--out", type=Path, default=HERE, help="where target/ and draft/ are written")
    parser.add_argument("--orders", type=int, default=6_000, help="orders to have said; each is used in many clips")
    parser.add_argument("--target-minutes", type=float, default=20.0, help="CPU minutes")
    parser.add_argument("--draft-minutes", type=float, default=2.0, help="CPU minutes")
    parser.add_argument("--quick", action="store_true", help="seconds in place of minutes: the pair will know nothing")
    options = parser.parse_args(arguments)
    minutes = {"target": options.target_minutes, "draft": options.draft_minutes}
    if options.quick:
        options.orders, minutes = 40, dict.fromkeys(minutes, 0.02)
    options.work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    training = make_bank(options.work / "training", options.orders, False, _either)
    held_out = make_bank(options.work / "held_out", options.orders // 10, True, _either)
    make_pair((training, held_out), options.work, options.out, minutes)
    print(f"done in {(time.monotonic() - begun) / 60:.1f} min; now: python -m models.speech.measure", flush=True)


def _either(chance: random.Random) -> str:
    return chance.choice(LANGUAGES)


if __name__ == "__main__":
    main()
