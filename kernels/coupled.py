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
    """Return what `weigh` needs of the noise at each of `places` `[R]`, float32 `[R, V]`.

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


def weigh(p: Tensor, noise: Tensor) -> Tensor:
    """Return p/(-e) of laws `p` `[..., V]`, with their rows of `noise_of`. TorchScript can compile it.

    g is -log(e), so the token of least e/p has the largest log p + g, and is that of least p/(-e): one logarithm a
    token. One of p = 0 never is.
    """
    return p / noise.log1p()


def runners_up(weighed: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the `count` largest of log p + g in each row of what `weigh` gave, `[R, V]`, and their tokens."""
    least, tokens = weighed.topk(min(count, weighed.shape[-1]), largest=False)
    return tokens.tolist(), least.neg().log().tolist()


def choose_each(p: Tensor, noise: Tensor) -> list[int]:
    """Return argmax(log p + g) of each row of `p` `[R, V]`, with its row of `noise`; where it is no law, any token."""
    tokens: list[int] = weigh(p, noise).numpy().argmin(-1).tolist()  # in numpy: twice as fast
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
    return pick(weigh_each(logits, laws, noise, bounds))


def weigh_each(
    logits: Tensor, laws: Sequence[SamplingLaw], noise: Tensor, bounds: Sequence[float] | None = None
) -> Tensor:
    """Return `weigh` of the law that each row of `logits` becomes `[B, V]`; see `draw`.

    A row is NaN where it is no law, and positive infinity where its law is above its bound; nothing else is positive.
    """
    B = logits.shape[0]
    if len(laws) != B or noise.shape != logits.shape:
        raise ValueError(f"{len(laws)} laws and noise of shape {tuple(noise.shape)} for logits {tuple(logits.shape)}")
    bounds = [math.inf] * B if bounds is None else bounds
    if len(bounds) != B:
        raise ValueError(f"{len(bounds)} bounds for {B} rows")
    weighed = torch.empty_like(noise)
    for shared in dict.fromkeys(laws):
        rows = [row for row in range(B) if laws[row] == shared]
        q = probabilities(logits if len(rows) == B else logits[rows], shared).cpu()
        weighed[rows] = weigh(q, noise[rows])
        for row, each in zip(rows, q, strict=True):
            bound = bounds[row]
            if bound < math.inf and (entropy_of_greedy(logits[row]) if shared.is_greedy else entropy(each)) > bound:
                weighed[row] = math.inf
    return weighed


def pick(weighed: Tensor) -> list[int]:
    """Return what each row of what `weigh_each` gave chooses, `[B]`: a token, or what stands for none; see `draw`."""
    return [-1 if row[0].isnan() else UNSURE if bool(row[0] == math.inf) else int(row.argmin()) for row in weighed]
