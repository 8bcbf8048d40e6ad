"""All layers of a Llama-like decoder in one call, over a KV cache by head: `cpu_decoder.c`.

torch runs some ten operations for a layer, and each costs as much time as the weights of a small layer. Here a pass
over a few rows takes about the time to read the weights. A decode loop is one call, too: `cpu_decode_loop.c` draws the
tokens between its passes.

Weights whose values are those of bfloat16 are kept in bfloat16, whatever the dtype of the model, so that a pass reads
half the bytes. Their products are in float32, and have the same bits. A model of dtype bfloat16 rounds the inputs
of products to bfloat16 where the processor has AVX512-BF16, whose dot product is faster still.

The sources are built three times with the package where there is a C compiler: for AVX512, for AVX2, and for any
processor with vectors of 128 bits, as those of ARM. Elsewhere `library` returns None.
"""

import ctypes
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu_decode_loop import (
    SAMPLE_NUMBERS,
    ChangesStruct,
    DrawStruct,
    LlamaStruct,
    LoopArrays,
    LoopStruct,
    ProposalStruct,
)
from kernels.sampling import Sample

PANEL = 32
"""Outputs of a panel, see `panels`."""
_VECTOR = 16  # sizes must be multiples of it
KEYS_TOGETHER = 16
"""Positions whose keys lie element by element (`place_of_key`); a block of the KV cache has a multiple of them."""
_LIBRARIES = ("kernels._cpu_avx512", "kernels._cpu_avx2", "kernels._cpu_any")
_FUNCTIONS = (
    "decoder_supported", "decoder_sizes", "decoder_scratch", "decoder_run", "decoder_loop_sizes", "decoder_loop",
    "decoder_loop_llama", "verify_sizes", "verify_proposals", "valid_supports",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16)
_F32, _BF16, _BF16_DOT = range(3)  # kinds of weights; a processor supports the first `decoder_supported`

_WEIGHTS = ("qkv", "output", "gate_up", "down")

_Pointer = ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("attention_norm", "mlp_norm", *_WEIGHTS)),
        *((f"{name}_bias", _Pointer) for name in _WEIGHTS),
        ("head_norm", _Pointer),
        ("scaling", ctypes.c_float),
        ("window", ctypes.c_int32),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab_size", "weights",
        )),
        ("eps", ctypes.c_float),
        *((name, _Pointer) for name in ("embedding", "norm", "head", "head_bias")),
        ("layer", ctypes.POINTER(_Layer)),
    ]  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "wanted", "threads", "block_tokens", "longest")),
        *((name, _Pointer) for name in ("tokens", "positions", "rotations", "memory")),
        ("places", ctypes.c_int64),
        ("logits", _Pointer),
        ("scratch", _Pointer),
    ]


@cache
def library() -> Any:
    """The fastest library for this processor; None where none was built, or for no such processor."""
    return next(filter(None, map(_loaded, _LIBRARIES)), None)


def _loaded(name: str) -> Any:
    """A library; None where it was not built, is of other sources, or the processor lacks its instructions."""
    found = importlib.util.find_spec(name)
    try:
        loaded = None if found is None or found.origin is None else ctypes.CDLL(found.origin)
    except OSError:
        return None
    if loaded is None or not all(hasattr(loaded, each) for each in _FUNCTIONS) or not loaded.decoder_supported():
        return None
    sizes = (ctypes.c_int32 * 10)()
    loaded.decoder_sizes(sizes)
    loaded.decoder_loop_sizes(ctypes.byref(sizes, 16))
    loaded.verify_sizes(ctypes.byref(sizes, 36))
    loop = DrawStruct, ctypes.c_int32 * SAMPLE_NUMBERS, LoopStruct, LlamaStruct, ChangesStruct
    structures = _Layer, _Model, _Pass, *loop, ProposalStruct
    if list(sizes) != [PANEL, *(ctypes.sizeof(each) for each in structures)]:
        return None
    loaded.decoder_scratch.restype = ctypes.c_int64
    return loaded


def can_run(dtype: torch.dtype, device: torch.device, *, hidden: int, head_dim: int) -> bool:
    """Whether `CPUDecoder` runs a model of these sizes here."""
    if device.type != "cpu" or hidden % _VECTOR or head_dim % _VECTOR:
        return False
    return dtype in _DTYPES and library() is not None


def weights_dtype(weights: Iterable[Tensor]) -> torch.dtype:
    """The dtype to keep the weights of a model in: bfloat16 if it has all their values."""
    return torch.bfloat16 if all(map(_has_bfloat16_values, weights)) else torch.float32


def _has_bfloat16_values(weight: Tensor) -> bool:
    if weight.dtype != torch.float32:
        return weight.dtype == torch.bfloat16
    return all(not bool((part.view(torch.int32) & 0xFFFF).any()) for part in weight.split(1024))


def panels(weight: Tensor) -> Tensor:
    """A weight `[out, in]` as the C code reads it: `[out / 32, in / t, 32, t]`, filled up with rows of zeros.

    t is 1 in float32, and 2 in bfloat16, as AVX512-BF16's dot product takes two neighbouring inputs of an output.
    """
    together = 4 // weight.itemsize
    filled = F.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return filled.unflatten(1, (-1, together)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def by_turns(gate_up: Tensor) -> Tensor:
    """Rows of gate and of up by turns, 32 of each: a weight or a bias `[2 · I, …]`, both filled up with zeros."""
    both = gate_up.unflatten(0, (2, -1))
    missing = -both.size(1) % PANEL
    filled = torch.cat((both, both.new_zeros(2, missing, *both.shape[2:])), 1)
    return filled.unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 2)


def filled_inputs(down: Tensor) -> Tensor:
    """A weight `[E, I]` with as many inputs as `by_turns` leaves of gate and of up."""
    return F.pad(down, (0, -down.size(1) % PANEL))


class Rows(NamedTuple):
    """The rows of a pass: of each of S sequences, one after the other.

    Attributes:
        tokens: int64 `[T]`.
        starts: `[S]`: the position of the first row of each sequence.
        counts: `[S]`: rows of each sequence, T in all.
        tables: `[S]`: the block table of each sequence.
        block_tokens: positions of a block.
        longest: positions of the longest sequence.
        rotations: e^(i · angle) of all positions, `[max_length, 1, D/2]`, complex64.
        memory: keys and values, `[layers, 2, kv_heads, places, head_dim]`, float32.
    """

    tokens: Tensor
    starts: Sequence[int]
    counts: Sequence[int]
    tables: Sequence[Sequence[int]]
    block_tokens: int
    longest: int
    rotations: Tensor
    memory: Tensor


class CPUDecoder:
    """A decoder. Only one thread may use it.

    Args:
        shared: an `outrider.runtime.fused_layers.SharedWeights`, its head as `panels`.
        layers: each an `outrider.runtime.fused_layers.LayerWeights`, its weights as `panels`, in one dtype:
            bfloat16 or float32.
    """

    def __init__(self, shared: Any, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self._library = library()
        self._vocab_size = shared.vocab_size
        self._kept: list[Tensor] = []  # the pointers point to these
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._model = _Model(
            layers=len(layers),
            hidden=shared.embedding.size(1),
            heads=shared.heads,
            kv_heads=shared.kv_heads,
            head_dim=shared.head_dim,
            mlp=layers[0].down.size(1) * layers[0].down.size(3),
            vocab_size=shared.vocab_size,
            weights=self._kind(shared.embedding.dtype, dtype),
            eps=shared.eps,
            embedding=self._keep(shared.embedding),
            norm=self._floats(shared.norm[0]),
            head=self._keep(shared.head),
            head_bias=self._bias(shared.head_bias),
            layer=self._layers,
        )

    @property
    def weight_bytes(self) -> int:
        return sum({each.data_ptr(): each.nbytes for each in self._kept}.values())

    def run(self, rows: Rows, wanted: Sequence[int]) -> Tensor:
        """Runs a pass; the keys and values of its rows are in memory afterwards.

        Args:
            wanted: `[R]`: the rows that need logits.

        Returns:
            Logits `[R, V]`, float32.

        Raises:
            ValueError: the memory is not float32.
        """
        logits = torch.empty(len(wanted), self._vocab_size, dtype=torch.float32)
        own, _numbers = self._pass(rows, wanted, logits)
        self._library.decoder_run(ctypes.byref(self._model), ctypes.byref(own))
        return logits

    def run_loop(self, rows: Rows, loop: LoopArrays) -> list[list[Sample]]:
        """Runs a pass, draws a token of each sequence, runs those tokens, and so on; the last one is not run.

        Args:
            rows: of the first pass; `tables` and `longest` are for all rows of the loop.

        Returns:
            The samples of each sequence.

        Raises:
            ValueError: the memory is not float32.
        """
        # Each pass of a draft writes its logits behind those of the pass before.
        logits = torch.empty(loop.rows_kept, self._vocab_size, dtype=torch.float32)
        own, _numbers = self._pass(rows, [end - 1 for end in accumulate(rows.counts)], logits)
        self._library.decoder_loop(ctypes.byref(self._model), ctypes.byref(own), ctypes.byref(loop.struct))
        return loop.samples(logits)

    def _pass(self, rows: Rows, wanted: Sequence[int], logits: Tensor) -> tuple[_Pass, np.ndarray]:
        """A pass, and numbers that it points to."""
        positions, first_blocks, blocks = list[int](), list[int](), list[int]()
        for start, count, table in zip(rows.starts, rows.counts, rows.tables, strict=True):
            positions += range(start, start + count)
            first_blocks += [len(blocks)] * count
            blocks += table
        if rows.memory.dtype != torch.float32:
            raise ValueError(f"the KV cache is {rows.memory.dtype}; the compiled decoder needs float32")
        numbers = np.array([*positions, *first_blocks, *wanted, *blocks], np.int32)  # in one array: 10 µs less
        own = _Pass(
            len(positions), len(wanted), torch.get_num_threads(), rows.block_tokens, rows.longest,
            rows.tokens.data_ptr(), numbers.ctypes.data, rows.rotations.data_ptr(), rows.memory.data_ptr(),
            rows.memory.size(3), logits.data_ptr(),
        )  # fmt: skip
        needed = self._library.decoder_scratch(ctypes.byref(self._model), ctypes.byref(own))
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        own.scratch = self._scratch.data_ptr()
        return own, numbers

    def _kind(self, weights: torch.dtype, dtype: torch.dtype) -> int:
        if weights == torch.float32:
            return _F32
        has_dot = self._library.decoder_supported() > _BF16_DOT
        return _BF16_DOT if dtype == torch.bfloat16 and has_dot else _BF16

    def _layer(self, layer: Any) -> _Layer:
        return _Layer(
            attention_norm=self._floats(layer.attention_norm[0]),
            mlp_norm=self._floats(layer.mlp_norm[0]),
            head_norm=self._floats(layer.head_norm),
            scaling=layer.scaling,
            window=layer.window,
            **{name: self._keep(getattr(layer, name)) for name in _WEIGHTS},
            **{f"{name}_bias": self._bias(getattr(layer, f"{name}_bias")) for name in _WEIGHTS},
        )

    def _bias(self, bias: Tensor | None) -> int | None:
        return None if bias is None else self._floats(F.pad(bias, (0, -len(bias) % PANEL)))

    def _floats(self, values: Tensor | None) -> int | None:
        return None if values is None else self._keep(values.float().contiguous())

    def _keep(self, values: Tensor) -> int:
        self._kept.append(values)
        return values.data_ptr()
