"""`kernels.rng.uniform` of many elements in one call."""

import torch
from torch import Tensor

from kernels import rng
from kernels.rng import Domain


def philox4x32_torch(counter: Tensor, key: Tensor) -> Tensor:
    """Return `philox4x32` of `counter` `[..., 4]` and `key` `[..., 2]` as `[..., 4]`.

    All tensors are int64 holding 32-bit words; the leading shapes broadcast.
    """
    # int64 products wrap at 2^64, which leaves the low 32 bits and, after masking the shift, the high 32 bits intact.
    shape = torch.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    multipliers = torch.tensor([rng._MULTIPLIER_0, rng._MULTIPLIER_1])
    weyl = torch.tensor([rng._WEYL_0, rng._WEYL_1])
    even, odd = counter[..., 0::2], counter[..., 1::2]  # (c0, c2), (c1, c3): [..., 2]
    for _ in range(rng._ROUNDS):
        product = even * multipliers
        even, odd = ((product >> 32) & rng._MASK32).flip(-1) ^ odd ^ key, (product & rng._MASK32).flip(-1)
        key = (key + weyl) & rng._MASK32
    return torch.stack((even, odd), dim=-1).expand(*shape, 2, 2).reshape(*shape, 4)


def uniforms(
    seed: int | Tensor, base_length: int | Tensor, index: int | Tensor, domain: Domain, draw: int = 0
) -> Tensor:
    """Return `uniform` of every element, float64, in the broadcast shape of the three arguments.

    Tensors are int64; a seed tensor holds the 64 bits of each seed (as two's complement above 2^63).
    """
    if isinstance(seed, int):
        seed = seed - 2**64 if seed >= 2**63 else seed
    words = (torch.as_tensor(each, dtype=torch.int64) for each in (base_length, index, seed))
    lengths, indices, seeds = torch.broadcast_tensors(*words)
    counter = torch.stack(
        (lengths, indices, torch.full_like(lengths, int(domain)), torch.full_like(lengths, draw)), dim=-1
    )
    key = torch.stack((seeds & rng._MASK32, (seeds >> 32) & rng._MASK32), dim=-1)
    out = philox4x32_torch(counter, key)
    bits = (out[..., 0] << 21) | (out[..., 1] >> 11)  # the upper 53 of 64 bits
    return bits.to(torch.float64) * rng._UNIT_53
