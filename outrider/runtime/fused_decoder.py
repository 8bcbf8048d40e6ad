"""Replaces the forward pass of a model by an equivalent one with fewer operations, and checks it against transformers.

`FusedDecoder` runs Llama, Mistral, Qwen2 and Qwen3: one product for queries, keys and values, one for gate and up, and
residual sums inside products. The rotary embedding is one complex product, so the weights are reordered: the elements
of each rotated pair (i, i + D/2) become neighbours. The decoders of T5, Whisper, BART and Marian have a fused form of
their own (`outrider.runtime.fused_encoder_decoder`). In other models, and in encoders, single modules are replaced: RMS
norms, if a test shows that they are RMS norms, and linear layers that can be packed.
"""

import copy
import ctypes
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.pytorch_utils import Conv1D

from kernels import cpu_decoder as cpu
from outrider.runtime.attention import AttentionLayer, Batch, Program, TransformersProgram, WantedRows
from outrider.runtime.batch import PackedBatch, PagedBatch
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_encoder_decoder import FusedCrossDecoder, has_fused_cross_decoder
from outrider.runtime.fused_layers import (
    FusedLayers,
    LayerWeights,
    PackedModule,
    RMSNormModule,
    SharedWeights,
    can_pack,
    compiled,
    doubled,
    is_plain,
    merge,
    pack,
)
from outrider.runtime.layer_ops import LayerOps, choose_layer_ops
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import kv_dtype
from outrider.runtime.selfcheck import check_program, logits_tolerance

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it

_NORM_TOLERANCE = 1e-5


def fuse_model(loaded: LoadedModel, *, paged: bool = False) -> Program:
    """The fused program of a model, built at the first call.

    The weights move into it, so the model's own forward no longer works. Quantised layers are not changed.

    Args:
        paged: whether it must run over a paged KV cache.

    Raises:
        CheckpointError: it fails, or its logits differ from those of transformers. This is a bug; `fuse=False` runs the
            model unfused.
        ValueError: it was fused for a KV cache that is not paged.
    """
    if loaded.fused is None:
        model = loaded.model
        with torch.inference_mode():
            if has_fused_decoder(model, loaded.layers):
                loaded.fused = fused = FusedDecoder(model, loaded.layers, paged=paged)
                if fused.cpu_decoder is not None:  # it may keep two bytes of a weight's four
                    loaded.weight_bytes = fused.cpu_decoder.weight_bytes
            else:
                program = loaded.encoder or TransformersProgram(model)
                called = _called_modules(loaded, program)
                if loaded.encoder is not None and has_fused_cross_decoder(model, loaded.dtype):
                    loaded.encoder.decoder = FusedCrossDecoder(model)
                _replace_modules(model, called, loaded.dtype)
                loaded.fused = program
        allowed = logits_tolerance(loaded.dtype, quantised=loaded.quantisation is not None)
        why = check_program(loaded.fused, loaded.layers, loaded.reference, kv_dtype(loaded), loaded.device, allowed)
        if why:
            raise CheckpointError(
                f"{type(model).__name__} gives other logits when fused than in transformers: {why}; this is a bug: "
                "please report it"
            ) from why.cause
    if paged and isinstance(loaded.fused, FusedDecoder) and loaded.fused.cpu_decoder is not None:
        raise ValueError(f"{loaded.name} was fused for a KV cache by head; for a paged one load it again")
    return loaded.fused


def _called_modules(loaded: LoadedModel, program: Program) -> set[nn.Module]:
    """The linear layers whose `forward` is called. Some models use the weight of a layer without calling it."""
    called: set[nn.Module] = set()
    linear = [module for module in loaded.model.modules() if is_plain(module, nn.Linear, Conv1D)]
    hooks = [module.register_forward_hook(lambda module, args, out: called.add(module)) for module in linear]
    try:
        check_program(program, loaded.layers, loaded.reference, loaded.dtype, loaded.device, float("inf"))
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _replace_modules(model: nn.Module, called: set[nn.Module], dtype: torch.dtype) -> None:
    replacements: dict[nn.Module, nn.Module] = {}  # a module may have several parents, or several names in one
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            replacement = replacements.get(child) or _equivalent(child, called, dtype)
            if replacement is not None:
                replacements[child] = replacement
                setattr(parent, name, replacement)
                if isinstance(replacement, PackedModule):  # it has a copy of the weight
                    child.register_parameter("weight", None)


def _equivalent(module: nn.Module, called: set[nn.Module], dtype: torch.dtype) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype != dtype:
        return None  # for example a norm in float32, which casts its result in its own way
    if module in called and is_plain(module, nn.Linear, Conv1D):
        if not can_pack(weight.dtype, weight.device):
            return None
        rows: Any = weight if type(module) is nn.Linear else weight.t()  # Conv1D holds [in, out]
        bias: Any = module.bias
        return PackedModule(rows, bias)
    if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")) and is_plain(module, type(module)):
        return _equivalent_norm(module, weight)
    return None


def _equivalent_norm(module: nn.Module, weight: Tensor) -> nn.Module | None:
    """An RMS norm with the same result on random input, in float32, with weight w or 1 + w; None if neither agrees, or
    if 1 + w has no exact value in the dtype of w.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight.dim() != 1 or not isinstance(eps, float) or len(list(module.parameters())) != 1:
        return None
    original = copy.deepcopy(module).float()
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
    for scale in (weight.detach(), 1.0 + weight.detach().float()):
        found = RMSNormModule(scale.float(), eps)(x)
        if torch.allclose(found, original(x), rtol=_NORM_TOLERANCE, atol=_NORM_TOLERANCE):
            rounded = scale.to(weight.dtype)
            return RMSNormModule(rounded, eps) if torch.equal(rounded.float(), scale.float()) else None
    return None


FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

# Kinds of rotary embedding whose angles depend on the position only.
_FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})

_FIRST_POSITIONS = 2048

_WEIGHTS = ("qkv", "output", "gate_up", "down")


def has_fused_decoder(model: Any, layers: Sequence[AttentionLayer]) -> bool:
    """Whether `FusedDecoder` supports a model, by its class, its configuration and its weights."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(model) in FAMILIES
        and config.hidden_act in ("silu", "swish")
        and rope.get("rope_type", "default") in _FIXED_ROTARY
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in layers}) == 1
        and all(layer.softcap is None and not layer.sinks for layer in layers)
        and layers[0].head_dim % 2 == 0
        and _has_plain_weights(model)
    )


def _has_plain_weights(model: Any) -> bool:
    """Whether embedding and linear layers have plain weights of one dtype, not quantised ones."""
    embedding = model.model.embed_tokens
    linear = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linear += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return is_plain(embedding, nn.Embedding) and all(
        is_plain(module, nn.Linear) and module.weight.dtype == embedding.weight.dtype for module in linear
    )


class FusedDecoder:
    """A program (`outrider.runtime.attention`) equal to the model's own forward up to rounding.

    Rotary positions are computed in float32 with any dtype, and on a CPU attention is, too. The weights of the model
    move into the program, so its own forward no longer works.

    Args:
        model: `has_fused_decoder` must be true for it.
        paged: whether it must run over a paged KV cache, which the decoder in C cannot.

    Attributes:
        cpu_decoder: the decoder in C, or None: torch runs the layers.
    """

    def __init__(self, model: Any, layers: Sequence[AttentionLayer], *, paged: bool = False) -> None:
        base, first = model.model, layers[0]
        embedding: Tensor = base.embed_tokens.weight.detach()
        self._device = embedding.device
        sizes = {"hidden": embedding.size(1), "head_dim": first.head_dim}
        self._runs_c = not paged and cpu.can_run(embedding.dtype, embedding.device, **sizes)
        self._packed = not self._runs_c and can_pack(embedding.dtype, embedding.device)
        self._group = first.heads // first.kv_heads
        self._half = first.head_dim // 2
        self._rotary = base.rotary_emb
        self._rotation_tables = [self._make_rotations(_FIRST_POSITIONS)]
        dtype = self._weights_dtype = embedding.dtype
        if self._runs_c:
            self._weights_dtype = cpu.weights_dtype(each for each in model.parameters() if each.dim() > 1)
            embedding = embedding.to(self._weights_dtype)
            base.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)  # no second one in float32
        weights = [self._pack(self._take(module, layer)) for module, layer in zip(base.layers, layers, strict=True)]
        vocab_size = model.lm_head.weight.shape[0]
        head, head_bias = merge(model.lm_head)
        head = head.to(self._weights_dtype)
        head = cpu.panels(head) if self._runs_c else pack(head) if self._packed else head
        shared = SharedWeights(
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            eps=base.norm.variance_epsilon,
            packed=self._packed,
            embedding=embedding,
            norm=doubled(base.norm.weight),
            head=head,
            head_bias=head_bias,
            vocab_size=vocab_size,
        )
        use_huge_pages([head, *(getattr(own, name) for own in weights for name in _WEIGHTS)])
        self.cpu_decoder: cpu.CPUDecoder | None = None
        if self._runs_c:
            self.cpu_decoder = cpu.CPUDecoder(shared, weights, dtype)
            return
        self._layers = FusedLayers(shared, weights)
        self._run: Callable[..., Tensor] = compiled(self._layers, self._device)
        self._chosen: dict[torch.dtype, LayerOps] = {}

    def __call__(self, token_ids: Tensor, batch: Batch, rows: WantedRows) -> Tensor:
        if isinstance(batch, PagedBatch):
            if isinstance(rows, int):
                rows = torch.arange(len(token_ids) - rows, len(token_ids), device=self._device)
            ops = self.choose_layers(batch.memory.keys[0].dtype)
            return ops.run(batch, self._rotations_to(batch.max_length), rows)
        if self.cpu_decoder is not None:
            wanted = rows.tolist() if isinstance(rows, Tensor) else range(batch.rows - (rows or batch.rows), batch.rows)
            ends = list(map(operator.add, batch.starts, batch.counts))
            return self.cpu_decoder.run(self.rows_in_c(token_ids, batch, ends), wanted)
        masks = [batch.causal_masks(self._group, window) for window in self._layers.windows]
        last, chosen = (batch.rows, rows) if rows is None or isinstance(rows, Tensor) else (rows, None)
        rotations = self._rotations_to(max(map(operator.add, batch.starts, batch.counts)))
        positions, slots = batch.position_ids(self._device), batch.slot_mapping
        return self._run(
            token_ids, rotations, positions, slots, batch.store, batch.block_tokens, batch.counts, batch.locations,
            masks, last, chosen,
        )  # fmt: skip

    def rows_in_c(self, token_ids: Tensor, batch: PackedBatch, ends: Sequence[int]) -> cpu.Rows:
        """The rows of a batch for the decoder in C, with the blocks of each sequence up to its end."""
        longest = max(ends)
        return cpu.Rows(
            token_ids,
            batch.starts,
            batch.counts,
            [batch.pool.blocks_to(*each)[0] for each in zip(batch.slots, ends, strict=True)],
            batch.block_tokens,
            longest,
            self._rotations_to(longest),
            batch.store,
        )

    def choose_layers(self, dtype: torch.dtype) -> LayerOps:
        """The operations of its layers over a paged KV cache of a dtype, chosen at the first call."""
        if dtype not in self._chosen:
            self._chosen[dtype] = choose_layer_ops(self._layers, dtype)
        return self._chosen[dtype]

    # ------------------------------------------------------------------------------------------------------- positions

    def _rotations_to(self, length: int) -> Tensor:
        """e^(i · angle) of at least `length` positions, `[length, 1, D/2]`.

        Shorter tables are kept: a CUDA graph may read them.
        """
        if length > len(self._rotation_tables[-1]):
            self._rotation_tables.append(self._make_rotations(max(length, 2 * len(self._rotation_tables[-1]))))
        return self._rotation_tables[-1]

    def _make_rotations(self, length: int) -> Tensor:
        probe = torch.zeros(1, device=self._device)  # the angles get its dtype
        cos, sin = self._rotary(probe, position_ids=torch.arange(length, device=self._device).unsqueeze(0))
        return torch.complex(cos[0, :, : self._half], sin[0, :, : self._half]).unsqueeze(1)

    # --------------------------------------------------------------------------------------------------------- weights

    def _take(self, module: Any, layer: AttentionLayer) -> LayerWeights:
        attention, mlp = module.self_attn, module.mlp
        pairs = torch.arange(layer.head_dim).view(2, -1).t().reshape(-1)  # 0, D/2, 1, D/2 + 1, …
        head_norm = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight] * layer.heads + [attention.k_norm.weight] * layer.kv_heads
            head_norm = torch.stack([norm.detach().float()[pairs.to(norm.device)] for norm in norms]).unsqueeze(1)
        linear = {
            "qkv": merge(attention.q_proj, attention.k_proj, attention.v_proj, order=(pairs, pairs, None)),
            "output": merge(attention.o_proj),
            "gate_up": merge(mlp.gate_proj, mlp.up_proj),
            "down": merge(mlp.down_proj),
        }
        weights: dict[str, Any] = {name: each.weight.to(self._weights_dtype) for name, each in linear.items()}
        biases: dict[str, Any] = {f"{name}_bias": each.bias for name, each in linear.items()}
        return LayerWeights(
            attention_norm=doubled(module.input_layernorm.weight),
            head_norm=head_norm,
            mlp_norm=doubled(module.post_attention_layernorm.weight),
            scaling=layer.scaling,
            window=layer.window or 0,
            **weights,
            **biases,
        )

    def _pack(self, layer: LayerWeights) -> LayerWeights:
        """The layer with its weights in the layout of its products."""
        if self._runs_c:
            bias = layer.gate_up_bias
            return replace(
                layer,
                qkv=cpu.panels(layer.qkv),
                output=cpu.panels(layer.output),
                gate_up=cpu.panels(cpu.by_turns(layer.gate_up)),
                gate_up_bias=None if bias is None else cpu.by_turns(bias),
                down=cpu.panels(cpu.filled_inputs(layer.down)),
            )
        if self._packed:
            packed: dict[str, Any] = {name: pack(getattr(layer, name)) for name in _WEIGHTS}
            return replace(layer, **packed)
        return layer


def use_huge_pages(weights: Iterable[Tensor]) -> int:
    """Moves the memory of weights on a CPU into huge pages where the system can. Returns how many pages it moved.

    A pass over one token reads all weights once, at the speed of memory. With pages of 4 KiB the processor also looks
    up a quarter of a million pages for each gigabyte.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages: dict[int, None] = {}
    for weight in weights:
        if weight.device.type == "cpu":
            first, size = _place(weight)
            pages |= dict.fromkeys(range(first // _HUGE_PAGE, (first + size - 1) // _HUGE_PAGE + 1))
    return sum(madvise(page * _HUGE_PAGE, _HUGE_PAGE, _MADV_COLLAPSE) == 0 for page in pages)


def _place(weight: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor, packed or not."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)
    return weight.data_ptr(), weight.untyped_storage().nbytes()
