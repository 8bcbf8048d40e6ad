"""Tensor parallelism: one model over several processes (ranks), each with the keys and values of its own heads.

torchrun starts the ranks, or anything that sets its variables. Rank 0 serves: it alone has clients, an engine and the
books of the KV pool. Before each pass it broadcasts the layout over a gloo group, and all ranks run the pass together;
the others (workers) look at no logits. A rank that is gone ends all of them, see `Watch`.
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

from outrider.runtime.batch import Layout
from outrider.runtime.block_pool import PagedMemory
from outrider.runtime.cuda_graph import Runner
from outrider.runtime.device import work_on
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.model_runner import ModelRunner
from outrider.service.logs import flush_all
from outrider.service.settings import SettingsError

_log = structlog.get_logger()

FLAG = "--tensor-parallel-size"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

# How long ranks wait for each other at the start. torchrun, which starts them together, waits before that.
_JOIN = timedelta(minutes=5)
# A service may be idle for as long as it likes: whoever listens ends a wait that is in vain.
_NEVER = timedelta(days=365)
# How long a rank whose pass broke waits for the watch: it says more than a broken collective.
_HEARSAY_SECONDS = 2.0


def leave(code: int) -> NoReturn:
    """Ends the process without what Python and torch do at exit, which waits for ranks that may be gone."""
    flush_all()
    os._exit(code)


# ----------------------------------------------------------------------------------------------------------- the ranks


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands among those that run one model.

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

    def device(self, asked: str) -> torch.device:
        """The device of this rank: on CUDA the one of its number on its machine.

        Args:
            asked: `auto`, `cpu` or `cuda`, as settings have it.

        Raises:
            SettingsError: there is none, or another one was asked for than the ranks can have.
        """
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if asked not in ("auto", "cpu", "cuda"):
            raise SettingsError(f"--device {asked}: with {FLAG} {self.size} each rank takes a GPU of its own; say cuda")
        if asked == "cpu" and found:
            raise SettingsError(
                f"--device cpu: with {FLAG} {self.size} transformers takes the GPUs it sees, and it sees {found}; hide "
                "them with CUDA_VISIBLE_DEVICES="
            )
        if asked == "cuda" and not found:
            raise SettingsError("--device cuda: torch sees no CUDA device")
        if found and self.local_rank >= found:
            raise SettingsError(
                f"{FLAG} {self.size}: rank {self.rank} is number {self.local_rank} on its machine, where torch sees "
                f"{found} CUDA devices"
            )
        return torch.device("cuda", self.local_rank) if found else torch.device("cpu")


def read_ranks(size: int, program: str) -> Ranks | None:
    """Reads torchrun's variables; None where the model runs in one process.

    Args:
        size: how many ranks the settings ask for.
        program: the module to be started, for the error.

    Raises:
        SettingsError: torchrun started another number, or did not start this process; or a package is missing.
    """
    by_torchrun = all(name in os.environ for name in _VARIABLES)
    started = int(os.environ["WORLD_SIZE"]) if by_torchrun else 1
    if size != started:
        how = f"torchrun started {started} ranks" if by_torchrun else "torchrun did not start this process"
        wanted = max(size, started)
        raise SettingsError(
            f"{FLAG} is {size}, and {how}; for {wanted} ranks on one machine: torchrun --nproc-per-node {wanted} -m "
            f"{program} {FLAG} {wanted} ..."
        )
    if size == 1:
        return None
    if importlib.util.find_spec("accelerate") is None:
        raise SettingsError(
            f"{FLAG} {size}: transformers' tensor-parallel plan needs the package accelerate, which is not installed "
            "(pip install 'outrider[parallel]')"
        )
    # Where nobody says how many are on this machine, others may be on another one.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Ranks(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]), local_size)


def is_worker(size: int) -> bool:
    """Whether this process is a rank other than 0."""
    return size > 1 and int(os.environ.get("RANK", "0")) > 0


# ------------------------------------------------------------------------------------------------------- who is alive


class Watch:
    """Tells that a rank is gone, and lets a rank say why it ends.

    Rank 0 and each worker send each other a message twice a second over a gloo group of its own, from threads that no
    load, pass or capture holds up. A rank that dies closes its sockets, which is noticed at once; one that hangs or
    cannot be reached is noticed by its silence.

    Args:
        store: where the ranks find each other.
        ranks: of this process.
        silence: seconds without a message after which a rank is gone.
        on_lost: takes the reason, on a thread of the watch.
        on_end: called on such a thread when rank 0 ends in order.
    """

    _BEAT_SECONDS = 0.5
    _PARTING_SECONDS = 5.0
    _MESSAGE_BYTES = 1024
    # What a message begins with; one of zeros says that its sender is alive.
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
        # Not by `new_group`: that needs the main group, and a rank can be lost while that is made. The stubs of torch
        # do not have its `send` and `recv`.
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
        """Tells the others, within some seconds, that this rank ends, and why. None: in order; it then waits until they
        have ended, too.
        """
        self._farewell = self._farewell or (self._ENDS if reason is None else self._FAILS + reason.encode())
        self._ending.set()
        until = time.monotonic() + self._PARTING_SECONDS
        for peer, speaking in self._speaking.items():
            speaking.join(max(0.0, until - time.monotonic()))
            if reason is None:
                self._listening[peer].join(max(0.0, until - time.monotonic()))
                if self._listening[peer].is_alive():
                    _log.warning("a rank has not ended", rank=peer)

    def _start(self, work: Callable[[int], None], peer: int) -> threading.Thread:
        thread = threading.Thread(target=work, args=(peer,), name=f"rank-{peer}-{work.__name__}", daemon=True)
        thread.start()
        return thread

    def _speak(self, peer: int) -> None:
        with suppress(RuntimeError):  # whoever listens hears of it too
            while True:
                said = self._farewell
                message = bytearray(said[: self._MESSAGE_BYTES].ljust(self._MESSAGE_BYTES, b"\0"))
                self._group.send([torch.frombuffer(message, dtype=torch.uint8)], peer, 0).wait(_NEVER)
                if said:
                    return
                self._ending.wait(self._BEAT_SECONDS)

    def _listen(self, peer: int) -> None:
        message = torch.empty(self._MESSAGE_BYTES, dtype=torch.uint8)
        heard = b""
        while not heard:
            began = time.monotonic()
            try:
                self._group.recv([message], peer, 0).wait(timedelta(seconds=self._silence))
            except RuntimeError:
                is_silent = time.monotonic() - began >= self._silence
                how = f"has been silent for {self._silence:g} s" if is_silent else "closed its connection"
                return self._lose(f"rank {peer} has gone: it {how}")
            heard = message.numpy().tobytes().rstrip(b"\0")
        if heard.startswith(self._ENDS):
            return self._on_end()
        return self._lose(f"rank {peer} ends: {heard[1:].decode(errors='ignore')}")

    def _lose(self, reason: str) -> None:
        if not self._farewell:
            self._on_lost(reason)


# ------------------------------------------------------------------------------------------------------------ the model


class _Kind(IntEnum):
    """What rank 0 has the workers do."""

    PASS = 0
    COPY = 1


class TensorParallel:
    """The ranks of one model, for one of them.

    Args:
        ranks: of this process.
        timeout: seconds that a rank may be silent before it counts as gone.

    Attributes:
        ranks: see above.
        lost: done with the reason once no pass can ever run again.
    """

    def __init__(self, ranks: Ranks, *, timeout: float) -> None:
        self.ranks = ranks
        self.lost: Future[str] = Future()
        self.lost.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._timeout = timeout
        self._watch: Watch | None = None
        self._control: dist.ProcessGroup | None = None

    def join(self, device: torch.device) -> None:
        """Meets the other ranks, within five minutes. A worker calls it on its main thread, and takes no signals from
        then on.

        Raises:
            ModelLost: they do not come, or one of them is gone again.
        """
        is_cuda = device.type == "cuda"
        work_on(device)
        if self.ranks.local_size == self.ranks.size:  # gloo then listens where no other machine can reach it
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        try:
            store, _, _ = next(rendezvous("env://", timeout=_JOIN))
            self._watch = Watch(
                store, self.ranks, silence=self._timeout, on_lost=self._lose, on_end=self._end_with_rank_0
            )
            if self.ranks.rank > 0:
                # torchrun and a terminal signal all ranks: rank 0 drains, and needs the others until it has.
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
            raise ModelLost(self.broke("the ranks did not find each other", error)) from error

    def agree(self, blocks: int, facts: dict[str, Any]) -> int:
        """Checks that all ranks have the same facts; returns the blocks of the pool that every rank has room for.

        Raises:
            CheckpointError: a rank differs.
            ModelLost: a rank is gone.
        """
        told: list[Any] = [None] * self.ranks.size
        try:
            dist.all_gather_object(told, (blocks, facts), group=self._control)
        except RuntimeError as error:
            raise ModelLost(self.broke("the ranks cannot agree", error)) from error
        first = told[0][1]
        for rank, (_, theirs) in enumerate(told):
            for name, value in theirs.items():
                if value != first[name]:
                    raise CheckpointError(
                        f"the ranks differ in their {name}: {first[name]} on rank 0, {value} on rank {rank}"
                    )
        return min(room for room, _ in told)

    def command_workers(self, model_runner: ModelRunner) -> None:
        """On rank 0: from here on the workers run each pass of the model, and each copy of blocks, too."""
        assert model_runner.paged_runner is not None
        assert model_runner.pool.paged is not None
        model_runner.paged_runner = _AllRanksRunner(model_runner.paged_runner, self)
        model_runner.pool.paged.on_copy = self.tell_copy
        layer = model_runner.loaded.layers[0]
        _log.info(
            "tensor parallel",
            ranks=self.ranks.size,
            backend=dist.get_backend(),
            heads_per_rank=layer.heads,
            kv_heads_per_rank=layer.kv_heads,
        )

    def work(self, model_runner: ModelRunner) -> NoReturn:
        """On a worker: runs what rank 0 says, until the watch ends the process.

        Raises:
            ModelLost: a pass broke here.
        """
        assert model_runner.paged_runner is not None
        assert model_runner.pool.paged is not None
        try:
            while True:
                self._work_once(model_runner.paged_runner, model_runner.pool.paged)
        except Exception as error:
            raise ModelLost(self.broke("a pass broke", error)) from error

    def end(self, reason: str | None) -> None:
        """Tells the other ranks that this one ends, without which they cannot go on, and why; None: in order, with no
        pass under way.
        """
        if self._watch is not None:
            self._watch.end(reason)

    def broke(self, what: str, error: Exception) -> str:
        """Settles why a step that all ranks take part in broke here: another one is gone, or else `error`."""
        with suppress(TimeoutError):
            return self.lost.result(_HEARSAY_SECONDS)
        self._lose(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
        return self.lost.result()

    def tell_pass(self, layout: Layout) -> None:
        """On rank 0: has the workers run a pass.

        Raises:
            ModelLost: a rank is gone.
        """
        body = torch.empty(Layout.size(layout.shape), dtype=torch.uint8)
        layout.pack_into(body.numpy())
        self._tell([_Kind.PASS, *layout.shape], body)

    def tell_copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """On rank 0: has the workers copy blocks, see `PagedMemory.on_copy`.

        Raises:
            ModelLost: a rank is gone.
        """
        self._tell([_Kind.COPY, len(source), 0, 0, 0, 0], torch.tensor([[*source], [*target]]))

    def _tell(self, header: list[int], body: Tensor) -> None:
        try:
            dist.broadcast(torch.tensor(header), 0, group=self._control)
            dist.broadcast(body, 0, group=self._control)
        except RuntimeError as error:
            raise ModelLost(self.broke("the workers take no more messages", error)) from error

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
        body = torch.empty(Layout.size((T, R, S, P, W)), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self._control)
        runner.run(Layout.unpack((T, R, S, P, W), body.numpy().tobytes()))

    def _lose(self, reason: str) -> None:
        with suppress(InvalidStateError):  # the first reason counts: others follow from it
            self.lost.set_result(reason)

    def _end_with_rank_0(self) -> None:
        _log.info("stopped", rank=self.ranks.rank)  # this thread has no context
        leave(0)


class _AllRanksRunner:
    """Has the workers run each pass, and runs it with them."""

    def __init__(self, runner: Runner, parallel: TensorParallel) -> None:
        self._runner = runner
        self._parallel = parallel

    def run(self, layout: Layout) -> Tensor:
        """See `Runner`.

        Raises:
            ModelLost: the pass broke here, or a rank is gone. The ranks are no longer in step, and no pass can follow.
        """
        self._parallel.tell_pass(layout)
        try:
            return self._runner.run(layout)
        except Exception as error:
            raise ModelLost(self._parallel.broke("a pass broke on rank 0", error)) from error
