"""Huge pages for the weights of a model on a CPU.

A pass over one token reads all weights once, at the speed of memory. With pages of 4 KiB the processor also looks up
half a million pages for each gigabyte.
"""

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it


def use_huge_pages(weights: Iterable[Tensor]) -> int:
    """Moves the memory of weights on a CPU into huge pages where the system can. Returns how many pages it moved."""
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages: dict[int, None] = {}
    for weight in weights:
        if weight.device.type == "cpu":
            first, size = _place(weight)
            pages |= dict.fromkeys(range(first // _HUGE_PAGE, (first + size - 1) // _HUGE_PAGE + 1))
    return sum(madvise(page * _HUGE_PAGE, _HUGE_PAGE, _MADV_COLLAPSE) == 0 for page in pages)


def _place(weight: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor, packed or not."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)
    return weight.data_ptr(), weight.untyped_storage().nbytes()
