"""What runs a pass: a model as transformers wrote it, or a fused equivalent (`outrider.runtime.fusion`).

It knows the layout of a pass, and nothing of slots or of who asks.
"""

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.runtime.batch import PackedBatch
from outrider.runtime.layer_ops import LayerOps
from outrider.runtime.paged import PagedBatch

Batch = PackedBatch | PagedBatch
"""A pass, its keys and values in one piece for each sequence, or in pages."""

Rows = Tensor | int | None
"""Which rows of a pass need logits: their indices, the last n, or (None) all."""


class Program(Protocol):
    """Runs one pass."""

    def __call__(self, token_ids: Tensor, batch: Batch, rows: Rows) -> Tensor:
        """Writes keys and values of all rows, and returns logits of some.

        Args:
            token_ids: `[T]`.
            batch: where each row belongs.
            rows: those that need logits.

        Returns:
            `[R, V]`, in the dtype of the model.
        """


@runtime_checkable
class PagedProgram(Program, Protocol):
    """One whose layers over pages run as operations of its choice."""

    def choose_layers(self, dtype: torch.dtype) -> LayerOps:
        """Chooses for pages of a dtype, at the first call, and says what was chosen: passes over them run as that."""


class TransformersProgram:
    """A transformers model, run through its own forward with our attention inside.

    Args:
        model: a causal language model whose attention is `outrider.runtime.attention.NAME`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, token_ids: Tensor, batch: Batch, rows: Rows) -> Tensor:
        inputs = {
            "input_ids": token_ids.unsqueeze(0),
            "position_ids": batch.position_ids(token_ids.device).unsqueeze(0),
            "use_cache": False,
            "packed_batch": batch,
        }
        if rows is None:
            return self._logits(inputs)
        if self._takes_rows:
            inputs["logits_to_keep"] = rows
            return self._logits(inputs)
        # An older forward, without the choice of rows. Whether head(base(x)) is all there is to its logits was held
        # against its own when it was loaded.
        hidden = self._model.base_model(**inputs).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        return _tensor(head(hidden.narrow(0, len(hidden) - rows, rows) if isinstance(rows, int) else hidden[rows]))

    def _logits(self, inputs: dict[str, Any]) -> Tensor:
        return _tensor(self._model(**inputs).logits[0])


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the model returned {type(value).__name__} where a tensor belongs")
    return value
