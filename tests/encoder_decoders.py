"""Small encoder–decoder models with random weights, their inputs, and the tokens that transformers writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GenerationMixin,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from outrider.runtime.loader import LoadedModel, adopt

V = 67
START, EOS = 1, 2
PLAIN: dict[str, Any] = {"decoder_start_token_id": START, "pad_token_id": 0, "do_sample": False}
_ENDS = PLAIN | {"eos_token_id": EOS}
_BART = _ENDS | {"no_repeat_ngram_size": 3, "forced_bos_token_id": 5, "forced_eos_token_id": EOS, "min_length": 12}
RULES: dict[str, dict[str, Any]] = {
    "t5": _ENDS | {"repetition_penalty": 1.3},
    "t5, gated, untied": _ENDS | {"min_new_tokens": 8},
    "bart": _BART,
    "marian": _ENDS | {"bad_words_ids": [[7], [9, 11], [12, 13, 14]], "forced_eos_token_id": EOS},
    "whisper": _ENDS | {
        "suppress_tokens": [3, 4, 30], "begin_suppress_tokens": [EOS, 8], "no_timestamps_token_id": 40,
        "is_multilingual": False, "max_initial_timestamp_index": 10, "return_timestamps": False,
        "bos_token_id": EOS,
    },
}  # fmt: skip
"""Generation configs, each with other rules."""


def t5(**changes: Any) -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=V, decoder_start_token_id=START, **(sizes | changes)))


def bart_like(model: Callable[[Any], Any], config: Callable[..., Any], **changes: Any) -> Any:
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 96,
        "decoder_start_token_id": START, "pad_token_id": 0, "forced_eos_token_id": None,
    }  # fmt: skip
    return model(config(vocab_size=V, **(sizes | changes)))


def whisper(**changes: Any) -> Any:
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_mel_bins": 20,
        "max_source_positions": 50, "max_target_positions": 80, "decoder_start_token_id": START, "pad_token_id": 0,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    return WhisperForConditionalGeneration(WhisperConfig(vocab_size=V, **(sizes | changes)))


MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "t5, gated, untied": lambda: t5(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, relative_attention_num_buckets=8, num_heads=2
    ),
    "bart": lambda: bart_like(BartForConditionalGeneration, BartConfig),
    "marian": lambda: bart_like(MarianMTModel, MarianConfig, scale_embedding=True),
    "whisper": whisper,
}


@cache
def build(name: str) -> Any:
    """A model of transformers."""
    torch.manual_seed(7)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # large enough for attention to matter
        if parameter.dim() > 1 and parameter.requires_grad:  # Marian's positions are not saved
            parameter.data.normal_(0, 2 * (parameter.shape[0] / parameter.numel()) ** 0.5)
    return model


def loaded(name: str) -> LoadedModel:
    """The same model, to run packed batches."""
    return adopt(copy.deepcopy(build(name)), name, name)


def inputs(name: str, count: int) -> list[Tensor]:
    """Inputs of the encoder: token ids of several lengths, or features."""
    generator = torch.Generator().manual_seed(5)
    config = build(name).config
    if mels := getattr(config, "num_mel_bins", None):
        frames = 2 * config.max_source_positions
        return [torch.randn(mels, frames, generator=generator) for _ in range(count)]
    return [torch.randint(3, V, (3 + 5 * (i % 6),), generator=generator) for i in range(count)]


def logits_of(name: str, encoder_input: Tensor, tokens: list[int]) -> Tensor:
    """`[tokens, V]` by the model's own forward."""
    key = "input_ids" if encoder_input.dim() == 1 else "input_features"
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        logits: Tensor = build(name)(**{key: encoder_input[None]}, decoder_input_ids=ids, use_cache=False).logits[0]
        return logits


def greedy(name: str, encoder_input: Tensor, count: int) -> list[int]:
    """What transformers' `generate` writes at temperature 0, past any end of sequence and without its rules."""
    return _generate(name, encoder_input, GenerationConfig(**PLAIN, max_new_tokens=count, min_new_tokens=count))


def generated(name: str, encoder_input: Tensor, count: int, *, timestamps: bool = False) -> list[int]:
    """What transformers' `generate` writes at temperature 0 with the rules of `save`, up to the end of sequence."""
    config = GenerationConfig(**RULES[name], max_new_tokens=count)
    prompt, processors = [START], []
    if timestamps:
        processors = [WhisperTimeStampLogitsProcessor(config, begin_index=1)]
    elif name == "whisper":
        prompt = [START, config.no_timestamps_token_id]
    return _generate(name, encoder_input, config, prompt, processors)


def _generate(
    name: str, encoder_input: Tensor, config: GenerationConfig, prompt: Sequence[int] = (START,), processors: Any = ()
) -> list[int]:
    key = "input_ids" if encoder_input.dim() == 1 else "input_features"
    arguments = {key: encoder_input[None], "decoder_input_ids": torch.tensor([prompt])}
    with torch.inference_mode():  # not Whisper's own `generate`, which reads windows and adds prompts
        written = GenerationMixin.generate(
            build(name), **arguments, generation_config=config, logits_processor=list(processors), use_cache=False
        )
    return [int(token) for token in written[0][len(prompt) :]]


def save(name: str, folder: Path, *, has_rules: bool = True, noise: float = 0.0) -> Path:
    """A checkpoint of the model, for services; a draft has `noise` in its weights. Returns the folder."""
    model = copy.deepcopy(build(name))
    generator = torch.Generator().manual_seed(11)
    for weight in model.parameters():
        weight.data += noise * weight.data.std(correction=0) * torch.randn(weight.shape, generator=generator)
    model.generation_config = GenerationConfig(**(RULES[name] if has_rules else PLAIN))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(V)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token=f"t{EOS}").save_pretrained(folder)
    if mels := getattr(model.config, "num_mel_bins", None):
        seconds = model.config.max_source_positions // 50
        WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds).save_pretrained(folder)
    return folder
