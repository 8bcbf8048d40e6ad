"""Chooses the implementation of `verify` for a device, and compiles it before the first request."""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch

from kernels.adjustments import RowAdjustment
from kernels.sampling import SamplingParams
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.verify import Proposed, Rule, implementation_for, verify
from kernels.verify_c import is_available

AUTO = "auto"
_FEW = 256


class PathUnavailable(ValueError):
    """The implementation cannot run on the device; the message is one line with the reason."""


@dataclass(frozen=True, slots=True)
class VerifyPath:
    """The chosen implementation.

    Attributes:
        name: for `kernels.verify.verify`.
        reason: why it was chosen, for the log.
    """

    name: str
    reason: str


def choose(requested: str, device: torch.device) -> VerifyPath:
    """Return the requested implementation, or with `auto` the fastest one on `device`.

    Raises:
        PathUnavailable: the requested implementation cannot run there.
    """
    if requested == AUTO:
        return VerifyPath(implementation_for(device), f"the fastest on {device.type}")
    why = _obstacle(requested, device)
    if why is not None:
        raise PathUnavailable(f"{requested} cannot verify on {device}: {why}")
    return VerifyPath(requested, "requested")


def try_out(name: str, device: torch.device) -> None:
    """Verify one drafted token on `device`, so that a missing driver or C compiler is found at the start.

    Raises:
        PathUnavailable: it failed; with the error message.
    """
    proposed = Proposed(tokens=(0,), q=(None,), params=SamplingParams(), seed=0, base_length=1)
    try:
        verify(torch.zeros(2, _FEW, device=device), [proposed], name)
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        raise PathUnavailable(f"{name} cannot verify on {device}: {type(error).__name__}: {words}") from error


def warm_up(name: str, device: torch.device, dtype: torch.dtype, V: int, width: int) -> None:
    """Verify every kind of proposal once, so that no request waits for the compiler.

    Kernels are compiled per row size and stride, per rule, and per kind of batch: adjustments, filters, temperature 0,
    shared noise.

    Args:
        V: tokens that may be sampled.
        width: logits of a row, V or more.
    """
    change = RowAdjustment(np.zeros(1, np.int64), np.ones(1, np.float32), np.ones(1, np.float32))
    tokenwise = Proposed((0,), (None,), SamplingParams(), 0, 1)
    filtered = replace(tokenwise, params=SamplingParams(top_k=1), rule=Rule.BLOCK)
    greedy = replace(tokenwise, params=SamplingParams(temperature=0))
    coupled = replace(tokenwise, q=(), rule=Rule.COUPLED)
    sigmoid = replace(
        tokenwise, q=(DraftLogits(torch.zeros(V).half()),), rule=Rule.SIGMOID, sigmoid=SigmoidScales(-1, 1)
    )
    logits = torch.zeros(4, width, dtype=dtype, device=device)[:, :V]
    for changes in ((), (change, None)):
        for batch in ((tokenwise, filtered), (greedy,), (coupled, sigmoid)):
            proposals = [replace(each, adjustments=changes) for each in batch]
            verify(logits[: 2 * len(batch)], proposals, name)


def _obstacle(name: str, device: torch.device) -> str | None:
    """Return why the implementation `name` cannot run on `device`, or None."""
    if name == "triton":
        if device.type not in ("cpu", "cuda"):
            return "it needs a CUDA device"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "it needs a CUDA device, or TRITON_INTERPRET=1 in the environment to interpret it, slowly"
        if find_spec("triton") is None:
            return "triton is not installed"
    if name == "c" and not is_available():
        return "it needs the library that a C compiler builds with the package"
    return None
