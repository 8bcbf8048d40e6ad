"""The largest pass that a service will ever run, run once: what it works in is then known, and set aside.

It knows a model and its pool, and nothing of what a service does.
"""

from torch import Tensor

from outrider.lm.batch import Chunk
from outrider.lm.memory import blocks_for
from outrider.lm.packed import PackedModel


def run_blocks(tokens: int, length: int, block_tokens: int) -> int:
    """Blocks that `run_largest` takes, where there are as many."""
    whole, rest = divmod(tokens, length)
    return whole * blocks_for(length, block_tokens) + blocks_for(rest, block_tokens)


def run_largest(packed: PackedModel, tokens: int) -> Tensor:
    """A pass of so many tokens with logits of them all, `[tokens, V]`; nothing of it stays in the pool.

    They are those of few long sequences. Where the pool has no room for so many, it has none for such a pass either,
    and the pass is as large as there is room for.
    """
    pool = packed.pool
    slots: list[int] = []
    chunks: list[Chunk] = []
    room = pool.blocks.unheld
    try:
        while tokens and room:
            count = min(tokens, pool.max_length, room * pool.block_tokens)
            slots.append(pool.allocate())
            chunks.append(Chunk(slots[-1], [0] * count, 0, 0))
            tokens -= count
            room -= blocks_for(count, pool.block_tokens)
        return packed.forward(chunks)
    finally:
        for slot in slots:
            pool.free(slot)
