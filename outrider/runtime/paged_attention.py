"""Attention over pages: what there is, which of it a model runs with, and why.

On a GPU that is `triton`, our kernel. What the kernel cannot do, and pages on a CPU, run by `eager`: each sequence's
pages gathered, and its scores spelled out (`outrider.runtime.sdpa`). The kernel is held to that before it is taken.
`sdpa` reads no pages: each sequence lies in one piece of memory, and torch's own attention runs over it.
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
from outrider.runtime.selfcheck import Refusal, check, operation_tolerance, random_pass

AUTO, SDPA, EAGER, TRITON = "auto", "sdpa", "eager", "triton"

_LARGEST_HEAD = 256  # of our kernel: a program holds whole heads


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """How a model attends.

    Attributes:
        name: `sdpa`, `eager` or `triton`.
        reason: why this one, in a few words, for the log.
        block_tokens: positions of a block of the KV pool.
    """

    name: str
    reason: str
    block_tokens: int = BLOCK_TOKENS

    @property
    def is_paged(self) -> bool:
        """Whether the pool is to be paged."""
        return self.name != SDPA

    @property
    def attend(self) -> PagedAttention:
        """The attention, of a paged pool."""
        return attend_triton if self.name == TRITON else attend_eager

    def can_be_captured(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold it: nothing in it may wait for the device. On a CPU anything over pages may."""
        return self.name == TRITON or (self.is_paged and device.type == "cpu")


ORDINARY = AttentionChoice(SDPA, "what a CPU is fastest with")
"""What a model runs with by default."""


def choose_attention(
    asked: str, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, *, paged: bool = False
) -> AttentionChoice:
    """The attention of a model: the one asked for, or by `auto` the fastest there is.

    Args:
        asked: `auto`, or a name.
        layers: what the model's ask for.
        dtype: of keys and values.
        device: where they lie.
        paged: whether only one that reads pages will do.

    Raises:
        CheckpointError: the one asked for is not there, with the reason.
    """
    if asked == SDPA and paged:
        raise CheckpointError("--attention sdpa keeps a sequence in one piece, and here the pool must be paged")
    if asked in (SDPA, EAGER):
        return AttentionChoice(asked, "as asked for")
    if asked == AUTO and device.type == "cpu":
        return AttentionChoice(EAGER, "what a CPU reads pages with") if paged else ORDINARY
    choice = AttentionChoice(TRITON, "our kernel gives what attention spelled out does")
    why = _obstacle(layers, device) or check_attention(choice, layers, dtype, device)
    if not why:
        return choice
    if asked == TRITON:
        raise CheckpointError(f"--attention triton cannot run here: {why}")
    return AttentionChoice(EAGER, f"no triton: {why}")


def _obstacle(layers: Sequence[AttentionLayer], device: torch.device) -> str:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    for i, layer in enumerate(layers):
        if layer.head_dim > _LARGEST_HEAD:
            return f"layer {i} has heads of {layer.head_dim}, and it takes {_LARGEST_HEAD} at most"
    return ""


# -------------------------------------------------------------------------------------------------------- attention


def attend_triton(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
    """See `PagedAttention`: all sequences in one launch or two, in any dtype, nothing copied."""
    from kernels.triton_attention import attend  # triton has no build for some platforms

    return attend(
        query,
        keys,
        values,
        batch.positions,
        batch.row_starts,
        batch.lengths,
        batch.tables,
        batch.items,
        batch.row_slots,
        slots=batch.slots,
        scaling=scoring.scaling,
        window=scoring.window,
        softcap=scoring.softcap,
        sinks=scoring.sinks,
    )


def attend_eager(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
    """See `PagedAttention`: one sequence after the other, its pages gathered, on any device and slowly."""
    told = batch if batch.layout is None else batch.layout
    row_starts, lengths = told.row_starts.tolist(), told.lengths.tolist()
    out = torch.zeros_like(query)
    for s, (first, last, end) in enumerate(zip(row_starts, row_starts[1:], lengths, strict=False)):
        count = last - first
        if not count:
            continue
        table = batch.tables[s, : -(-end // keys.size(1))]
        seen_keys, seen_values = (
            pages.index_select(0, table).flatten(0, 1).narrow(0, 0, end).transpose(0, 1).unsqueeze(1)
            for pages in (keys, values)
        )
        rows = query.narrow(0, first, count)
        out[first:last] = attend_scores(rows, [end - count], [count], [seen_keys], [seen_values], scoring)
    return out


# ------------------------------------------------------------------------------------------------------------ trial

# Passes: (positions held before, rows) of each sequence, and whether long ones are cut among programs. Keys of one
# page, of several, and of many; single rows alone; and rows of a prompt.
_PASSES = (
    (((0, 1), (40, 6), (700, 17), (1500, 1)), True),
    (((0, 1), (300, 1)), True),
    (((20, 150), (550, 9)), False),
)


def check_attention(
    choice: AttentionChoice, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> Refusal | None:
    """Holds an attention to `attend_eager` on random numbers, in passes of several kinds.

    Args:
        choice: of the attention.
        layers: what a model's layers ask for; each kind is tried once.
        dtype: of keys and values.
        device: where they lie.
    """
    for layer in dict.fromkeys(layers):
        generator = torch.Generator().manual_seed(layer.heads)
        sinks = torch.randn(layer.heads, generator=generator).to(device, dtype) if layer.sinks else None
        scoring = Scoring(layer.scaling, layer.window or 0, layer.softcap, sinks)
        for spans, cuts in _PASSES:
            block = choice.block_tokens
            layout, memory = random_pass(spans, layer.kv_heads, layer.head_dim, dtype, device, block_tokens=block)
            work = work_list(layout.row_starts, layout.lengths, cuts=cuts)
            layout = replace(layout, items=work.items, row_slots=work.row_slots)
            batch = to_device(layout, memory, choice.attend, device)
            query = torch.randn(len(layout.tokens), layer.heads, layer.head_dim, generator=generator)
            told = query.to(device, dtype), memory.keys[0], memory.values[0], batch, scoring
            candidate, reference = partial(_rows, choice.attend, *told), partial(_rows, attend_eager, *told)
            why = check(candidate, reference, operation_tolerance(dtype))
            if why:
                return why
    return None


def _rows(attend: PagedAttention, *told: Any) -> dict[str, Tensor]:
    return {"rows": attend(*told)}
