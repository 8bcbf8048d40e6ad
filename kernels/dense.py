"""What a draft may say of a token over the whole vocabulary: a dense law, or the logits that the rule `sigmoid` takes.

Services send neither under the exact rules, since `sparse` says the same in a thousandth of the bytes; callers in the
same process may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

EXCLUDED = -65504.0
"""The least finite 16-bit logit: in `DraftLogits` it says that a token could not be drafted."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseDistribution:
    """A law over the whole vocabulary, which the token was sampled from as it stands here.

    Attributes:
        probabilities: float32 `[V]`, of sum 1 up to rounding, on any device.
    """

    probabilities: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftLogits:
    """The draft's logits after temperature and filters, for the rule `sigmoid` [W 3.2.2].

    Attributes:
        values: float16 `[V]`, finite, on any device; `EXCLUDED` where the draft's filters leave no chance.
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
            raise ValueError(f"alpha is {self.alpha} and beta is {self.beta}; alpha must be the smaller")
