"""The ranks of one model, from where one of them stands: they find each other, agree, and learn that one is gone.

It knows processes and connections, and nothing of models or passes.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from outrider.parallel.line import LineBroken
from outrider.parallel.ranks import Ranks
from outrider.runtime.device import work_on
from outrider.runtime.errors import ModelLost

JOIN_SECONDS = 300.0
"""How long ranks wait for each other at the start. torchrun, which starts them together, waits before that."""

LEAD_KEY = "outrider/lead"
"""Under which rank 0 says where it listens."""

# How long a rank whose pass broke waits to hear that another one is gone: that says more than a broken collective.
_HEARSAY_SECONDS = 2.0


class Team(ABC):
    """The ranks, for one of them. Nothing is connected before `join`.

    Attributes:
        ranks: which one this is.
        lost: once there is a result, no pass will ever run again, and that is why.
    """

    def __init__(self, ranks: Ranks, *, silence: float) -> None:
        """`silence` is for how many seconds a rank may be silent before it counts as gone."""
        self.ranks = ranks
        self.lost: Future[str] = Future()
        self.lost.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._silence = silence
        self._settling = threading.Lock()

    def join(self, device: torch.device) -> None:
        """Meets the other ranks: by lines of our own, and then as a process group of torch. Takes as long as they take
        to come.

        Raises:
            ModelLost: they do not, or one of them is gone again.
        """
        is_cuda = device.type == "cuda"
        work_on(device)
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
            self._connect(store)
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=dist.PrefixStore("outrider/group", store),
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                device_id=device if is_cuda else None,
            )
        except (OSError, RuntimeError, LineBroken) as error:
            raise ModelLost(self.broke("the ranks did not find each other", error)) from error

    @abstractmethod
    def exchange(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Tells all ranks something, and returns what each has told, by rank. Waits for them.

        Args:
            facts: what JSON can hold.

        Raises:
            ModelLost: one of them is gone.
        """

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Ends this rank's part, without which the others cannot go on, and tells them why."""

    def broke(self, what: str, error: Exception) -> str:
        """Settles why something that all ranks take part in broke here: another one is gone, or else `error`."""
        with contextlib.suppress(TimeoutError):
            return self.lost.result(_HEARSAY_SECONDS)
        self.lose(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
        return self.lost.result()

    def lose(self, reason: str) -> None:
        """Says that no pass will run again. The first reason counts: others follow from it."""
        with self._settling:
            if not self.lost.done():
                self.lost.set_result(reason)

    @abstractmethod
    def _connect(self, store: dist.Store) -> None:
        """Makes the lines between rank 0 and the others."""
