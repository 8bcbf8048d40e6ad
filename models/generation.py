"""Let a model of the pair write many texts at once, keeping its distributions, for distillation and measurement.

It works on Llama modules and a flat KV cache, for any text. All rows of a batch have the same length, so there is
no padding and no mask beyond the causal one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

REACH = 32  # attention reaches to a multiple of this: a new size of product costs its compilation on a CPU


class Writer:
    """A model with a KV cache for `rows` sequences of `length` tokens each."""

    def __init__(self, model: LlamaForCausalLM, rows: int, length: int) -> None:
        config = model.config
        self.model = model
        self.heads, self.key_heads, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, rows * self.key_heads, length, self.width)
        self.keys = torch.zeros(shape, dtype=model.dtype)
        self.values = torch.zeros(shape, dtype=model.dtype)
        self.used = 0

    @torch.no_grad()  # so that nothing outlives the step
    def extend(self, ids: Tensor) -> Tensor:
        """Append `ids` `[B, n]` to the sequences; returns the logits after each of them, `[B, n, V]` float32."""
        body = self.model.model
        state = body.embed_tokens(ids)
        positions = torch.arange(self.used, self.used + ids.shape[1])[None]
        rotation = body.rotary_emb(state, positions)
        layer: Any  # torch types a module list's items too broadly
        for index, layer in enumerate(body.layers):
            state = state + self._attend(index, layer.self_attn, layer.input_layernorm(state), rotation)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        self.used += ids.shape[1]
        return self.model.lm_head(body.norm(state)).float()

    def _attend(self, index: int, attention: Any, state: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        rows, count, _ = state.shape
        end = self.used + count
        query = attention.q_proj(state).view(rows, count, self.heads, self.width).transpose(1, 2)
        key = attention.k_proj(state).view(rows, count, self.key_heads, self.width).transpose(1, 2)
        value = attention.v_proj(state).view(rows, count, self.key_heads, self.width).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        groups = rows * self.key_heads
        reach = min(self.keys.shape[2], -(-end // REACH) * REACH)
        keys, values = self.keys[index, :groups, :reach], self.values[index, :groups, :reach]
        keys[:, self.used : end] = key.reshape(groups, count, self.width)
        values[:, self.used : end] = value.reshape(groups, count, self.width)
        scores = torch.bmm((query * attention.scaling).reshape(groups, -1, self.width), keys.mT)
        future = torch.ones(count, reach, dtype=torch.bool).triu(self.used + 1)
        scores = scores.view(groups, -1, count, reach).masked_fill_(future, float("-inf"))
        mixed = torch.bmm(scores.softmax(dim=-1).view(groups, -1, reach), values).view(
            rows, self.heads, count, self.width
        )
        return attention.o_proj(mixed.transpose(1, 2).reshape(rows, count, -1))


@dataclass(frozen=True)
class Text:
    """Texts of a model: `ids` `[B, L]` (prompt first), and its largest probabilities after each position."""

    ids: Tensor
    top_ids: Tensor  # [B, L, K] int16: row i: the tokens after position i
    top_probabilities: Tensor  # [B, L, K] float16, at temperature 1, whatever the sampling temperature was


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row of `logits` `[B, V]` at `temperatures` `[B]`; 0 takes the largest logit, lowest id on ties."""
    greedy = logits.argmax(dim=-1)
    scaled = logits / temperatures.clamp_min(1e-3)[:, None]
    cumulative = scaled.double().softmax(dim=-1).cumsum(dim=-1)
    uniforms = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator) * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, uniforms, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    return torch.where(temperatures == 0, greedy, sampled)


def steps(
    model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, temperatures: Tensor, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Continue `prompts` `[B, n]`: yields (ids `[B, k]`, logits `[B, k, V]` after them), first for the whole prompt.

    The ids of one step were drawn from the logits of the step before; the last ids drawn get their logits too.
    """
    writer = Writer(model, len(prompts), prompts.shape[1] + new_tokens)
    ids = prompts
    for _ in range(new_tokens + 1):
        logits = writer.extend(ids)
        yield ids, logits
        ids = draw(logits[:, -1], temperatures, generator)[:, None]


def write(
    model: LlamaForCausalLM,
    prompts: Tensor,
    new_tokens: int,
    temperatures: Tensor,
    generator: torch.Generator,
    keep: int,
) -> Text:
    """Continue `prompts` `[B, n]` by `new_tokens` each, keeping the `keep` likeliest tokens at each position."""
    ids, top_ids, top_probabilities = [], [], []
    for new, logits in steps(model, prompts, new_tokens, temperatures, generator):
        top = logits.softmax(dim=-1).topk(keep, dim=-1, sorted=False)
        ids.append(new)
        top_ids.append(top.indices.to(torch.int16))
        top_probabilities.append(top.values.to(torch.float16))
    return Text(torch.cat(ids, 1), torch.cat(top_ids, 1), torch.cat(top_probabilities, 1))
