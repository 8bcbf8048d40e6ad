"""Tiny encoder–decoder pairs of random weights on disk, with tokenizers and generation configs, and what they write."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from protos.outrider.v1 import input_pb2

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, END, START, EN, DE, TRANSLATE, TRANSCRIBE, SILENT = range(len(LETTERS), len(LETTERS) + 8)
SPECIAL = ("<pad>", "</s>", *(f"<|{x}|>" for x in ("start", "en", "de", "translate", "transcribe", "notimestamps")))
FIRST_TIMESTAMP = SILENT + 1
MELS, FRAMES, RATE = 20, 100, 16_000
TIMESTAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(FRAMES // 2 + 1)]
V = FIRST_TIMESTAMP + len(TIMESTAMPS)
LAYERS: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2}
HEADS: dict[str, Any] = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


@dataclass(frozen=True)
class EncoderPair:
    """A target and its draft, which is the target with other weights nearby.

    Attributes:
        target: folder of the target.
        draft: folder of the draft.
        is_speech: Whisper-like, otherwise T5-like.
    """

    target: Path
    draft: Path
    is_speech: bool

    @cached_property
    def _model(self) -> Any:
        auto: Any = AutoModelForSpeechSeq2Seq if self.is_speech else AutoModelForSeq2SeqLM
        return auto.from_pretrained(self.target, dtype=torch.float32).eval()

    def greedy(self, prompt: dict[str, Any], decoder_prompt: list[int], count: int) -> list[int]:
        """What transformers' `generate` writes at temperature 0 for the `prompt` of a request.

        Not that of Whisper's class: it cuts windows at each timestamp, which this model writes unasked.
        """
        if self.is_speech:
            samples = np.frombuffer(prompt["audio"].samples, "<i2").astype(np.float32) / 32768
            inputs = features_of(self.target, samples)
        else:
            inputs = torch.tensor([prompt["token_ids"]["ids"]])
        model = self._model
        config = copy.deepcopy(model.generation_config)
        config.update(do_sample=False, num_beams=1, max_new_tokens=count, max_length=None)
        decoder = torch.tensor([decoder_prompt])
        written = GenerationMixin.generate(model, inputs, decoder_input_ids=decoder, generation_config=config)
        return [int(token) for token in written[0][len(decoder_prompt) :]]


def features_of(folder: Path, samples: np.ndarray) -> torch.Tensor:
    """`[1, mels, frames]`, by the extractor of a model."""
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features: torch.Tensor = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    return features


def write_pair(folder: Path, *, is_speech: bool) -> EncoderPair:
    """Writes both models."""
    torch.manual_seed(5)
    model = _speech() if is_speech else _text()
    for parameter in model.parameters():  # large enough for attention to matter
        if parameter.dim() > 1:
            parameter.data.normal_(0, 2 * (parameter.shape[0] / parameter.numel()) ** 0.5)
    pair = EncoderPair(folder / "target", folder / "draft", is_speech)
    _save(model, pair.target, is_speech=is_speech)
    for parameter in model.parameters():
        parameter.data += 0.1 * parameter.data.std(correction=0) * torch.randn_like(parameter)
    _save(model, pair.draft, is_speech=is_speech)
    return pair


def prompt_of(pair: EncoderPair, seed: int) -> dict[str, Any]:
    """The prompt of a request: letters, or some noise of half a second and more."""
    coin = np.random.default_rng(seed)
    if not pair.is_speech:
        return {"token_ids": {"ids": coin.integers(0, len(LETTERS), 3 + 4 * (seed % 5)).tolist()}}
    loudness = np.repeat(coin.uniform(0, 12_000, 20 + seed % 5), RATE // 40)
    samples = (coin.normal(size=len(loudness)) * loudness).clip(-32768, 32767).astype("<i2")
    audio = input_pb2.Audio(samples=samples.tobytes(), format=input_pb2.AUDIO_FORMAT_S16LE, sample_rate=RATE)
    return {"audio": audio}


def _text() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    return T5ForConditionalGeneration(T5Config(vocab_size=V, n_positions=64, **sizes, **special))


def _speech() -> Any:
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_mel_bins": MELS, **LAYERS, **HEADS}
    length = {"max_source_positions": FRAMES // 2, "max_target_positions": 80}
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    unused = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return WhisperForConditionalGeneration(WhisperConfig(vocab_size=V, **sizes, **length, **special, **unused))


def _save(model: Any, folder: Path, *, is_speech: bool) -> None:
    config: dict[str, Any] = {"pad_token_id": PAD, "eos_token_id": END, "suppress_tokens": [3, *range(START, SILENT)]}
    if is_speech:
        config |= {
            "bos_token_id": START,
            "decoder_start_token_id": START,
            "begin_suppress_tokens": [END, 7],
            "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
            "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
            "no_timestamps_token_id": SILENT,
            "max_initial_timestamp_index": 20,
            "is_multilingual": True,
            "return_timestamps": False,
        }
        WhisperFeatureExtractor(feature_size=MELS, chunk_length=FRAMES // 100).save_pretrained(folder)
    else:
        config |= {"decoder_start_token_id": PAD, "no_repeat_ngram_size": 3, "bad_words_ids": [[4], [5, 6]]}
    model.generation_config = GenerationConfig(**config)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate((*LETTERS, *SPECIAL, *TIMESTAMPS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *TIMESTAMPS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
