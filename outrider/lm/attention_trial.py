"""Tries attention over pages out, on random keys and values, against attention spelled out on the same.

It knows what layers ask for and how a pass is laid out; nothing of models, nor of what is done where a trial fails.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.lm.batch import Chunk
from outrider.lm.kv_pool import KVPool
from outrider.lm.paged import PagedAttention, lay_out, to_device
from outrider.lm.paged_attention import gather
from outrider.lm.probe import AttentionLayer
from outrider.lm.scores import Scoring, attend_scores

# Passes: (positions held before, rows) of each sequence. Keys of one page, of several, and of many; single rows alone;
# and rows of a prompt.
_PASSES = (((0, 1), (40, 6), (700, 17), (1500, 1)), ((0, 1), (300, 1)), ((20, 150),))
_LENGTH = 1501

# Of values about 1; a step of rounding in bfloat16 is 2^-8.
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4}
_CLOSE_HALF = 0.03


def try_out(
    build: Callable[[int], PagedAttention],
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_tokens: int,
) -> str:
    """Why an attention cannot be used, or nothing where it can.

    Args:
        build: makes it for sequences of a length.
        layers: what a model's layers ask for; each kind is tried once.
        dtype: of keys and values.
        device: where they lie.
        block_tokens: positions of a block.
    """
    close = _CLOSE.get(dtype, _CLOSE_HALF)
    for layer in dict.fromkeys(layers):
        for spans in _PASSES:
            try:
                found, wanted = _attend(build, layer, spans, dtype, device, block_tokens)
            except Exception as error:
                words = (str(error).splitlines() or [""])[0]
                return f"{type(error).__name__}: {words}"
            distance = float((found - wanted).abs().max())
            if not distance <= close:
                return f"it differs by {distance:.2g} from attention spelled out, {close:g} allowed"
    return ""


def _attend(
    build: Callable[[int], PagedAttention],
    layer: AttentionLayer,
    spans: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int,
) -> list[Tensor]:
    """What it gives, and what attention spelled out gives: products and a softmax, which run on any device."""
    blocks = sum(-(-(start + count) // block_tokens) for start, count in spans) + 2
    pool = KVPool(
        1, layer.kv_heads, layer.head_dim,
        blocks=blocks, max_length=_LENGTH, dtype=dtype, device=device, block_tokens=block_tokens, paged=True,
    )  # fmt: skip
    assert pool.pages is not None
    generator = torch.Generator().manual_seed(layer.head_dim)
    for store in (pool.pages.keys[0], pool.pages.values[0]):
        store.copy_(torch.randn(store.shape, generator=generator))
    pool.grow(pool.allocate(), 1)  # so that no sequence begins where the memory does
    chunks = []
    for start, count in reversed(spans):
        slot = pool.allocate()
        pool.grow(slot, start + count)
        pool.extend(slot, start)
        chunks.append(Chunk(slot, [0] * count, start, 0))
    rows = sum(count for _, count in spans)
    query = torch.randn(rows, layer.heads, layer.head_dim, generator=generator).to(device, dtype)
    sinks = torch.randn(layer.heads, generator=generator).to(device, dtype) if layer.sinks else None
    scoring = Scoring(layer.scaling, layer.window or 0, layer.softcap, sinks)
    attention = build(_LENGTH)
    batch = to_device(lay_out(chunks, pool), pool.pages, attention, device, longest=_LENGTH)
    keys, values = pool.pages.keys[0], pool.pages.values[0]
    found = attention.attend(query, keys, values, batch, scoring)
    wanted = attend_scores(query, *gather(keys, values, batch), scoring)
    return [found.float().cpu(), wanted.float().cpu()]
