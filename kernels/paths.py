"""Which implementation of `verify` runs, and why: what a device can run, and what was asked for.

It runs none of them, and imports none that may not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kernels.verify import implementation_for, implementations

AUTO = "auto"


class PathUnavailable(ValueError):
    """The implementation that was asked for cannot run on the device; the text is one line that says why."""


@dataclass(frozen=True, slots=True)
class VerifyPath:
    """A choice.

    Attributes:
        name: as `kernels.verify.verify` takes it.
        reason: why this one, for people.
    """

    name: str
    reason: str


def choose(asked: str, device: torch.device) -> VerifyPath:
    """Return the implementation that judges logits on `device`: the one asked for, or by `auto` the fastest.

    Raises:
        PathUnavailable: the one asked for cannot run there.
    """
    if asked == AUTO:
        return VerifyPath(implementation_for(device), f"the fastest here for {device.type}")
    why = obstacle(asked, device, implementations())
    if why is not None:
        raise PathUnavailable(f"{asked} cannot judge on {device}: {why}")
    return VerifyPath(asked, "asked for")


def obstacle(name: str, device: torch.device, built: Collection[str]) -> str | None:
    """Return why the implementation `name` cannot run on `device`; None where it can. `built` names those there are."""
    if name == "triton":
        if device.type not in ("cpu", "cuda"):
            return "it needs a CUDA device"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "it needs a CUDA device, or TRITON_INTERPRET=1 in the environment to interpret it, slowly"
        if find_spec("triton") is None:
            return "triton is not installed"
    if name not in built:
        return f"this build has {', '.join(built)}"
    return None
