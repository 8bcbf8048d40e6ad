"""How unsure a law is, in nats, and what a draft answers where it is less sure than it was asked to be.

A proposal that ends early ends *before* the next token is sampled: whether it does is a matter of the law alone, and of
the tokens that are sent (Law 4). Knows nothing of proposals, nor of what bound is a good one.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNSURE = -2
"""In the place of a token: the law's entropy is above the bound, and nothing was sampled from it."""


def entropy(p: Tensor) -> float:
    """Return -Σ p log p of one law `p` `[V]`; NaN where it is none. TorchScript can compile it."""
    return -float(torch.xlogy(p, p).sum())


def entropy_of_weights(weights: Tensor) -> float:
    """Return the entropy of the law in proportion to integer `weights` `[K]`. TorchScript can compile it.

    Both ways of drafting come through here, so that they end a proposal at the same token.
    """
    return entropy(weights.double() / float(weights.sum()))


def entropy_of_greedy(logits: Tensor) -> float:
    """Return how unsure a greedy choice from one row of `logits` `[V]` is. TorchScript can compile it.

    The law itself is a point mass, which is always sure; so this is the entropy at temperature 1.
    """
    return entropy(torch.softmax(logits.float(), -1))
