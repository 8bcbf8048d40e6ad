"""Tiny pairs with random weights, written to disk as checkpoints, so that the services load them as any other.

A Llama of 24 tokens: few enough to enumerate three of them, enough for top-k 20 to cut. Weights are so large that
distributions differ much from prefix to prefix. The drafts are the target with another output layer; most are bad.
`write_demo_like` has the vocabulary of the demo in place of the 24 tokens.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cluster import MODELS
from tests.outrider.runtime import tiny

DEMO_TOKENS = 2048
LETTERS = "abcdefghijklmnopqrstuvw"
END = "<end>"
VOCABULARY = len(LETTERS) + 1
END_ID = len(LETTERS)
CONTEXT = 2048
WIDTH = 32

HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    # Flat enough that draft and target have some tokens in common after top-k and top-p.
    "reversed": lambda head: -0.25 * head,
    "uniform": torch.zeros_like,
    # Logits thousands apart: whatever the temperature, one token gets all.
    "point_mass": lambda head: 1000.0 * head,
    # Good drafts have the target's order of tokens, with too little entropy or too much.
    "sharpened": lambda head: 1.5 * head,
    "flattened": lambda head: 0.5 * head,
}
"""The output layer of each draft, from the target's."""

BAD_DRAFTS = ("reversed", "uniform", "point_mass")


def write_target(folder: Path, *, seed: int, sharpness: float = 1.5, markov: bool = False) -> Path:
    """Write a target and return its folder; `sharpness` is about the standard deviation of its logits. A `markov` one
    has no attention, so that the next token depends on the last one alone.
    """
    model = _model(seed, sharpness)
    if markov:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
    return _save(model, folder)


def write_draft(folder: Path, target: Path, kind: str) -> Path:
    """Write the draft of one of the `HEADS` for a target and return its folder."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(HEADS[kind](model.lm_head.weight))
    return _save(model, folder)


def write_parallel_draft(folder: Path, target: Path, kind: str = "sharpened") -> Path:
    """Write the draft of one of the `HEADS`, with a mask token: a random row more. Return its folder."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(HEADS[kind](model.lm_head.weight))
        model.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
        generator = torch.Generator().manual_seed(0)
        model.get_input_embeddings().weight[VOCABULARY].normal_(generator=generator)
        model.lm_head.weight[VOCABULARY] = model.lm_head.weight[:VOCABULARY].mean(0)
    model.config.pard_token = VOCABULARY
    return _save(model, folder)


def write_demo_like(folder: Path, **shape: int) -> tuple[Path, Path]:
    """Write a target with the tokens of the demo, and a draft that often agrees with it. Return their folders."""
    config = LlamaConfig(
        vocab_size=DEMO_TOKENS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=0, **shape,
    )  # fmt: skip
    target, draft_folder = tiny.save(config, folder / "target", seed=1), folder / "draft"
    draft = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        draft.lm_head.weight.add_(0.05 * torch.randn(draft.lm_head.weight.shape, generator=torch.manual_seed(5)))
    draft.save_pretrained(draft_folder)
    for each in (target, draft_folder):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODELS / "target" / name, each / name)
    return target, draft_folder


def _model(seed: int, sharpness: float) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                scale = 1.0 if "embed" in name else 1.0 / math.sqrt(weight.shape[1])
                factor = sharpness if "lm_head" in name else 1.5 if "o_proj" in name else 1.0
                weight.normal_(0.0, factor * scale, generator=generator)
    return model


def _save(model: LlamaForCausalLM, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: number for number, letter in enumerate((*LETTERS, END))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
