"""What ranks refuse before anything is connected, and how they learn that one of them is gone."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import sharding
from outrider.runtime.tensor_parallel import Ranks, TensorParallel, Watch, is_worker, read_ranks
from outrider.service.settings import SettingsError
from tests.outrider.runtime import tiny
from tests.outrider.runtime.two_ranks import told

VARIABLES = tuple(told(0, "localhost:1"))
SOON_S = 20.0


@pytest.fixture(autouse=True)
def _not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in told(rank, "localhost:1", size=size).items():
        monkeypatch.setenv(name, value)


def test_one_process_is_no_rank() -> None:
    assert read_ranks(1, "verifier_service") is None
    assert not is_worker(1)


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
    assert is_worker(2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert read_ranks(2, "verifier_service") == Ranks(1, 2, 1, 1), "others may be on another machine"


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


class Watching:
    """A rank's watch, and what it has said."""

    def __init__(self, store: dist.Store, rank: int, size: int, silence: float) -> None:
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        ranks = Ranks(rank, size, rank, size)
        self.watch = Watch(store, ranks, silence=silence, on_lost=self.lost.put, on_end=self._end)

    def _end(self) -> None:
        self.ended.put(True)
        self.watch.end("as rank 0")


Watches = Callable[..., list[Watching]]


@pytest.fixture
def watches() -> Iterator[Watches]:
    """Makes the watches of some ranks, in this process: a thread that waits in torch must not outlive Python."""
    made: list[Watching] = []

    def make(size: int, *, silence: float = 30.0) -> list[Watching]:
        store = dist.HashStore()
        with ThreadPoolExecutor(size) as pool:  # each waits for the others
            made.extend(pool.map(lambda rank: Watching(store, rank, size, silence), range(size)))
        return made

    yield make
    for each in reversed(made):
        each.watch.end("the test")


def beside_a_bare_rank(silence: float) -> tuple[Watching, dist.ProcessGroupGloo]:
    """The watch of rank 0, and a rank 1 that joins and says nothing."""
    store, bound = dist.HashStore(), timedelta(seconds=SOON_S)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Watching, store, 0, 2, silence)
        other = pool.submit(dist.ProcessGroupGloo, dist.PrefixStore("outrider/watch", store), 1, 2, bound)
        return first.result(), other.result()


def test_ranks_that_have_nothing_to_say_are_alive_until_rank_0_ends(watches: Watches) -> None:
    ranks = watches(3, silence=1.5)
    time.sleep(2.5)
    assert all(each.lost.empty() and each.ended.empty() for each in ranks)
    ranks[0].watch.end(None)
    assert [each.ended.get(timeout=SOON_S) for each in ranks[1:]] == [True, True]
    assert all(each.lost.empty() for each in ranks)


def test_a_worker_that_ends_says_why_and_rank_0_passes_it_on(watches: Watches) -> None:
    ranks = watches(3)
    ranks[2].watch.end("out of memory")
    reason = ranks[0].lost.get(timeout=SOON_S)
    assert reason == "rank 2 ends: out of memory"
    ranks[0].watch.end(reason)
    assert ranks[1].lost.get(timeout=SOON_S) == "rank 0 ends: rank 2 ends: out of memory"
    assert ranks[1].ended.empty()


def test_a_reason_of_any_length_arrives(watches: Watches) -> None:
    first, second = watches(2)
    second.watch.end("é" * 5000)
    assert first.lost.get(timeout=SOON_S).startswith("rank 1 ends: " + "é" * 500)


def test_a_silent_rank_is_gone() -> None:
    first, _other = beside_a_bare_rank(silence=1.0)
    assert first.lost.get(timeout=SOON_S) == "rank 1 has gone: it has been silent for 1 s"


def test_a_rank_that_closes_its_connection_is_gone_at_once() -> None:
    first, other = beside_a_bare_rank(silence=300.0)
    assert first.lost.empty()
    del other
    assert first.lost.get(timeout=SOON_S) == "rank 1 has gone: it closed its connection"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_rank_that_is_gone_explains_a_broken_pass(is_lost: bool) -> None:
    parallel = TensorParallel(Ranks(0, 2, 0, 2), timeout=30.0)
    hearing = threading.Timer(0.2, parallel.lost.set_result, ["rank 1 has gone"])
    if is_lost:
        hearing.start()
    reason = parallel.broke("a pass broke", RuntimeError("no sum\nof parts"))
    assert reason == parallel.lost.result()
    assert reason == ("rank 1 has gone" if is_lost else "a pass broke: RuntimeError: no sum of parts")
