"""Chooses the attention of a model, and implements paged attention.

`triton` is our kernel, for GPUs. `eager` gathers the blocks of each sequence and computes explicit scores
(`outrider.runtime.sdpa`): for layers that the kernel does not support, and for block tables on a CPU. The kernel is
checked against `eager` before it is chosen. `sdpa` is torch's attention over contiguous keys and values, without block
tables.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels.attention_work import work_list
from outrider.runtime.attention import AttentionLayer
from outrider.runtime.batch import PagedAttention, PagedBatch, to_device
from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.sdpa import Scoring, attend_scores
from outrider.runtime.selfcheck import Refusal, check, operation_tolerance, random_batch

AUTO, SDPA, EAGER, TRITON = "auto", "sdpa", "eager", "triton"

_LARGEST_HEAD = 256  # of our kernel: one program holds a whole head


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention of a model.

    Attributes:
        name: `sdpa`, `eager` or `triton`.
        reason: why it was chosen, for the log.
        block_tokens: positions of a block of the KV pool.
    """

    name: str
    reason: str
    block_tokens: int = BLOCK_TOKENS

    @property
    def is_paged(self) -> bool:
        """Whether it needs a paged pool."""
        return self.name != SDPA

    @property
    def attend(self) -> PagedAttention:
        """The implementation for a paged pool."""
        return attend_triton if self.name == TRITON else attend_eager

    def can_be_captured(self, device: torch.device) -> bool:
        """Whether it can be captured: it has no host sync. On a CPU every paged attention can."""
        return self.name == TRITON or (self.is_paged and device.type == "cpu")


ORDINARY = AttentionChoice(SDPA, "fastest on a CPU")
"""The default."""


def choose_attention(
    requested: str,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    *,
    paged: bool = False,
    has_encoder: bool = False,
) -> AttentionChoice:
    """Return the requested attention, or with `auto` the fastest one available.

    Args:
        requested: `auto`, `sdpa`, `eager` or `triton`.
        paged: whether the pool must be paged.
        has_encoder: whether the model has an encoder. Then the pool cannot be paged.

    Raises:
        CheckpointError: the requested attention cannot run here; the message has the reason.
    """
    if has_encoder:
        if requested in (AUTO, SDPA):
            return ORDINARY
        raise CheckpointError(f"--attention is {requested}; a model with an encoder needs auto or sdpa")
    if requested == SDPA and paged:
        raise CheckpointError("--attention is sdpa; with --tensor-parallel-size use auto, eager or triton")
    if requested in (SDPA, EAGER):
        return AttentionChoice(requested, "as requested")
    if requested == AUTO and device.type == "cpu":
        return AttentionChoice(EAGER, "paged attention on a CPU") if paged else ORDINARY
    choice = AttentionChoice(TRITON, "the kernel agrees with eager attention")
    why = _obstacle(layers, device) or check_attention(choice, layers, dtype, device)
    if not why:
        return choice
    if requested == TRITON:
        raise CheckpointError(f"--attention triton cannot run here: {why}; use --attention auto")
    return AttentionChoice(EAGER, f"triton cannot run: {why}")


def _obstacle(layers: Sequence[AttentionLayer], device: torch.device) -> str:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device; the device is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    for i, layer in enumerate(layers):
        if layer.head_dim > _LARGEST_HEAD:
            return f"the heads of layer {i} have {layer.head_dim} elements; at most {_LARGEST_HEAD}"
    return ""


# -------------------------------------------------------------------------------------------------------- attention


def attend_triton(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
    """See `PagedAttention`: one or two launches for all sequences, without copies."""
    from kernels.triton_attention import attend  # triton has no build for some platforms

    return attend(
        query,
        keys,
        values,
        batch.positions,
        batch.row_starts,
        batch.lengths,
        batch.block_tables,
        batch.items,
        batch.row_partials,
        partials=batch.partials,
        scaling=scoring.scaling,
        window=scoring.window,
        softcap=scoring.softcap,
        sinks=scoring.sinks,
    )


def attend_eager(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
    """See `PagedAttention`: gathers the blocks of one sequence after the other. Slow, on any device."""
    source = batch if batch.host_batch is None else batch.host_batch  # on the host no sync is needed
    row_starts, lengths = source.row_starts.tolist(), source.lengths.tolist()
    out = torch.zeros_like(query)
    for s, (first, last, end) in enumerate(zip(row_starts, row_starts[1:], lengths, strict=False)):
        count = last - first
        if not count:
            continue
        table = batch.block_tables[s, : -(-end // keys.size(1))]
        seen_keys, seen_values = (
            blocks.index_select(0, table).flatten(0, 1).narrow(0, 0, end).transpose(0, 1).unsqueeze(1)
            for blocks in (keys, values)
        )
        rows = query.narrow(0, first, count)
        out[first:last] = attend_scores(rows, [end - count], [count], [seen_keys], [seen_values], scoring)
    return out


# ------------------------------------------------------------------------------------------------------------ check

# Batches: (positions before, rows) of each sequence, and whether long ones are split among programs. They cover one
# block, several and many; single rows alone; and prompt chunks.
_BATCHES = (
    (((0, 1), (40, 6), (700, 17), (1500, 1)), True),
    (((0, 1), (300, 1)), True),
    (((20, 150), (550, 9)), False),
)


def check_attention(
    choice: AttentionChoice, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> Refusal | None:
    """Checks an attention against `attend_eager` on random batches of several kinds.

    Args:
        layers: of a model; equal ones are checked once.
    """
    for layer in dict.fromkeys(layers):
        generator = torch.Generator().manual_seed(layer.heads)
        sinks = torch.randn(layer.heads, generator=generator).to(device, dtype) if layer.sinks else None
        scoring = Scoring(layer.scaling, layer.window or 0, layer.softcap, sinks)
        for spans, cuts in _BATCHES:
            block = choice.block_tokens
            host_batch, memory = random_batch(spans, layer.kv_heads, layer.head_dim, dtype, device, block_tokens=block)
            work = work_list(host_batch.row_starts.tolist(), host_batch.lengths.tolist(), cuts=cuts)
            host_batch = replace(host_batch, items=work.items, row_partials=work.row_partials)
            batch = to_device(host_batch, memory, choice.attend, device)
            query = torch.randn(len(host_batch.tokens), layer.heads, layer.head_dim, generator=generator)
            inputs = query.to(device, dtype), memory.keys[0], memory.values[0], batch, scoring
            candidate, reference = partial(_rows, choice.attend, *inputs), partial(_rows, attend_eager, *inputs)
            why = check(candidate, reference, operation_tolerance(dtype))
            if why:
                return why
    return None


def _rows(attend: PagedAttention, *inputs: Any) -> dict[str, Tensor]:
    return {"rows": attend(*inputs)}
