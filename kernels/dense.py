"""Draft distributions over the whole vocabulary: dense probabilities, and the logits for the rule `sigmoid`.

Services send neither under the exact rules: `sparse` needs a thousandth of the bytes. Callers in the same process may
pass both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

EXCLUDED = -65504.0
"""The least finite 16-bit logit. In `DraftLogits` it marks a token that cannot be drafted."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseDistribution:
    """The distribution that the token was sampled from, over the whole vocabulary, unchanged.

    Attributes:
        probabilities: float32 `[V]`, sums to 1 up to rounding, on any device.
    """

    probabilities: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftLogits:
    """The draft's logits after temperature and filters, for the rule `sigmoid` [W 3.2.2].

    Attributes:
        values: float16 `[V]`, finite, on any device; `EXCLUDED` if the draft's filters exclude a token.
    """

    values: Tensor


@dataclass(frozen=True, slots=True)
class SigmoidScales:
    """The scales of the rule `sigmoid`: p̂ = 1 / (1 + exp(-(z - alpha) / (beta - alpha))) [W 3.2.2, Eq. 5].

    Raises:
        ValueError: a scale is not finite, or alpha is not below beta.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and math.isfinite(self.beta)):
            raise ValueError(f"alpha is {self.alpha} and beta is {self.beta}; both must be finite")
        if not self.alpha < self.beta:
            raise ValueError(f"alpha is {self.alpha} and beta is {self.beta}; alpha must be below beta")
