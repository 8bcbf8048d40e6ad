"""Each row sees its own sequence up to itself, at any length, group size, window and block."""

import random

import pytest
import torch
from torch import Tensor, nn

from outrider.lm import attention, batch
from outrider.lm.attention import attend, packed_attention
from outrider.lm.batch import CausalMasks, pack
from outrider.lm.kv_pool import KVPool

HEAD_DIM = 8
MAX_LENGTH = 80


def naive(query: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Row by row in float64: query `[n, H, D]`, keys and values `[KV, end, D]`."""
    group = query.shape[1] // keys.shape[0]
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query.shape[0]):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            seen, told = keys[head // group, first : position + 1], values[head // group, first : position + 1]
            weights = torch.softmax(seen.double() @ query[row, head].double() * 0.3, dim=0)
            out[row, head] = weights @ told.double()
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 20, 200])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_attention_equals_the_definition(
    heads: int, kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 24)  # so that a chunk of a few rows already falls into blocks
    rng = random.Random(heads * 100 + kv_heads)
    torch.manual_seed(rng.randint(0, 999))
    pool = KVPool(1, kv_heads, HEAD_DIM, max_sequences=3, max_length=MAX_LENGTH, dtype=torch.float32, device="cpu")
    masks = CausalMasks(MAX_LENGTH, torch.float32, torch.device("cpu"))
    slots = [pool.allocate() for _ in range(3)]
    history = {slot: torch.empty(2, kv_heads, 0, HEAD_DIM) for slot in slots}
    for counts in ([1, 7, 30], [5, 1, 1], [40], [12, 12], [1, 1, 1], [2, 3]):
        spans = [(slot, pool.length(slot), count) for slot, count in zip(slots, counts, strict=False)]
        packed = pack(spans, pool, masks)
        query = torch.randn(packed.rows, heads, HEAD_DIM)
        for (slot, start, count), segment in zip(spans, packed.segments, strict=True):
            new = torch.randn(2, kv_heads, count, HEAD_DIM)
            segment.new[0].copy_(new)
            history[slot] = torch.cat((history[slot], new), dim=2)
            pool.extend(slot, start + count)
        found = attend(query, 0, packed, 0.3, window)
        for (slot, start, count), segment in zip(spans, packed.segments, strict=True):
            rows = query[segment.first : segment.first + count]
            wanted = naive(rows, history[slot][0], history[slot][1], start, window)
            assert torch.allclose(found[segment.first : segment.first + count].double(), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "length", "group", "window"), [(1, 1, 1, None), (3, 5, 2, None), (4, 9, 1, 2), (2, 70, 3, 5)]
)
def test_a_mask_hides_the_future_and_what_left_the_window(
    count: int, length: int, group: int, window: int | None
) -> None:
    mask = CausalMasks(MAX_LENGTH, torch.float32, torch.device("cpu")).get(count, length, group, window)
    assert mask.shape == (group * count, length)
    for row in range(group * count):
        position = length - count + row % count
        for seen in range(length):
            visible = seen <= position and (window is None or seen > position - window)
            assert mask[row, seen] == (0 if visible else float("-inf"))


def test_masks_are_built_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_MASK_CACHE_ELEMENTS", 100_000)
    masks = CausalMasks(4096, torch.float32, torch.device("cpu"))
    first = masks.get(6, 100, 2, None)
    again = masks.get(6, 101, 2, None)
    longer = masks.get(6, 1000, 2, None)
    assert first.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    assert masks.get(6, 900, 2, None).untyped_storage().data_ptr() == longer.untyped_storage().data_ptr()
    for rows in range(1, 40):  # more than the cache may hold, and in the end more than it takes
        assert masks.get(rows, 4000, 1, None).shape == (rows, 4000)
        assert sum(mask.numel() for mask in masks._masks.values()) == masks._elements <= 100_000


def test_a_model_called_without_a_pass_says_so() -> None:
    rows = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="runs on packed passes only"):
        packed_attention(nn.Module(), rows, rows, rows, None)
