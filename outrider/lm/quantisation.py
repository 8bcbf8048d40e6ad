"""What a checkpoint says of how its weights are quantised, and what that changes in loading it.

transformers does the quantised arithmetic itself, by the checkpoint's own `quantization_config`. This module knows
configurations and loaded modules, and nothing of passes.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import is_accelerate_available

from outrider.lm.errors import CheckpointError
from outrider.lm.linear import is_changed, is_plain_tensor

# Where modules come from that hold plain numbers; quantised ones come from elsewhere.
_ORDINARY = ("torch.nn.", "transformers.models.", "transformers.pytorch_utils", "transformers_modules.")


def quantisation_method(config: Any, name: str) -> str | None:
    """The method a checkpoint's weights are quantised by; None where they are not.

    Args:
        config: of the checkpoint.
        name: what to call it in an error.

    Raises:
        CheckpointError: transformers does not know the method. It would load the weights as if they were plain ones.
    """
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    said = said if isinstance(said, dict) else said.to_dict()
    method = said.get("quant_method")
    method = getattr(method, "value", method)
    for bits in ("4bit", "8bit"):
        if said.get(f"load_in_{bits}"):
            method = f"bitsandbytes_{bits}"
    if method is None:
        raise CheckpointError(f"the quantization_config of '{name}' names no quant_method")
    if method not in AUTO_QUANTIZER_MAPPING:
        known = ", ".join(sorted(AUTO_QUANTIZER_MAPPING))
        raise CheckpointError(
            f"the weights of '{name}' are quantised by '{method}', which this transformers does not know (it knows "
            f"{known})"
        )
    return str(method)


def placement(device: torch.device) -> dict[str, Any]:
    """How quantised weights are to be loaded: on a GPU at once, as some methods choose their kernels while loading."""
    return {"device_map": {"": device}} if device.type == "cuda" and is_accelerate_available() else {}


def settle_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts what is not quantised, or was dequantised while loading, to the dtype asked for.

    transformers casts all that it loads, but not from a quantised checkpoint: there, embedding, norms and head stay as
    they were stored. Scales of quantised layers are left alone, and so is what the model keeps in float32.
    """
    kept: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not type(module).__module__.startswith(_ORDINARY) or is_changed(module):
            continue
        if not all(is_plain_tensor(parameter) for parameter in own.values()):
            continue
        for key, parameter in own.items():
            if not any(part in f"{name}.{key}" for part in kept):
                parameter.data = parameter.data.to(dtype)
