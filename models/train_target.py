"""Train the demo target: a deep, thin Llama on the standard library.

It needs the corpus's tokens, and not the draft.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from models.tokenizer import CONTEXT, VOCABULARY
from models.training import ATTENTION, DTYPE, Optimizer, Run, Schedule, batch_of, windows

MATRIX_RATE, VECTOR_RATE = 0.02, 4e-3

# (until this share of the time, windows per step and process, their length). Short windows first: long ones cost
# attention on a CPU. Small batches first: many steps matter more at the start.
SHALLOW_STAGES = ((0.6, 8, 256), (1.0, 16, 256))
DEEP_STAGES = ((0.6, 8, 256), (0.85, 8, 512), (1.0, 4, CONTEXT))
SHALLOW_LAYERS, COPIES = 4, 3
SHALLOW_SHARE = 0.68  # of the time
AT_ONCE = 2048
WINDOW = 512


def llama_config(
    hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int, end: int
) -> LlamaConfig:
    """A Llama of the pair: tied embeddings, heads of 64."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        use_cache=False,
        attn_implementation=ATTENTION,
    )


def target_config(end: int, layers: int = SHALLOW_LAYERS * COPIES) -> LlamaConfig:
    """Deep and thin, so that the target's cost is its depth."""
    return llama_config(hidden=320, intermediate=896, layers=layers, heads=5, key_value_heads=1, end=end)


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A fresh model; the projections that write to the residual stream begin small."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.mul_(1.0 / math.sqrt(2 * config.num_hidden_layers))
    return model.to(DTYPE)


def hidden_states(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The states before the output head: `[B, L]` ids to `[B, L, H]`."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def bits_per_token(model: LlamaForCausalLM, stream: np.ndarray, limit: int = 40) -> float:
    """Mean held-out loss in bits over at most `limit` windows of `WINDOW` ids, no overlap."""
    count = min(limit, len(stream) // WINDOW)
    ids = torch.from_numpy(stream[: count * WINDOW].astype(np.int64)).view(count, WINDOW)
    total = 0.0
    with torch.no_grad():
        for rows in ids.split(8):
            logits = model.lm_head(hidden_states(model, rows)).float()
            loss = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), rows[:, 1:].reshape(-1))
            total += loss.item() * len(rows)
    return total / count / math.log(2)


def deepened(shallow: LlamaForCausalLM, end: int) -> LlamaForCausalLM:
    """The same function with `COPIES` times the layers: behind each layer, copies of it that write nothing yet."""
    deep = LlamaForCausalLM(target_config(end)).to(DTYPE)
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for index, layer in enumerate(deep.model.layers):
        layer.load_state_dict(shallow.model.layers[index // COPIES].state_dict())
        if index % COPIES:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
    return deep


def train_target(
    stream: np.ndarray, held_out: np.ndarray, minutes: float, folder: Path, end: int
) -> tuple[LlamaForCausalLM, Run, Run]:
    """Train for `minutes` on the ids `stream`, reporting the loss on `held_out`; checkpoints go to `folder`.

    A shallow model first, as it sees three times the tokens in the same time; then it is deepened and trained on.
    Returns the model and the two runs.
    """
    shallow = new_model(target_config(end, SHALLOW_LAYERS), seed=1)
    schedule = Schedule(warmup=0.03, decay_from=0.5, last=0.5)
    first = Run(_optimizer(shallow), schedule, SHALLOW_SHARE * minutes, folder / "shallow.pt")
    _train(shallow, first, stream, held_out, SHALLOW_STAGES)
    deep = deepened(shallow, end)
    schedule = Schedule(warmup=0.03, decay_from=0.0, peak=0.5)
    second = Run(_optimizer(deep), schedule, (1.0 - SHALLOW_SHARE) * minutes, folder / "deep.pt")
    _train(deep, second, stream, held_out, DEEP_STAGES)
    return deep, first, second


def _optimizer(model: LlamaForCausalLM) -> Optimizer:
    return Optimizer(model, MATRIX_RATE, VECTOR_RATE)


def _train(
    model: LlamaForCausalLM,
    run: Run,
    stream: np.ndarray,
    held_out: np.ndarray,
    stages: tuple[tuple[float, int, int], ...],
) -> None:
    layers = model.config.num_hidden_layers
    if distributed.get_rank() == 0:
        print(f"target of {layers} layers: {model.num_parameters():,} parameters, {len(stream):,} tokens", flush=True)
    run.resume()
    generator = np.random.default_rng([layers, run.steps, distributed.get_rank()])
    sources = {length: windows(stream, length, generator) for _, _, length in stages}

    def step(progress: float) -> tuple[float, int]:
        _, count, length = next(stage for stage in stages if progress <= stage[0])
        ids = batch_of(sources[length], count)
        parts = ids.split(AT_ONCE // length)
        total = 0.0
        for part in parts:
            logits = model.lm_head(hidden_states(model, part)).float()
            loss = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), part[:, 1:].reshape(-1))
            (loss / len(parts)).backward()
            total += loss.item() / len(parts)
        return total, ids.numel()

    run.train(step, lambda: f"held-out bits per token {bits_per_token(model, held_out):.3f}")
