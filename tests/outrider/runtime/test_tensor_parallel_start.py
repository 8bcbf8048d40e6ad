"""How real ranks meet, and what they do where the other one is gone before anything is loaded."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outrider.cli.processes import ServiceProcess
from outrider.runtime.tensor_parallel import Watch
from tests import cluster as clusters
from tests.cluster import Cluster, free_address
from tests.outrider.runtime import tiny
from tests.outrider.runtime.two_ranks import FLAGS, ended_within, reason, start_rank

SOON_S = 20.0
WAITING = timedelta(seconds=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of as many tokens as it has."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("llama"))
    words = {f"w{i}": i for i in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def store(address: str, *, is_master: bool) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), 2, is_master, timeout=WAITING, wait_for_workers=not is_master)


def join_and_leave(store: dist.Store, rank: int) -> None:
    """As a rank that is gone once the other one has joined, and beats."""
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("outrider/watch", store), rank, 2, WAITING)
    group.recv([torch.empty(Watch._MESSAGE_BYTES, dtype=torch.uint8)], 1 - rank, 0).wait(WAITING)


def test_rank_0_ends_where_a_worker_is_gone_before_the_load(model: Path) -> None:
    address = free_address()
    with Cluster() as cluster:
        first = start_rank(cluster, 0, address, model)
        join_and_leave(store(address, is_master=False), 1)
        assert ended_within(SOON_S, [first]) == [1]
        assert reason(first) == "verifier_service: rank 1 has gone: it closed its connection"


def test_a_worker_ends_where_rank_0_is_gone_before_the_load(model: Path) -> None:
    address = free_address()
    meeting = store(address, is_master=True)
    with Cluster() as cluster:
        worker = start_rank(cluster, 1, address, model)
        join_and_leave(meeting, 0)
        assert ended_within(SOON_S, [worker]) == [1]
        assert reason(worker) == "verifier_service: rank 0 has gone: it closed its connection"


def test_rank_0_says_what_another_one_died_of(model: Path) -> None:
    """Rank 0 is in the midst of its load by then, and waits for the other one's part in it."""
    address = free_address()
    with Cluster() as cluster:
        first = start_rank(cluster, 0, address, model)
        worker = start_rank(cluster, 1, address, model / "nowhere")
        assert ended_within(SOON_S, [first, worker]) == [1, 1]
        why = reason(worker).removeprefix("verifier_service: ")
        assert str(model / "nowhere") in why
        assert reason(first) == f"verifier_service: rank 1 ends: {why}"


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_its_signal_ends_them_in_order(model: Path) -> None:
    """In all other tests of ranks the services are forked, with the variables that torchrun sets."""
    flags = ["--model", str(model), *clusters.FLAGS, *FLAGS, "--listen", "127.0.0.1:0"]
    arguments = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "verifier_service", *flags]
    with ServiceProcess.launch(arguments) as ranks:
        ranks.wait_healthy()
        ranks.stop()
        events = [json.loads(line) for line in ranks.log_lines() if line.startswith("{")]
    (first,) = (each for each in events if each["event"] == "tensor parallel")
    assert (first["ranks"], first["backend"]) == (2, "gloo")
    assert (first["heads_per_rank"], first["kv_heads_per_rank"]) == (2, 1)
    assert [each["rank"] for each in events if each["event"] == "stopped" and "rank" in each] == [1]
    assert len([each for each in events if each["event"] == "stopped"]) == 2
    assert [each for each in events if each["level"] == "error"] == []
