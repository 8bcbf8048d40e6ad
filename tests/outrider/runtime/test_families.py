"""Each family of models reads packed as in transformers: in any chunks, rolled back, in company, in 16 bits too."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from tests.outrider.runtime import tiny
from tests.outrider.runtime.tiny import CONFIGS, EXPERTS, FAMILIES, VOCABULARY, WINDOW, Truth

CLOSE = 1e-5  # of the largest logit
LENGTH = 24  # almost five windows
ROOM = 32

# |difference| / |logits| of the median row. One step of rounding is 2^-8 in bfloat16 and 2^-11 in float16. Where
# rounding decides between two experts, that row and all that read it differ by more.
NEAR = {"bfloat16": 0.05, "float16": 0.01}
NEAR_WITH_EXPERTS = {"bfloat16": 0.1, "float16": 0.02}


def read(model: ModelRunner, tokens: list[int], cut: int) -> Tensor:
    """All logits of a sequence that is read in chunks of a size, beside another sequence.

    Before each chunk a wrong draft is read and rejected; now and then more than a window is rolled back and read again.
    """
    rng = random.Random(cut)
    slot, other = model.pool.allocate(), model.pool.allocate()
    rows = []
    for start in range(0, len(tokens), cut):
        wrong = rng.choices(range(VOCABULARY), k=min(6, ROOM - start))
        model.forward([Chunk(slot, wrong, start, len(wrong))])
        back = start - (WINDOW + 4) if start > 10 and start % 3 == 0 else start
        model.pool.rollback(slot, back)
        if back < start:
            model.forward([Chunk(slot, tokens[back:start], back, start - back)])
        if model.pool.length(other) + 3 > ROOM:
            model.pool.rollback(other, 1)
        company = Chunk(other, rng.choices(range(VOCABULARY), k=3), model.pool.length(other), 3)
        rows.append(model.forward([company, Chunk(slot, tokens[start : start + cut], start, 0)]))
    model.pool.free(slot)
    model.pool.free(other)
    model.pool.check_integrity()
    return torch.cat(rows)


def sequence(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


@pytest.mark.parametrize(
    ("name", "fuse"),
    [(name, fuse) for name in FAMILIES for fuse in (False, True) if fuse or name not in CONFIGS],
    ids=lambda value: value if isinstance(value, str) else "fused" if value else "unfused",
)
def test_a_family_reads_as_in_transformers(
    name: str, fuse: bool, load: Callable[..., LoadedModel], checkpoint: Callable[[str], Path]
) -> None:
    """Those of `CONFIGS` unfused are in `test_packed`."""
    model = ModelRunner.build(load(name), 2, ROOM, fuse=fuse)
    tokens = sequence(1)
    wanted = Truth(checkpoint(name))(tokens)
    for cut in (1, 7, LENGTH) if fuse else (2, LENGTH):
        found = read(model, tokens, cut)
        assert (found - wanted).abs().max() <= CLOSE * max(1.0, float(wanted.abs().max())), f"chunks of {cut}"


def test_a_soft_cap_and_a_window_make_a_difference(
    load: Callable[..., LoadedModel], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Else the test above would say nothing of them."""
    tokens = sequence(2)
    capped = Truth(checkpoint("gemma2"))(tokens)
    changes: list[dict[str, Any]] = [{"attn_logit_softcapping": None}, {"sliding_window": 64}]
    for i, change in enumerate(changes):
        other = Truth(tiny.save(tiny.gemma2(**change), tmp_path / str(i)))(tokens)
        assert (other - capped).abs().max() > 1e-2 * capped.abs().max()
    assert {layer.window for layer in load("gemma2").layers} == {WINDOW, None}


# -------------------------------------------------------------------------------------------------- mixtures of experts


def write(model: ModelRunner, prompt: list[int], company: list[list[int]], count: int) -> tuple[list[int], Tensor]:
    """Greedy tokens after a prompt and the logits that chose them, with others in every pass."""
    rng = random.Random(len(company))
    slot, others = model.pool.allocate(), [model.pool.allocate() for _ in company]
    tokens, rows = list(prompt), []
    done = 0
    while len(tokens) < len(prompt) + count:
        chunks = [Chunk(slot, tokens[done:], done, len(tokens) - done - 1)]
        for other, text in zip(others, company, strict=True):
            held = model.pool.length(other)
            step = min(rng.choice([1, 2, 5]), len(text) - held)
            if step:
                chunks.append(Chunk(other, text[held : held + step], held, step))
        rng.shuffle(chunks)
        rows.append(model.forward(chunks))
        done = len(tokens)
        tokens.append(int(rows[-1][0].argmax()))
    for taken in (slot, *others):
        model.pool.free(taken)
    return tokens[len(prompt) :], torch.cat(rows)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_chosen_alike_alone_and_in_company(name: str, load: Callable[..., LoadedModel]) -> None:
    model = ModelRunner.build(load(name), 6, ROOM)
    prompt = sequence(0, 6)
    alone, wanted = write(model, prompt, [], 16)
    among, found = write(model, prompt, [sequence(100 + i) for i in range(5)], 16)
    assert among == alone
    assert (found - wanted).abs().max() <= CLOSE * max(1.0, float(wanted.abs().max()))


def test_experts_with_room_for_so_many_rows_of_a_pass_are_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a router would let the company decide; the self-check at load sees it."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    forward = MixtralTopKRouter.forward

    def crowded(self: MixtralTopKRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = forward(self, hidden)
        before = torch.nn.functional.one_hot(chosen, 4).cumsum(0).gather(2, chosen.unsqueeze(2)).squeeze(2)
        return logits, weights * (before <= 3), chosen

    monkeypatch.setattr(MixtralTopKRouter, "forward", crowded)
    with pytest.raises(CheckpointError, match="give other logits than its own forward"):
        load_model(ModelSource(str(checkpoint("mixtral")), dtype="float32", device="cpu"))


# -------------------------------------------------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "phi", "mixtral", "qwen3-moe", "gpt-oss"])
def test_sixteen_bits_stay_near_float32(name: str, dtype: str, load: Callable[..., LoadedModel]) -> None:
    """A wrong mask or a missing factor moves logits by their own size."""
    tokens = sequence(3)
    exact, rounded = (
        read(ModelRunner.build(load(name, kind), 2, ROOM, fuse=fuse), tokens, 7)
        for kind, fuse in (("float32", False), (dtype, True))
    )
    assert rounded.dtype == torch.float32
    distance = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert distance.median() <= (NEAR_WITH_EXPERTS if name in EXPERTS else NEAR)[dtype]
