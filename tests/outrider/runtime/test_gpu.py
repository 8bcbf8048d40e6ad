"""On a CUDA device attention over blocks and captured steps give the results of the CPU.

Without a device: `test_paged_attention`, `test_cuda_graph` and `test_decode_loop`.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime.cuda_graph import CudaCapturer, GraphRunner
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import AttentionChoice, choose_attention
from outrider.runtime.torch_runner import TorchRunner
from tests.outrider.runtime.steps import MAX_LENGTH, random_steps
from tests.outrider.runtime.test_decode_loop import step_by_step
from tests.outrider.runtime.tiny import EXPERTS, FAMILIES, VOCABULARY

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
NEAR = {"float32": 1e-4, "bfloat16": 0.06}
CONFIG = SparseConfig(keep_mass=0.97, max_support=40)


@pytest.fixture
def on_gpu(checkpoint: Callable[[str], Path]) -> Callable[[str, str], LoadedModel]:
    def get(name: str, dtype: str) -> LoadedModel:
        return load_model(ModelSource(str(checkpoint(name)), dtype=dtype, device="cuda:0"))

    return get


def chosen(loaded: LoadedModel) -> AttentionChoice:
    return choose_attention("auto", loaded.layers, loaded.dtype, loaded.device)


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: str, name: str = "") -> bool:
    """In 16 bits by the median row: rounding sometimes decides between experts."""
    if len(wanted) == 0:
        return len(found) == 0
    distance = (found.float().cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    most = distance.max() if dtype == "float32" and name not in EXPERTS else distance.median()
    return float(most) <= NEAR[dtype] * (2 if name in EXPERTS else 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_the_cpu(
    name: str, dtype: str, on_gpu: Callable[[str, str], LoadedModel], load: Callable[..., LoadedModel]
) -> None:
    loaded = on_gpu(name, dtype)
    choice = chosen(loaded)
    assert choice.name == "triton", choice.reason
    model = TorchRunner.build(loaded, 5, MAX_LENGTH, attention=choice)
    wanted, _ = random_steps(TorchRunner.build(load(name, dtype), 5, MAX_LENGTH), 3, 25)
    for one, other in zip(random_steps(model, 3, 25)[0], wanted, strict=True):
        assert near(one, other, dtype, name), choice.reason


def captured(loaded: LoadedModel) -> ModelRunner:
    model = TorchRunner.build(loaded, 5, MAX_LENGTH, attention=chosen(loaded))
    found = model.capture(CudaCapturer(CUDA), max_sequences=4, widest=8, seconds=300, most_bytes=1 << 32)
    count = len(model.paged_runner._captured) if isinstance(model.paged_runner, GraphRunner) else 0
    assert found == f"{count} of {count} sizes"
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-sliding", "gpt2", "phi"])
def test_graphs_give_the_logits_of_eager_steps(name: str, on_gpu: Callable[[str, str], LoadedModel]) -> None:
    model, eager = captured(on_gpu(name, "bfloat16")), on_gpu(name, "bfloat16")
    if name not in ("gpt2", "phi"):
        assert model.layer_choice is not None
        assert model.layer_choice.name == "triton", model.layer_choice.reason
    plain = TorchRunner.build(eager, 5, MAX_LENGTH, attention=chosen(eager))
    for one, other in zip(random_steps(model, 4, 25)[0], random_steps(plain, 4, 25)[0], strict=True):
        assert near(one, other.float().cpu(), "bfloat16", name)


def test_captured_steps_draw_the_tokens_of_single_steps(on_gpu: Callable[[str, str], LoadedModel]) -> None:
    """In bfloat16 a step of another number of rows may round otherwise, so few texts may differ."""
    model = captured(on_gpu("llama", "bfloat16"))
    loop = DecodeLoop(model, VOCABULARY, CONFIG)
    found = loop.capture(CudaCapturer(CUDA), sequences=4, tokens=8, with_kernels=True, seconds=300, most_bytes=1 << 32)
    assert found == "steps of up to 4 sequences"
    rng, differing = random.Random(1), 0
    for number in range(30):
        params = SamplingParams(temperature=(0.0, 1.0, 0.7)[number % 3])
        prompt = rng.choices(range(VOCABULARY), k=6)
        one, other = model.pool.allocate(), model.pool.allocate()
        draws = [Draw(params, rng.random()) for _ in range(8)]
        (samples,) = loop.decode([Chunk(one, prompt, 0, 6)], [draws])
        expected = step_by_step(model, other, prompt, draws, VOCABULARY)
        differing += [each.token for each in samples] != [each.token for each in expected]
        for slot in (one, other):
            model.pool.free(slot)
    assert differing <= 6
