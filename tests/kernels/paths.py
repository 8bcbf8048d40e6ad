"""The implementations of `verify` that tests are held to, and `verify` where each of them runs.

Triton's kernels run on a CUDA device where there is one, under the mark `gpu`; elsewhere Triton's interpreter runs the
same code (tests/conftest.py sees to it), some thousand times as slowly, so what it is given stays small.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
from torch import Tensor

from kernels import verify as door
from kernels.verify import Proposed, VerifyResult

door._MODULES.setdefault("reference", "tests.kernels.reference")  # so that `verify` takes it, after its checks

HOST = ("torch", "reference")
"""For tests that patch an implementation, or that ask for thousands of results."""

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_MARKS = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform"),
    *(() if IS_INTERPRETED else (pytest.mark.gpu,)),
]
TRITON = pytest.param("triton", marks=_MARKS)

PATHS = (*HOST, TRITON)


def verify(logits: Tensor, proposals: Sequence[Proposed], path: str | None = None) -> list[VerifyResult]:
    """Rule by `path`, with the logits where it wants them."""
    if path == "triton" and not IS_INTERPRETED:
        logits = logits.cuda()
    return door.verify(logits, proposals, path)


def verify_by_triton(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """Rule by Triton's kernels."""
    return verify(logits, proposals, "triton")
