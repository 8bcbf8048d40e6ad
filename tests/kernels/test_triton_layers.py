"""The kernels between a layer's matrix products against torch's operations: shapes, dtypes, slots and rounding."""

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import gaussian
from tests.kernels.paths import DEVICE, IS_INTERPRETED, TRITON

pytestmark = TRITON.marks
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_rounded_alike(found: Tensor, wanted: Tensor) -> None:
    """Within a step of the last bit, and in 16 bits the same nearly everywhere: rounded just where torch rounds.

    The interpreter truncates bfloat16 instead of rounding it, as no GPU does; so there it may be three steps.
    """
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    is_truncated = IS_INTERPRETED and found.dtype == torch.bfloat16
    step = STEP[found.dtype] * (3 if is_truncated else 1)
    torch.testing.assert_close(found.cpu(), wanted, rtol=step, atol=2e-6, equal_nan=True)
    if found.dtype != torch.float32 and not is_truncated:
        assert int((found.cpu() != wanted).sum()) <= 1 + wanted.numel() // 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [1, 48, 1023, 1100])
def test_rms_norm_equals_torchs(E: int, dtype: torch.dtype) -> None:
    """Also for small rows, whose norm is mostly eps."""
    from kernels.triton_layers import rms_norm

    weight = gaussian(E, E).to(dtype)
    for scale in (1.0, 1e-3):
        x = gaussian(E + 1, 3, E, scale=scale).to(dtype)
        wanted = torch.rms_norm(x.float(), [E], weight.float(), 1e-5).to(dtype)
        assert_rounded_alike(rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5), wanted)


# ------------------------------------------------------------------------------------------------------------- rotation

SLOTS = [5, 33, 2, 17, 40, 40]  # scattered over four blocks; the last two are padding
POSITIONS = [3, 9, 63, 0, 1, 0]
BLOCKS, BLOCK_SIZE = 6, 8
UNTOUCHED = -7.0


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [*((each, each) for each in DTYPES), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 80), (14, 2, 128), (2, 2, 256)], ids=str)
def test_heads_are_rotated_and_stored_in_their_slots_alone(
    shape: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, is_normed: bool
) -> None:
    from kernels.triton_layers import rotate_and_store

    heads, kv_heads, D = shape
    T, rotated = len(SLOTS), heads + kv_heads
    qkv = gaussian(D, T, (rotated + kv_heads) * D).to(dtype)
    qkv[5] = qkv[4]  # of two rows in one slot either may stay
    phases = gaussian(D + 1, 64, D // 2, scale=3)
    rotations = torch.polar(torch.ones_like(phases), phases)
    rotations[POSITIONS[5]] = rotations[POSITIONS[4]]
    head_norm = gaussian(D + 2, rotated, D) if is_normed else None
    cache = [torch.full((BLOCKS, BLOCK_SIZE, kv_heads, D), UNTOUCHED, dtype=cache_dtype, device=DEVICE) for _ in "kv"]
    positions, slots = (torch.tensor(each, device=DEVICE) for each in (POSITIONS, SLOTS))
    query = rotate_and_store(
        qkv.to(DEVICE), torch.view_as_real(rotations).to(DEVICE), positions, slots, cache[0], cache[1],
        None if head_norm is None else head_norm.to(DEVICE), heads=heads, kv_heads=kv_heads, eps=1e-5,
    )  # fmt: skip

    x = qkv.float().view(T, -1, D)
    if head_norm is not None:
        x = torch.cat((torch.rms_norm(x[:, :rotated], [D], None, 1e-5) * head_norm, x[:, rotated:]), 1)
    pairs = torch.view_as_complex(x[:, :rotated].reshape(T, rotated, D // 2, 2))
    turned = torch.view_as_real(pairs * rotations[POSITIONS].unsqueeze(1)).flatten(2)
    assert_rounded_alike(query, turned[:, :heads].to(cache_dtype))
    for found, rows in zip(cache, (turned[:, heads:], x[:, rotated:]), strict=True):
        wanted = torch.full((BLOCKS * BLOCK_SIZE, kv_heads, D), UNTOUCHED, dtype=cache_dtype)
        wanted[SLOTS] = rows.to(cache_dtype)
        assert_rounded_alike(found, wanted.view_as(found))


@pytest.mark.gpu
def test_slots_may_lie_beyond_2_to_the_31() -> None:
    from kernels.triton_layers import rotate_and_store

    kv_heads, D, far = 8, 128, 2**21 + 5  # the first number of that slot is the 2^31 + 5,120th
    cache = [torch.zeros(2**17 + 2, 16, kv_heads, D, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    qkv = gaussian(1, 1, 3 * kv_heads * D).bfloat16().cuda()
    still = torch.view_as_real(torch.ones(1, D // 2, dtype=torch.complex64, device="cuda"))
    position, slot = (torch.tensor([each], device="cuda") for each in (0, far))
    query = rotate_and_store(
        qkv, still, position, slot, cache[0], cache[1], None, heads=kv_heads, kv_heads=kv_heads, eps=1e-5
    )
    for found, wanted in zip(
        (query[0], *(each.flatten(0, 1)[far] for each in cache)), qkv.view(3, kv_heads, D), strict=True
    ):
        assert torch.equal(found, wanted)
    assert all(int(each.count_nonzero()) == kv_heads * D for each in cache)
