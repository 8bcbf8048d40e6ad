"""What is refused before anything is connected, in one line that names the flag and the numbers."""

import sys

import pytest
import torch

from outrider.parallel.ranks import Ranks, is_follower, read_ranks
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import sharding
from outrider.settings import SettingsError
from tests.outrider.parallel.started import told
from tests.outrider.runtime import tiny

VARIABLES = tuple(told(0, "localhost:1"))


@pytest.fixture(autouse=True)
def _not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in told(rank, "localhost:1", size=size).items():
        monkeypatch.setenv(name, value)


def test_one_process_is_no_rank() -> None:
    assert read_ranks(1, "verifier_service") is None
    assert not is_follower(1)


def test_who_is_not_started_by_torchrun_is_told_how() -> None:
    with pytest.raises(SettingsError) as told:
        read_ranks(4, "verifier_service")
    assert str(told.value) == (
        "--tensor-parallel-size is 4, and torchrun did not start this process; for 4 ranks on one machine: torchrun "
        "--nproc-per-node 4 -m verifier_service --tensor-parallel-size 4 ..."
    )


@pytest.mark.parametrize(("asked", "started"), [(4, 2), (1, 2), (2, 4)])
def test_another_number_than_torchrun_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: int, started: int
) -> None:
    start(monkeypatch, 1, started)
    with pytest.raises(SettingsError, match=f"size is {asked}, and torchrun started {started} ranks"):
        read_ranks(asked, "verifier_service")


def test_ranks_are_as_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, 1, 2)
    ranks = read_ranks(2, "verifier_service")
    assert ranks == Ranks(1, 2, 1, 2)
    assert ranks.on_one_machine
    assert is_follower(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    elsewhere = read_ranks(2, "verifier_service")
    assert elsewhere is not None
    assert not elsewhere.on_one_machine


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, 0, 2)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 2: .* accelerate, .*outrider\[parallel\]"):
        read_ranks(2, "verifier_service")


def test_each_rank_has_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Ranks(3, 4, 1, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert second.device("auto") == second.device("cpu") == torch.device("cpu")
    with pytest.raises(SettingsError, match="--device cuda: torch sees no CUDA device"):
        second.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert second.device("auto") == second.device("cuda") == torch.device("cuda:1")
    with pytest.raises(SettingsError, match=r"--device cuda:1: .* 4 each rank takes a GPU of its own"):
        second.device("cuda:1")
    with pytest.raises(SettingsError, match=r"--device cpu: .* it sees 2"):
        second.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match="rank 3 is number 1 on its machine, where torch sees 1 CUDA devices"):
        second.device("auto")


def test_one_rank_takes_a_model_as_it_is() -> None:
    assert sharding(tiny.FAMILIES["gpt2"](), "tiny", "awq", 1) == {}


@pytest.mark.parametrize(
    ("family", "quantisation", "ranks", "said"),
    [
        ("llama", None, 4, "--tensor-parallel-size 4: 'tiny' has 4 attention heads and 2 of keys and values"),
        ("llama", None, 3, "--tensor-parallel-size 3: 'tiny' has 4 attention heads and 2 of keys and values"),
        ("gpt2", None, 2, "--tensor-parallel-size 2: transformers has no tensor-parallel plan for 'gpt2'"),
        ("llama", "awq", 2, "--tensor-parallel-size 2: the weights of 'tiny' are quantised by 'awq'"),
    ],
)
def test_what_cannot_be_shared_is_refused(family: str, quantisation: str | None, ranks: int, said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        sharding(tiny.FAMILIES[family](), "tiny", quantisation, ranks)
    assert str(refused.value).startswith(said)
