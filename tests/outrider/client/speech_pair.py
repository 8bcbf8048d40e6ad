"""A pair of small Whisper models with random weights, as folders, and what transformers writes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

RATE, WINDOW_S = 16_000, 1.0
MELS, FRAMES, MAX_TOKENS = 16, 100, 60
END, START, EN, DE = "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>"
TASKS, NO_TIMESTAMPS = ("translate", "transcribe"), "<|notimestamps|>"


def tokenizer() -> Any:
    """Bytes, Whisper's special tokens, and timestamps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [END, START, EN, DE, *(f"<|{task}|>" for task in TASKS), NO_TIMESTAMPS]
    made.add_special_tokens(special)
    times = [f"<|{step * 0.02:.2f}|>" for step in range(FRAMES // 2 + 1)]
    made.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END, pad_token=END)


def bytes_of_no_text(tokenizer: Any) -> list[int]:
    """Tokens of bytes that are no ASCII letter, sign or space: with them random text is mostly invalid."""
    letters = tokenizer.get_vocab().items()
    return sorted(i for letter, i in letters if len(letter) == 1 and ord(letter) > 126 and letter != "Ġ")


class SpeechPair:
    """Target and draft in a folder.

    Attributes:
        first_timestamp: token of the timestamp 0.00.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizer()
        number = self.tokenizer.convert_tokens_to_ids
        self.first_timestamp = number("<|0.00|>")
        self.target, self.draft = folder / "target", folder / "draft"
        end = number(END)
        generation = GenerationConfig(
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            decoder_start_token_id=number(START),
            is_multilingual=True,
            lang_to_id={EN: number(EN), DE: number(DE)},
            task_to_id={task: number(f"<|{task}|>") for task in TASKS},
            no_timestamps_token_id=number(NO_TIMESTAMPS),
            max_initial_timestamp_index=10,
            return_timestamps=False,
            suppress_tokens=[*bytes_of_no_text(self.tokenizer), number(START), number(NO_TIMESTAMPS)],
            begin_suppress_tokens=[end],
            max_length=MAX_TOKENS,
        )
        self._extractor = WhisperFeatureExtractor(feature_size=MELS)
        self._extractor.nb_max_frames, self._extractor.n_samples = FRAMES, FRAMES * RATE // 100
        torch.manual_seed(3)
        for path, layers in ((self.target, 2), (self.draft, 1)):
            model = WhisperForConditionalGeneration(
                WhisperConfig(
                    vocab_size=len(self.tokenizer),
                    num_mel_bins=MELS,
                    max_source_positions=FRAMES // 2,
                    max_target_positions=MAX_TOKENS,
                    d_model=32,
                    encoder_layers=layers,
                    decoder_layers=layers,
                    encoder_attention_heads=4,
                    decoder_attention_heads=4,
                    encoder_ffn_dim=48,
                    decoder_ffn_dim=48,
                    decoder_start_token_id=number(START),
                    pad_token_id=end,
                    bos_token_id=end,
                    eos_token_id=end,
                    suppress_tokens=None,
                    begin_suppress_tokens=None,
                )
            ).eval()
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(0, 2 * (parameter.shape[0] / parameter.numel()) ** 0.5)
            model.generation_config = generation
            model.save_pretrained(path)
            self.tokenizer.save_pretrained(path)
            if path == self.target:
                self._model = model

    def features(self, samples: Any) -> Any:
        """`[MELS, FRAMES]` of 16-bit samples."""
        floats = np.asarray(samples, "float32") / 2**15
        return self._extractor(floats, sampling_rate=RATE, return_tensors="np").input_features[0]

    def written(self, samples: Any, *, timestamps: bool, language: str = "en", count: int) -> list[int]:
        """What the target writes about one window, without the end."""
        with torch.inference_mode():
            tokens = self._model.generate(
                torch.from_numpy(self.features(samples))[None],
                language=language,
                task="transcribe",
                return_timestamps=timestamps,
                force_unique_generate_call=True,
                do_sample=False,
                max_new_tokens=count,
            )[0].tolist()
        prompt = 3 if timestamps else 4  # start, language, task, no timestamps
        return [token for token in tokens[prompt:] if token != self.tokenizer.eos_token_id]

    def segments(self, samples: Any, *, count: int) -> list[tuple[float, float, list[int]]]:
        """The segments of long audio, each window's features by its own samples."""
        seek, found, total = 0, [], len(samples) // 160
        while seek < total:
            frames = min(FRAMES, total - seek)
            tokens = self.written(samples[seek * 160 : (seek + frames) * 160], timestamps=True, count=count)
            new, advance = WhisperGenerationMixin._retrieve_segment(
                seek_sequence=torch.tensor(tokens),
                seek_outputs=[None],
                time_offset=torch.tensor([seek * 0.01], dtype=torch.float64),
                timestamp_begin=self.first_timestamp,
                seek_num_frames=torch.tensor([frames]),
                time_precision=0.02,
                time_precision_features=0.01,
                input_stride=2,
                prev_idx=0,
                idx=0,
                return_token_timestamps=False,
                decoder_input_ids=torch.zeros(1, 3),
            )
            found += [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in new]
            seek += int(advance)
        return found
