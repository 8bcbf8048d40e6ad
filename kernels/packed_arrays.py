"""Several arrays in one buffer, so that one copy sends them all to a device. Each is aligned to 16 bytes, as the
kernels expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

_EDGE = 16
_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float64: torch.float64, np.float32: torch.float32}


@dataclass(frozen=True, slots=True)
class Field:
    """One array: a type of numpy's, and its shape."""

    type: type[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.type).itemsize


class PackedArrays:
    """Arrays in one buffer, by name."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        """Lay the arrays out, one after the other."""
        ends = list(accumulate((-(-field.nbytes // _EDGE) * _EDGE for field in fields.values()), initial=0))
        self._fields = dict(fields)
        self._starts = dict(zip(fields, ends, strict=False))
        self.nbytes = max(ends[-1], _EDGE)

    def buffer(self, device: torch.device, pinned: bool = False) -> Tensor:
        """Return an uninitialised buffer for all arrays, uint8 `[nbytes]`."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def arrays(self, buffer: Tensor) -> dict[str, np.ndarray]:
        """Return views of the arrays in `buffer`, on the host."""
        return {
            name: buffer[start : start + field.nbytes].numpy().view(field.type).reshape(field.shape)
            for name, field, start in self._placed()
        }

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the arrays in `buffer` as tensors, on any device."""
        return {
            name: buffer[start : start + field.nbytes].view(_TORCH[field.type]).view(field.shape)
            for name, field, start in self._placed()
        }

    def _placed(self) -> list[tuple[str, Field, int]]:
        return [(name, field, self._starts[name]) for name, field in self._fields.items()]
