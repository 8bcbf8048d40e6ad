"""Small encoder–decoder models with random weights, their inputs, and the tokens that transformers writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationMixin,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from outrider.runtime.loader import LoadedModel, adopt

V = 67
START = 1


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
        if parameter.dim() > 1:
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
    """What transformers' `generate` writes at temperature 0, past any end of sequence."""
    model = build(name)
    config = copy.deepcopy(model.generation_config)
    config.update(
        max_length=None,
        min_length=None,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
    )
    config.update(pad_token_id=0, bos_token_id=None, forced_bos_token_id=None, forced_eos_token_id=None)
    key = "input_ids" if encoder_input.dim() == 1 else "input_features"
    arguments = {key: encoder_input[None], "decoder_input_ids": torch.tensor([[START]])}
    with torch.inference_mode():  # not Whisper's own `generate`, which adds windows and prompts
        written = GenerationMixin.generate(model, **arguments, generation_config=config, use_cache=False)
    return [int(token) for token in written[0][1:]]
