"""Attention of packed sequences: by torch's SDPA, and with explicit scores.

TorchScript compiles `attend_causal` and `attend_all` (`outrider.runtime.fused_layers`), so they use only its features.
`attend_scores` is the reference. It also runs layers that SDPA does not support: with soft-capping (Gemma 2), which
bounds each score s to c · tanh(s / c) before the softmax, and with sinks (GPT-OSS), one learned score per head that
takes part in the softmax and has no value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""The most rows of scores in one call; longer chunks are cut into blocks of rows."""

_MASK_CACHE_ELEMENTS = 16 << 20
_NEVER = float("-inf")


class CausalMasks:
    """Additive causal masks for the last rows of a sequence, cached for all lengths and batches.

    The mask of a shorter sequence is the right-hand end of the mask of a longer one. So there is one mask per number of
    rows, and each length is a view of it.

    Attributes:
        none: `[0, 0]`, for chunks that need no mask.
        no_rows: int64 `[0]`.
    """

    def __init__(self, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._max_length = max_length
        self._dtype = dtype
        self._device = device
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self._elements = 0
        self.none = torch.empty(0, 0, dtype=dtype, device=device)
        self.no_rows = torch.empty(0, dtype=torch.int64, device=device)

    def for_rows(self, count: int, length: int, group: int, window: int) -> Tensor:
        """Return the mask of the last `count` of `length` positions.

        Args:
            count: rows.
            length: positions, at least `count`.
            group: how many times each row is repeated.
            window: how many positions a row sees, its own included; 0 is all.

        Returns:
            `[b · group, W]` with b = `count`, at most `BLOCK` // `group`, and W at least the positions that the rows of
            a block see; `[0, 0]` for a single row, and for the rows of a whole sequence.
        """
        if count == 1 or (count == length and not 0 < window < length):
            return self.none
        rows = min(count, max(1, BLOCK // group))
        width = length if window == 0 else min(length, window + rows - 1)
        key = (rows, group, window)
        mask = self._masks.get(key)
        if mask is None or mask.shape[1] < width:
            mask = self._build(rows, min(self._max_length, max(256, 1 << (width - 1).bit_length())), group, window)
            self._keep(key, mask)
        return mask

    def _keep(self, key: tuple[int, int, int], mask: Tensor) -> None:
        if mask.numel() > _MASK_CACHE_ELEMENTS:
            return
        replaced = self._masks.pop(key, None)
        self._elements += mask.numel() - (0 if replaced is None else replaced.numel())
        if self._elements > _MASK_CACHE_ELEMENTS:
            self._masks.clear()
            self._elements = mask.numel()
        self._masks[key] = mask

    def _build(self, rows: int, width: int, group: int, window: int) -> Tensor:
        unseen = _unseen(rows, width, window, self._device)
        mask = torch.zeros(rows, width, dtype=self._dtype, device=self._device).masked_fill_(unseen, _NEVER)
        return mask.repeat_interleave(group, 0)


class Location(NamedTuple):
    """Where the keys and values that a chunk attends to are in memory.

    Attributes:
        start: the first position; 0 with `blocks`.
        blocks: int64 `[B]`: the blocks to gather; empty if they are consecutive.
        end: how many positions: up to the chunk's last row, or all of the encoder.
    """

    start: int
    blocks: Tensor
    end: int


def attend_causal(
    query: Tensor,
    memory: Tensor,
    counts: list[int],
    locations: list[Location],
    masks: list[Tensor],
    block_tokens: int,
    scaling: float,
    window: int,
) -> Tensor:
    """Causal attention of each row over its own sequence. Keys and values of all rows are written before.

    Args:
        query: `[T, heads, head_dim]`, in the dtype of the pool.
        memory: keys and values of all blocks of the layer, `[2, kv_heads, positions, head_dim]`.
        counts: rows of each chunk.
        locations: of each chunk.
        masks: of each chunk (`CausalMasks.for_rows`).
        window: how many positions a row sees, its own included; 0 is all.

    Returns:
        `[T, heads, head_dim]`, of any strides.
    """
    parts: list[Tensor] = []
    for i, rows in enumerate(query.split_with_sizes(counts)):
        keys, values = _keys_and_values(memory, locations[i], block_tokens)
        parts.append(_attend(rows, keys, values, masks[i], scaling, window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def keys_and_values(memory: Tensor, locations: list[Location], block_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values at each location, `[kv_heads, 1, end, head_dim]`; `memory` is that of `attend_causal`."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for location in locations:
        own_keys, own_values = _keys_and_values(memory, location, block_tokens)
        keys.append(own_keys)
        values.append(own_values)
    return keys, values


def _keys_and_values(memory: Tensor, location: Location, block_tokens: int) -> tuple[Tensor, Tensor]:
    if location.blocks.numel() > 0:
        kv_heads, head_dim = memory.size(1), memory.size(3)
        blocks = memory.view(2 * kv_heads, -1, block_tokens * head_dim).index_select(1, location.blocks)
        memory = blocks.view(2, kv_heads, -1, head_dim)
    keys, values = memory.narrow(2, location.start, location.end).unsqueeze(2).unbind(0)
    return keys, values


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, window: int) -> Tensor:
    # query: [n, H, D]; keys, values: [KV, 1, end, D] -> [n, H, D]
    n, heads, head_dim = query.shape
    kv_heads, end = keys.size(0), keys.size(2)
    group = heads // kv_heads
    if n == 1:
        if 0 < window < end:
            keys, values = keys.narrow(2, end - window, window), values.narrow(2, end - window, window)
        # Query heads that share a KV head become rows of one head, so keys are not copied. One row needs no mask.
        packed = query.reshape(kv_heads, 1, group, head_dim)
        return F.scaled_dot_product_attention(packed, keys, values, scale=scaling).view(1, heads, head_dim)
    if mask.size(0) == 0:
        rows, keys, values = query.transpose(0, 1).unsqueeze(0), keys.transpose(0, 1), values.transpose(0, 1)
        out = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scaling, enable_gqa=group > 1)
        return out.squeeze(0).transpose(0, 1)
    most = mask.size(0) // group
    if n <= most:
        return _attend_block(query, keys, values, mask, scaling, window)
    blocks: list[Tensor] = []
    for first in range(0, n, most):
        count = min(most, n - first)
        seen = end - n + first + count
        block = query.narrow(0, first, count)
        blocks.append(_attend_block(block, keys.narrow(2, 0, seen), values.narrow(2, 0, seen), mask, scaling, window))
    return torch.cat(blocks)


def _attend_block(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, window: int) -> Tensor:
    """Attention of the last n positions, n at most the rows of the mask."""
    n, heads, head_dim = query.shape
    kv_heads, end = keys.size(0), keys.size(2)
    group = heads // kv_heads
    if window > 0 and window + n - 1 < end:
        seen = window + n - 1
        keys, values = keys.narrow(2, end - seen, seen), values.narrow(2, end - seen, seen)
        end = seen
    # The last n rows of the mask, each repeated g times.
    mask = mask.narrow(0, mask.size(0) - n * group, n * group).narrow(1, mask.size(1) - end, end)
    if mask.is_cuda:  # the fused kernels need a mask aligned to 16 bytes, and check only its strides
        mask = mask.contiguous()
    # [n, KV, g, D] -> [KV, 1, n · g, D], as for one row. With one KV head this is a view.
    grouped = query.reshape(n, kv_heads, group, head_dim)
    packed = grouped.transpose(0, 1).reshape(kv_heads, 1, n * group, head_dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    return out.view(kv_heads, n, group, head_dim).transpose(0, 1).reshape(n, heads, head_dim)


def attend_all(
    query: Tensor, counts: list[int], keys: list[Tensor], values: list[Tensor], masks: list[Tensor], scaling: float
) -> Tensor:
    """Attention of each row over all keys of its sequence, or with a mask for each head.

    Args:
        query: `[T, heads, head_dim]`, in the dtype of the pool.
        counts: rows of each chunk.
        keys: of each chunk, `[heads, 1, end, head_dim]`.
        values: like `keys`.
        masks: of each chunk, `[heads, 1, n, end]` (`biased_mask`), in the same dtype; none: each row sees all keys.

    Returns:
        `[T, heads, head_dim]`, of any strides.
    """
    parts: list[Tensor] = []
    for i, chunk in enumerate(query.split_with_sizes(counts)):
        rows = chunk.transpose(0, 1).unsqueeze(1)
        mask: Tensor | None = None
        if len(masks) > 0:
            mask = masks[i]
        out = F.scaled_dot_product_attention(rows, keys[i], values[i], attn_mask=mask, scale=scaling)
        parts.append(out.squeeze(1).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def biased_mask(bias: Tensor, start: int, count: int) -> Tensor:
    """`[heads, 1, count, start + count]`: the bias of each key by its distance; -inf for later keys.

    Args:
        bias: `[heads, positions]`, see `Scoring`.
        start: the position of the first row.
    """
    key = torch.arange(start + count, device=bias.device)
    distance = key.narrow(0, start, count).unsqueeze(1) - key
    return bias[:, distance.clamp_min(0)].masked_fill(distance < 0, -torch.inf).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer computes attention scores.

    Attributes:
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.
        softcap: c, the bound of the scaled scores; None is no bound.
        sinks: `[heads]`: the score of each head's sink, or None.
        bias: `[heads, positions]`: added to the scaled scores, by the distance of the key before the row (T5), or None.
            A layer has it alone (`attend_all`).
    """

    scaling: float
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the softmax is over the scaled scores alone, without soft-capping, sinks and bias."""
        return self.softcap is None and self.sinks is None and self.bias is None


def attend_scores(
    query: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scoring: Scoring,
) -> Tensor:
    """Causal attention of each row over its own sequence, with explicit scores. Other arguments are as in `attend_all`.

    Args:
        starts: the position of the first row of each chunk.
        keys: of each chunk, `[kv_heads, 1, end, head_dim]`, with `end` at or after its last row.

    Returns:
        `[T, heads, head_dim]`, in the dtype of the values.
    """
    blocks: list[Tensor] = []
    first = 0
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for done in range(0, count, BLOCK):
            rows = query.narrow(0, first + done, min(BLOCK, count - done))
            blocks.append(_block(rows, start + done, keys[i], values[i], scoring))
        first += count
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block(query: Tensor, position: int, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Attention of rows from `position` on: query `[n, H, D]`, keys and values `[KV, 1, end, D]`, to `[n, H, D]`."""
    window, softcap, sinks = scoring.window, scoring.softcap, scoring.sinks
    n, heads, head_dim = query.shape
    kv_heads = keys.size(0)
    group = heads // kv_heads
    first = max(0, position - window + 1) if window else 0
    seen = position + n - first
    keys, values = keys.narrow(2, first, seen).squeeze(1), values.narrow(2, first, seen).squeeze(1)
    rows = query.reshape(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, head_dim)
    scores = torch.matmul(rows, keys.transpose(1, 2)).float().mul_(scoring.scaling).view(kv_heads, group, n, seen)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if n > 1:
        scores = scores.masked_fill(_unseen(n, seen, window, query.device), _NEVER)
    if sinks is None:
        shares = scores.softmax(-1)
    else:
        sink = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, n, -1)
        shares = torch.cat((scores, sink), dim=-1).softmax(-1).narrow(-1, 0, seen)
    out = torch.matmul(shares.reshape(kv_heads, group * n, seen).to(values.dtype), values)
    return out.view(kv_heads, group, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)


def _unseen(n: int, seen: int, window: int, device: torch.device) -> Tensor:
    """`[n, seen]`: the positions masked for each of the last n of `seen` positions."""
    position = torch.arange(seen, device=device)
    row = position.narrow(0, seen - n, n).unsqueeze(1)
    unseen = position > row
    return unseen | (position <= row - window) if window else unseen
