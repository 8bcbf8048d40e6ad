"""The acceptance rule between two drafts [L 6, Alg. 1]: a cheap one guesses, the draft's own q̂ judges.

Both laws have integer weights, so every test and every draw is made in integers: what comes out has q̂ for its law bit
for bit, and not a float's idea of it. A guess whose law is a point mass (None) is what it is, with no law to divide by.
It knows nothing of models, of rounds, or of where the uniforms come from.
"""

from __future__ import annotations

import numpy as np

from kernels.sparse import SparseLaw

_BITS = 53


def accepts(u: float, guessed: SparseLaw | None, law: SparseLaw, token: int) -> bool:
    """Say whether a guessed token stands: u · r(x) < q̂(x), strictly, so that q̂ = 0 never does.

    Args:
        u: uniform of 53 bits in [0, 1).
        guessed: r, what the token was sampled from.
        law: q̂, of the draft.
        token: x; where r does not have it, it never stands.
    """
    q = _weight(law, token)
    if guessed is None:
        r, total = 1, 1
    else:
        r, total = _weight(guessed, token), guessed.total
    return r > 0 and int(u * 2.0**_BITS) * r * law.total < (q * total) << _BITS


def resample(u: float, guessed: SparseLaw | None, law: SparseLaw, token: int) -> int:
    """Return the token of the inverse CDF of norm(max(0, q̂ - r)) at `u`, after `token` was rejected.

    After a rejection the residual has mass: q̂(x) < r(x) there, so elsewhere q̂ is the larger.

    Raises:
        ValueError: it has none, since `token` cannot have been rejected.
    """
    ids = law.ids.astype(np.int64)
    if guessed is None:
        rest = np.where(ids == token, 0, law.weights.astype(np.int64))
    else:
        # q̂ - r over the common denominator: weights of 16 bits times totals of 24.
        r = np.zeros(len(ids), dtype=np.int64)
        slots = np.searchsorted(guessed.ids, ids).clip(max=len(guessed.ids) - 1)
        same = guessed.ids[slots] == ids
        r[same] = guessed.weights[slots[same]]
        rest = np.maximum(0, law.weights.astype(np.int64) * guessed.total - r * law.total)
    cdf = rest.cumsum()
    total = int(cdf[-1])
    if not total:
        raise ValueError(f"token {token} was rejected, and nothing is left of the law")
    return int(ids[cdf.searchsorted((int(u * 2.0**_BITS) * total) >> _BITS, side="right")])


def _weight(law: SparseLaw, token: int) -> int:
    slot = int(np.searchsorted(law.ids, token)) if token >= 0 else len(law.ids)
    return int(law.weights[slot]) if slot < len(law.ids) and int(law.ids[slot]) == token else 0
