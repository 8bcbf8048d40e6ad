"""The kernels between a layer's products against torch's operations: shapes and dtypes, places, roundings."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.paths import IS_INTERPRETED, TRITON

pytestmark = TRITON.marks
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_rounded_alike(found: Tensor, wanted: Tensor) -> None:
    """Within a step of the last bit, and in 16 bits the same nearly everywhere: rounded just where torch rounds.

    The interpreter cuts bfloat16 off in place of rounding it, as no GPU does; so there it may be three steps.
    """
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    is_cut = IS_INTERPRETED and found.dtype == torch.bfloat16
    step = STEP[found.dtype] * (3 if is_cut else 1)
    torch.testing.assert_close(found.cpu(), wanted, rtol=step, atol=2e-6, equal_nan=True)
    if found.dtype != torch.float32 and not is_cut:
        assert int((found.cpu() != wanted).sum()) <= 1 + wanted.numel() // 100


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# --------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [1, 8, 48, 1023, 1024, 1100])
def test_a_row_is_normed_as_torch_norms_it(E: int, dtype: torch.dtype) -> None:
    """Rows of some size, and small ones, whose norm is mostly eps."""
    from kernels.triton_layers import rms_norm

    weight = numbers(E, E).to(dtype)
    for scale in (1.0, 1e-3):
        x = numbers(E + 1, 3, E, scale=scale).to(dtype)
        wanted = torch.rms_norm(x.float(), [E], weight.float(), 1e-5).to(dtype)
        assert_rounded_alike(rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5), wanted)


def test_rows_may_lie_apart_and_have_more_dimensions() -> None:
    from kernels.triton_layers import gated, rms_norm

    x = numbers(3, 4, 1, 96)[:, :, :48].to(DEVICE)
    weight = torch.ones(48, device=DEVICE)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))
    assert gated(x).shape == (4, 1, 24)
    assert torch.equal(gated(x), gated(x.contiguous()))


# ----------------------------------------------------------------------------------------------------------- rotation

PLACES = [5, 33, 2, 17, 40, 40]  # scattered over four pages, and twice the page of nobody
POSITIONS = [3, 9, 63, 0, 1, 0]
PAGES, PAGE = 6, 8
UNTOUCHED = -7.0


def rotate(
    shape: tuple[int, int, int], dtype: torch.dtype, pages_dtype: torch.dtype, is_normed: bool, scale: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Queries, and the pages of keys and values, by the kernel and by torch's operations.

    Args:
        shape: H, KV and D.
        dtype: of what was multiplied.
        pages_dtype: of keys and values.
        is_normed: whether heads have norms.
        scale: of what was multiplied.
    """
    from kernels.triton_layers import rotate_and_store

    heads, kv_heads, D = shape
    T, rotated = len(PLACES), heads + kv_heads
    qkv = numbers(D, T, (rotated + kv_heads) * D, scale=scale).to(dtype)
    qkv[5] = qkv[4]  # of two rows at one place it must not matter which stays
    phases = numbers(D + 1, 64, D // 2, scale=3)
    rotations = torch.polar(torch.ones_like(phases), phases)
    rotations[POSITIONS[5]] = rotations[POSITIONS[4]]
    head_norm = numbers(D + 2, rotated, D) if is_normed else None
    pages = [torch.full((PAGES, PAGE, kv_heads, D), UNTOUCHED, dtype=pages_dtype, device=DEVICE) for _ in range(2)]
    query = rotate_and_store(
        qkv.to(DEVICE),
        torch.view_as_real(rotations).to(DEVICE),
        torch.tensor(POSITIONS, device=DEVICE),
        torch.tensor(PLACES, device=DEVICE),
        pages[0],
        pages[1],
        None if head_norm is None else head_norm.to(DEVICE),
        heads=heads,
        kv_heads=kv_heads,
        eps=1e-5,
    )
    found = [query, *pages]

    x = qkv.float().view(T, -1, D)
    if head_norm is not None:
        x = torch.cat((torch.rms_norm(x[:, :rotated], [D], None, 1e-5) * head_norm, x[:, rotated:]), 1)
    pairs = torch.view_as_complex(x[:, :rotated].reshape(T, rotated, D // 2, 2))
    turned = torch.view_as_real(pairs * rotations[POSITIONS].unsqueeze(1)).flatten(2)
    wanted = [turned[:, :heads].to(pages_dtype)]
    for rows in (turned[:, heads:], x[:, rotated:]):
        store = torch.full((PAGES * PAGE, kv_heads, D), UNTOUCHED, dtype=pages_dtype)
        store[PLACES] = rows.to(pages_dtype)
        wanted.append(store.view(PAGES, PAGE, kv_heads, D))
    return found, wanted


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2), (1, 1, 8), (4, 2, 64), (3, 1, 80), (6, 2, 96), (14, 2, 128), (2, 2, 256)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_heads_are_rotated_and_stored_as_torch_does_it(shape: tuple[int, int, int], is_normed: bool) -> None:
    """And no place but those of the rows is written to."""
    for dtype in DTYPES:
        for found, wanted in zip(*rotate(shape, dtype, dtype, is_normed), strict=True):
            assert_rounded_alike(found, wanted)


def test_pages_may_hold_another_dtype() -> None:
    for found, wanted in zip(*rotate((4, 2, 16), torch.bfloat16, torch.float32, True), strict=True):
        assert_rounded_alike(found, wanted)


def test_small_heads_are_normed_by_eps() -> None:
    for found, wanted in zip(*rotate((4, 2, 16), torch.float32, torch.float32, True, scale=1e-3), strict=True):
        assert_rounded_alike(found, wanted)


@pytest.mark.gpu
def test_places_may_lie_beyond_2_to_the_31() -> None:
    from kernels.triton_layers import rotate_and_store

    kv_heads, D, far = 8, 128, 2**21 + 5  # the first number of that place is the 2^31 + 5,120th
    pages = [torch.zeros(2**17 + 2, 16, kv_heads, D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    qkv = numbers(1, 1, 3 * kv_heads * D).bfloat16().cuda()
    still = torch.view_as_real(torch.ones(1, D // 2, dtype=torch.complex64, device="cuda"))
    query = rotate_and_store(
        qkv, still, torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([far], device="cuda"),
        pages[0], pages[1], None, heads=kv_heads, kv_heads=kv_heads, eps=1e-5,
    )  # fmt: skip
    for found, wanted in zip(
        (query[0], *(each.flatten(0, 1)[far] for each in pages)), qkv.view(3, kv_heads, D), strict=True
    ):
        assert torch.equal(found, wanted)
    assert all(int(each.count_nonzero()) == kv_heads * D for each in pages)


# --------------------------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 48, 1023, 2050])
def test_a_row_is_gated_as_torch_gates_it(inner: int, dtype: torch.dtype) -> None:
    """The gate is rounded before it is multiplied, as by torch."""
    from kernels.triton_layers import gated

    both = numbers(inner, 3, 2 * inner, scale=4).to(dtype)
    gate, up = both.chunk(2, -1)
    assert_rounded_alike(gated(both.to(DEVICE)), F.silu(gate) * up)


def test_gates_have_torchs_limits() -> None:
    from kernels.triton_layers import gated

    gate = torch.tensor([-math.inf, -200.0, -90.0, 0.0, 90.0, 200.0, math.inf, math.nan])
    found = gated(torch.cat((gate, torch.ones(8)))[None].to(DEVICE))
    assert_rounded_alike(found, F.silu(gate)[None])
