"""What a layer makes of its scores before the softmax. It knows nothing of keys, values or passes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one layer scores.

    Attributes:
        scaling: of the scores.
        window: how many positions a row sees, its own included; 0 is all.
        softcap: c, which bounds the scaled scores (`outrider.lm.scores`); None bounds nothing.
        sinks: `[heads]`: the score of each head's sink; None is none.
    """

    scaling: float
    window: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the softmax is over the scaled scores of the positions, and nothing else."""
        return self.softcap is None and self.sinks is None
