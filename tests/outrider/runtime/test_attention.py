"""Each row sees its own sequence up to itself, at any length, group size, window and block."""

import random

import pytest
import torch
from torch import Tensor, nn

from outrider.runtime import batch, sdpa
from outrider.runtime.attention import NoPass, packed_attention
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


@pytest.mark.parametrize(
    ("count", "length", "group", "window"), [(2, 3, 1, 0), (3, 5, 2, 0), (4, 9, 1, 2), (2, 70, 3, 5), (6, 6, 1, 4)]
)
def test_a_mask_hides_the_future_and_what_left_the_window(count: int, length: int, group: int, window: int) -> None:
    mask = CausalMasks(MAX_LENGTH, torch.float32, torch.device("cpu")).for_rows(count, length, group, window)
    assert mask.shape[0] == group * count
    width = length if not window else min(length, window + count - 1)
    assert mask.shape[1] >= width
    for row in range(group * count):
        position = length - count + row // group
        for back in range(1, width + 1):
            seen = length - back
            visible = seen <= position and (window == 0 or seen > position - window)
            assert mask[row, -back] == (0 if visible else float("-inf"))


@pytest.mark.parametrize(("count", "length", "window"), [(1, 1, 0), (1, 70, 5), (5, 5, 0), (5, 5, 5), (5, 5, 9)])
def test_one_row_or_a_whole_sequence_needs_no_mask(count: int, length: int, window: int) -> None:
    mask = CausalMasks(MAX_LENGTH, torch.float32, torch.device("cpu")).for_rows(count, length, 2, window)
    assert mask.shape == (0, 0)


def test_masks_are_built_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_MASK_CACHE_ELEMENTS", 100_000)
    masks = CausalMasks(4096, torch.float32, torch.device("cpu"))
    first = masks.for_rows(6, 100, 2, 0)
    assert masks.for_rows(6, 101, 2, 0) is first
    longer = masks.for_rows(6, 1000, 2, 0)
    assert longer is not first
    assert masks.for_rows(6, 900, 2, 0) is longer
    assert masks.for_rows(300, 4000, 2, 0).shape == (2 * 128, 4096), "no more than a block of rows"
    for rows in range(2, 40):  # more than the cache may hold, and in the end more than it takes
        assert masks.for_rows(rows, 4000, 1, 0).shape == (rows, 4096)
        assert sum(mask.numel() for mask in masks._masks.values()) == masks._elements <= 100_000


def test_a_step_makes_each_mask_once() -> None:
    pool = KVPool(1, 1, HEAD_DIM, blocks=6, max_length=MAX_LENGTH, dtype=torch.float32, device="cpu")
    masks = CausalMasks(MAX_LENGTH, torch.float32, torch.device("cpu"))
    slots = [pool.allocate(), pool.allocate()]
    packed = batch.pack([(slots[0], 10, 3), (slots[1], 0, 4)], pool, masks)
    assert packed.masks_for(2, 0) is packed.masks_for(2, 0)
    assert [tuple(mask.shape) for mask in packed.masks_for(1, 0)] == [(3, 80), (0, 0)]
    assert packed.position_ids(torch.device("cpu")).tolist() == [10, 11, 12, 0, 1, 2, 3]


def test_a_model_called_without_a_batch_is_refused() -> None:
    rows = torch.zeros(1, 1, 1, 4)
    with pytest.raises(NoPass, match="runs on packed passes only"):
        packed_attention(nn.Module(), rows, rows, rows, None)
