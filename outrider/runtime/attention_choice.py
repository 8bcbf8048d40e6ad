"""Which attention a model runs with on its device, and why: the fastest that gives what its definition says.

It knows what layers ask for and what this torch has, and nothing of pools' sizes or of passes.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from outrider.runtime.batch import Chunk
from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_pool import BLOCK_TOKENS, KVPool
from outrider.runtime.paged import PagedAttention, PagedBatch, lay_out, to_device
from outrider.runtime.paged_attention import GatheredAttention, TritonAttention, VarlenAttention, gather
from outrider.runtime.probe import AttentionLayer
from outrider.runtime.scores import Scoring, attend_scores
from outrider.runtime.selfcheck import Refusal, check, operation_tolerance

AUTO, SDPA, GATHERED = "auto", "sdpa", GatheredAttention.name
VARLEN, TRITON = VarlenAttention.name, TritonAttention.name

# Pages that some build of torch's kernel takes: any, or (FlashAttention 2) multiples of 256.
_PAGES = (BLOCK_TOKENS, 256)

_NEEDED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")

# What our kernel holds of a row at once.
_LARGEST_HEAD, _LARGEST_GROUP = 256, 64


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """How a model attends.

    Attributes:
        name: `varlen` (torch's kernel), `triton` (ours), `sdpa` (each sequence by itself, in one piece of memory) or
            `sdpa-paged` (the same, gathered).
        reason: why this one, in a few words, for the log.
        block_tokens: positions of a block of the KV pool.
        kernel: torch's function, of `varlen`.
        gives_key_starts: see `VarlenAttention`.
    """

    name: str
    reason: str
    block_tokens: int = BLOCK_TOKENS
    kernel: Any = None
    gives_key_starts: bool = False

    @property
    def is_paged(self) -> bool:
        """Whether the pool is to be paged."""
        return self.name != SDPA

    def can_be_captured(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold it: nothing in it may wait for the device. On a CPU anything over pages may."""
        return self.name in (VARLEN, TRITON) or (self.is_paged and device.type == "cpu")

    def build(self, max_length: int, dtype: torch.dtype, device: torch.device) -> PagedAttention:
        """The attention, for a paged pool of such sequences.

        Raises:
            ValueError: it is none for pages.
        """
        if not self.is_paged:
            raise ValueError(f"{self.name} reads no pages")
        if self.name == VARLEN:
            return VarlenAttention(self.kernel, gives_key_starts=self.gives_key_starts)
        return TritonAttention() if self.name == TRITON else GatheredAttention(max_length, dtype, device)


ORDINARY = AttentionChoice(SDPA, "what a CPU is fastest with")
"""What a model runs with where nothing is said."""


def choose_attention(
    asked: str, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, *, paged: bool = False
) -> AttentionChoice:
    """The attention of a model: the one asked for, or by `auto` the fastest there is.

    Args:
        asked: `auto`, or a name.
        layers: what the model's ask for.
        dtype: of keys and values.
        device: where they lie.
        paged: whether only one that reads pages will do.

    Raises:
        CheckpointError: the one asked for is not there, with the reason.
    """
    plain = GATHERED if paged else SDPA
    if asked == SDPA and paged:
        raise CheckpointError("--attention sdpa keeps a sequence in one piece, and here the pool must be paged")
    if asked in (SDPA, GATHERED):
        return AttentionChoice(asked, "as asked for")
    if asked == AUTO and device.type == "cpu":
        return AttentionChoice(plain, ORDINARY.reason if plain == SDPA else "the one of a CPU that reads pages")
    refusals: list[str] = []
    found: AttentionChoice | str = ""
    for name, choose in ((VARLEN, _varlen), (TRITON, _triton)):
        if asked in (AUTO, name):
            found = choose(layers, dtype, device)
            if isinstance(found, AttentionChoice):
                before = "".join(f"; no {refusal}" for refusal in refusals)
                return replace(found, reason=found.reason + before)
            refusals.append(f"{name}: {found}")
    if asked != AUTO:
        raise CheckpointError(f"--attention {asked} cannot run here: {found}")
    return AttentionChoice(plain, "; ".join(f"no {refusal}" for refusal in refusals))


def _varlen(layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> AttentionChoice | str:
    """The kernel of torch, tried on shapes like the model's; or why not."""
    why = _obstacle(layers, dtype, device)
    if why:
        return why
    try:
        kernel = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} does not have it"
    lacking = [name for name in _NEEDED if name not in inspect.signature(kernel).parameters]
    if lacking:
        return f"that of torch {torch.__version__} takes no {', '.join(lacking)}"
    refusal: str | None = ""
    for pages in _PAGES:
        for gives in (False, True):
            choice = AttentionChoice(
                VARLEN, f"torch {torch.__version__} has varlen_attn, in pages of {pages}", pages, kernel, gives
            )
            refusal = try_out(choice, layers, dtype, device)
            if not refusal:
                return choice
    return refusal or ""


def _triton(layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> AttentionChoice | str:
    """Our kernel, tried likewise; or why not."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    for i, layer in enumerate(layers):
        group = layer.heads // layer.kv_heads
        if layer.head_dim > _LARGEST_HEAD or group > _LARGEST_GROUP:
            most = f"{_LARGEST_HEAD} and {_LARGEST_GROUP}"
            return f"layer {i} has heads of {layer.head_dim}, {group} to a key head, and it takes {most} at most"
    choice = AttentionChoice(TRITON, "our kernel gives what attention spelled out does")
    refusal = try_out(choice, layers, dtype, device)
    return refusal or choice


def _obstacle(layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, and keys and values are {str(dtype).removeprefix('torch.')}"
    capped = [i for i, layer in enumerate(layers) if layer.softcap is not None]
    if capped:
        return f"it does not bound scores, as layer {capped[0]} asks"
    sunk = [i for i, layer in enumerate(layers) if layer.sinks]
    if sunk:
        return f"it has no sinks, as layer {sunk[0]} asks"
    return ""


# ----------------------------------------------------------------------------------------------------------- trials

# Passes: (positions held before, rows) of each sequence. Keys of one page, of several, and of many; single rows alone;
# and rows of a prompt.
_PASSES = (((0, 1), (40, 6), (700, 17), (1500, 1)), ((0, 1), (300, 1)), ((20, 150),))
_LENGTH = 1501


def try_out(
    choice: AttentionChoice, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> Refusal | None:
    """Why an attention cannot be used, or None where it gives what attention spelled out gives on random numbers.

    Args:
        choice: of the attention.
        layers: what a model's layers ask for; each kind is tried once.
        dtype: of keys and values.
        device: where they lie.
    """
    for layer in dict.fromkeys(layers):
        for spans in _PASSES:
            try:
                query, keys, values, batch, scoring = _pass(choice, layer, spans, dtype, device)
            except Exception as error:
                return Refusal(f"{type(error).__name__}: {error}")
            why = check(
                partial(_attended, query, keys, values, batch, scoring),
                partial(_spelled_out, query, keys, values, batch, scoring),
                operation_tolerance(dtype),
            )
            if why:
                return why
    return None


def _attended(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> dict[str, Tensor]:
    return {"rows": batch.attention.attend(query, keys, values, batch, scoring)}


def _spelled_out(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> dict[str, Tensor]:
    return {"rows": attend_scores(query, *gather(keys, values, batch), scoring)}


def _pass(
    choice: AttentionChoice,
    layer: AttentionLayer,
    spans: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, PagedBatch, Scoring]:
    """What attention is given: rows, pages of keys and of values, the pass, and how the layer scores."""
    blocks = sum(-(-(start + count) // choice.block_tokens) for start, count in spans) + 2
    pool = KVPool(
        1, layer.kv_heads, layer.head_dim,
        blocks=blocks, max_length=_LENGTH, dtype=dtype, device=device, block_tokens=choice.block_tokens, paged=True,
    )  # fmt: skip
    assert pool.pages is not None
    generator = torch.Generator().manual_seed(layer.head_dim)
    for store in (pool.pages.keys[0], pool.pages.values[0]):
        store.copy_(torch.randn(store.shape, generator=generator))
    pool.grow(pool.allocate(), 1)  # so that no sequence begins where the memory does
    chunks = []
    for start, count in reversed(spans):
        slot = pool.allocate()
        pool.grow(slot, start + count)
        pool.extend(slot, start)
        chunks.append(Chunk(slot, [0] * count, start, 0))
    rows = sum(count for _, count in spans)
    query = torch.randn(rows, layer.heads, layer.head_dim, generator=generator).to(device, dtype)
    sinks = torch.randn(layer.heads, generator=generator).to(device, dtype) if layer.sinks else None
    scoring = Scoring(layer.scaling, layer.window or 0, layer.softcap, sinks)
    attention = choice.build(_LENGTH, dtype, device)
    batch = to_device(lay_out(chunks, pool), pool.pages, attention, device, longest=_LENGTH)
    keys, values = pool.pages.keys[0], pool.pages.values[0]
    return query, keys, values, batch, scoring
