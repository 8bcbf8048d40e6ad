"""How a device's memory is shared: weights, KV cache, CUDA graphs, and the workspace of the largest batch."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.loader import LoadedModel

MIB = 1 << 20


def kv_dtype(loaded: LoadedModel) -> torch.dtype:
    """The dtype of the KV cache: float32 on a CPU, where torch's attention reads 16-bit values far slower."""
    if loaded.kv_dtype is not None:
        return loaded.kv_dtype
    return torch.float32 if loaded.device.type == "cpu" else loaded.dtype


def block_bytes(loaded: LoadedModel) -> int:
    """Bytes of one block, keys and values of all layers."""
    numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in loaded.layers)
    return numbers * BLOCK_TOKENS * kv_dtype(loaded).itemsize


def blocks_for(positions: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks for `positions` of one sequence."""
    return -(-positions // block_tokens)


def sequence_blocks(loaded: LoadedModel, positions: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks for a sequence of `positions`, and for the longest input of its encoder if it has one."""
    encoder = 0 if loaded.encoder is None else loaded.encoder.info.max_length
    return blocks_for(positions, block_tokens) + blocks_for(encoder, block_tokens)


class OutOfMemory(CheckpointError):
    """A device is out of memory; the message has its total and free memory."""


class DeviceMemory:
    """The memory of one device; as it is, of the host. Other programs share that, so nothing is measured, and
    `--kv-cache-mb` sets the size of the KV cache.

    Attributes:
        name: of the device.
        total: bytes it has; 0 for a host.
    """

    name = "cpu"
    total = 0

    def free(self) -> int:
        """Free bytes; 0 for a host."""
        return 0

    def peak(self, run: Callable[[], Any]) -> int:
        """Peak bytes that `run` allocates, beyond those allocated before; 0 for a host, where it is not called."""
        return 0


class CudaMemory(DeviceMemory):
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = str(device)
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def free(self) -> int:
        """Memory that torch has reserved but not allocated counts as free."""
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + idle

    def peak(self, run: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - before)


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory()


@contextmanager
def explain_out_of_memory(memory: DeviceMemory, purpose: str) -> Iterator[None]:
    """Turns torch's out-of-memory errors into one line with the numbers.

    Args:
        purpose: of the allocation, for the message; perhaps with advice.

    Raises:
        OutOfMemory: torch is out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory for {purpose}: {_numbers(memory)} ({_wanted(str(error))})") from error


def _numbers(memory: DeviceMemory) -> str:
    if not memory.total:
        return f"{memory.name} has no memory left"
    return f"{memory.name} has {memory.total / MIB:.0f} MiB, {memory.free() / MIB:.0f} of them free"


def _wanted(words: str) -> str:
    """How much torch tried to allocate, from its message."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", words)
    return f"{found[1]} more are needed" if found else "torch does not say how many more are needed"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch means out of memory: on a GPU by its type, on a CPU by its message."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
