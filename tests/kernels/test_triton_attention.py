"""Attention over pages by Triton is what its definition says, whoever shares the pass and wherever the pages lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention_work import ITEM, Work, work_list, work_size
from tests.kernels.paths import IS_INTERPRETED

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform"),
    *(() if IS_INTERPRETED else (pytest.mark.gpu,)),
]

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
SCALING = 0.3


def wide_blocks(head_dim: int, page: int, dtype: torch.dtype) -> dict[str, int | str]:
    """In place of `kernels.triton_attention.attend_sizes`: interpreted, a narrow block takes as long as a wide one."""
    return {"PAGE": page, "ITEM": ITEM, "BLOCK_N": 64, "PRECISION": "ieee"}


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        monkeypatch.setattr("kernels.triton_attention.attend_sizes", wide_blocks)


class Pages:
    """Keys and values of some sequences, in pages in any order, and rows that attend to them."""

    def __init__(
        self, heads: int, kv_heads: int, D: int, page: int, spans: list[tuple[int, int]], *, seed: int = 0
    ) -> None:
        """`spans`: of each sequence, its length and how many of its last positions are rows."""
        made = torch.Generator().manual_seed(seed)
        self.lengths = [length for length, _ in spans]
        self.counts = [count for _, count in spans]
        taken = [-(-length // page) for length in self.lengths]
        free = random.Random(seed).sample(range(sum(taken) + 1), sum(taken) + 1)
        self.tables = torch.zeros(len(spans), max(taken) + 1, dtype=torch.int32)
        for own, count in zip(self.tables, taken, strict=True):
            own[:count] = torch.tensor([free.pop() for _ in range(count)])
        rows = sum(self.counts) + 2  # the last belong to nobody
        self.query = torch.randn(rows, heads, D, generator=made)
        self.keys, self.values = (torch.randn(sum(taken) + 1, page, kv_heads, D, generator=made) for _ in range(2))
        self.sinks = torch.randn(heads, generator=made)

    def attend(
        self,
        window: int,
        softcap: float | None,
        sinks: bool,
        *,
        growth: int = 0,
        filled: bool = False,
        work: Work | None = None,
        **changed: Any,
    ) -> Tensor:
        """`filled`: up to a fixed size, as a captured pass is. `changed`: in place of what is."""
        from kernels.triton_attention import attend

        starts, lengths = np.cumsum([0, *self.counts]), np.array(self.lengths)
        work = work or work_list(starts, lengths, growth)
        items, slots = work.items, int(work.items[:, 4].max()) + 1
        if filled:
            size, slots = work_size(sum(self.counts), 2000)
            items = np.concatenate((items, np.zeros((size - len(items), ITEM), np.int32)))
        nobodys = len(self.query) - sum(self.counts)
        positions = [
            length - count + row
            for length, count in zip(self.lengths, self.counts, strict=True)
            for row in range(count)
        ]
        told = {
            "query": self.query,
            "keys": self.keys,
            "values": self.values,
            "positions": torch.tensor([*positions, *[0] * nobodys]),
            "row_starts": torch.from_numpy(starts).int(),
            "lengths": torch.from_numpy(lengths).int(),
            "tables": self.tables,
            "items": torch.from_numpy(items),
            "row_slots": torch.from_numpy(np.concatenate((work.row_slots, np.full(nobodys, -1, np.int32)))),
            **changed,
        }
        found = attend(
            **{name: each.to(DEVICE) for name, each in told.items()},
            slots=slots,
            scaling=SCALING,
            window=window,
            softcap=softcap,
            sinks=self.sinks.to(DEVICE) if sinks else None,
        )
        return found[: sum(self.counts)].cpu()

    def naive(self, window: int, softcap: float | None, sinks: bool) -> Tensor:
        """Row by row, in float64."""
        out, first = [], 0
        group = self.query.shape[1] // self.keys.shape[2]
        for table, length, count in zip(self.tables, self.lengths, self.counts, strict=True):
            keys, values = (pages[table.long()].flatten(0, 1)[:length].double() for pages in (self.keys, self.values))
            for row in range(count):
                end = length - count + row + 1
                low = max(0, end - window) if window else 0
                for head in range(self.query.shape[1]):
                    query = self.query[first + row, head].double()
                    scores = keys[low:end, head // group] @ query * SCALING
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks:
                        scores = torch.cat((scores, self.sinks[head : head + 1].double()))
                    out.append(scores.softmax(0)[: end - low] @ values[low:end, head // group])
            first += count
        return torch.stack(out).view(first, *self.query.shape[1:])


SPANS = [(3, 1), (40, 5), (7, 0), (59, 9)]
LONG = [(700, 1), (40, 5), (513, 2), (1400, 9)]
MANY = [(150, 140), (1100, 3)]


SHAPES = [(4, 4, 16, 4), (6, 2, 12, 8), (5, 1, 40, 32)]
"""Heads, those of keys, their size, and positions of a page."""


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("scores", range(3), ids=["plain", "capped", "sinks"])
@pytest.mark.parametrize("lengths", range(3), ids=["short", "in stretches", "many rows"])
def test_attention_equals_the_definition(lengths: int, scores: int) -> None:
    """Each two of scores, lengths and shapes meet once."""
    pages = Pages(*SHAPES[(lengths + scores) % 3], (SPANS, LONG, MANY)[lengths])
    softcap, sinks = [(None, False), (4.0, False), (None, True)][scores]
    for window in (0, 7, 600) if lengths else (0, 1, 7):
        found, wanted = pages.attend(window, softcap, sinks), pages.naive(window, softcap, sinks)
        assert (found - wanted).abs().max() < 3e-5, window


def test_in_16_bits_it_is_rounded_once_or_twice() -> None:
    pages = Pages(6, 2, 16, 8, LONG)
    made = {name: getattr(pages, name).half() for name in ("query", "keys", "values")}
    assert (pages.attend(0, None, False, **made).double() - pages.naive(0, None, False)).abs().max() < 5e-3


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("scores", [(0, None, False), (300, 4.0, True)], ids=["plain", "window, capped, sinks"])
def test_a_row_has_the_same_bits_however_tiles_are_cut_and_whoever_is_there(
    scores: tuple[int, float | None, bool],
) -> None:
    together = Pages(6, 2, 16, 8, LONG)
    found = together.attend(*scores)
    assert torch.equal(together.attend(*scores, work=UNCUT), found)
    assert torch.equal(together.attend(*scores, growth=3000), found)
    assert torch.equal(together.attend(*scores, filled=True), found)
    first = 0
    for s, (length, count) in enumerate(LONG):
        for row in {0, count // 2, count - 1}:  # in a pass of its own
            alone = Pages(6, 2, 16, 8, [(length - count + row + 1, 1)])
            alone.tables, alone.sinks = together.tables[s : s + 1], together.sinks
            alone.query = together.query[first + row : first + row + 1]
            alone.keys, alone.values = together.keys, together.values
            assert torch.equal(alone.attend(*scores)[0], found[first + row])
        first += count


STARTS, LENGTHS = np.array([0, 1, 6, 8, 17]), np.array([700, 40, 513, 1400])  # of LONG
CUT, UNCUT = (work_list(STARTS, LENGTHS, cuts=cuts) for cuts in (True, False))


def _the_last_stretch_twice(items: np.ndarray) -> None:
    items[-1, 3] -= 1


def _another_sequence(items: np.ndarray) -> None:
    items[:, 0] = (items[:, 0] + 1) % 4


def _slots_in_another_order(items: np.ndarray) -> None:
    cut = items[:, 4] >= 0
    items[cut, 4] = items[cut, 4][::-1]


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("change", [_the_last_stretch_twice, _another_sequence, _slots_in_another_order])
def test_a_list_that_is_wrong_shows(change: Callable[[np.ndarray], None]) -> None:
    pages = Pages(4, 2, 16, 8, LONG)
    wanted = pages.naive(0, None, False)
    assert (pages.attend(0, None, False, work=CUT) - wanted).abs().max() < 3e-5
    items = CUT.items.copy()
    change(items)
    found = pages.attend(0, None, False, work=Work(items, CUT.row_slots))
    assert not (found - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lengths", lambda each: each - 1),
        ("tables", lambda each: each.roll(1, 1)),
        ("row_starts", lambda each: each - torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32)),
        ("values", lambda each: each.roll(1, 2)),
    ],
)
def test_what_is_told_wrongly_shows(name: str, change: object) -> None:
    pages = Pages(4, 2, 16, 4, SPANS)
    told = {
        "lengths": torch.tensor(pages.lengths, dtype=torch.int32),
        "tables": pages.tables,
        "row_starts": torch.tensor([0, *pages.counts]).cumsum(0, dtype=torch.int32),
        "values": pages.values,
    }
    changed = {name: change(told[name])}  # type: ignore[operator]
    assert (pages.attend(0, None, False, **changed) - pages.naive(0, None, False)).abs().max() > 1e-2


def test_heads_and_rows_beyond_a_program_are_those_of_others() -> None:
    """A group of query heads that is no power of two, and more rows than one program takes."""
    for (heads, kv_heads), window in product([(14, 2), (7, 1)], [0, 30]):
        pages = Pages(heads, kv_heads, 16, 8, [(90, 33), (20, 20)])
        assert (pages.attend(window, 5.0, True) - pages.naive(window, 5.0, True)).abs().max() < 3e-5
