"""Records what a device is asked to do, so that it can be asked again in one call.

On CUDA a record is a graph: the host then launches one thing in place of hundreds, and never holds a pass up. Elsewhere
it is the function itself. Either way what is recorded reads and writes the same tensors each time, so what differs from
run to run must be written there before. It knows nothing of what is recorded.
"""

from collections.abc import Callable
from typing import Protocol

import torch

# The first runs make what later ones keep: workspaces, compiled kernels, plans of products.
_WARM_UPS = 2


class Recorder(Protocol):
    """Records on one device."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it some times, and returns what runs it again.

        Raises:
            CannotRecord: the device cannot hold it; the text says why.
        """

    @property
    def bytes(self) -> int:
        """Memory that the records hold."""


class CannotRecord(RuntimeError):
    """What was to be recorded asks for something that a record cannot hold."""


class Repeating:
    """Repeats by calling again: where there are no graphs."""

    bytes = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`."""
        run()
        return run


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: they never run at once.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """See `Recorder`: what the device has lost since the first record."""
        return self._bytes

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        mode = torch.cuda.get_sync_debug_mode()
        current = torch.cuda.current_stream(self._device)
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
                torch.cuda.set_sync_debug_mode("error")  # what waits for the device says so here, in plain words
                run()
                torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._pool = torch.cuda.graph_pool_handle()  # what a broken capture leaves in the other is not known
            words = (str(error).splitlines() or [""])[0]
            raise CannotRecord(f"{type(error).__name__}: {words}") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self._bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay


def recorder_for(device: torch.device) -> Recorder:
    """What records on a device."""
    return CudaRecorder(device) if device.type == "cuda" else Repeating()
