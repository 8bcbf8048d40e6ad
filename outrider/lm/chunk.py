"""What one sequence adds to a pass. It knows nothing of passes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        slot: a sequence of the pool.
        tokens: at least one.
        start: the position of the first; must equal the pool's length of the slot.
        logits_from: index within the chunk from which on logits are wanted; `len(tokens)` is none.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    logits_from: int
