"""Several arrays in one buffer, so that one copy sends them all to a device. Each is aligned to 16 bytes, as the
kernels expect.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.type).itemsize


class PackedArrays:
    """Arrays in one buffer, by name."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        """Lay the arrays out, one after the other."""
        self._fields: dict[str, tuple[Field, slice]] = {}  # with its elements in a buffer of its type
        end = 0
        for name, field in fields.items():
            first = end // field.itemsize
            self._fields[name] = field, slice(first, first + field.size)
            end += -(-field.size * field.itemsize // _EDGE) * _EDGE
        self.nbytes = max(end, _EDGE)

    def buffer(self, device: torch.device, pinned: bool = False) -> Tensor:
        """Return an uninitialised buffer for all arrays, uint8 `[nbytes]`."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def arrays(self, buffer: Tensor) -> dict[str, np.ndarray]:
        """Return views of the arrays in `buffer`, on the host."""
        host = buffer.numpy()
        typed = {each: host.view(each) for each in _TORCH}
        return {name: typed[each.type][part].reshape(each.shape) for name, (each, part) in self._fields.items()}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the arrays in `buffer` as tensors, on any device."""
        typed = {each: buffer.view(dtype) for each, dtype in _TORCH.items()}
        return {name: typed[each.type][part].view(each.shape) for name, (each, part) in self._fields.items()}
