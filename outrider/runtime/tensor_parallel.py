"""Tensor parallelism: one model over several processes (ranks), each with the keys and values of its own heads.

torchrun starts the ranks, or any launcher that sets its variables. Only rank 0 has clients, an engine and the block
tables of the KV pool. Before each step it broadcasts the batch over a gloo group, and all ranks run the step together;
the other ranks (workers) ignore the logits. When one rank is lost, all end, see `Watch`.
"""

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from outrider.rpc.tls import SettingsError
from outrider.runtime.batch import HostBatch, layout
from outrider.runtime.block_pool import PagedMemory
from outrider.runtime.cuda_graph import Runner
from outrider.runtime.device import work_on
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.model_runner import ModelRunner

_log = structlog.get_logger()

FLAG = "--tensor-parallel-size"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# How long ranks wait for each other at the start.
_JOIN = timedelta(minutes=5)
# A service may be idle without limit. The watch ends the wait for a lost rank.
_NEVER = timedelta(days=365)
# How long a rank whose step failed waits for the watch, whose reason is clearer than that of a failed collective.
_REASON_SECONDS = 2.0


# ----------------------------------------------------------------------------------------------------------- the ranks


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among those that run one model.

    Attributes:
        rank: of this process, from 0.
        size: how many ranks there are.
        local_rank: of this process on its machine.
        local_size: how many ranks are on its machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def device(self, requested: str) -> torch.device:
        """Return the device of this rank; with CUDA, GPU `local_rank` of its machine.

        Args:
            requested: `auto`, `cpu` or `cuda`, from the settings.

        Raises:
            SettingsError: there is no such device, or ranks cannot use it.
        """
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if requested not in ("auto", "cpu", "cuda"):
            raise SettingsError(
                f"--device is {requested}; with {FLAG} {self.size} each rank takes its own GPU: use --device cuda"
            )
        if requested == "cpu" and found:
            raise SettingsError(
                f"--device is cpu; with {FLAG} {self.size} transformers uses every visible GPU, and {found} are "
                "visible: hide them with CUDA_VISIBLE_DEVICES="
            )
        if requested == "cuda" and not found:
            raise SettingsError(
                "--device is cuda; torch finds no CUDA device: use --device cpu, or a build of torch for CUDA"
            )
        if found and self.local_rank >= found:
            raise SettingsError(
                f"{FLAG} is {self.size}; rank {self.rank} needs GPU {self.local_rank} of its machine, and torch finds "
                f"{found} there, numbered from 0: start fewer ranks on this machine"
            )
        return torch.device("cuda", self.local_rank) if found else torch.device("cpu")


def read_ranks(size: int, program: str) -> Ranks | None:
    """Reads torchrun's variables. Returns None if the model runs in one process.

    Args:
        size: ranks, from the settings.
        program: the module to start, for the error message.

    Raises:
        SettingsError: torchrun started another number of ranks, or none; or a package is missing.
    """
    by_torchrun = all(name in os.environ for name in _VARIABLES)
    started = int(os.environ["WORLD_SIZE"]) if by_torchrun else 1
    if size != started:
        how = f"torchrun started {started} ranks" if by_torchrun else "torchrun did not start this process"
        wanted = max(size, started)
        raise SettingsError(
            f"{FLAG} is {size}, but {how}; for {wanted} ranks on one machine run: torchrun --nproc-per-node {wanted} "
            f"-m {program} {FLAG} {wanted} ..."
        )
    if size == 1:
        return None
    if importlib.util.find_spec("accelerate") is None:
        raise SettingsError(
            f"{FLAG} is {size}; tensor parallelism in transformers needs the package accelerate, which is not "
            "installed (pip install -e '.[parallel]' in a clone of Outrider)"
        )
    # Without LOCAL_WORLD_SIZE the other ranks may be on other machines.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Ranks(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]), local_size)


def is_worker(size: int) -> bool:
    """Whether this process is a rank other than 0."""
    return size > 1 and int(os.environ.get("RANK", "0")) > 0


# ---------------------------------------------------------------------------------------------------- loss of ranks


class Watch:
    """Detects lost ranks, and sends the reason when a rank ends.

    Rank 0 and each worker exchange a heartbeat twice a second over a separate gloo group, on separate threads: loading,
    steps and captures do not delay them. A rank that dies closes its sockets, and is detected at once; one that hangs
    or is unreachable is detected by its silence.

    Args:
        silence: seconds without a heartbeat after which a rank counts as lost.
        on_lost: receives the reason, on a thread of the watch.
        on_end: called on a thread of the watch when rank 0 shuts down in order.
    """

    _BEAT_SECONDS = 0.5
    _PARTING_SECONDS = 5.0
    _MESSAGE_BYTES = 1024
    # The first byte of a message. A message of zeros is a heartbeat.
    _ENDS, _FAILS = b"\1", b"\2"

    def __init__(
        self,
        store: dist.Store,
        ranks: Ranks,
        *,
        silence: float,
        on_lost: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        # Not `new_group`: that needs the main group, and a rank can be lost while that is created. torch's stubs lack
        # `send` and `recv`.
        own_store = dist.PrefixStore("outrider/watch", store)
        self._group: Any = dist.ProcessGroupGloo(own_store, ranks.rank, ranks.size, _JOIN)
        self._silence = silence
        self._on_lost = on_lost
        self._on_end = on_end
        self._farewell = b""
        self._ending = threading.Event()
        peers = range(1, ranks.size) if ranks.rank == 0 else [0]
        self._listening = {peer: self._start(self._listen, peer) for peer in peers}
        self._speaking = {peer: self._start(self._speak, peer) for peer in peers}

    def end(self, reason: str | None) -> None:
        """Sends the other ranks that this one ends, and why; takes some seconds at most.

        A `reason` of None is an orderly shutdown: it then waits until the others have ended, too.
        """
        self._farewell = self._farewell or (self._ENDS if reason is None else self._FAILS + reason.encode())
        self._ending.set()
        until = time.monotonic() + self._PARTING_SECONDS
        for peer, speaking in self._speaking.items():
            speaking.join(max(0.0, until - time.monotonic()))
            if reason is None:
                self._listening[peer].join(max(0.0, until - time.monotonic()))
                if self._listening[peer].is_alive():
                    _log.warning("rank did not end in time", rank=peer, seconds=self._PARTING_SECONDS)

    def _start(self, work: Callable[[int], None], peer: int) -> threading.Thread:
        thread = threading.Thread(target=work, args=(peer,), name=f"rank-{peer}-{work.__name__}", daemon=True)
        thread.start()
        return thread

    def _speak(self, peer: int) -> None:
        with suppress(RuntimeError):  # the listening thread reports a lost peer
            while True:
                farewell = self._farewell
                message = bytearray(farewell[: self._MESSAGE_BYTES].ljust(self._MESSAGE_BYTES, b"\0"))
                self._group.send([torch.frombuffer(message, dtype=torch.uint8)], peer, 0).wait(_NEVER)
                if farewell:
                    return
                self._ending.wait(self._BEAT_SECONDS)

    def _listen(self, peer: int) -> None:
        message = torch.empty(self._MESSAGE_BYTES, dtype=torch.uint8)
        received = b""
        while not received:
            began = time.monotonic()
            try:
                self._group.recv([message], peer, 0).wait(timedelta(seconds=self._silence))
            except RuntimeError:
                is_silent = time.monotonic() - began >= self._silence
                how = f"sent nothing for {self._silence:g} s" if is_silent else "closed its connection"
                return self._lose(f"rank {peer} is lost: it {how}")
            received = message.numpy().tobytes().rstrip(b"\0")
        if received.startswith(self._ENDS):
            return self._on_end()
        return self._lose(f"rank {peer} ended: {received[1:].decode(errors='ignore')}")

    def _lose(self, reason: str) -> None:
        if not self._farewell:
            self._on_lost(reason)


# ------------------------------------------------------------------------------------------------------------ the model


class _Kind(IntEnum):
    """The commands of rank 0 to the workers."""

    STEP = 0
    COPY = 1


class TensorParallel:
    """The tensor-parallel group, from the view of one rank.

    Args:
        timeout: seconds without a heartbeat after which a rank counts as lost.
        on_end: of a worker: ends its process, on a thread of the watch, when rank 0 shuts down in order.

    Attributes:
        lost: completes with the reason when no step can run again.
    """

    def __init__(self, ranks: Ranks, *, timeout: float, on_end: Callable[[], object] = lambda: None) -> None:
        self.ranks = ranks
        self.lost: Future[str] = Future()
        self.lost.set_running_or_notify_cancel()  # so that no waiter can cancel it
        self._timeout = timeout
        self._on_end = on_end
        self._watch: Watch | None = None
        self._control: dist.ProcessGroup | None = None

    def join(self, device: torch.device) -> None:
        """Joins the other ranks, within five minutes. A worker calls it on its main thread, and ignores SIGTERM and
        SIGINT from then on.

        Raises:
            ModelLost: a rank did not join, or is lost.
        """
        is_cuda = device.type == "cuda"
        work_on(device)
        if self.ranks.local_size == self.ranks.size:  # gloo then listens on the loopback interface only
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        try:
            store, _, _ = next(rendezvous("env://", timeout=_JOIN))
            self._watch = Watch(
                store, self.ranks, silence=self._timeout, on_lost=self._lose, on_end=self._end_with_rank_0
            )
            if self.ranks.rank > 0:
                # torchrun and terminals signal all ranks. Rank 0 drains, and needs the workers until then.
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=dist.PrefixStore("outrider/group", store),
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                device_id=device if is_cuda else None,
            )
            self._control = dist.new_group(backend="gloo", timeout=_NEVER)
        except (OSError, RuntimeError) as error:
            raise ModelLost(self.failure_reason("the ranks could not join", error)) from error

    def agree(self, blocks: int, facts: dict[str, Any]) -> int:
        """Checks that all ranks have the same `facts`. Returns the smallest `blocks` of all ranks.

        Raises:
            CheckpointError: a rank differs.
            ModelLost: a rank is lost.
        """
        gathered: list[Any] = [None] * self.ranks.size
        try:
            dist.all_gather_object(gathered, (blocks, facts), group=self._control)
        except RuntimeError as error:
            raise ModelLost(self.failure_reason("the ranks could not compare their settings", error)) from error
        first = gathered[0][1]
        for rank, (_, theirs) in enumerate(gathered):
            for name, value in theirs.items():
                if value != first[name]:
                    raise CheckpointError(
                        f"{name} differs between ranks: {first[name]} on rank 0, {value} on rank {rank}; start all "
                        "ranks with the same model and settings"
                    )
        return min(count for count, _ in gathered)

    def command_workers(self, model_runner: ModelRunner) -> None:
        """On rank 0: from here on the workers repeat each step and each copy of blocks."""
        assert model_runner.paged_runner is not None
        assert model_runner.pool.paged is not None
        model_runner.paged_runner = _AllRanksRunner(model_runner.paged_runner, self)
        model_runner.pool.paged.on_copy = self.send_copy
        layer = model_runner.loaded.layers[0]
        _log.info(
            "tensor parallel",
            ranks=self.ranks.size,
            backend=dist.get_backend(),
            heads_per_rank=layer.heads,
            kv_heads_per_rank=layer.kv_heads,
        )

    def work(self, model_runner: ModelRunner) -> NoReturn:
        """On a worker: runs the commands of rank 0 until the watch ends the process.

        Raises:
            ModelLost: a step failed here.
        """
        assert model_runner.paged_runner is not None
        assert model_runner.pool.paged is not None
        try:
            while True:
                self._work_once(model_runner.paged_runner, model_runner.pool.paged)
        except Exception as error:
            raise ModelLost(self.failure_reason("a step failed", error)) from error

    def end(self, reason: str | None) -> None:
        """Sends the other ranks that this one ends, which ends them too. A `reason` of None is an orderly shutdown,
        with no step under way.
        """
        if self._watch is not None:
            self._watch.end(reason)

    def failure_reason(self, failed: str, error: Exception) -> str:
        """Returns why an operation of all ranks failed: the reason of the watch if another rank is lost, else `error`.

        `failed` describes the operation.
        """
        with suppress(TimeoutError):
            return self.lost.result(_REASON_SECONDS)
        self._lose(f"{failed}: {type(error).__name__}: {' '.join(str(error).split())}")
        return self.lost.result()

    def send_step(self, host_batch: HostBatch) -> None:
        """On rank 0: has the workers run a batch."""
        self._send([_Kind.STEP, *host_batch.shape], host_batch.packed())

    def send_copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """On rank 0: has the workers copy blocks, see `PagedMemory.on_copy`."""
        self._send([_Kind.COPY, len(source), 0, 0, 0, 0], torch.tensor([[*source], [*target]]))

    def _send(self, header: list[int], body: Tensor) -> None:
        try:
            dist.broadcast(torch.tensor(header), 0, group=self._control)
            dist.broadcast(body, 0, group=self._control)
        except RuntimeError as error:
            raise ModelLost(self.failure_reason("the workers cannot be reached", error)) from error

    def _work_once(self, runner: Runner, memory: PagedMemory) -> None:
        header = torch.empty(6, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._control)
        kind, *numbers = header.tolist()
        if kind == _Kind.COPY:
            blocks = torch.empty((2, numbers[0]), dtype=torch.int64)
            dist.broadcast(blocks, 0, group=self._control)
            memory.copy(*blocks.tolist())
            return
        T, R, S, P, W = numbers
        body = layout((T, R, S, P, W)).buffer(torch.device("cpu"))
        dist.broadcast(body, 0, group=self._control)
        runner.run(HostBatch.view((T, R, S, P, W), body))

    def _lose(self, reason: str) -> None:
        with suppress(InvalidStateError):  # the first reason counts: others follow from it
            self.lost.set_result(reason)

    def _end_with_rank_0(self) -> None:
        _log.info("stopped", rank=self.ranks.rank)  # this thread has no context
        self._on_end()


class _AllRanksRunner:
    """A `Runner` that has the workers run each batch, and runs it with them."""

    def __init__(self, runner: Runner, parallel: TensorParallel) -> None:
        self._runner = runner
        self._parallel = parallel

    def run(self, host_batch: HostBatch) -> Tensor:
        """See `Runner`.

        Raises:
            ModelLost: the step failed here, or a rank is lost. The ranks are out of sync, and no step can follow.
        """
        self._parallel.send_step(host_batch)
        try:
            return self._runner.run(host_batch)
        except Exception as error:
            raise ModelLost(self._parallel.failure_reason("a step failed on rank 0", error)) from error
