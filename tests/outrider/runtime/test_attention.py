"""Each row sees its own sequence up to itself, at any length, group size, window and block."""

import random

import pytest
import torch
from torch import Tensor

from outrider.runtime import batch, sdpa
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.sdpa import CausalMasks, attend

HEAD_DIM = 8
MAX_LENGTH = 80


def reference(query: Tensor, keys: Tensor, values: Tensor, start: int, window: int) -> Tensor:
    """Row by row in float64: query `[n, H, D]`, keys and values `[KV, end, D]`."""
    group = query.shape[1] // keys.shape[0]
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        position = start + row
        first = max(0, position - window + 1) if window else 0
        for head in range(query.shape[1]):
            own = slice(first, position + 1)
            scores = keys[head // group, own].double() @ query[row, head].double() * 0.3
            out[row, head] = scores.softmax(0) @ values[head // group, own].double()
    return out


@pytest.mark.parametrize("window", [0, 1, 3, 20, 200])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_attention_equals_the_definition(
    heads: int, kv_heads: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "BLOCK", 24)  # so that a chunk of a few rows already falls into blocks
    rng = random.Random(heads * 100 + kv_heads)
    torch.manual_seed(rng.randint(0, 999))
    pool = KVPool(1, kv_heads, HEAD_DIM, blocks=3 * 3, max_length=MAX_LENGTH, dtype=torch.float32, device="cpu")
    masks = CausalMasks(MAX_LENGTH, torch.float32, torch.device("cpu"))
    slots = [pool.allocate() for _ in range(3)]
    history = {slot: torch.empty(2, kv_heads, 0, HEAD_DIM) for slot in slots}
    for counts in ([1, 7, 30], [5, 1, 1], [40], [12, 12], [1, 1, 1], [2, 3]):
        spans = [(slot, pool.length(slot), count) for slot, count in zip(slots, counts, strict=False)]
        packed = batch.pack(spans, pool, masks)
        query = torch.randn(packed.rows, heads, HEAD_DIM)
        for (slot, start, count), new in zip(spans, [views.new for views in packed.views], strict=True):
            kv = torch.randn(2, kv_heads, count, HEAD_DIM)
            new[0].copy_(kv)
            history[slot] = torch.cat((history[slot], kv), dim=2)
            pool.extend(slot, start + count)
        needed = packed.masks_for(heads // kv_heads, window)
        held = [views.keys[0] for views in packed.views], [views.values[0] for views in packed.views]
        found = attend(query, packed.counts, *held, needed, 0.3, window)
        first = 0
        for slot, start, count in spans:
            rows = query[first : first + count]
            wanted = reference(rows, history[slot][0], history[slot][1], start, window)
            assert torch.allclose(found[first : first + count].double(), wanted, atol=1e-5)
            first += count
