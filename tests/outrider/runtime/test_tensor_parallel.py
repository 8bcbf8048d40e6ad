"""Two ranks give the logits of one, refuse models that cannot be sharded, and end when one of them is lost."""

import json
import queue
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outrider.cli.processes import ServiceProcess
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.loader import LoadedModel, sharding
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.tensor_parallel import Ranks, Watch, is_worker, read_ranks
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.settings import SettingsError
from tests import cluster as clusters
from tests.cluster import Cluster, free_address
from tests.outrider.runtime import tiny
from tests.outrider.runtime.two_ranks import FLAGS, as_rank_0, ended_within, environment, reason, start_rank

Checkpoint = Callable[[str], Path]
SOON_S = 20.0
WAITING = timedelta(seconds=60)


def test_ranks_are_read_from_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment(0, "localhost:1"):
        monkeypatch.delenv(name, raising=False)
    assert read_ranks(1, "verifier_service") is None
    assert not is_worker(1)
    with pytest.raises(
        SettingsError, match=r"is 4, but torchrun did not start this process; .* --nproc-per-node 4 -m v"
    ):
        read_ranks(4, "verifier_service")
    for name, value in environment(1, "localhost:1").items():
        monkeypatch.setenv(name, value)
    assert read_ranks(2, "verifier_service") == Ranks(1, 2, 1, 2)
    assert is_worker(2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert read_ranks(2, "verifier_service") == Ranks(1, 2, 1, 1), "others may be on another machine"
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size is 2; .* accelerate, .*'\.\[parallel\]'"):
        read_ranks(2, "verifier_service")


@pytest.mark.parametrize(
    ("family", "quantisation", "ranks", "message"),
    [
        ("llama", None, 4, "--tensor-parallel-size 4: 'tiny' has 4 attention heads and 2 KV heads"),
        ("llama", None, 3, "--tensor-parallel-size 3: 'tiny' has 4 attention heads and 2 KV heads"),
        ("gpt2", None, 2, "--tensor-parallel-size 2: transformers has no tensor-parallel plan for 'gpt2'"),
        ("llama", "awq", 2, "--tensor-parallel-size 2: the weights of 'tiny' are quantised by 'awq'"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(
    family: str, quantisation: str | None, ranks: int, message: str
) -> None:
    assert sharding(tiny.FAMILIES[family](), "tiny", quantisation, 1) == {}
    with pytest.raises(CheckpointError) as refused:
        sharding(tiny.FAMILIES[family](), "tiny", quantisation, ranks)
    assert str(refused.value).startswith(message)


def test_the_reason_of_a_worker_reaches_all_ranks() -> None:
    """Watches of three ranks in this process. All end here: a thread that waits in torch would crash Python at exit."""
    store, lost = dist.HashStore(), [queue.SimpleQueue[str]() for _ in range(3)]

    def watch(rank: int) -> Watch:
        ranks = Ranks(rank, 3, rank, 3)
        return Watch(store, ranks, silence=30.0, on_lost=lost[rank].put, on_end=lambda: None)

    with ThreadPoolExecutor(3) as pool:  # each waits for the others
        watches = list(pool.map(watch, range(3)))
    try:
        watches[2].end("out of memory " + "é" * 5000)
        assert lost[0].get(timeout=SOON_S).startswith("rank 2 ended: out of memory " + "é" * 500)
        watches[0].end("rank 2 ended: out of memory")
        assert lost[1].get(timeout=SOON_S) == "rank 0 ended: rank 2 ended: out of memory"
    finally:
        for each in reversed(watches):
            each.end("the test")


CLOSE = 1e-4  # relative: a sum of two halves is rounded otherwise
SPLIT = ("llama-biased", "qwen3", "gemma3", "mixtral")
WHOLE = ("olmo2",)
"""Its plan shards other layers, and leaves every rank all heads."""


def history(runner: ModelRunner) -> Tensor:
    """Logits of sequences that are cut, forked in the middle of a block, rolled back and ended.

    A fork that continues writes into a copy of the block that it shares.
    """
    pool = runner.pool
    first, second = pool.allocate(), pool.allocate()
    logits = [runner.forward([Chunk(first, list(range(3, 23)), 0, 0), Chunk(second, [5, 80, 7], 0, 2)])]
    fork = pool.fork(first)
    logits.append(runner.forward([Chunk(fork, [40, 41, 42], 20, 0), Chunk(second, [9], 3, 0)]))
    pool.rollback(first, 18)
    logits.append(runner.forward([Chunk(first, [60, 61, 62, 63], 18, 0), Chunk(fork, [43], 23, 0)]))
    pool.free(second)
    again = pool.allocate()
    logits.append(runner.forward([Chunk(again, list(range(30, 70)), 0, 38), Chunk(first, [8], 22, 0)]))
    for slot in (first, fork, again):
        pool.free(slot)
    pool.check_integrity()
    return torch.cat(logits)


@pytest.mark.parametrize("family", [*SPLIT, *WHOLE])
def test_two_ranks_give_the_logits_of_one(
    load: Callable[..., LoadedModel], checkpoint: Checkpoint, family: str
) -> None:
    expected = history(TorchRunner.build(load(family), max_sequences=4, max_length=64, fuse=False))
    with as_rank_0(checkpoint(family)) as runner:
        found = history(runner)
        parts, config = 1 if family in WHOLE else 2, runner.loaded.model.config
        assert {layer.heads for layer in runner.loaded.layers} == {config.num_attention_heads // parts}
        assert {layer.kv_heads for layer in runner.loaded.layers} == {config.num_key_value_heads // parts}
        paged = runner.pool.paged
        assert paged is not None
        assert {each.size(2) for each in (*paged.keys, *paged.values)} == {config.num_key_value_heads // parts}
        assert runner.loaded.vocab_size == tiny.VOCABULARY
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (("--max-sequence-tokens", "48"), "tokens of a sequence differs between ranks: 64 on rank 0, 48 on rank 1"),
        (("--dtype", "bfloat16"), "dtype differs between ranks: float32 on rank 0, bfloat16 on rank 1"),
    ],
)
def test_ranks_with_different_settings_do_not_begin(
    checkpoint: Checkpoint, theirs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message), as_rank_0(checkpoint("llama"), theirs=theirs):
        pass


def test_a_worker_whose_step_fails_gives_the_reason(checkpoint: Checkpoint) -> None:
    with as_rank_0(checkpoint("llama"), ends_with=1) as runner:
        assert runner.pool.paged is not None
        assert runner.pool.paged.on_copy is not None
        runner.pool.paged.on_copy([10**6], [0])  # in the worker's memory alone
        with pytest.raises(ModelLost, match=r"rank 1 ended: a step failed: .* out of DATA bounds"):
            history(runner)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    path = tiny.save(tiny.FAMILIES["llama"](), tmp_path_factory.mktemp("llama"))
    words = {f"w{i}": i for i in range(tiny.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def test_a_worker_ends_if_rank_0_is_lost_before_the_load(model: Path) -> None:
    """Rank 0 is this process, which leaves once it has joined and received a heartbeat."""
    address = free_address()
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), 2, is_master=True, timeout=WAITING, wait_for_workers=False)
    with Cluster() as cluster:
        service = start_rank(cluster, 1, address, model)
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore("outrider/watch", store), 0, 2, WAITING)
        group.recv([torch.empty(Watch._MESSAGE_BYTES, dtype=torch.uint8)], 1, 0).wait(WAITING)
        del group
        assert ended_within(SOON_S, [service]) == [1]
        assert reason(service) == "verifier_service: rank 0 is lost: it closed its connection"


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_its_signal_ends_them_in_order(model: Path) -> None:
    """All other tests of ranks fork the services, with the variables of torchrun."""
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
