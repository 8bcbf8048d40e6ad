"""The approximate rule of [W 3.2.2], labelled lossy: σ of scaled logits in place of softmax, on the host.

    p̂ = σ((z - α) / (β - α)) of the target's logits after the temperature, 0 where its filters exclude a token;
    q̂ = the same of the draft's logits, temperature and filters already applied.

Neither is normalised: they do not sum to 1. The text does not follow the target's distribution;
docs/explanation/lossy-rules.md has the measured distances. p̂ and q̂ are so close that float32 loses their difference,
so this module computes in float64. With fewer bits use p̂ - q̂ = p̂ · (1 - q̂) · -expm1((v - z) / (β - α)).

The reference is tests/kernels/reference.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn import functional

from kernels.sampling import SamplingParams, kept

EXCLUDED = -65504.0
"""The least finite 16-bit logit. In `DraftLogits` it marks a token that cannot be drafted."""

_LARGEST = 65504.0
_LEAST_KEPT = -65472.0  # the neighbour of EXCLUDED


@dataclass(frozen=True, slots=True, eq=False)
class DraftLogits:
    """The draft's logits after temperature and filters.

    Attributes:
        values: float16 `[V]`, finite, on any device; `EXCLUDED` if the draft's filters exclude a token.
    """

    values: Tensor


@dataclass(frozen=True, slots=True)
class SigmoidScales:
    """The scales α and β [W 3.2.2, Eq. 5].

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


def draft_logits(z: Tensor, params: SamplingParams, vocab_size: int | None = None) -> list[DraftLogits]:
    """Return the draft's logits of each row of `z` `[B, V]`: z / temperature, filters applied, float16, on the host.

    Logits outside the range of float16 are clamped. `vocab_size` is the target's: ids from V on are `EXCLUDED`. The
    result of a bad row (`sampling.bad_rows`) has no meaning.

    Raises:
        ValueError: the temperature is 0.
    """
    if params.is_greedy:
        raise ValueError("temperature is 0; draft logits need a temperature above 0")
    v = (z.double() / params.temperature).clamp(_LEAST_KEPT, _LARGEST).half()
    v = v.masked_fill(~kept(z, params) | (z == -math.inf), EXCLUDED)
    missing = 0 if vocab_size is None else vocab_size - v.shape[1]
    return [DraftLogits(row) for row in functional.pad(v, (0, missing), value=EXCLUDED).cpu()]


class Scores:
    """p̂ and q̂ of one proposal above temperature 0, computed on demand."""

    def __init__(self, z: Tensor, params: SamplingParams, drafts: Sequence[DraftLogits], scales: SigmoidScales) -> None:
        """Keep the target's adjusted logits `z` `[n, V]` of the first n positions, and the draft's logits there."""
        self._z = z
        self._temperature = params.temperature
        self._kept = None if params.has_no_filters else kept(z, params)
        self._drafts = drafts
        self._alpha, self._width = scales.alpha, scales.beta - scales.alpha

    def at(self, i: int, token: int) -> tuple[float, float]:
        """Return p̂ and q̂ of the drafted token at index `i`; 0 outside the vocabulary."""
        if not 0 <= token < self._z.shape[1]:
            return 0.0, 0.0
        z, v = float(self._z[i, token]), float(self._drafts[i].values[token])
        p = _sigmoid((z / self._temperature - self._alpha) / self._width)
        if self._kept is not None and not self._kept[i, token]:
            p = 0.0
        return p, 0.0 if v == EXCLUDED else _sigmoid((v - self._alpha) / self._width)

    def rows(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return p̂ and q̂ of every token at index `i`, float64 `[V]` each."""
        p = self._sigmoids(self._z[i].double() / self._temperature)
        if self._kept is not None:
            p.masked_fill_(~self._kept[i], 0.0)
        v = self._drafts[i].values.cpu()
        return p.numpy(), self._sigmoids(v.double()).masked_fill_(v == EXCLUDED, 0.0).numpy()

    def _sigmoids(self, z: Tensor) -> Tensor:
        return z.sub(self._alpha).div_(self._width).sigmoid_()


def _sigmoid(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    e = math.exp(x)
    return e / (1 + e)
