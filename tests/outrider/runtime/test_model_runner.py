"""Packed steps give the logits of transformers, for each family and however sequences are cut and mixed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime import tiny
from tests.outrider.runtime.steps import MAX_LENGTH, logits_by, random_steps
from tests.outrider.runtime.tiny import EXPERTS, FAMILIES, VOCABULARY, WINDOW, Truth

Load = Callable[..., LoadedModel]
Checkpoint = Callable[[str], Path]
CLOSE = 1e-5
COUNTS = (1, 1, 1, 2, 4, 7, 24)

# |difference| / |logits| of the median row. One step of rounding is 2^-8 in bfloat16 and 2^-11 in float16. Where
# rounding decides between two experts, that row and all that read it differ by more.
NEAR = {"bfloat16": 0.05, "float16": 0.01}


def sequence(seed: int, length: int = 24) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Within 1e-5 of the size of the logits, which is about 1."""
    return not found.numel() or bool((found - wanted).abs().max() <= CLOSE * max(1.0, float(wanted.abs().max())))


# ------------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("fuse", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("name", FAMILIES)
def test_any_steps_give_the_logits_of_transformers(name: str, fuse: bool, load: Load, checkpoint: Checkpoint) -> None:
    """Prompts, single tokens, forks, rollbacks, rows nobody wants; several windows long."""
    model = ModelRunner.build(load(name), 5, MAX_LENGTH, fuse=fuse)
    found, wanted = random_steps(model, seed=1, steps=24, counts=COUNTS)
    expected = logits_by(Truth(checkpoint(name)), wanted)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, torch.float32)
        assert close(mine, theirs), step


def test_a_soft_cap_and_a_window_make_a_difference(load: Load, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Else the test above would say nothing of them."""
    tokens = sequence(2)
    capped = Truth(checkpoint("gemma2"))(tokens)
    changes: list[dict[str, Any]] = [{"attn_logit_softcapping": None}, {"sliding_window": 64}]
    for i, change in enumerate(changes):
        other = Truth(tiny.save(tiny.gemma2(**change), tmp_path / str(i)))(tokens)
        assert (other - capped).abs().max() > 1e-2 * capped.abs().max()
    assert {layer.window for layer in load("gemma2").layers} == {WINDOW, None}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "phi", "mixtral", "qwen3-moe", "gpt-oss"])
def test_sixteen_bits_stay_near_float32(name: str, dtype: str, load: Load) -> None:
    """A wrong mask or a missing factor moves logits by their own size."""
    exact, rounded = (
        torch.cat(random_steps(ModelRunner.build(load(name, kind), 5, MAX_LENGTH, fuse=fuse), 3)[0])
        for kind, fuse in (("float32", False), (dtype, True))
    )
    assert rounded.dtype == torch.float32
    distance = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert distance.median() <= NEAR[dtype] * (2 if name in EXPERTS else 1)


def test_experts_with_room_for_a_number_of_rows_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a router would let the batch decide; the self-check at load sees it."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    forward = MixtralTopKRouter.forward

    def crowded(self: MixtralTopKRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = forward(self, hidden)
        before = torch.nn.functional.one_hot(chosen, 4).cumsum(0).gather(2, chosen.unsqueeze(2)).squeeze(2)
        return logits, weights * (before <= 3), chosen

    monkeypatch.setattr(MixtralTopKRouter, "forward", crowded)
    with pytest.raises(CheckpointError, match="give other logits than its own forward"):
        load_model(ModelSource(str(checkpoint("mixtral")), dtype="float32", device="cpu"))


# ----------------------------------------------------------------------------------------------------- rows of the head


def rows_of_the_head(loaded: LoadedModel) -> list[int]:
    """Will hold how many rows each step gives to the head."""
    seen: list[int] = []
    loaded.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[-2]))
    return seen


def test_the_head_sees_the_wanted_rows_alone(load: Load) -> None:
    loaded = load("gpt2")
    seen = rows_of_the_head(loaded)
    model = ModelRunner.build(loaded, 2, 48, fuse=False)
    a, b = model.pool.allocate(), model.pool.allocate()
    model.forward([Chunk(a, sequence(1, 20), 0, 19)])
    model.forward([Chunk(a, sequence(2, 10), 20, 8), Chunk(b, sequence(3, 20), 0, 20)])
    model.forward([Chunk(b, sequence(3, 20), 20, 20)])
    assert seen == [1, 2, 0]


def old_forward(scale: float) -> Callable[..., CausalLMOutput]:
    """A forward as older architectures have it, without a choice of rows."""

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> CausalLMOutput:
        hidden = self.transformer(input_ids, position_ids=position_ids, **options).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden) * scale)

    return forward


def test_without_a_choice_of_rows_the_head_is_applied_to_the_wanted_ones(
    load: Load, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, tokens = Truth(checkpoint("gpt2")), sequence(81)
    monkeypatch.setattr(GPT2LMHeadModel, "forward", old_forward(1.0))
    loaded = load("gpt2")
    seen = rows_of_the_head(loaded)
    model = ModelRunner.build(loaded, 2, 48, fuse=False)
    a, b = model.pool.allocate(), model.pool.allocate()
    assert close(model.forward([Chunk(a, tokens[:9], 0, 7)]), truth(tokens)[7:9])
    rows = model.forward([Chunk(b, tokens[:4], 0, 3), Chunk(a, tokens[9:12], 9, 1)])
    assert close(rows, truth(tokens)[[3, 10, 11]])
    assert close(model.forward([Chunk(a, tokens[12:], 12, 0)]), truth(tokens)[12:])
    assert seen == [2, 3, 12]


def test_logits_that_are_more_than_the_head_are_refused_without_a_choice_of_rows(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "forward", old_forward(2.0))
    with pytest.raises(CheckpointError, match="other logits than its own forward"):
        load("gpt2")


@pytest.mark.parametrize("fuse", [False, True])
def test_a_long_prompt_over_a_large_vocabulary_makes_few_logits(fuse: bool, tmp_path: Path) -> None:
    """No tensor of a step is as large as the logits of all its rows would be."""
    vocabulary, length, sizes = 20_000, 60, []
    config = tiny.CONFIGS["llama"]()
    config.vocab_size = vocabulary
    loaded = load_model(ModelSource(str(tiny.save(config, tmp_path)), device="cpu"))
    model = ModelRunner.build(loaded, 1, 64, fuse=fuse)
    if isinstance(loaded.fused, FusedDecoder):
        loaded.fused._run = loaded.fused._layers  # the same uncompiled, so that each operation shows

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not out._is_view():
                sizes.append(out.numel())
            return out

    with Sizes():
        logits = model.forward([Chunk(model.pool.allocate(), [7] * length, 0, length - 1)])
    assert logits.shape == (1, vocabulary)
    assert len(sizes) > 20
    assert vocabulary <= max(sizes) < 2 * vocabulary


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def llama(load: Load) -> LoadedModel:
    return load("llama")


def test_a_failed_step_changes_no_length(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelRunner.build(llama, 2, 48)
    slot = model.pool.allocate()
    model.forward([Chunk(slot, [1, 2, 3], 0, 3)])

    def fail(*args: object) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "program", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.forward([Chunk(slot, [4, 5], 3, 0)])
    assert model.pool.length(slot) == 3
    model.pool.check_integrity()
    model.forward([Chunk(slot, [4, 5], 3, 0)])


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk(0, [], 3, 0)], "no tokens"),
        ([Chunk(0, [1], 2, 0)], "starts at 2, its slot holds 3"),
        ([Chunk(0, [1], 4, 0)], "starts at 4, its slot holds 3"),
        ([Chunk(0, [1] * 46, 3, 0)], "holds 3 positions: 46 more go beyond its 48"),
        ([Chunk(0, [1, 2], 3, 3)], "logits_from 3 .* outside its 2 tokens"),
        ([Chunk(0, [1, 2], 3, -1)], "logits_from -1"),
        ([Chunk(0, [1, -1], 3, 0)], "token -1 .* outside 0 to 96"),
        ([Chunk(0, [1, VOCABULARY], 3, 0)], "token 97 .* outside 0 to 96"),
        ([Chunk(1, [1], 0, 0)], "slot 1 is not taken"),
        ([Chunk(9, [1], 0, 0)], "slot 9 is not taken"),
        ([], "at least one chunk"),
        ([Chunk(0, [1], 3, 0)] * 2, "twice"),
    ],
    ids=str,
)
def test_chunks_that_do_not_fit_are_refused_with_their_numbers(
    llama: LoadedModel, chunks: list[Chunk], message: str
) -> None:
    model = ModelRunner.build(llama, 2, 48)
    slot = model.pool.allocate()
    model.forward([Chunk(slot, [1, 2, 3], 0, 3)])
    with pytest.raises(ValueError, match=message):
        model.forward(chunks)
    assert model.pool.length(slot) == 3


def test_a_pool_that_does_not_fit_the_model_is_refused(llama: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"max_length 65 is beyond .* context of 64"):
        ModelRunner.build(llama, 1, 65)


def test_warm_up_leaves_the_pool_as_it_was(llama: LoadedModel) -> None:
    model = ModelRunner.build(llama, 2, 48)
    model.warm_up([1, 2, 5, 30])
    assert model.pool.used_blocks == 0
    model.pool.check_integrity()
