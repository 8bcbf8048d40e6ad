"""Gumbel noise that draft and target share: a pure function of (seed, absolute position, token id).

With it the argmax of log p + g has the law p, and the same seed gives the same token whoever asks and whatever was
drafted: the rule `coupled` rests on this. A row's key is one Philox block of (seed, position). Within the row a short
hash of 32-bit operations makes one word a token, since Philox for every token would cost several times the memory
bandwidth. Knows nothing of laws, drafts and targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.philox import MAX_SEED, MAX_WORD, Domain, philox4x32

# Three multiplications and a key at each step. Without the first or the last, tokens that differ in one high bit stay
# related, and the tests see it. The first spreads neighbouring ids apart (2^32 over the golden ratio); the others are a
# pair that a search found to be of least bias (C. Wellons, "Prospecting for hash functions").
SPREAD = 0x9E3779B9
FIRST_MULTIPLIER = 0x21F0AAAD
SECOND_MULTIPLIER = 0x735A2D97

_MASK32 = 0xFFFFFFFF
_UNIT_32 = 2.0**-32


def row_key(seed: int, position: int) -> tuple[int, int, int]:
    """Return the key of one position's noise, three 32-bit words.

    Args:
        seed: the request's seed, 0 to 2^64 - 1.
        position: tokens before this one, prompt included, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is outside its range.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed}, outside 0..{MAX_SEED}")
    if not 0 <= position <= MAX_WORD:
        raise ValueError(f"position is {position}, outside 0..{MAX_WORD}")
    return philox4x32((position, 0, int(Domain.COUPLED), 0), (seed & _MASK32, seed >> 32))[:3]


def words(keys: Sequence[tuple[int, int, int]], V: int, device: torch.device | None = None) -> Tensor:
    """Return one 32-bit word a token for each of `keys` `[R]`, as int64 `[R, V]`. No word occurs twice in a row."""
    key = torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 3, 1)
    x = torch.arange(V, dtype=torch.int64, device=device).mul_(SPREAD) + key[:, 0]
    # In place, since for a large vocabulary most of the time would go into fresh memory.
    x.bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 16).mul_(FIRST_MULTIPLIER).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 15).add_(key[:, 1]).bitwise_and_(_MASK32)
    x.mul_(SECOND_MULTIPLIER).bitwise_and_(_MASK32)
    return x.bitwise_xor_(x >> 15).bitwise_xor_(key[:, 2])


def unit(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return -v of each word, with v = (word + ½) / 2^32 uniform in (0, 1), in `dtype`.

    Each step is correctly rounded, so that a row is the same whatever it is computed with.
    """
    u = words.to(dtype).add_(0.5).mul_(-_UNIT_32)
    return u.clamp_(min=2.0**-24 - 1) if dtype == torch.float32 else u  # the largest words round to v = 1


def exponential(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the exponential variable of mean 1 of each word, in `dtype`.

    The least values decide who wins a race, so they are the finest: e = -log(1 - v), with v of `unit`.
    """
    return unit(words, dtype).log1p_().neg_()


def gumbel(seed: int, positions: Sequence[int], V: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the noise of `V` tokens at each of `positions` `[R]`, as `[R, V]` of `dtype`: g = -log(e), -3.2 to 22.9.

    Raises:
        ValueError: the seed or a position is outside its range.
    """
    keys = [row_key(seed, position) for position in positions]
    return exponential(words(keys, V), dtype).log_().neg_()
