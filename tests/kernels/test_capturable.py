"""`OnlyCapturable` refuses what a CUDA graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.capturable import NotCapturable, OnlyCapturable

_SYNCS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda z: z[0, 0].item(),
    "branch": lambda z: bool(z.any()),
    "nonzero": lambda z: z.nonzero(),
    "masked select": lambda z: z.masked_select(z > 0),
    "index by a mask": lambda z: z[z > 0],
    "put by a mask": lambda z: z.index_put_((z > 0,), z[0, 0]),
    "repeat": lambda z: z[0].repeat_interleave((z[0] > 0).long()),
    "unique": lambda z: z.unique(),
    "equal": lambda z: torch.equal(z, z + 1),
    "from the host": lambda z: z + torch.tensor([1.0]),
    "to another device": lambda z: z.to("meta"),
}


@pytest.mark.parametrize("name", _SYNCS)
def test_host_syncs_and_dynamic_shapes_are_refused(name: str) -> None:
    with pytest.raises(NotCapturable), OnlyCapturable():
        _SYNCS[name](torch.randn(3, 8))


def test_other_operations_pass_and_are_noted() -> None:
    with OnlyCapturable() as operations:
        torch.randn(3, 8).cumsum(1).argmax(1)
    assert operations.seen == ["randn", "cumsum", "argmax"]


def test_in_place_allocates_no_memory() -> None:
    z = torch.randn(3, 8)
    with OnlyCapturable(in_place=True) as operations:
        z[1].view(2, 4).add_(1)
    assert operations.seen[-1] == "add_"
    with pytest.raises(NotCapturable, match="add allocates memory"), OnlyCapturable(in_place=True):
        z + 1
