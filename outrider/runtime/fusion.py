"""Replaces a model's forward by an equivalent with fewer operations, where one is known, and holds it to the original.

A decoder of a known family becomes a program of its own (`outrider.runtime.fused_decoder`); in any other model single
modules are replaced: root-mean-square norms that prove to be just that, and linear layers that can be packed. It knows
nothing of requests, nor of how checkpoints are read.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, has_fused_decoder
from outrider.runtime.linear import PackedModule, can_pack, is_plain
from outrider.runtime.loader import LoadedModel
from outrider.runtime.norm import RMSNormModule
from outrider.runtime.program import Program, TransformersProgram
from outrider.runtime.selfcheck import check_program, logits_tolerance

_NORM_TOLERANCE = 1e-5


def fuse_model(loaded: LoadedModel) -> Program:
    """The fused program of a model, made at the first call.

    The weights move into it, so the model's own forward, and with it the unfused program, is lost. Layers that are
    quantised stay as they are.

    Raises:
        CheckpointError: it fails, or gives other logits than the model did: a bug; `fuse=False` runs the model without.
    """
    if loaded.fused is None:
        model = loaded.model
        with torch.inference_mode():
            if has_fused_decoder(model, loaded.layers):
                loaded.fused = FusedDecoder(model, loaded.layers)
            else:
                _replace_modules(model, _called_modules(loaded), loaded.dtype)
                loaded.fused = TransformersProgram(model)
        allowed = logits_tolerance(loaded.dtype, quantised=loaded.quantisation is not None)
        why = check_program(loaded.fused, loaded.layers, loaded.reference, loaded.dtype, loaded.device, allowed)
        if why:
            raise CheckpointError(
                f"the fused forward of {type(model).__name__} gives other logits than its own: {why}; run it unfused"
            ) from why.cause
    return loaded.fused


def _called_modules(loaded: LoadedModel) -> set[nn.Module]:
    """The linear layers that a pass calls. Some models multiply by a layer's weight themselves, past its forward."""
    called: set[nn.Module] = set()
    linear = [module for module in loaded.model.modules() if is_plain(module, nn.Linear, Conv1D)]
    hooks = [module.register_forward_hook(lambda module, args, out: called.add(module)) for module in linear]
    try:
        told = loaded.layers, loaded.reference, loaded.dtype, loaded.device
        check_program(TransformersProgram(loaded.model), *told, float("inf"))
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _replace_modules(model: nn.Module, called: set[nn.Module], dtype: torch.dtype) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _equivalent(child, called, dtype)
            if replacement is not None:
                setattr(parent, name, replacement)


def _equivalent(module: nn.Module, called: set[nn.Module], dtype: torch.dtype) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype != dtype:
        return None  # a norm that is kept in float32 casts its result in a way of its own
    if module in called and is_plain(module, nn.Linear, Conv1D):
        if not can_pack(weight.dtype, weight.device):
            return None
        rows: Any = weight if type(module) is nn.Linear else weight.t()  # Conv1D holds [in, out]
        bias: Any = module.bias
        return PackedModule(rows, bias)
    if type(module).__name__.endswith("RMSNorm") and is_plain(module, type(module)):
        return _equivalent_norm(module, weight)
    return None


def _equivalent_norm(module: nn.Module, weight: Tensor) -> nn.Module | None:
    """A norm that gives the same on random input, in float32; None where neither w nor 1 + w does."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight.dim() != 1 or not isinstance(eps, float) or len(list(module.parameters())) != 1:
        return None
    original = copy.deepcopy(module).float()
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    for scale in (weight.detach(), 1.0 + weight.detach().float()):
        found = RMSNormModule(scale.float(), eps)(x)
        if torch.allclose(found, original(x), rtol=_NORM_TOLERANCE, atol=_NORM_TOLERANCE):
            return RMSNormModule(scale.to(weight.dtype), eps)
    return None
