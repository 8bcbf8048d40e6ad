"""How many blocks of keys and values a model's pool gets. It knows bytes, and nothing of settings or sequences."""

import torch

from outrider.lm.checkpoint import LoadedModel
from outrider.lm.kv_pool import BLOCK_TOKENS

MIB = 1 << 20


def kv_dtype(loaded: LoadedModel) -> torch.dtype:
    """What keys and values are kept in: on a CPU float32, as torch's attention reads 16-bit ones far slower there."""
    return torch.float32 if loaded.device.type == "cpu" else loaded.dtype


def block_bytes(loaded: LoadedModel, block_tokens: int = BLOCK_TOKENS) -> int:
    """Bytes of one block: keys and values of all layers."""
    numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in loaded.layers)
    return numbers * block_tokens * kv_dtype(loaded).itemsize


def blocks_for(positions: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that so many positions of one sequence take."""
    return -(-positions // block_tokens)
