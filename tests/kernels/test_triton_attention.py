"""Attention over blocks by Triton equals its definition, in any batch and for any order of blocks."""

import random
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention_work import ITEM, Work, work_list, work_size
from tests.kernels.paths import DEVICE, IS_INTERPRETED, TRITON

pytestmark = TRITON.marks
SCALING = 0.3
Scores = tuple[int, float | None, bool]
"""A window, a cap and whether there are sinks."""
PLAIN: Scores = (0, None, False)
Spans = list[tuple[int, int]]
"""The length of each sequence, and how many of its last positions are rows."""
SHORT: Spans = [(3, 1), (40, 5), (7, 0), (59, 9)]
LONG: Spans = [(600, 1), (40, 5), (513, 2), (800, 9)]
MANY: Spans = [(80, 70), (600, 3)]
SHAPES = [(4, 4, 16, 4), (14, 2, 12, 8), (5, 1, 40, 32)]
"""Heads, key heads, their size, and positions of a block. Groups of 5 and 7 heads are no power of two."""


def wide_tiles(head_dim: int, page: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Replaces `kernels.triton_attention.attend_sizes`: interpreted, a narrow tile takes as long as a wide one."""
    return {"BLOCK_TOKENS": page, "ITEM": ITEM, "BLOCK_N": 64, "PRECISION": "ieee"}


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        monkeypatch.setattr("kernels.triton_attention.attend_sizes", wide_tiles)


@pytest.fixture
def same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, `tl.dot` is numpy's matmul. On some processors its last bits depend on a row's place in the tile."""

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("ij,jk->ik", a, b).astype(dtype)

    if IS_INTERPRETED:
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", matmul)


class Batch:
    """Keys and values of some sequences, in blocks in any order, and rows that attend to them."""

    def __init__(self, heads: int, kv_heads: int, D: int, block: int, spans: Spans) -> None:
        made = torch.Generator().manual_seed(0)
        self.lengths, self.counts = ([span[i] for span in spans] for i in (0, 1))
        taken = [-(-length // block) for length in self.lengths]
        free = random.Random(0).sample(range(sum(taken) + 1), sum(taken) + 1)
        self.block_tables = torch.zeros(len(spans), max(taken) + 1, dtype=torch.int32)
        for own, count in zip(self.block_tables, taken, strict=True):
            own[:count] = torch.tensor([free.pop() for _ in range(count)])
        self.query = torch.randn(sum(self.counts) + 2, heads, D, generator=made)  # the last two are padding
        self.keys, self.values = (torch.randn(sum(taken) + 1, block, kv_heads, D, generator=made) for _ in "kv")
        self.sinks = torch.randn(heads, generator=made)

    def attend(
        self, scores: Scores = PLAIN, *, growth: int = 0, padded: bool = False, work: Work | None = None, **changed: Any
    ) -> Tensor:
        """`padded`: to a fixed size, as for a captured step. `changed` replaces inputs."""
        from kernels.triton_attention import attend

        window, softcap, sinks = scores
        starts, lengths = np.cumsum([0, *self.counts]), np.array(self.lengths)
        work = work or work_list(starts.tolist(), self.lengths, growth)
        items, partials = work.items, int(work.items[:, 4].max()) + 1
        if padded:
            size, partials = work_size(sum(self.counts), 2000)
            items = np.concatenate((items, np.zeros((size - len(items), ITEM), np.int32)))
        padding = len(self.query) - sum(self.counts)
        positions = [p for n, length in zip(self.counts, self.lengths, strict=True) for p in range(length - n, length)]
        inputs = {
            "query": self.query,
            "keys": self.keys,
            "values": self.values,
            "positions": torch.tensor([*positions, *[0] * padding]),
            "row_starts": torch.from_numpy(starts).int(),
            "lengths": torch.from_numpy(lengths).int(),
            "block_tables": self.block_tables,
            "items": torch.from_numpy(items),
            "row_partials": torch.from_numpy(np.concatenate((work.row_partials, np.full(padding, -1, np.int32)))),
            **changed,
        }
        on_device = {name: each.to(DEVICE) for name, each in inputs.items()}
        own = self.sinks.to(DEVICE) if sinks else None
        found = attend(**on_device, partials=partials, scaling=SCALING, window=window, softcap=softcap, sinks=own)
        return found[: sum(self.counts)].cpu()

    def reference(self, window: int, softcap: float | None, sinks: bool) -> Tensor:
        """Row by row, in float64."""
        out: list[Tensor] = []
        group = self.query.shape[1] // self.keys.shape[2]
        query, rows = self.query.double(), iter(range(len(self.query)))
        for table, length, count in zip(self.block_tables, self.lengths, self.counts, strict=True):
            keys, values = (blocks[table.long()].flatten(0, 1)[:length].double() for blocks in (self.keys, self.values))
            for end in range(length - count + 1, length + 1):
                row, low = next(rows), max(0, end - window) if window else 0
                for head in range(query.shape[1]):
                    z = keys[low:end, head // group] @ query[row, head] * SCALING
                    if softcap is not None:
                        z = softcap * torch.tanh(z / softcap)
                    if sinks:
                        z = torch.cat((z, self.sinks[head : head + 1].double()))
                    out.append(z.softmax(0)[: end - low] @ values[low:end, head // group])
        return torch.stack(out).view(-1, *query.shape[1:])

    def error(self, scores: Scores = PLAIN, **changed: Any) -> float:
        return float((self.attend(scores, **changed) - self.reference(*scores)).abs().max())


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("kind", range(3), ids=["plain", "capped", "sinks"])
@pytest.mark.parametrize("lengths", range(3), ids=["short", "in stretches", "many rows"])
def test_attention_equals_the_definition(lengths: int, kind: int) -> None:
    """Each two of scores, lengths and shapes meet once."""
    batch = Batch(*SHAPES[(lengths + kind) % 3], (SHORT, LONG, MANY)[lengths])
    for window in (0, 7, 300) if lengths else (0, 1, 7):
        assert batch.error((window, *[(None, False), (4.0, False), (None, True)][kind])) < 3e-5, window


@pytest.mark.usefixtures("few_tiles", "same_rows")
@pytest.mark.parametrize("scores", [PLAIN, (300, 4.0, True)], ids=["plain", "window, capped, sinks"])
def test_a_row_has_the_same_bits_however_tiles_are_cut_and_in_any_batch(scores: Scores) -> None:
    together = Batch(6, 2, 16, 8, LONG)
    found = together.attend(scores)
    starts = list(accumulate((count for _, count in LONG), initial=0))
    whole = work_list(starts, [each for each, _ in LONG], cuts=False)
    assert torch.equal(together.attend(scores, work=whole), found)
    assert torch.equal(together.attend(scores, growth=3000), found)
    assert torch.equal(together.attend(scores, padded=True), found)
    first = 0
    for s, (length, count) in enumerate(LONG):
        for row in {0, count // 2, count - 1}:
            alone = Batch(6, 2, 16, 8, [(length - count + row + 1, 1)])
            alone.block_tables, alone.sinks = together.block_tables[s : s + 1], together.sinks
            alone.query = together.query[first + row : first + row + 1]
            alone.keys, alone.values = together.keys, together.values
            assert torch.equal(alone.attend(scores)[0], found[first + row])
        first += count
