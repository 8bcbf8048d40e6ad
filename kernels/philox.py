"""Counter-based uniforms: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A draw is a pure function of (seed, base_length, index, domain, draw), so a retried round redraws the same numbers with
no state kept, and no two uses of the same numbers can meet: draft and verifier may share a seed because their domains
differ. This module does not know what the numbers are used for.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_UNIT_53 = 2.0**-53

MAX_SEED = 2**64 - 1
"""The largest seed; a seed is the 64-bit key."""

MAX_WORD = 2**32 - 1
"""The largest base_length, index and draw; each is one 32-bit word of the counter."""


class Domain(IntEnum):
    """What a draw is for; the third word of the counter, so draws for different purposes never coincide."""

    DRAFT = 0
    ACCEPT = 1
    RESAMPLE = 2
    COUPLED = 3  # keys the noise of `noise`; its counter holds an absolute position in place of base_length
    # The game of a draft model and a cheaper draft [L 6], played within a round: `draw` is how many of the round's
    # tokens there were when it began.
    STAGED_DRAFT = 4
    STAGED_ACCEPT = 5
    STAGED_RESAMPLE = 6


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of one Philox4x32-10 block; every input is a 32-bit word, low word first.

    Plain integers: one block costs a few microseconds, where a tensor would cost hundreds.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(*key):
        a = _MULTIPLIER_0 * c0
        b = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK32, (a >> 32) ^ c3 ^ k1, a & _MASK32
    return c0, c1, c2, c3


@lru_cache(maxsize=1024)
def _round_keys(k0: int, k1: int) -> tuple[tuple[int, int], ...]:
    return tuple(((k0 + i * _WEYL_0) & _MASK32, (k1 + i * _WEYL_1) & _MASK32) for i in range(_ROUNDS))


def philox4x32_torch(counter: Tensor, key: Tensor) -> Tensor:
    """Return Philox4x32-10 of `counter` `[..., 4]` and `key` `[..., 2]` as `[..., 4]`.

    All tensors are int64 holding 32-bit words; the leading shapes broadcast. Equal to `philox4x32` word for word.
    """
    # int64 products wrap at 2^64, which leaves the low 32 bits and, after masking the shift, the high 32 bits intact.
    shape = torch.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    multipliers = torch.tensor([_MULTIPLIER_0, _MULTIPLIER_1], dtype=torch.int64, device=counter.device)
    weyl = torch.tensor([_WEYL_0, _WEYL_1], dtype=torch.int64, device=counter.device)
    even, odd = counter[..., 0::2], counter[..., 1::2]  # (c0, c2), (c1, c3): [..., 2]
    for _ in range(_ROUNDS):
        product = even * multipliers
        even, odd = ((product >> 32) & _MASK32).flip(-1) ^ odd ^ key, (product & _MASK32).flip(-1)
        key = (key + weyl) & _MASK32
    return torch.stack((even, odd), dim=-1).expand(*shape, 2, 2).reshape(*shape, 4)


def uniform(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Return the uniform of 53 bits in [0, 1) that belongs to this seed, round, place, purpose and draw.

    Args:
        seed: the request's seed, 0 to 2^64 - 1; the key.
        base_length: committed tokens (prompt included) when the round began, 0 to 2^32 - 1.
        index: place in the proposal, from 0.
        domain: what the number is for.
        draw: counts the draws made for that purpose at that place.

    Raises:
        ValueError: an argument is outside its range.
    """
    if not (
        0 <= seed <= MAX_SEED and 0 <= base_length <= MAX_WORD and 0 <= index <= MAX_WORD and 0 <= draw <= MAX_WORD
    ):
        _refuse(seed=seed, base_length=base_length, index=index, draw=draw)
    high, low, _, _ = philox4x32((base_length, index, int(domain), draw), (seed & _MASK32, seed >> 32))
    return (((high << 32) | low) >> 11) * _UNIT_53


def uniforms(
    seed: int | Tensor, base_length: int | Tensor, index: int | Tensor, domain: Domain, draw: int = 0
) -> Tensor:
    """Return `uniform` of every element, float64, in the broadcast shape of the three arguments.

    Tensors are int64; a seed tensor holds the 64 bits of each seed (as two's complement above 2^63). One call costs
    about as much as thirty calls of `uniform`, whatever the number of elements up to some thousands.

    Raises:
        ValueError: an argument given as a number is outside its range.
    """
    if isinstance(seed, int):
        _refuse_outside("seed", seed, MAX_SEED)
        seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64)
    _refuse_outside("draw", draw, MAX_WORD)
    words = []
    for name, value in (("base_length", base_length), ("index", index)):
        if isinstance(value, int):
            _refuse_outside(name, value, MAX_WORD)
        words.append(torch.as_tensor(value, dtype=torch.int64))
    lengths, indices, seeds = torch.broadcast_tensors(*words, seed)
    counter = torch.stack(
        (lengths, indices, torch.full_like(lengths, int(domain)), torch.full_like(lengths, draw)), dim=-1
    )
    key = torch.stack((seeds & _MASK32, (seeds >> 32) & _MASK32), dim=-1)
    out = philox4x32_torch(counter, key)
    bits = (out[..., 0] << 21) | (out[..., 1] >> 11)  # the upper 53 of 64 bits
    return bits.to(torch.float64) * _UNIT_53


def _refuse(**words: int) -> None:
    for name, value in words.items():
        _refuse_outside(name, value, MAX_SEED if name == "seed" else MAX_WORD)


def _refuse_outside(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise ValueError(f"{name} is {value}, outside 0..{largest}")
