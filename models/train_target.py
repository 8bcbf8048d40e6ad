"""Train the demo target: a deep, thin Llama on the standard library.

It needs the corpus's tokens, and not the draft.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from models.measure import WINDOW, bits_per_token, model_log_probabilities
from models.tokenizer import CONTEXT, VOCABULARY
from models.training import ATTENTION, DEEP, DTYPE, SHALLOW, Optimizer, Run, batch_of, begin_small, deepen, windows

MATRIX_RATE, VECTOR_RATE = 0.02, 4e-3

# (until this share of the time, windows per step and process, their length). Short windows first: long ones cost
# attention on a CPU. Small batches first: many steps matter more at the start.
SHALLOW_STAGES = ((0.6, 8, 256), (1.0, 16, 256))
DEEP_STAGES = ((0.6, 8, 256), (0.85, 8, 512), (1.0, 4, CONTEXT))
SHALLOW_LAYERS, COPIES = 4, 3
SHALLOW_SHARE = 0.68  # of the time
AT_ONCE = 2048


def llama_config(layers: int, end: int) -> LlamaConfig:
    """A Llama of the pair: thin, with tied embeddings. The cost of a step is its layers, not their width."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=layers,
        num_attention_heads=5,
        num_key_value_heads=1,
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


def hidden_states(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The states before the output head: `[B, L]` ids to `[B, L, H]`."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def train_target(
    stream: np.ndarray, held_out: np.ndarray, minutes: float, folder: Path, end: int
) -> tuple[LlamaForCausalLM, Run, Run]:
    """Train for `minutes` on the ids `stream`, reporting the loss on `held_out`; checkpoints go to `folder`.

    A shallow model first, as it sees three times the tokens in the same time; then it is deepened and trained on.
    Returns the model and the two runs.
    """
    torch.manual_seed(1)
    shallow = LlamaForCausalLM(llama_config(SHALLOW_LAYERS, end))
    begin_small(shallow, 1.0 / math.sqrt(2 * SHALLOW_LAYERS))
    shallow.to(DTYPE)
    first = Run(_optimizer(shallow), SHALLOW, SHALLOW_SHARE * minutes, folder / "shallow.pt")
    _train(shallow, first, stream, held_out, SHALLOW_STAGES)
    deep = LlamaForCausalLM(llama_config(COPIES * SHALLOW_LAYERS, end)).to(DTYPE)
    deepen(shallow, deep)
    second = Run(_optimizer(deep), DEEP, (1.0 - SHALLOW_SHARE) * minutes, folder / "deep.pt")
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

    def evaluate() -> str:
        bits = bits_per_token(model_log_probabilities(model), held_out[: 40 * WINDOW])
        return f"held-out bits per token {bits:.3f}"

    run.train(step, evaluate)
