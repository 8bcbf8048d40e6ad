"""Operations that a CUDA graph cannot hold, noticed where there is no GPU.

Under `OnlyCapturable` an operation that copies between host and device, or whose result's shape depends on values, is
an error. `tolist` and `numpy` bypass torch's dispatcher and so this check, but fail on tensors of the device `meta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_FROM_THE_HOST = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}
_BY_INDEX = ("index_put", "index_put_", "_index_put_impl_")


class NotCapturable(Exception):
    """An operation that a CUDA graph cannot hold."""


class OnlyCapturable(TorchDispatchMode):
    """Lets only operations through that may be captured, and notes their names.

    With `in_place` it also refuses those that allocate memory.
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
        has_mask = name in _BY_INDEX and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if _SYNCS & set(func.tags) or func in _FROM_THE_HOST or has_mask:
            raise NotCapturable(name)
        result = func(*args, **(kwargs or {}))
        made = [each for each in (result if isinstance(result, list | tuple) else [result]) if _is_tensor(each)]
        device = next((each.device for each in (*args, *made) if _is_tensor(each)), None)
        if any(each.device != device for each in made):
            raise NotCapturable(f"{name} copies from one device to another")
        if self.in_place and not (func.is_view or name.endswith("_")):
            raise NotCapturable(f"{name} allocates memory")
        self.seen.append(name)
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
