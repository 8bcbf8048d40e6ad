"""Kernels that start while the kernel before them ends: programmatic dependent launch, of GPUs from Hopper on.

A forward pass over a few rows is hundreds of kernels of a few microseconds, and without overlap each waits about one
microsecond for the end of the one before. A kernel that is launched with `overlap_options` must call
`wait_for_kernel_before` before it touches memory, in every program: then all kernels before it have ended, too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_MAJOR = 9  # compute capability of Hopper


@triton.jit
def wait_for_kernel_before(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait until the results of the kernel before are there. Nothing without OVERLAP."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """Return the constant OVERLAP of a kernel on a device, with the launch option it needs; do not modify."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < _FIRST_MAJOR:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
