"""Steps over a paged KV cache give the logits of contiguous memory, bit for bit, for any blocks and chunks."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime import attention, fused_decoder, fused_layers, paged_attention
from outrider.runtime.attention import AttentionLayer
from outrider.runtime.batch import PagedBatch, build_batch
from outrider.runtime.block_pool import MemoryShape, PagedMemory
from outrider.runtime.cuda_graph import Capturer, GraphRunner
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.layer_ops import LayerOps
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk
from outrider.runtime.paged_attention import (
    EAGER,
    ORDINARY,
    AttentionChoice,
    attend_eager,
    check_attention,
    choose_attention,
)
from outrider.runtime.sdpa import Location, Scoring, attend_scores, keys_and_values
from outrider.runtime.torch_runner import TorchRunner
from tests.kernels.test_triton_attention import wide_tiles
from tests.outrider.runtime.steps import MAX_LENGTH, PAGED, random_steps
from tests.outrider.runtime.tiny import GATED, VOCABULARY

Load = Callable[..., LoadedModel]
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")


def _attend_by_scores(
    query: Tensor,
    memory: Tensor,
    counts: list[int],
    locations: list[Location],
    masks: list[Tensor],
    block_tokens: int,
    scaling: float,
    window: int,
) -> Tensor:
    """In place of `outrider.runtime.sdpa.attend_causal`."""
    keys, values = keys_and_values(memory, locations, block_tokens)
    starts = [location.end - count for location, count in zip(locations, counts, strict=True)]
    return attend_scores(query, starts, counts, keys, values, Scoring(scaling, window))


# The families whose layers we compute, and of those that transformers computes one for each kind of attention: without
# groups of queries, with scores scaled, soft-capped, or with sinks, with windows in some layers of a part of a model,
# with keys longer than values, with more attentions than layers.
@pytest.mark.usefixtures("layers_by_torch")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(
            [*GATED, "gpt2", "granite", "gemma2", "gpt-oss", "gemma3-with-vision", "deepseek3", "longcat"], ["float32"]
        ),
        *product(["llama", "gpt2", "gemma2", "gpt-oss"], ["bfloat16"]),
    ],
)
def test_blocks_give_the_bits_of_contiguous_memory(
    name: str, dtype: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both compute the scores explicitly."""
    for module in (attention, fused_layers):
        monkeypatch.setattr(module, "attend_causal", _attend_by_scores)
    monkeypatch.setattr(fused_decoder, "compiled", lambda module, device: module)
    loaded = load(name, dtype)
    paged, ordinary = (TorchRunner.build(loaded, 5, MAX_LENGTH, attention=each) for each in (PAGED, ORDINARY))
    assert paged.pool.paged is not None
    for found, wanted in zip(random_steps(paged, 3)[0], random_steps(ordinary, 3)[0], strict=True):
        assert torch.equal(found.float(), wanted)


KINDS = (
    AttentionLayer(4, 4, 16, 0.25, None),
    AttentionLayer(6, 2, 8, 0.4, 5),
    AttentionLayer(4, 1, 8, 0.4, 700),
)
SCORING = (
    AttentionLayer(4, 2, 8, 0.4, None, softcap=5.0),
    AttentionLayer(4, 4, 8, 0.4, 7, sinks=True),
)


@needs_triton
def test_our_kernel_is_checked_on_the_layers_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft caps and sinks too; interpreted here."""
    monkeypatch.setattr("kernels.triton_attention.attend_sizes", wide_tiles)
    found = choose_attention("triton", (KINDS[1], *SCORING), torch.float32, CPU)
    assert (found.name, found.block_tokens) == ("triton", 32)
    assert found.can_be_captured(torch.device("cuda"))
    wide = AttentionLayer(1, 1, 512, 1.0, None)
    with pytest.raises(CheckpointError, match="the heads of layer 1 have 512 elements; at most 256"):
        choose_attention("triton", (KINDS[0], wide), torch.float32, CPU)


@needs_triton
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_our_kernel_gives_the_logits_of_torch(name: str, load: Load) -> None:
    choice = AttentionChoice("triton", "interpreted", block_tokens=4)
    ordinary, paged = (TorchRunner.build(load(name), 5, MAX_LENGTH, attention=each) for each in (ORDINARY, choice))
    for found, wanted in zip(random_steps(paged, 3, 8)[0], random_steps(ordinary, 3, 8)[0], strict=True):
        assert torch.allclose(found, wanted, atol=2e-5)


@needs_triton
def test_captured_steps_continue_in_new_stretches(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our kernel, whose work list is made once for all steps of a call. Stretches are short here."""
    for module in ("attention_work", "triton_attention"):
        monkeypatch.setattr(f"kernels.{module}.STRETCH", 16)
    model = TorchRunner.build(load("qwen3"), 5, 48, attention=AttentionChoice("triton", "interpreted", block_tokens=4))
    bounds: dict[str, Any] = {"seconds": 1e3, "most_bytes": 1 << 30}
    loop = DecodeLoop(model, VOCABULARY, SparseConfig())
    loop.capture(Capturer(), sequences=3, tokens=6, with_kernels=True, **bounds)
    model.capture(Capturer(), max_sequences=3, widest=2, **bounds)
    plain = TorchRunner.build(load("qwen3"), 5, 48)
    prompts = [[(7 * i + length) % VOCABULARY for i in range(length)] for length in (13, 29, 5)]
    slots = [model.pool.allocate() for _ in prompts]
    chunks = [Chunk(slot, prompt, 0, len(prompt)) for slot, prompt in zip(slots, prompts, strict=True)]
    decoded = loop.decode(chunks, [[Draw(SamplingParams(temperature=0))] * 6] * 3)
    assert isinstance(model.paged_runner, GraphRunner)
    held = []
    for slot, prompt, samples in zip(slots, prompts, decoded, strict=True):
        text = [*prompt, *(each.token for each in samples)]
        held.append((plain.pool.allocate(), len(text)))
        rows = plain.forward([Chunk(held[-1][0], text, 0, 0)])
        assert rows[len(prompt) - 1 : -1].argmax(-1).tolist() == text[len(prompt) :]
        found = model.forward([Chunk(slot, text[-1:], len(text) - 1, 0)])
        assert torch.allclose(found, rows[-1:], atol=2e-5)
    ends = [Chunk(slots[i], [7, 8], held[i][1], 0) for i in (2, 1)]  # the first has one stretch, the other several
    captured = model.paged_runner._find(build_batch(ends, model.pool))
    assert captured is not None
    assert captured.rows == 4
    wanted = torch.cat([plain.forward([Chunk(held[i][0], [7, 8], held[i][1], 0)]) for i in (2, 1)])
    assert torch.allclose(model.forward(ends), wanted, atol=2e-5)


CHANGES: dict[str, Callable[[PagedBatch, Scoring], tuple[PagedBatch, Scoring]]] = {
    "wider window": lambda batch, scoring: (batch, replace(scoring, window=scoring.window + 1)),
    "other blocks": lambda batch, scoring: (replace(batch, block_tables=batch.block_tables.roll(1, 1)), scoring),
    "uncut": lambda batch, scoring: (
        batch,
        replace(scoring, scaling=2 * scoring.scaling) if not batch.partials and batch.max_length > 500 else scoring,
    ),
    "no soft cap": lambda batch, scoring: (batch, replace(scoring, softcap=None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_attention_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        return attend_eager(query, keys, values, *CHANGES[change](batch, scoring))

    monkeypatch.setattr(paged_attention, "attend_triton", changed)
    kinds = {"wider window": KINDS[1:2], "no soft cap": SCORING[:1]}.get(change, KINDS)
    for dtype in (torch.float32, torch.bfloat16):
        reason = check_attention(AttentionChoice("triton", "a test"), kinds, dtype, CPU)
        assert reason is not None
        assert re.match(r"rows differ by .* of their size|(Index|Runtime)Error: ", reason), reason


def test_attention_is_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = KINDS[:1]
    assert choose_attention("auto", layers, torch.float32, CPU) == ORDINARY
    assert choose_attention("auto", layers, torch.float32, CPU, paged=True).name == EAGER
    assert choose_attention("eager", layers, torch.float32, CPU).is_paged
    with pytest.raises(CheckpointError, match="with --tensor-parallel-size use auto, eager or triton"):
        choose_attention("sdpa", layers, torch.bfloat16, CPU, paged=True)
    wide = (*layers, AttentionLayer(1, 1, 512, 1.0, None))
    found = choose_attention("auto", wide, torch.bfloat16, torch.device("cuda"))
    assert (found.name, found.can_be_captured(torch.device("cuda"))) == (EAGER, False)
    assert found.reason.startswith("triton cannot run: the heads of layer 1 have 512")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cannot = "--attention triton cannot run here: it needs a CUDA device; the device is"
    with pytest.raises(CheckpointError, match=cannot):
        choose_attention("triton", layers, torch.bfloat16, CPU)


def to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [to_meta(each) for each in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def test_a_step_has_no_host_sync(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on the device meta has no values to read back."""
    monkeypatch.setattr(fused_decoder, "can_pack", lambda dtype, device: False)
    program = fuse_model(load("qwen3", "bfloat16"), paged=True)
    assert isinstance(program, FusedDecoder)
    layers = program._layers
    layers.small = 0  # as on a device
    for name, value in list(vars(layers).items()):
        setattr(layers, name, to_meta(value))

    def attend(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        return torch.empty_like(query)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, device="meta", dtype=dtype)

    tokens, positions, slot_mapping, rows = (ints(5, dtype=torch.int64) for _ in range(4))
    batch = PagedBatch(
        tokens=tokens, positions=positions, slot_mapping=slot_mapping, rows=rows, row_starts=ints(4), lengths=ints(3),
        block_tables=ints(3, 2), items=ints(3, 5), row_partials=ints(5), partials=0, attention=attend,
        memory=PagedMemory(MemoryShape((2, 2, 2), (16, 16, 16), 9, 32), torch.bfloat16, torch.device("meta")),
    )  # fmt: skip
    rotations = torch.empty(64, 1, 8, device="meta", dtype=torch.complex64)
    logits = LayerOps(layers, "").run(batch, rotations, None)
    assert (logits.shape, logits.dtype, logits.device.type) == ((5, VOCABULARY), torch.bfloat16, "meta")
