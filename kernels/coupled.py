"""The choice that draft and target both make under the rule `coupled`: the token that a law and the shared noise take.

The target judges a draft by its own choice (`verify`), so nothing of q need be known to it. Knows nothing of where
seeds and positions come from, nor of proposals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.distribution import SamplingLaw, probabilities
from kernels.entropy import UNSURE, entropy, entropy_of_greedy
from kernels.noise import row_key, unit, words

_AT_ONCE = 1 << 15
"""Words that are made at once: small rows share the cost of each operation, and large ones stay in the cache."""


def noise_of(places: Sequence[tuple[int, int]], V: int) -> Tensor:
    """Return what `choose` needs of the noise at each of `places` `[R]`, float32 `[R, V]`.

    Args:
        places: seed and absolute position (tokens before it, prompt included) of each token to draw.
        V: tokens to choose from.

    Raises:
        ValueError: a seed or a position is outside its range.
    """
    keys = [row_key(seed, position) for seed, position in places]
    rows = rows_at_once(V)
    return torch.cat([unit(words(keys[i : i + rows], V)) for i in range(0, len(keys), rows)])


def rows_at_once(V: int) -> int:
    """Return how many rows of noise to ask for at once, where it is not known how many will be used."""
    return max(1, _AT_ONCE // V)


def choose(p: Tensor, noise: Tensor) -> int:
    """Return argmax(log p + g) of one law `p` `[V]`, with its row of `noise_of`. TorchScript can compile it.

    g is -log(e), so the token of least e/p wins, which is that of least p/(-e): one logarithm a token. One of p = 0
    never does.
    """
    return int((p / noise.log1p()).argmin())


def choose_each(p: Tensor, noise: Tensor) -> list[int]:
    """Return `choose` of each row of `p` `[R, V]` with its row of `noise`; for a row that is no law, any token."""
    tokens: list[int] = (p / noise.log1p()).numpy().argmin(-1).tolist()  # in numpy: twice as fast
    return tokens


def draw(
    logits: Tensor, laws: Sequence[SamplingLaw], noise: Tensor, bounds: Sequence[float] | None = None
) -> list[int]:
    """Choose one token from each row of `logits` `[B, V]`; at temperature 0 it is the largest, whatever the noise.

    Args:
        logits: the draft's logits, adjustments made.
        laws: how each row becomes q, `[B]`.
        noise: of each row, as `noise_of` gives it, `[B, V]`.
        bounds: the entropy in nats above which nothing is chosen from a row, one for each; None is no bound.

    Returns:
        The tokens; -1 for a row that is no law (`distribution.bad_rows`), `entropy.UNSURE` for one whose law (at
        temperature 0: whose logits) is above its bound.

    Raises:
        ValueError: the number of laws or bounds is not B, or the noise is not `[B, V]`.
    """
    B = logits.shape[0]
    if len(laws) != B or noise.shape != logits.shape:
        raise ValueError(f"{len(laws)} laws and noise of shape {tuple(noise.shape)} for logits {tuple(logits.shape)}")
    bounds = [math.inf] * B if bounds is None else bounds
    if len(bounds) != B:
        raise ValueError(f"{len(bounds)} bounds for {B} rows")
    tokens = [-1] * B
    for shared in dict.fromkeys(laws):
        rows = [row for row in range(B) if laws[row] == shared]
        q = probabilities(logits if len(rows) == B else logits[rows], shared).cpu()
        for row, each in zip(rows, q, strict=True):
            if bool(torch.isnan(each[0])):
                continue
            bound = bounds[row]
            unsure = (
                bound < math.inf and (entropy_of_greedy(logits[row]) if shared.is_greedy else entropy(each)) > bound
            )
            tokens[row] = UNSURE if unsure else choose(each, noise[row])
    return tokens
