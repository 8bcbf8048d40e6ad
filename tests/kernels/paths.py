"""The implementations of `verify` under test, and `verify` where each of them runs.

Triton's kernels run on a CUDA device where there is one, under the mark `gpu`; elsewhere Triton's interpreter runs the
same code (tests/conftest.py sees to it), some thousand times as slowly, so its inputs stay small.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
from torch import Tensor

from kernels import verify as verification
from kernels.verify import Proposed, VerifyResult
from kernels.verify_c import is_available

verification._MODULES.setdefault("reference", "tests.kernels.reference")  # so that `verify` takes it, after its checks

HOST = ("torch", "reference")
"""For tests that patch an implementation, or need thousands of results."""

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
"""Where Triton's kernels run."""

_MARKS = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform"),
    *(() if IS_INTERPRETED else (pytest.mark.gpu,)),
]
TRITON = pytest.param("triton", marks=_MARKS)

C = pytest.param(
    "c", marks=pytest.mark.skipif(not is_available(), reason="there is no library in C for this processor")
)

PATHS = (*HOST, C, TRITON)


def verify(logits: Tensor, proposals: Sequence[Proposed], path: str | None = None) -> list[VerifyResult]:
    """Verify by `path`, with the logits where it wants them."""
    return verification.verify(logits.to(DEVICE) if path == "triton" else logits, proposals, path)


def verify_by_triton(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    return verify(logits, proposals, "triton")
