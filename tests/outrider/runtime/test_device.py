"""What a thread that works on a CUDA device sets; nothing of it needs one."""

import pytest
import torch

from outrider.runtime.device import work_on


def test_products_in_16_bits_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a sum that meet in bfloat16 make rows of passes of other sizes differ by more than their rounding."""
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        work_on(torch.device("cpu"))
        assert (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction) == before
        work_on(torch.device("cuda", 0))
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
