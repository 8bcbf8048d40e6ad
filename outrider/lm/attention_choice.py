"""Which attention a model runs with on its device, and why: the fastest that gives what torch's ordinary one does.

It knows what layers ask for and what this torch has, and nothing of pools' sizes or of passes.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from outrider.lm.chunk import Chunk
from outrider.lm.errors import CheckpointError
from outrider.lm.kv_pool import BLOCK_TOKENS, KVPool
from outrider.lm.paged import PagedAttention, lay_out, to_device
from outrider.lm.paged_attention import GatheredAttention, VarlenAttention
from outrider.lm.probe import AttentionLayer

AUTO, SDPA, GATHERED, VARLEN = "auto", "sdpa", GatheredAttention.name, VarlenAttention.name

# Pages that some build of torch's kernel takes: any, or (FlashAttention 2) multiples of 256.
_PAGES = (BLOCK_TOKENS, 256)

_NEEDED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")

# What is tried: (positions held before, rows) of each sequence, so that keys take one page, several, and many.
_TRIED = ((0, 1), (40, 6), (700, 17), (1500, 1))
_CLOSE = 0.03  # of values about 1; a step of rounding in bfloat16 is 2^-8


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """How a model attends.

    Attributes:
        name: `varlen`, `sdpa` (each sequence by itself, in one piece of memory) or `sdpa-paged` (the same, gathered).
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

    def can_be_recorded(self, device: torch.device) -> bool:
        """Whether a record of `outrider.lm.recording` can hold it: one of a GPU takes nothing that asks for numbers."""
        return self.name == VARLEN or (self.is_paged and device.type == "cpu")

    def build(self, max_length: int, dtype: torch.dtype, device: torch.device) -> PagedAttention:
        """The attention, for a paged pool of such sequences.

        Raises:
            ValueError: it is none for pages.
        """
        if not self.is_paged:
            raise ValueError(f"{self.name} reads no pages")
        if self.name == VARLEN:
            return VarlenAttention(self.kernel, gives_key_starts=self.gives_key_starts)
        return GatheredAttention(max_length, dtype, device)


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
    if asked not in (AUTO, VARLEN):
        return AttentionChoice(asked, "as asked for")
    if asked == AUTO and device.type == "cpu":
        return AttentionChoice(plain, ORDINARY.reason if plain == SDPA else "the one of a CPU that reads pages")
    found = _varlen(layers, dtype, device)
    if isinstance(found, AttentionChoice):
        return found
    if asked == VARLEN:
        raise CheckpointError(f"--attention varlen cannot run here: {found}")
    return AttentionChoice(plain, f"no varlen_attn: {found}")


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
    refusal = ""
    for pages in _PAGES:
        for gives in (False, True):
            choice = AttentionChoice(
                VARLEN, f"torch {torch.__version__} has varlen_attn, in pages of {pages}", pages, kernel, gives
            )
            refusal = try_out(choice, layers, dtype, device)
            if not refusal:
                return choice
    return f"tried, {refusal}"


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


def try_out(choice: AttentionChoice, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device) -> str:
    """Why an attention cannot be used, or nothing: held to gathered attention on each kind of layer there is."""
    length = max(start + count for start, count in _TRIED)
    for layer in dict.fromkeys(layers):
        pool = KVPool(
            1, layer.kv_heads, layer.head_dim,
            blocks=sum(-(-(start + count) // choice.block_tokens) for start, count in _TRIED) + 2,
            max_length=length, dtype=dtype, device=device, block_tokens=choice.block_tokens, paged=True,
        )  # fmt: skip
        assert pool.pages is not None
        generator = torch.Generator().manual_seed(layer.head_dim)
        for store in (pool.pages.keys[0], pool.pages.values[0]):
            store.copy_(torch.randn(store.shape, generator=generator))
        pool.grow(pool.allocate(), 1)  # so that no sequence begins where the memory does
        chunks = []
        for start, count in reversed(_TRIED):
            slot = pool.allocate()
            pool.grow(slot, start + count)
            pool.extend(slot, start)
            chunks.append(Chunk(slot, [0] * count, start, 0))
        query = torch.randn(sum(count for _, count in _TRIED), layer.heads, layer.head_dim, generator=generator)
        found: list[Tensor] = []
        for attention in (choice.build(length, dtype, device), GatheredAttention(length, dtype, device)):
            batch = to_device(lay_out(chunks, pool), pool.pages, attention, device)
            told = pool.pages.keys[0], pool.pages.values[0], batch, layer.scaling, layer.window or 0
            try:
                found.append(attention.attend(query.to(device, dtype), *told).float().cpu())
            except Exception as error:
                words = (str(error).splitlines() or [""])[0]
                return f"{type(error).__name__}: {words}"
        distance = float((found[0] - found[1]).abs().max())
        if not distance <= _CLOSE:
            return f"it differs by {distance:.2g} from torch's ordinary attention, {_CLOSE} allowed"
    return ""
