"""What runs the passes of a paged pool: layouts in, logits out. It knows programs and pages, and no slots."""

from typing import Protocol

import torch
from torch import Tensor

from outrider.lm.kv_memory import PagedMemory
from outrider.lm.paged import Layout, PagedAttention, to_device
from outrider.lm.program import Program


class Runner(Protocol):
    """Runs passes, one after the other, on one thread."""

    def run(self, layout: Layout) -> Tensor:
        """Writes keys and values of all rows, and returns logits of those that need them, `[R, V]`, in the order of the
        rows and the dtype of the model. Another run may write over them.
        """


class PagedRunner:
    """Runs each pass as it comes.

    Args:
        program: of the model.
        memory: of its keys and values.
        attention: that reads them.
        device: of all.
        dtype: of the logits.
        max_length: positions of a sequence at most. Passes are told of that length, and not of their own longest: what
            attends then shares work out alike in all of them, and is compiled once.
    """

    def __init__(
        self,
        program: Program,
        memory: PagedMemory,
        attention: PagedAttention,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
    ) -> None:
        self.program = program
        self.memory = memory
        self.attention = attention
        self.device = device
        self.dtype = dtype
        self.max_length = max_length

    @torch.inference_mode()
    def run(self, layout: Layout) -> Tensor:
        """See `Runner`."""
        batch = to_device(layout, self.memory, self.attention, self.device, longest=self.max_length)
        return self.program(batch.tokens, batch, None if len(layout.rows) == len(layout.tokens) else batch.rows)
