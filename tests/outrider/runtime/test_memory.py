"""The KV cache gets the memory that a profiling run leaves; out of memory is one line with the numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.memory import MIB, DeviceMemory, OutOfMemory, block_bytes, explain_out_of_memory, memory_of
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.loading import (
    DEFAULT_CPU_KV_MB,
    build_model_runner,
    kv_blocks,
    profiling_blocks,
    profiling_run,
)
from outrider.service.settings import ServiceSettings, SettingsError
from tests.cluster import MODELS

Load = Callable[..., LoadedModel]


class FakeMemory(DeviceMemory):
    """A device of so many MiB; a step takes some of them while it runs."""

    name = "cuda:7"

    def __init__(self, total: int, free: int, takes: int) -> None:
        self.total, self._free, self._takes = total * MIB, free * MIB, takes * MIB
        self.runs = 0

    def free(self) -> int:
        return self._free

    def peak(self, run: Callable[[], Any]) -> int:
        run()
        self.runs += 1
        return self._takes


def settings(*flags: str) -> ServiceSettings:
    found: ServiceSettings = ServiceSettings.from_command_line(["--model", "m", *flags], program="a service")
    return found


def test_out_of_memory_is_one_line_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(DeviceMemory(), "the weights of 'm'"):
        torch.empty(1 << 50)
    assert str(caught.value) == (
        "out of memory for the weights of 'm': cpu has no memory left (4503599627370496 bytes more are needed)"
    )
    device = FakeMemory(total=1000, free=30, takes=0)
    with pytest.raises(OutOfMemory) as caught, explain_out_of_memory(device, "keys and values"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 7 has a total capacity of …")
    assert str(caught.value) == (
        "out of memory for keys and values: cuda:7 has 1000 MiB, 30 of them free (2.50 GiB more are needed)"
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_profiling_run_has_its_size_and_leaves_no_block(attention: str, load: Load) -> None:
    built = build_model_runner(
        settings("--attention", attention, "--device", "cpu"), load("llama"), 20, max_batch_tokens=50
    )
    packed = built.model_runner
    assert profiling_run(packed, 50).shape == (50, packed.loaded.vocab_size)
    assert packed.pool.used_blocks == 0
    packed.pool.check_integrity()
    small = TorchRunner.build(load("llama"), 1, 20, blocks=2)
    assert len(profiling_run(small, 500)) == 40, "no step is larger than the pool"
    assert profiling_blocks(150, 40) == 2 + 2 + 2 + 1


@pytest.mark.parametrize(("flags", "size"), [((), DEFAULT_CPU_KV_MB), (("--kv-cache-mb", "4"), 4)])
def test_on_a_cpu_the_kv_cache_has_the_size_of_its_setting(load: Load, flags: tuple[str, ...], size: int) -> None:
    loaded = load("llama")
    count, block = kv_blocks(settings(*flags), loaded, left=0), block_bytes(loaded)
    assert count * block <= size * MIB < (count + 1) * block


def test_one_sequence_at_its_longest_must_fit() -> None:
    target = load_model(ModelSource(str(MODELS / "target"), dtype="bfloat16", device="cpu"))
    with pytest.raises(SettingsError, match=r"the KV cache of 1 MiB has \d+ blocks; .* --max-sequence-tokens 1024"):
        kv_blocks(settings("--kv-cache-mb", "1"), target, left=0)


def test_on_a_gpu_the_kv_cache_gets_its_fraction_of_the_free_memory(load: Load) -> None:
    """Less than one sequence needs is refused with the numbers."""
    loaded = load("llama")
    loaded.device = torch.device("cuda:7")
    size = block_bytes(loaded)
    assert kv_blocks(settings("--kv-memory-fraction", "0.5"), loaded, left=60 * MIB) == 30 * MIB // size
    with pytest.raises(
        SettingsError,
        match=r"^--kv-memory-fraction 0.5 of 0 MiB: the KV cache of 0 MiB has 0 blocks; one sequence of "
        r"--max-sequence-tokens 64 takes 2, or 0.0 MiB: give it more memory \(another service on the device may hold "
        r"it: lower its --kv-cache-mb\), or lower --max-sequence-tokens$",
    ):
        kv_blocks(settings("--kv-memory-fraction", "0.5"), loaded, left=-5)


def test_the_profiling_run_happens_before_and_after_the_pool(load: Load) -> None:
    memory = FakeMemory(total=200, free=100, takes=10)
    seen: list[tuple[int, ...]] = []
    built = build_model_runner(
        settings("--attention", "eager", "--device", "cpu", "--kv-cache-mb", "1"),
        load("llama"),
        32,
        max_batch_tokens=40,
        behind=lambda logits: seen.append(tuple(logits.shape)),
        memory=memory,
    )
    assert memory.runs == 2
    assert seen == [(40, built.model_runner.loaded.vocab_size)] * 2
    tried = 2 * block_bytes(built.model_runner.loaded)
    assert built.workspace == 10 * MIB - tried


@pytest.mark.gpu
def test_a_device_reports_its_memory(load: Load) -> None:
    memory = memory_of(torch.device("cuda:0"))
    before = memory.free()
    kept: list[torch.Tensor] = []
    assert memory.peak(lambda: kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0"))) == 64 * MIB
    assert before - memory.free() >= 64 * MIB
    refused = r"^out of memory for a test: cuda:0 has \d+ MiB, \d+ of them free \("
    with pytest.raises(OutOfMemory, match=refused), explain_out_of_memory(memory, "a test"):
        torch.empty(2 * memory.total, dtype=torch.uint8, device="cuda:0")
