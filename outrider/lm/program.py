"""What runs a pass: a model as transformers wrote it, or a fused equivalent (`outrider.lm.fusion`).

It knows the layout of a pass, and nothing of slots or of who asks.
"""

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.sparse import SparseLaw
from outrider.lm.batch import PackedBatch
from outrider.lm.writing import Sampling

Rows = Tensor | int | None
"""Which rows of a pass need logits: their indices, the last n, or (None) all."""


class Program(Protocol):
    """Runs one pass."""

    def __call__(self, token_ids: Tensor, batch: PackedBatch, rows: Rows) -> Tensor:
        """Writes keys and values of all rows, and returns logits of some.

        Args:
            token_ids: `[T]`.
            batch: where each row belongs.
            rows: those that need logits.

        Returns:
            `[R, V]`, in the dtype of the model.
        """


@runtime_checkable
class WritingProgram(Program, Protocol):
    """One that can also write several tokens of one sequence in one call."""

    def write(
        self, token_ids: Tensor, batch: PackedBatch, sampling: Sampling
    ) -> tuple[list[int], list[SparseLaw | None]]:
        """Runs `token_ids` `[T]`, draws a token, runs that, and so on; the last token drawn is not run.

        Args:
            token_ids: what is to be run before the first token can be drawn.
            batch: one chunk, of all T + γ - 1 rows that will be run.
            sampling: how the γ tokens are drawn.

        Returns:
            The tokens and the law of each, None at temperature 0. A token of -1 says that the logits were no numbers,
            one of -2 that its law is above its bound; either is the last.
        """


class TransformersProgram:
    """A transformers model, run through its own forward with our attention inside.

    Args:
        model: a causal language model whose attention is `outrider.lm.attention.NAME`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, token_ids: Tensor, batch: PackedBatch, rows: Rows) -> Tensor:
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
