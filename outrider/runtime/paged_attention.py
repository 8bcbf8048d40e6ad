"""Attention that reads sequences by their tables of blocks: torch's kernel, ours, and the same of ordinary operations.

It knows a pass (`outrider.runtime.paged`), and nothing of what model calls it, nor of how one of them is chosen.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.runtime.batch import CausalMasks
from outrider.runtime.paged import PagedBatch
from outrider.runtime.scores import Scoring, attend_scores
from outrider.runtime.sdpa import attend


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`: all sequences in one kernel, in 16 bits, nothing copied.

    Args:
        kernel: that function.
        gives_key_starts: whether this build of it asks for the sums of lengths too, which a table makes needless.
    """

    name = "varlen"

    def __init__(self, kernel: Callable[..., Tensor], *, gives_key_starts: bool) -> None:
        self._kernel = kernel
        self._gives_key_starts = gives_key_starts

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        """See `outrider.runtime.paged.PagedAttention`."""
        if not scoring.is_plain:
            raise ValueError("varlen_attn neither bounds scores nor has sinks")
        return self._kernel(
            query,
            keys,
            values,
            batch.row_starts,
            batch.key_starts if self._gives_key_starts else None,
            batch.widest,
            batch.longest,
            scale=scoring.scaling,
            # Ours counts the row itself, torch's what lies before it.
            window_size=(scoring.window - 1 if scoring.window else -1, 0),
            enable_gqa=query.size(1) != keys.size(2),
            seqused_k=batch.lengths,
            block_table=batch.tables,
        )


class TritonAttention:
    """The kernel of `kernels.triton_attention`: all sequences in one launch or two, in any dtype, nothing copied."""

    name = "triton"

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        """See `outrider.runtime.paged.PagedAttention`."""
        from kernels.triton_attention import attend as attend_in_pages  # triton has no build for some platforms

        return attend_in_pages(
            query,
            keys,
            values,
            batch.row_starts,
            batch.lengths,
            batch.tables,
            widest=batch.widest,
            longest=batch.longest,
            scaling=scoring.scaling,
            window=scoring.window,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
        )


class GatheredAttention:
    """Each sequence's pages put together, then torch's ordinary attention: on any device, in any dtype, and slow.

    Args:
        max_length: positions of a sequence at most.
        dtype: of keys and values.
        device: where they lie.
    """

    name = "sdpa-paged"

    def __init__(self, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._masks = CausalMasks(max_length, dtype, device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        """See `outrider.runtime.paged.PagedAttention`."""
        starts, counts, seen_keys, seen_values = gather(keys, values, batch)
        rows = query.narrow(0, 0, sum(counts))
        if counts and not scoring.is_plain:
            return _filled_up(attend_scores(rows, starts, counts, seen_keys, seen_values, scoring), query)
        group = query.size(1) // keys.size(2)
        masks = [
            self._masks.for_rows(count, start + count, group, scoring.window)
            for start, count in zip(starts, counts, strict=True)
        ]
        if counts:
            rows = attend(rows, counts, seen_keys, seen_values, masks, scoring.scaling, scoring.window)
        return _filled_up(rows, query)


def _filled_up(attended: Tensor, query: Tensor) -> Tensor:
    """With zeros for the rows of no sequence, which come last."""
    more = query.size(0) - attended.size(0)
    return torch.cat((attended, torch.zeros_like(query.narrow(0, 0, more)))) if more else attended


def gather(keys: Tensor, values: Tensor, batch: PagedBatch) -> tuple[list[int], list[int], list[Tensor], list[Tensor]]:
    """What each sequence of a pass sees, in one piece.

    Args:
        keys: pages of a layer, `[blocks, block_tokens, kv_heads, head_dim]`.
        values: like `keys`.
        batch: the pass.

    Returns:
        Of each sequence with rows: the position of its first, how many there are, and keys and values up to its last,
        `[kv_heads, 1, end, head_dim]`.
    """
    told = batch if batch.layout is None else batch.layout
    row_starts, lengths = told.row_starts.tolist(), told.lengths.tolist()
    starts: list[int] = []
    counts: list[int] = []
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for s, end in enumerate(lengths):
        count = row_starts[s + 1] - row_starts[s]
        if not count:
            continue
        table = batch.tables[s, : -(-end // keys.size(1))]
        for pages, each in zip((keys, values), seen, strict=True):
            together = pages.index_select(0, table).flatten(0, 1).narrow(0, 0, end)
            each.append(together.transpose(0, 1).unsqueeze(1))
        starts.append(end - count)
        counts.append(count)
    return starts, counts, *seen
