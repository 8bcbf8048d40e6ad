"""Holds a way to run a model against transformers' own forward, on a few tokens, when the model is loaded.

What the packed attention or a fused layer does not know of a model (a state outside the attention, a scale somewhere)
shows here as other logits, before any request does. It knows programs and pools, and nothing of checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.attention import NAME
from outrider.runtime.batch import CausalMasks, Chunk, pack
from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_pool import BLOCK_TOKENS, KVPool
from outrider.runtime.paged import PagedAttention, lay_out, to_device
from outrider.runtime.probe import AttentionLayer
from outrider.runtime.program import Batch, Program

_LENGTH = 9
_SEED = 20221130

# Median over rows of |difference| / |logits|. In 16 bits, other kernels alone differ by about a hundredth. So they do
# where activations are rounded to 8 bits, whatever the dtype around that.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """Two short sequences and what transformers makes of them.

    Attributes:
        tokens: `[2, n]`.
        logits: `[2, n, V]`, float32, on the CPU.
    """

    tokens: Tensor
    logits: Tensor


def reference(model: Any, vocab_size: int, context_length: int) -> Reference:
    """Runs the model's own forward with transformers' attention.

    Raises:
        CheckpointError: it does not run.
    """
    generator = torch.Generator().manual_seed(_SEED)
    shape = (2, min(_LENGTH, context_length))
    tokens = torch.randint(min(vocab_size, 1000), shape, generator=generator)
    try:
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False).logits
    except Exception as error:
        raise CheckpointError(
            f"{type(model).__name__} does not run in transformers itself: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.set_attn_implementation(NAME)
    return Reference(tokens, logits.float().cpu())


def make_pool(
    layers: Sequence[AttentionLayer],
    *,
    blocks: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    block_tokens: int = BLOCK_TOKENS,
    paged: bool = False,
) -> KVPool:
    """A pool for the attention layers of a model."""
    return KVPool(
        len(layers),
        [layer.kv_heads for layer in layers],
        [layer.head_dim for layer in layers],
        blocks=blocks,
        max_length=max_length,
        dtype=dtype,
        device=device,
        block_tokens=block_tokens,
        paged=paged,
    )


def deviation(
    program: Program,
    layers: Sequence[AttentionLayer],
    expected: Reference,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: PagedAttention | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> float:
    """How far a program's logits lie from the reference: median over rows of |difference| / |logits|.

    Both sequences run interleaved, cut in two, the second part in the other order; only some rows ask for logits.

    Args:
        program: to be looked at.
        layers: what its attention layers ask for.
        expected: what it should give.
        dtype: of keys and values.
        device: of all.
        attention: over pages of `block_tokens` positions; None runs each sequence in one piece.
        block_tokens: see `attention`.
    """
    length = expected.tokens.shape[1]
    pool = make_pool(
        layers,
        blocks=2 * -(-length // block_tokens),
        max_length=length,
        dtype=dtype,
        device=device,
        block_tokens=block_tokens,
        paged=attention is not None,
    )
    slots = (pool.allocate(), pool.allocate())
    masks = CausalMasks(length, dtype, device)
    cuts = (min(4, length), min(3, length))
    # (sequence, start, count)
    passes = [[(0, 0, cuts[0]), (1, 0, cuts[1])], [(1, cuts[1], length - cuts[1]), (0, cuts[0], length - cuts[0])]]
    found, wanted = [], []
    with torch.inference_mode():
        for spans in passes:
            spans = [span for span in spans if span[2]]
            if not spans:
                continue
            token_ids = torch.cat([expected.tokens[i, start : start + count] for i, start, count in spans])
            rows = torch.arange(len(token_ids))[1:] if len(token_ids) > 1 else torch.arange(1)
            batch: Batch
            if attention is None:
                batch = pack(((slots[i], start, count) for i, start, count in spans), pool, masks)
            else:
                assert pool.pages is not None
                layout = lay_out([Chunk(slots[i], [0] * count, start, 0) for i, start, count in spans], pool)
                layout = replace(layout, tokens=token_ids.numpy())
                batch = to_device(layout, pool.pages, attention, device)
            found.append(program(token_ids.to(device), batch, rows.to(device)).float().cpu())
            wanted.append(torch.cat([expected.logits[i, start : start + count] for i, start, count in spans])[rows])
            for i, start, count in spans:
                pool.extend(slots[i], start + count)
    logits, truth = _centred(torch.cat(found)), _centred(torch.cat(wanted))
    distance = (logits - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-6)
    return float(distance.median())


def tolerance(dtype: torch.dtype, *, quantised: bool = False) -> float:
    """The largest deviation that rounding explains."""
    return _TOLERANCE_HALF if quantised else _TOLERANCE.get(dtype, _TOLERANCE_HALF)


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)
