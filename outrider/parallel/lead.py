"""Rank 0: what it tells the others, and a runner of passes that all ranks run together."""

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch.distributed as dist
from torch import Tensor

from outrider.loading import Built
from outrider.parallel.line import Line, LineBroken, receive
from outrider.parallel.messages import TOKEN_BYTES, Greeting, Kind, pack_copy, pack_pass
from outrider.parallel.ranks import Ranks
from outrider.parallel.sharded import build_sharded, load_share
from outrider.parallel.team import JOIN_SECONDS, LEAD_KEY, Team
from outrider.runtime.cuda_graph import Runner
from outrider.runtime.errors import ModelLost
from outrider.runtime.loader import LoadedModel
from outrider.runtime.paged import Layout
from outrider.settings import ServiceSettings

_log = structlog.get_logger()

# How long rank 0 waits, when all is over, for the others to have ended.
_PARTING_SECONDS = 5.0


class Lead(Team):
    """The team, for rank 0."""

    def __init__(self, ranks: Ranks, *, silence: float) -> None:
        super().__init__(ranks, silence=silence)
        self._lines: dict[int, Line] = {}
        self._facts: dict[int, bytes] = {}
        self._changed = threading.Condition()

    def tell(self, kind: Kind, *parts: bytes) -> None:
        """Sends all others a frame.

        Raises:
            ModelLost: one of them is gone.
        """
        for rank, line in list(self._lines.items()):
            try:
                line.send(kind, *parts)
            except LineBroken as error:
                raise ModelLost(self.broke(f"rank {rank} takes no more messages", error)) from error

    def copied(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Has the others copy these blocks too: for `PagedMemory.on_copy`.

        Raises:
            ModelLost: one of them is gone.
        """
        self.tell(Kind.COPY, *pack_copy(source, target))

    def exchange(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._facts) == self.ranks.size - 1 or self.lost.done())
        if self.lost.done():
            raise ModelLost(self.lost.result())
        told = [facts, *(json.loads(self._facts[rank]) for rank in sorted(self._facts))]
        self.tell(Kind.FACTS, json.dumps(told).encode())
        return told

    def dismiss(self) -> None:
        """Tells the others that all is over, and waits, for some seconds, until they have ended. No pass may be under
        way.
        """
        with contextlib.suppress(ModelLost):
            self.tell(Kind.END)
        end = time.monotonic() + _PARTING_SECONDS
        for rank, line in list(self._lines.items()):
            if not line.wait_ended(max(0.0, end - time.monotonic())):
                _log.warning("a rank has not ended", rank=rank)
            line.close()

    def abandon(self, reason: str) -> None:
        self.lose(reason)
        for line in list(self._lines.values()):
            with contextlib.suppress(LineBroken):
                line.send(Kind.WOE, reason.encode())

    def lose(self, reason: str) -> None:
        super().lose(reason)
        with self._changed:
            self._changed.notify_all()

    def _connect(self, store: dist.Store) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        with _listener(self.ranks) as listener:
            listener.settimeout(JOIN_SECONDS)
            store.set(LEAD_KEY, json.dumps({"port": listener.getsockname()[1], "token": token.hex()}))
            while len(self._lines) < self.ranks.size - 1:
                connection, _ = listener.accept()
                rank = self._greeted(connection, token)
                if rank is None:
                    connection.close()
                else:
                    self._lines[rank] = self._line(connection, rank)

    def _greeted(self, connection: socket.socket, token: bytes) -> int | None:
        """The rank that has come; None of a stranger."""
        connection.settimeout(self._silence)
        try:
            said = Greeting.unpack(receive(connection, Greeting.SIZE))
        except (OSError, LineBroken):
            return None
        is_ours = secrets.compare_digest(said.token, token)
        return said.rank if is_ours and 0 < said.rank < self.ranks.size and said.rank not in self._lines else None

    def _line(self, connection: socket.socket, rank: int) -> Line:
        def hear(kind: int, data: bytes) -> None:
            if kind == Kind.WOE:
                self.lose(f"rank {rank} has gone: {data.decode()}")
                return
            with self._changed:
                self._facts[rank] = data
                self._changed.notify_all()

        line = Line(
            connection,
            silence=self._silence,
            on_frame=hear,
            on_broken=lambda how: self.lose(f"rank {rank} has gone: {how}"),
        )
        line.start()
        return line


class LeadRunner:
    """Has the other ranks run each pass, and runs it with them.

    Args:
        runner: of this rank's heads.
        lead: the team.
    """

    def __init__(self, runner: Runner, lead: Lead) -> None:
        self._runner = runner
        self._lead = lead

    def run(self, layout: Layout) -> Tensor:
        """See `Runner`.

        Raises:
            ModelLost: the pass broke here, or a rank is gone. The ranks are no longer in step, and no pass can follow.
        """
        self._lead.tell(Kind.PASS, *pack_pass(layout))
        try:
            return self._runner.run(layout)
        except Exception as error:
            raise ModelLost(self._lead.broke("a pass broke on rank 0", error)) from error


def load_as_lead(settings: ServiceSettings, lead: Lead) -> LoadedModel:
    """Meets the other ranks, and loads this one's share of the model while they load theirs.

    Raises:
        CheckpointError: the model cannot be loaded or run.
        SettingsError: this rank has no device.
        ModelLost: another rank is gone.
    """
    device = lead.ranks.device(settings.device)
    lead.join(device)
    return load_share(settings, device, lead)


def build_as_lead(
    settings: ServiceSettings,
    loaded: LoadedModel,
    length: int,
    lead: Lead,
    *,
    pass_tokens: int,
    behind: Callable[[Tensor], object] | None = None,
) -> Built:
    """The model over all ranks. Like `outrider.loading.build_packed`, but for them.

    Raises:
        CheckpointError, SettingsError, ModelLost: see `build_sharded`.
    """
    built = build_sharded(settings, loaded, length, lead, pass_tokens=pass_tokens, behind=behind)
    packed = built.packed
    assert packed.runner is not None
    assert packed.pool.pages is not None
    packed.runner = LeadRunner(packed.runner, lead)
    packed.pool.pages.on_copy = lead.copied
    _log.info(
        "leading",
        ranks=lead.ranks.size,
        backend=dist.get_backend(),
        heads_per_rank=loaded.layers[0].heads,
        kv_heads_per_rank=loaded.layers[0].kv_heads,
    )
    return built


def _listener(ranks: Ranks) -> socket.socket:
    if ranks.on_one_machine:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
