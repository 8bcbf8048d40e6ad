"""Products of a few rows against torch's operations, and each row alone against the same row among others."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import gaussian
from tests.kernels.paths import DEVICE, IS_INTERPRETED, TRITON

pytestmark = TRITON.marks
EPS = 1e-5
# The interpreter multiplies no matrices of bfloat16.
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.bfloat16, torch.float16]
STEP = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
ROWS = (1, 8, 9, 16)
SHAPES = [(256, 128), (128, 384)] if IS_INTERPRETED else [(384, 640), (2048, 8192), (4096, 14336)]  # E and inputs
VOCABULARY = 80


def results(tokens: Tensor, shape: tuple[int, int], dtype: torch.dtype, *, biased: bool) -> dict[str, Tensor]:
    """Every kind of product, one after the other, on the device of the kernels; and by torch on the host."""
    from kernels import triton_products as products

    E, inner = shape
    sizes = {"embedding": (VOCABULARY, E), "qkv": (48, E), "gate_up": (2 * inner, E), "down": (E, inner)}
    weights = {
        name: gaussian(sum(size), *size, scale=1.0 if name == "embedding" else size[1] ** -0.5).to(dtype).to(DEVICE)
        for name, size in sizes.items()
    }
    first, second = (1 + gaussian(number, E, scale=0.1).to(dtype).to(DEVICE) for number in (20, 21))
    bias = {name: gaussian(rows, rows).to(dtype).to(DEVICE) if biased else None for name, (rows, _) in sizes.items()}

    stream = products.embed(tokens.to(DEVICE), weights["embedding"], first)
    queries = products.normed_product(stream, weights["qkv"], bias["qkv"], EPS)
    gated = products.normed_product(stream, weights["gate_up"], bias["gate_up"], EPS, gated=True)
    stream = products.add_product(stream, gated, weights["down"], bias["down"], second)
    found = {"queries": queries, "gates": gated, "residuals": stream.values}
    found["next"] = products.normed_product(stream, weights["qkv"], None, EPS)

    x = weights["embedding"][tokens]
    normed = torch.rms_norm(x, [E], first, EPS)
    gate, up = torch.nn.functional.linear(normed, weights["gate_up"], bias["gate_up"]).chunk(2, -1)
    after = x + torch.nn.functional.linear(gated, weights["down"], bias["down"])
    wanted = {
        "queries": torch.nn.functional.linear(normed, weights["qkv"], bias["qkv"]),
        "gates": torch.nn.functional.silu(gate) * up,
        "residuals": after,
        "next": torch.nn.functional.linear(torch.rms_norm(after, [E], second, EPS), weights["qkv"]),
    }
    for name, each in wanted.items():
        step = STEP[dtype] * float(each.abs().max())
        torch.testing.assert_close(found[name].cpu(), each.cpu(), rtol=STEP[dtype], atol=step, msg=name)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_torch_and_a_row_does_not_depend_on_the_others(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bit for bit: rows are compared where a batch has 1, 8 or fewer, and 16 or fewer of them."""
    tokens = torch.arange(max(ROWS)) * 5 % VOCABULARY
    found = [results(tokens[:rows], shape, dtype, biased=True) for rows in ROWS]
    for fewer, more in pairwise(found):
        for name in fewer:
            assert torch.equal(fewer[name], more[name][: len(fewer[name])]), name
    results(tokens[:3], shape, dtype, biased=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "D"), [(4, 2, 32), (3, 1, 80)])
def test_queries_and_keys_are_rotated_and_stored_as_after_the_product(
    heads: int, kv_heads: int, D: int, dtype: torch.dtype
) -> None:
    from kernels import triton_layers
    from kernels import triton_products as products

    E, width = 256, (heads + 2 * kv_heads) * D
    embedding, weight = gaussian(1, VOCABULARY, E).to(dtype).to(DEVICE), gaussian(2, width, E, scale=E**-0.5)
    norm, bias = 1 + gaussian(3, E, scale=0.1), gaussian(4, width)
    weight, norm, bias = (each.to(dtype).to(DEVICE) for each in (weight, norm, bias))
    phases = gaussian(5, 64, D // 2, scale=3)
    cos_sin = torch.view_as_real(torch.polar(torch.ones_like(phases), phases)).to(DEVICE)
    for T in (1, 6, 11):
        positions = (torch.arange(T) * 7 % 64).to(DEVICE)
        slots = (torch.arange(T) * 5 % 48).to(DEVICE)
        caches = [torch.full((6, 8, kv_heads, D), -7.0, dtype=dtype, device=DEVICE) for _ in range(4)]
        stream = products.embed(torch.arange(T, device=DEVICE), embedding, norm)
        found = products.rotated_product(stream, weight, bias, EPS, cos_sin, positions, slots, caches[0], caches[1])
        qkv = products.normed_product(stream, weight, bias, EPS)
        wanted = triton_layers.rotate_and_store(
            qkv, cos_sin, positions, slots, caches[2], caches[3], None, heads=heads, kv_heads=kv_heads, eps=EPS
        )
        for one, other in zip((found, *caches[:2]), (wanted, *caches[2:]), strict=True):
            torch.testing.assert_close(one, other, rtol=STEP[dtype], atol=STEP[dtype] * 4)
            assert torch.equal(one == -7.0, other == -7.0)  # slots of other rows are left alone


def test_weights_that_the_kernel_cannot_take_are_refused() -> None:
    from kernels.triton_products import why_not

    device = torch.device("cuda")  # only its name counts
    good = torch.empty(32, 256, dtype=torch.bfloat16)
    assert why_not({"head": good}, device) == ""
    assert "the device is cpu" in why_not({"head": good}, torch.device("cpu"))
    assert "head has torch.float16" in why_not({"qkv": good, "head": good.half()}, device)
    assert "qkv has the shape [32, 192]" in why_not({"qkv": good[:, :192]}, device)
    assert "qkv has the shape [24, 256]" in why_not({"qkv": good[:24]}, device)
