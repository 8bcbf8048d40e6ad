"""Attention with its scores spelled out: the definition, and what torch's fused attention leaves out.

Soft-capping (Gemma 2) bounds each score s to c · tanh(s / c) before the softmax. A sink (GPT-OSS) is a learned score of
each head that stands beside those of the positions, takes its share of the softmax, and has no value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.runtime.batch import BLOCK


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer scores.

    Attributes:
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.
        softcap: c, which bounds the scaled scores (`outrider.runtime.scores`); None bounds nothing.
        sinks: `[heads]`: the score of each head's sink; None is none.
    """

    scaling: float
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the softmax is over the scaled scores of the positions, and nothing else."""
        return self.softcap is None and self.sinks is None


_NEVER = float("-inf")


def attend_scores(
    query: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scoring: Scoring,
) -> Tensor:
    """Lets each row see its own sequence up to itself. Keys and values of all rows have been written before.

    Args:
        query: `[T, heads, head_dim]`.
        starts: the position of the first row of each chunk.
        counts: rows of each chunk.
        keys: of each chunk, `[kv_heads, 1, end, head_dim]`.
        values: like `keys`.
        scoring: of the layer.

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


def _block(
    query: Tensor,
    position: int,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
) -> Tensor:
    """Rows at `position` and after it: query `[n, H, D]`, keys and values `[KV, 1, end, D]`; to `[n, H, D]`."""
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
    """`[n, seen]`: what each of the last n of `seen` positions does not see."""
    position = torch.arange(seen, device=device)
    row = position.narrow(0, seen - n, n).unsqueeze(1)
    unseen = position > row
    return unseen | (position <= row - window) if window else unseen
