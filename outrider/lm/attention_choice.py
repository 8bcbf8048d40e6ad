"""Which attention a model runs with on its device, and why: the fastest that gives what its definition says.

It knows what layers ask for and what this torch has, and nothing of pools' sizes or of passes.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from outrider.lm.attention_trial import try_out as try_attention
from outrider.lm.errors import CheckpointError
from outrider.lm.kv_pool import BLOCK_TOKENS
from outrider.lm.paged import PagedAttention
from outrider.lm.paged_attention import GatheredAttention, TritonAttention, VarlenAttention
from outrider.lm.probe import AttentionLayer

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

    def can_be_recorded(self, device: torch.device) -> bool:
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
    return f"tried, {refusal}" if refusal else choice


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
    """Why an attention cannot be used, or nothing; see `outrider.lm.attention_trial`."""
    return try_attention(
        lambda length: choice.build(length, dtype, device), layers, dtype, device, block_tokens=choice.block_tokens
    )
