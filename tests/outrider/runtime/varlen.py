"""What torch's documentation says that `varlen_attn` gives, row by row in float64: its kernel needs a GPU."""

import torch
from torch import Tensor


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """See `torch.nn.attention.varlen.varlen_attn`. Rows of no sequence come out as NaN: nothing may rest on them.

    Query `[T, H, D]`, keys and values `[pages, page, KV, D]`; a window of (left, right) around the row's own position,
    which is counted from the end of the keys; -1 is no bound.
    """
    assert seqused_k is not None
    assert block_table is not None
    assert scale is not None
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert query.dtype == key.dtype == value.dtype
    assert enable_gqa or query.size(1) == key.size(2)
    out = torch.full_like(query, torch.nan)
    group = query.size(1) // key.size(2)
    left, right = window_size
    for s, end in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[s : s + 2].tolist()
        assert last - first <= max_q
        assert end <= max_k
        keys, values = (pages[block_table[s].long()].flatten(0, 1)[:end].double() for pages in (key, value))
        for row in range(first, last):
            position = end - (last - row)
            low = 0 if left < 0 else max(0, position - left)
            high = end if right < 0 else min(end, position + right + 1)
            for head in range(query.size(1)):
                scores = keys[low:high, head // group] @ query[row, head].double() * scale
                out[row, head] = (scores.softmax(0) @ values[low:high, head // group]).to(out.dtype)
    return out
