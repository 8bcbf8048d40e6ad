"""Which implementation of `verify` runs, and why: what a device can run, and what was asked for."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch

from kernels.adjustments import RowAdjustment
from kernels.dense import DraftLogits, SigmoidScales
from kernels.sampling import SamplingParams
from kernels.sparse import MAX_SUPPORT, SparseDistribution
from kernels.verify import Proposed, Rule, implementation_for, implementations, verify

AUTO = "auto"
_FEW = 256


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


def rehearse(name: str, device: torch.device) -> None:
    """Have the implementation judge one drafted token of a few logits on `device`: what it lacks shows now.

    A kernel is compiled at its first use, which needs more than its package: a driver, a C compiler.

    Raises:
        PathUnavailable: it failed; with its own words.
    """
    proposed = Proposed(tokens=(0,), q=(None,), law=SamplingParams(), seed=0, base_length=1)
    try:
        verify(torch.zeros(2, _FEW, device=device), [proposed], name)
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        raise PathUnavailable(f"{name} cannot judge on {device}: {type(error).__name__}: {words}") from error


def warm_up(name: str, device: torch.device, dtype: torch.dtype, V: int, width: int) -> None:
    """Have the implementation judge every form of proposal, so that no request waits for what is compiled at first use.

    Kernels are compiled for the size and the distance of the rows, and for what a batch holds: changes to the logits,
    filters, large supports, shared noise, rows over the vocabulary.

    Args:
        name: the implementation.
        device: where the logits lie.
        dtype: theirs.
        V: tokens that may be written.
        width: logits of a row, V or more.
    """
    logits = torch.zeros(4, width, dtype=dtype, device=device)[:, :V]
    change = RowAdjustment(np.zeros(1, np.int64), np.ones(1, np.float32), np.ones(1, np.float32))
    few = Proposed((0,), (None,), SamplingParams(top_k=1), 0, 1)
    ids = np.arange(min(V, MAX_SUPPORT))
    many = replace(few, q=(SparseDistribution(ids, np.ones(len(ids), np.uint16), len(ids)),), law=SamplingParams())
    coupled = replace(few, q=(), rule=Rule.COUPLED)
    sigmoid = replace(few, q=(DraftLogits(torch.zeros(V).half()),), rule=Rule.SIGMOID, sigmoid=SigmoidScales(-1, 1))
    for changes in ((), (change, None)):
        for batch in ((few,), (many, coupled), (sigmoid,)):
            proposals = [replace(each, adjustments=changes) for each in batch]
            verify(logits[: 2 * len(batch)], proposals, name)


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
