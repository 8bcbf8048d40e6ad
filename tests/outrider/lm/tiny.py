"""Tiny models with random weights, one per architecture, saved as checkpoints are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 97
WINDOW = 5

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=2),
    "llama-tied-mqa": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-scaled-rope": lambda: LlamaConfig(
        **_SHAPE,
        num_key_value_heads=4,
        head_dim=12,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=2),
    "qwen2-sliding": lambda: Qwen2Config(
        **_SHAPE, num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16),
    "mistral": lambda: MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, layer_types=_ALTERNATING
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**_SHAPE),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "phi": lambda: PhiConfig(**_SHAPE),
}
"""Architectures that run packed."""

GATED = [name for name in CONFIGS if name.startswith(("llama", "qwen", "mistral"))]
"""Those the fused decoder computes."""


def gemma2(**changes: Any) -> PreTrainedConfig:
    """Soft-capped scores unless told otherwise."""
    shape = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, **changes}
    return Gemma2Config(**shape, layer_types=_ALTERNATING)


def save(config: PreTrainedConfig, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Makes a model of random weights, with logits of some size, and saves it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1 / parameter.shape[-1] ** 0.5)
            elif "norm" in name or "ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


class Truth:
    """The same checkpoint in transformers' own hands: no cache, eager attention."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits `[n, V]` of a whole sequence."""
        logits: Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits
