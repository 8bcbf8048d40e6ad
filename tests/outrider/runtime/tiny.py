"""Tiny models with random weights, one per architecture, as checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCABULARY = 97
WINDOW = 5

SHAPE: dict[str, Any] = {
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
    "llama": lambda: transformers.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama-tied-mqa": lambda: transformers.LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-scaled-rope": lambda: transformers.LlamaConfig(
        **SHAPE,
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
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen2-sliding": lambda: transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
    "mistral-sliding": lambda: transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, layer_types=_ALTERNATING
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "phi": lambda: transformers.PhiConfig(**SHAPE),
}

GATED = [name for name in CONFIGS if name.startswith(("llama", "qwen", "mistral"))]
"""Computed by the fused decoder."""


_GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}

# A latent of 16 numbers makes keys of 8 + 4 and values of 8.
_LATENT: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


EXPERTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: transformers.MixtralConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, rope_parameters=_ROPE
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**_EXPERTS, shared_expert_intermediate_size=24),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**_EXPERTS, head_dim=16),
    "olmoe": lambda: transformers.OlmoeConfig(**_GROUPED, num_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_GROUPED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters=_ROPE,
    ),
    "deepseek3": lambda: transformers.DeepseekV3Config(**_LATENT, n_group=1, topk_group=1, first_k_dense_replace=1),
    # Its router multiplies by the weight of a linear layer that nothing calls.
    "longcat": lambda: transformers.LongcatFlashConfig(
        **{**_LATENT, "num_hidden_layers": 4},
        head_dim=4,
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        moe_topk=2,
        zero_expert_num=2,
    ),
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    **CONFIGS,
    **EXPERTS,
    "gemma": lambda: transformers.GemmaConfig(**_GROUPED, head_dim=8),
    # Scores are soft-capped well below their size.
    "gemma2": lambda: transformers.Gemma2Config(
        **_GROUPED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=0.5, layer_types=_ALTERNATING
    ),
    "gemma2-full": lambda: transformers.Gemma2Config(
        **_GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=["full_attention"] * 3
    ),
    "gemma3-with-vision": lambda: transformers.Gemma3Config(
        text_config={**_GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "phi3": lambda: transformers.Phi3Config(**_GROUPED),
    "granite": lambda: transformers.GraniteConfig(
        **_GROUPED, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.4
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_GROUPED),
    "cohere": lambda: transformers.CohereConfig(**_GROUPED),
    "cohere2": lambda: transformers.Cohere2Config(**_GROUPED, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "smollm3": lambda: transformers.SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0, 1]),
    "starcoder2": lambda: transformers.Starcoder2Config(**_GROUPED, sliding_window=WINDOW),
}
"""Families compared with transformers."""


def save(config: PreTrainedConfig, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model of random weights, scaled so that logits are about 1."""
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


class Reference:
    """A checkpoint by transformers: no cache, eager attention."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits `[n, V]` of a whole sequence."""
        return self.padded([tokens])[0]

    @torch.inference_mode()
    def padded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits `[len(texts), length of the longest, V]`, by one pass; rows behind the end of a text are noise."""
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        logits: Tensor = self._model(ids, use_cache=False).logits
        return logits
