"""What of a device's memory goes where: weights, keys and values, captured passes, and room for the largest pass."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.loader import LoadedModel

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


class OutOfMemory(CheckpointError):
    """A device has no room for something; the text says what it has, and what is free."""


class DeviceMemory(Protocol):
    """The memory of one device.

    Attributes:
        name: of the device.
        total: bytes it has; 0 where they are not ours to share out.
    """

    name: str
    total: int

    def free(self) -> int:
        """Bytes that nobody has taken, now."""

    def peak(self, run: Callable[[], Any]) -> int:
        """Bytes that a function takes while it runs, beside those that are taken before."""


class CudaMemory:
    """That of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = str(device)
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def free(self) -> int:
        """See `DeviceMemory`: what torch has set aside and does not use counts as free."""
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + idle

    def peak(self, run: Callable[[], Any]) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - before)


class HostMemory:
    """That of the host: shared with all else that runs there, so a setting says how much is ours."""

    name = "cpu"
    total = 0

    def free(self) -> int:
        """See `DeviceMemory`."""
        return 0

    def peak(self, run: Callable[[], Any]) -> int:
        """See `DeviceMemory`: not measured, and not run."""
        return 0


def memory_of(device: torch.device) -> DeviceMemory:
    """That of a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one model's service on a device.

    Attributes:
        weights: of the model.
        keys_and_values: the KV pool.
        graphs: passes of fixed sizes, with what they work in.
        workspace: what the largest pass works in; 0 where it is not measured.
    """

    weights: int
    keys_and_values: int
    graphs: int
    workspace: int

    def told(self, memory: DeviceMemory) -> dict[str, Any]:
        """The same in MiB, for the log, with what the device has and what is left."""
        parts = {
            "weights_mib": self.weights,
            "kv_mib": self.keys_and_values,
            "graphs_mib": self.graphs,
            "workspace_mib": self.workspace,
        }
        if memory.total:
            parts |= {"free_mib": memory.free(), "total_mib": memory.total}
        return {"device": memory.name, **{name: round(size / MIB) for name, size in parts.items()}}


@contextmanager
def telling(memory: DeviceMemory, what: str) -> Iterator[None]:
    """Turns what torch says when there is no room into one line with the numbers.

    Args:
        memory: of the device.
        what: that is being made room for.

    Raises:
        OutOfMemory: there is none.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory for {what}: {_numbers(memory)} ({_wanted(str(error))})") from error


def _numbers(memory: DeviceMemory) -> str:
    if not memory.total:
        return f"{memory.name} has no room"
    return f"{memory.name} has {memory.total / MIB:.0f} MiB, {memory.free() / MIB:.0f} of them free"


def _wanted(words: str) -> str:
    """Of torch's words, how much was tried."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", words)
    return f"{found[1]} more were wanted" if found else "no more is known"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says that there is no room: on a GPU by its type, on a CPU in words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
