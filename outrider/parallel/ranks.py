"""Which of how many processes this one is, by what torchrun says of it. It knows no model and opens no connection."""

import importlib.util
import os
from dataclasses import dataclass

import torch

from outrider.settings import SettingsError

FLAG = "--tensor-parallel-size"

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process stands among those that run one model.

    Attributes:
        rank: which one this is, from 0.
        size: how many there are.
        local_rank: which one it is on its machine.
        local_size: how many are on its machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def on_one_machine(self) -> bool:
        """Whether all are on this machine."""
        return self.local_size == self.size

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
    """What torchrun says of this process; None where the model runs in one.

    Args:
        size: how many ranks the settings ask for.
        program: the module to be started, for the error.

    Raises:
        SettingsError: torchrun started another number, or did not start this; or what it takes is not installed.
    """
    told = all(name in os.environ for name in _VARIABLES)
    started = int(os.environ["WORLD_SIZE"]) if told else 1
    if size != started:
        how = f"torchrun started {started} ranks" if told else "torchrun did not start this process"
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
    return Ranks(
        int(os.environ["RANK"]),
        size,
        int(os.environ["LOCAL_RANK"]),
        int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )


def is_follower(size: int) -> bool:
    """Whether this process follows another one: rank 0 or one alone does not."""
    return size > 1 and int(os.environ.get("RANK", "0")) > 0
