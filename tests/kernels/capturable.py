"""Operations that a CUDA graph cannot hold, noticed where there is no GPU.

Under `OnlyCapturable` an operation that reads a value back to the host, that brings one from it, or whose result has a
shape that depends on what its arguments hold, is an error. It sees what goes through torch's dispatcher: what reads a
CPU tensor's memory (`tolist`, `numpy`) is seen by giving it tensors without any, of the device `meta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_FROM_THE_HOST = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}
_BY_INDEX = ("index_put", "index_put_", "_index_put_impl_")


class NotCapturable(Exception):
    """An operation that a CUDA graph cannot hold."""


class OnlyCapturable(TorchDispatchMode):
    """Lets operations through that may be captured, and notes their names.

    With `in_place` it lets none through that makes a tensor of its own memory.
    """

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse, or note and go on."""
        name = func._schema.name.removeprefix("aten::")
        if _WAITING & set(func.tags) or func in _FROM_THE_HOST or (name in _BY_INDEX and _has_mask(args[1])):
            raise NotCapturable(name)
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        if any(isinstance(each, torch.Tensor) and each.device != _device(args, each) for each in made):
            raise NotCapturable(f"{name} copies from one device to another")
        if self.in_place and not (func.is_view or name.endswith("_")):
            raise NotCapturable(f"{name} takes memory")
        self.seen.append(name)
        return result


def _device(args: Sequence[Any], result: torch.Tensor) -> torch.device:
    """Return the device of the first tensor among `args`; that of the result where there is none."""
    return next((each.device for each in args if isinstance(each, torch.Tensor)), result.device)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
