"""Counter-based random numbers: uniforms of a round, and the Gumbel noise that draft and target share.

Uniforms come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of
(seed, base_length, index, domain, draw): a retried round draws the same numbers without any state. Draft and verifier
may share a seed, because their domains differ.

Noise is a function of (seed, absolute position, token id). The argmax of log p + g is distributed as p, and the same
seed gives the same token for any drafts: the rule `coupled` is based on this. One Philox block of (seed, position) is
the key of a row. Within the row a hash of 32-bit operations gives one word per token, because Philox for every token
would take several times as long as reading the logits.
"""

from collections.abc import Sequence
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
    """The purpose of a draw. It is the third word of the counter, so draws for different purposes never coincide."""

    DRAFT = 0
    ACCEPT = 1
    RESAMPLE = 2
    COUPLED = 3  # keys the noise; the counter holds an absolute position in place of base_length
    # Staged drafting [L 6], within a round: `draw` is the number of tokens of the round before the inner round.
    STAGED_DRAFT = 4
    STAGED_ACCEPT = 5
    STAGED_RESAMPLE = 6


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of one Philox4x32-10 block; every input is a 32-bit word, low word first.

    Plain integers: one block costs a few microseconds; a tensor would cost hundreds.
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


def uniform(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
    """Return a uniform in [0, 1) with 53 bits.

    Args:
        seed: the request's seed, 0 to 2^64 - 1; the key.
        base_length: committed tokens (prompt included) when the round began, 0 to 2^32 - 1.
        index: index in the proposal, from 0.
        draw: number of the draw for that purpose at that index, from 0.

    Raises:
        ValueError: an argument is outside its range.
    """
    _refuse_outside("seed", seed, MAX_SEED)
    _refuse_outside("base_length", base_length, MAX_WORD)
    _refuse_outside("index", index, MAX_WORD)
    _refuse_outside("draw", draw, MAX_WORD)
    high, low, _, _ = philox4x32((base_length, index, int(domain), draw), (seed & _MASK32, seed >> 32))
    return (((high << 32) | low) >> 11) * _UNIT_53


def _refuse_outside(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise ValueError(f"{name} is {value}; it must be 0 to {largest}")


# ------------------------------------------------------------------------------------------------------------- noise

# Three multiplications, with a key at each step. Without the first or the last key, tokens that differ in one high bit
# stay correlated, and a test fails. The first multiplier separates neighbouring ids (2^32 over the golden ratio); the
# others are the pair of least bias in a search (C. Wellons, "Prospecting for hash functions").
SPREAD = 0x9E3779B9
FIRST_MULTIPLIER = 0x21F0AAAD
SECOND_MULTIPLIER = 0x735A2D97

_UNIT_32 = 2.0**-32


def row_key(seed: int, position: int) -> tuple[int, int, int]:
    """Return the key of one position's noise, three 32-bit words.

    Args:
        seed: the request's seed, 0 to 2^64 - 1.
        position: tokens before this one, prompt included, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is outside its range.
    """
    _refuse_outside("seed", seed, MAX_SEED)
    _refuse_outside("position", position, MAX_WORD)
    return philox4x32((position, 0, int(Domain.COUPLED), 0), (seed & _MASK32, seed >> 32))[:3]


def words(keys: Sequence[tuple[int, int, int]], V: int) -> Tensor:
    """Return one 32-bit word a token for each of `keys` `[R]`, as int64 `[R, V]`. No word occurs twice in a row."""
    key = torch.tensor(keys, dtype=torch.int64).view(-1, 3, 1)
    x = torch.arange(V, dtype=torch.int64).mul_(SPREAD) + key[:, 0]
    # In place: for a large vocabulary, allocating new memory would take most of the time.
    x.bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 16).mul_(FIRST_MULTIPLIER).bitwise_and_(_MASK32)
    x.bitwise_xor_(x >> 15).add_(key[:, 1]).bitwise_and_(_MASK32)
    x.mul_(SECOND_MULTIPLIER).bitwise_and_(_MASK32)
    return x.bitwise_xor_(x >> 15).bitwise_xor_(key[:, 2])


def unit(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return -v of each word, with v = (word + ½) / 2^32 uniform in (0, 1), in `dtype`.

    Each operation is correctly rounded, so every implementation computes the same row.
    """
    u = words.to(dtype).add_(0.5).mul_(-_UNIT_32)
    return u.clamp_(min=2.0**-24 - 1) if dtype == torch.float32 else u  # the largest words round to v = 1


def exponential(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the exponential variable of mean 1 of each word, in `dtype`.

    The smallest values decide the argmax, so they have the finest steps: e = -log(1 - v), with v of `unit`.
    """
    return unit(words, dtype).log1p_().neg_()


def gumbel(seed: int, positions: Sequence[int], V: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the noise of `V` tokens at each of `positions` `[R]`, as `[R, V]` of `dtype`: g = -log(e), -3.2 to 22.9.

    Raises:
        ValueError: the seed or a position is outside its range.
    """
    keys = [row_key(seed, position) for position in positions]
    return exponential(words(keys, V), dtype).log_().neg_()


_WORDS_AT_ONCE, _ROWS_AT_ONCE = 1 << 14, 8
"""Small rows of neighbouring positions are computed together: they share the cost of each operation."""


def noise_rows(positions: Sequence[tuple[int, int]], V: int) -> Tensor:
    """Return -v of `unit` for each token at each of `positions` `[R]`, float32 `[R, V]`: the noise of `sampling`.

    Args:
        positions: seed and absolute position (tokens before it, prompt included) of each token to draw.

    Raises:
        ValueError: a seed or a position is outside its range.
    """
    rows = max(1, min(_ROWS_AT_ONCE, _WORDS_AT_ONCE // V))
    for _, position in positions:
        _refuse_outside("position", position, MAX_WORD)
    return torch.stack([_noise_block(seed, position // rows, rows, V)[position % rows] for seed, position in positions])


@lru_cache(maxsize=64)
def _noise_block(seed: int, block: int, rows: int, V: int) -> Tensor:
    # [rows, V]. A rejected token's position is drafted again, so the same rows are needed several times.
    positions = range(block * rows, min((block + 1) * rows, MAX_WORD + 1))
    return unit(words([row_key(seed, position) for position in positions], V))
