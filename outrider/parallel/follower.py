"""A rank that follows: it runs what rank 0 tells it, over its own heads, until rank 0 says that all is over or is gone.

It has no clients, no engine and no books of the KV pool, and looks at no logits.
"""

import contextlib
import json
import os
import queue
import signal
import socket
from concurrent.futures import Future
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist

from outrider.loading import sequence_tokens
from outrider.parallel.ending import fail, leave
from outrider.parallel.line import Line, LineBroken
from outrider.parallel.messages import Greeting, Kind, unpack_copy, unpack_pass
from outrider.parallel.ranks import Ranks, read_ranks
from outrider.parallel.settings import ParallelSettings
from outrider.parallel.sharded import build_sharded, load_share
from outrider.parallel.team import JOIN_SECONDS, LEAD_KEY, Team
from outrider.runtime.cuda_graph import Runner
from outrider.runtime.device import check_environment
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.kv_memory import PagedMemory
from outrider.settings import SettingsError
from outrider.telemetry import configure_logging

_log = structlog.get_logger()


class Follower(Team):
    """The team, for a rank that follows. The process ends, from whatever it does, as soon as rank 0 says so or is gone:
    it holds nothing that would have to be saved, and may be waiting for rank 0 in a pass.

    Args:
        ranks: which one this is.
        silence: see `Team`.
        program: what the process is called in the one line that an operator looks for.
    """

    def __init__(self, ranks: Ranks, *, silence: float, program: str) -> None:
        super().__init__(ranks, silence=silence)
        self._program = program
        self._told: Future[bytes] = Future()
        self._orders: queue.SimpleQueue[tuple[Kind, bytes]] = queue.SimpleQueue()
        self._line: Line | None = None

    def exchange(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._line is not None
        try:
            self._line.send(Kind.FACTS, json.dumps(facts).encode())
        except LineBroken as error:
            raise ModelLost(self.broke("rank 0 takes no more messages", error)) from error
        told: list[dict[str, Any]] = json.loads(self._told.result())
        return told

    def abandon(self, reason: str) -> None:
        if self._line is not None:
            with contextlib.suppress(LineBroken):
                self._line.send(Kind.WOE, reason.encode())

    def follow(self, runner: Runner, memory: PagedMemory) -> NoReturn:
        """Does what rank 0 tells, pass after pass.

        Raises:
            ModelLost: a pass broke here.
        """
        while True:
            kind, data = self._orders.get()
            try:
                if kind == Kind.COPY:
                    memory.copy(*unpack_copy(data))
                else:
                    runner.run(unpack_pass(data))
            except Exception as error:
                raise ModelLost(self.broke("a pass broke", error)) from error

    def _connect(self, store: dist.Store) -> None:
        known = json.loads(store.get(LEAD_KEY))
        address = "127.0.0.1" if self.ranks.on_one_machine else os.environ["MASTER_ADDR"]
        connection = socket.create_connection((address, known["port"]), JOIN_SECONDS)
        connection.sendall(Greeting(self.ranks.rank, bytes.fromhex(known["token"])).pack())
        self._line = Line(
            connection,
            silence=self._silence,
            on_frame=self._hear,
            on_broken=lambda how: self._end(f"rank 0 has gone: {how}"),
        )
        self._line.start()
        # torchrun and a terminal send their signals to all ranks: rank 0 drains, and needs the others until it has.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _hear(self, kind: int, data: bytes) -> None:
        match kind:
            case Kind.FACTS:
                self._told.set_result(data)
            case Kind.END:
                _log.info("stopped", rank=self.ranks.rank)  # this thread knows no context
                leave(0)
            case Kind.WOE:
                self._end(f"rank 0 ends: {data.decode()}")
            case _:
                self._orders.put((Kind(kind), data))

    def _end(self, reason: str) -> NoReturn:
        fail(self._program, reason, rank=self.ranks.rank)


def follow(program: str, settings: ParallelSettings, *, pass_tokens: int) -> NoReturn:
    """Runs a rank that follows as a process, which ends with 0 when rank 0 says that all is over, and else with 1, or
    with 2 where a setting cannot be met on this machine. `pass_tokens` are the rows of a pass at most.
    """
    configure_logging(program, settings.log_level)
    team: Follower | None = None
    try:
        check_environment()
        ranks = read_ranks(settings.tensor_parallel_size, program)
        assert ranks is not None
        structlog.contextvars.bind_contextvars(rank=ranks.rank)
        device = ranks.device(settings.device)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        team = Follower(ranks, silence=settings.rank_timeout, program=program)
        team.join(device)
        loaded = load_share(settings, device, team)
        built = build_sharded(settings, loaded, sequence_tokens(settings, loaded), team, pass_tokens=pass_tokens)
        packed = built.packed
        assert packed.runner is not None
        assert packed.pool.pages is not None
        _log.info("following", heads=loaded.layers[0].heads, device=str(device))
        team.follow(packed.runner, packed.pool.pages)
    except Exception as error:
        known = isinstance(error, (CheckpointError, ModelLost, SettingsError))
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        if team is not None:
            team.abandon(reason)
        fail(program, reason, code=2 if isinstance(error, SettingsError) else 1)
