"""Passes over pages: the logits of one piece of memory, bit for bit, however blocks lie and passes are cut."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime import attention, fused_decoder, fused_layers, paged_attention
from outrider.runtime.attention import AttentionLayer
from outrider.runtime.batch import Layout, PagedBatch, lay_out
from outrider.runtime.block_pool import MemoryShape, PagedMemory
from outrider.runtime.cuda_graph import Repeating
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_layers import Frame, FusedLayers, LayerWeights
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.layer_ops import LayerOps, run_paged
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import (
    EAGER,
    ORDINARY,
    AttentionChoice,
    attend_eager,
    check_attention,
    choose_attention,
)
from outrider.runtime.sdpa import Scoring, attend_scores
from tests.kernels.test_triton_attention import wide_tiles
from tests.outrider.runtime.tiny import FAMILIES, VOCABULARY

PAGED = AttentionChoice(EAGER, "to be held against the other", block_tokens=4)
ROOM = 32


def chat(model: ModelRunner, seed: int, passes: int = 25) -> list[Tensor]:
    """Many passes of a few sequences, which come, go, fork, are rolled back and meet in any mixture; their logits."""
    rng = random.Random(seed)
    slots: list[int] = []
    told = []
    for _ in range(passes):
        if len(slots) < 2 or (len(slots) < 4 and rng.random() < 0.3):
            slots.append(model.pool.fork(rng.choice(slots)) if slots and rng.random() < 0.5 else model.pool.allocate())
        if rng.random() < 0.2:
            model.pool.free(slots.pop(rng.randrange(len(slots))))
        chunks = []
        for slot in rng.sample(slots, rng.randint(1, len(slots)) if slots else 0):
            held = model.pool.length(slot)
            if rng.random() < 0.3 or held > ROOM - 9:
                held = rng.randint(0, held)
                model.pool.rollback(slot, held)
            count = rng.randint(1, 8)
            chunks.append(Chunk(slot, rng.choices(range(VOCABULARY), k=count), held, rng.randint(0, count)))
        if chunks:
            told.append(model.forward(chunks).clone())
    model.pool.check_integrity()
    return told


def _spelled_out(
    query: Tensor,
    counts: list[int],
    keys: list[Tensor],
    values: list[Tensor],
    masks: list[Tensor],
    scaling: float,
    window: int,
) -> Tensor:
    """In place of `outrider.runtime.sdpa.attend`."""
    starts = [each.size(2) - count for each, count in zip(keys, counts, strict=True)]
    return attend_scores(query, starts, counts, keys, values, Scoring(scaling, window))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(FAMILIES, ["float32"]), *product(["llama", "gpt2", "gemma2", "gpt-oss"], ["bfloat16"])],
)
def test_pages_give_what_one_piece_of_memory_gives(
    name: str, dtype: str, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both spell their scores out; in float32 torch's own attention over one piece comes near, too."""
    plain = chat(ModelRunner.build(load(name, dtype), 5, ROOM), 3, 16)
    for module in (attention, fused_layers):
        monkeypatch.setattr(module, "attend", _spelled_out)
    monkeypatch.setattr(fused_decoder, "compiled", lambda module, device: module)
    ordinary, paged = (ModelRunner.build(load(name, dtype), 5, ROOM, attention=choice) for choice in (ORDINARY, PAGED))
    assert ordinary.fused == paged.fused
    assert paged.pool.paged is not None
    for found, wanted, near in zip(chat(paged, 3, 16), chat(ordinary, 3, 16), plain, strict=True):
        assert torch.equal(found.float(), wanted)
        if dtype == "float32":
            assert torch.allclose(found, near, atol=1e-4)


def test_a_layout_says_where_each_row_goes_and_goes_itself_as_bytes() -> None:
    pool = KVPool(1, 1, 2, blocks=9, max_length=12, dtype=torch.float32, device="cpu", block_tokens=4, paged=True)
    first, second = pool.allocate(), pool.allocate()
    pool.grow(second, 1)
    for slot, held in ((first, 3), (second, 5)):
        pool.grow(slot, held)
        pool.extend(slot, held)
    layout = lay_out([Chunk(second, [7, 8], 5, 1), Chunk(first, [9, 10, 11], 3, 3)], pool)
    table = {slot: pool.block_table(slot) for slot in (first, second)}
    assert layout.shape == (5, 1, 2, 2, 2)
    assert layout.tokens.tolist() == [7, 8, 9, 10, 11]
    assert layout.positions.tolist() == [5, 6, 3, 4, 5]
    assert layout.places.tolist() == [
        4 * table[second][1] + 1,
        4 * table[second][1] + 2,
        4 * table[first][0] + 3,
        4 * table[first][1],
        4 * table[first][1] + 1,
    ]
    assert (layout.rows.tolist(), layout.row_starts.tolist(), layout.lengths.tolist()) == ([1], [0, 2, 5], [7, 6])
    assert layout.tables.tolist() == [list(table[second]), list(table[first])]
    assert (layout.items.tolist(), layout.row_slots.tolist()) == ([[0, 0, 2, -1, -1], [1, 2, 3, -1, -1]], [-1] * 5)
    again = Layout.unpack(layout.shape, layout.pack())
    assert all(map(np.array_equal, again._arrays(), layout._arrays()))
    with pytest.raises(ValueError, match=r"has 224 bytes, not 223"):
        Layout.unpack(layout.shape, layout.pack()[:-1])
    with pytest.raises(ValueError, match=r"does not fit \(8, 8, 2, 3, 8\)"):
        layout.padded((8, 8, 2, 3, 8), nowhere=36)


def test_a_pool_of_pages_has_no_views_and_copies_what_is_shared_before_it_is_written() -> None:
    pool = KVPool(2, [1, 2], 2, blocks=4, max_length=12, dtype=torch.float32, device="cpu", block_tokens=4, paged=True)
    assert pool.paged is not None
    slot = pool.allocate()
    with pytest.raises(ValueError, match="no views"):
        pool.views(slot, 0, 2)
    pool.grow(slot, 2)
    pool.extend(slot, 2)
    (block,) = pool.block_table(slot)
    for layer in range(2):
        pool.paged.keys[layer][block] = 1 + layer
        pool.paged.values[layer][block] = 5 + layer
    told: list[tuple[Sequence[int], Sequence[int]]] = []
    pool.paged.on_copy = lambda source, target: told.append((source, target))
    fork = pool.fork(slot)
    pool.grow(fork, 3)
    (copy,) = pool.block_table(fork)
    assert copy != block
    assert told == [([block], [copy])]
    for layer in range(2):
        assert bool((pool.paged.keys[layer][copy] == 1 + layer).all())
        assert bool((pool.paged.values[layer][copy] == 5 + layer).all())
    assert pool.paged.null_position == 16, "behind all blocks that anybody may hold"


def test_pool_and_attention_are_both_paged_or_neither(load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(ValueError, match="the attention is eager, and the pool is not paged"):
        ModelRunner(load("llama"), ModelRunner.build(load("llama"), 1, 8).pool, attention=PAGED)


def test_a_model_that_reads_its_pages_wrongly_is_refused(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PagedBatch.write
    monkeypatch.setattr(PagedBatch, "write", lambda self, i, keys, values: right(self, i, values, keys))
    with pytest.raises(CheckpointError, match=r"other logits over pages, by eager, .*--attention sdpa reads no"):
        ModelRunner.build(load("llama"), 1, 8, attention=PAGED)


# ---------------------------------------------------------------------------------------------------------- choice

KINDS = (
    AttentionLayer(4, 4, 16, 0.25, None),
    AttentionLayer(6, 2, 8, 0.4, 5),
    AttentionLayer(4, 1, 8, 0.4, 700),
)
ASKING = (
    AttentionLayer(4, 2, 8, 0.4, None, softcap=5.0),
    AttentionLayer(4, 4, 8, 0.4, 7, sinks=True),
)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")
def test_our_kernel_is_tried_on_what_layers_ask_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded scores and sinks too; interpreted here."""
    monkeypatch.setattr("kernels.triton_attention.attend_sizes", wide_tiles)
    found = choose_attention("triton", (KINDS[1], *ASKING), torch.float32, torch.device("cpu"))
    assert (found.name, found.block_tokens) == ("triton", 32)
    assert found.can_be_captured(torch.device("cuda"))
    wide = AttentionLayer(1, 1, 512, 1.0, None)
    with pytest.raises(CheckpointError, match="layer 1 has heads of 512, and it takes 256 at most"):
        choose_attention("triton", (KINDS[0], wide), torch.float32, torch.device("cpu"))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss"])
def test_by_our_kernel_a_model_gives_what_it_gives_otherwise(name: str, load: Callable[..., LoadedModel]) -> None:
    choice = AttentionChoice("triton", "interpreted", block_tokens=4)
    ordinary, paged = (ModelRunner.build(load(name), 5, ROOM, attention=each) for each in (ORDINARY, choice))
    for found, wanted in zip(chat(paged, 3, 12), chat(ordinary, 3, 12), strict=True):
        assert torch.allclose(found, wanted, atol=2e-5)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")
def test_captured_steps_and_passes_go_on_into_stretches_that_were_not_there(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our kernel, whose work is listed once for all steps. Stretches are short here."""
    for module in ("attention_work", "triton_attention"):
        monkeypatch.setattr(f"kernels.{module}.STRETCH", 16)
    model = ModelRunner.build(load("qwen3"), 5, 48, attention=AttentionChoice("triton", "interpreted", block_tokens=4))
    bounds: dict[str, Any] = {"seconds": 1e3, "most_bytes": 1 << 30}
    loop = DecodeLoop(model, VOCABULARY, SparseConfig())
    loop.capture(Repeating(), sequences=3, tokens=6, with_noise=False, **bounds)
    model.capture(Repeating(), max_sequences=3, widest=2, **bounds)
    plain = ModelRunner.build(load("qwen3"), 5, 48)
    rng = random.Random(3)
    lengths = (13, 29, 5)
    prompts = [rng.choices(range(VOCABULARY), k=length) for length in lengths]
    slots = [model.pool.allocate() for _ in prompts]
    chunks = [Chunk(slot, prompt, 0, len(prompt)) for slot, prompt in zip(slots, prompts, strict=True)]
    decoded = loop.decode(chunks, [[Draw(SamplingParams(temperature=0))] * 6] * 3)
    assert model.captured is not None
    held = []
    for slot, prompt, samples in zip(slots, prompts, decoded, strict=True):
        text = [*prompt, *(each.token for each in samples)]
        held.append((plain.pool.allocate(), len(text)))
        rows = plain.forward([Chunk(held[-1][0], text, 0, 0)])
        assert rows[len(prompt) - 1 : -1].argmax(-1).tolist() == text[len(prompt) :]
        found = model.forward([Chunk(slot, text[-1:], len(text) - 1, 0)])
        assert torch.allclose(found, rows[-1:], atol=2e-5)
    ends = [Chunk(slots[i], [7, 8], held[i][1], 0) for i in (2, 1)]  # the first has one stretch, the other several
    assert model.captured.find(lay_out(ends, model.pool)) == 4
    wanted = torch.cat([plain.forward([Chunk(held[i][0], [7, 8], held[i][1], 0)]) for i in (2, 1)])
    assert torch.allclose(model.forward(ends), wanted, atol=2e-5)


CHANGES: dict[str, Callable[[PagedBatch, Scoring], tuple[PagedBatch, Scoring]]] = {
    "wider": lambda batch, scoring: (batch, replace(scoring, window=scoring.window + 1)),
    "shorter": lambda batch, scoring: (replace(batch, lengths=batch.lengths - 1, layout=None), scoring),
    "another's pages": lambda batch, scoring: (replace(batch, tables=batch.tables.roll(1, 1)), scoring),
    "scale": lambda batch, scoring: (batch, replace(scoring, scaling=1.1 * scoring.scaling)),
    "uncut": lambda batch, scoring: (
        batch,
        replace(scoring, scaling=2 * scoring.scaling) if not batch.slots and batch.max_length > 500 else scoring,
    ),
    "no capping": lambda batch, scoring: (batch, replace(scoring, softcap=None)),
    "no sinks": lambda batch, scoring: (batch, replace(scoring, sinks=None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attention_that_gives_something_else_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        return attend_eager(query, keys, values, *CHANGES[change](batch, scoring))

    monkeypatch.setattr(paged_attention, "attend_triton", changed)
    kinds = {"wider": KINDS[1:2], "no capping": ASKING[:1], "no sinks": ASKING[1:]}.get(change, KINDS)
    choice = AttentionChoice("triton", "on trial")
    for dtype in (torch.float32, torch.bfloat16):
        why = check_attention(choice, kinds, dtype, torch.device("cpu"))
        assert why is not None
        assert re.match(r"rows differ by .* of their size|(Index|Runtime)Error: ", why), why


def test_what_is_taken_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, layers = torch.device("cpu"), KINDS[:1]
    assert choose_attention("auto", layers, torch.float32, cpu) == ORDINARY
    assert choose_attention("auto", layers, torch.float32, cpu, paged=True).name == EAGER
    assert choose_attention("eager", layers, torch.float32, cpu).is_paged
    with pytest.raises(CheckpointError, match="the pool must be paged"):
        choose_attention("sdpa", layers, torch.bfloat16, cpu, paged=True)
    wide = (*layers, AttentionLayer(1, 1, 512, 1.0, None))
    found = choose_attention("auto", wide, torch.bfloat16, torch.device("cuda"))
    assert (found.name, found.can_be_captured(torch.device("cuda"))) == (EAGER, False)
    assert found.reason.startswith("no triton: layer 1 has heads of 512")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        CheckpointError, match="--attention triton cannot run here: it needs a CUDA device, and this is"
    ):
        choose_attention("triton", layers, torch.bfloat16, cpu)


def weightless_layers(**weights: Any) -> FusedLayers:
    """A decoder of one layer, in bfloat16, that has shapes and no numbers."""
    made: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    heads, kv_heads, head_dim, size, inner = 4, 2, 16, 32, 48
    frame = Frame(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-5,
        packed=False,
        embedding=torch.empty(VOCABULARY, size, **made),
        norm=torch.empty(2, size, **made),
        head=torch.empty(VOCABULARY, size, **made),
        head_bias=None,
        vocab_size=VOCABULARY,
    )
    layer = LayerWeights(
        attention_norm=torch.empty(2, size, **made),
        qkv=torch.empty((heads + 2 * kv_heads) * head_dim, size, **made),
        qkv_bias=None,
        head_norm=torch.empty(heads + kv_heads, 1, head_dim, device="meta"),
        output=torch.empty(size, heads * head_dim, **made),
        output_bias=None,
        mlp_norm=torch.empty(2, size, **made),
        gate_up=torch.empty(2 * inner, size, **made),
        gate_up_bias=None,
        down=torch.empty(size, inner, **made),
        down_bias=None,
        scaling=0.25,
        window=7,
    )
    return FusedLayers(frame, [layer])


@pytest.mark.parametrize("asks", [False, True])
def test_a_pass_on_a_gpu_never_asks_it_for_a_number(asks: bool) -> None:
    """Else the host would wait, and no graph could hold it. Here there are shapes alone, and no numbers to be had."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, scoring: Scoring) -> Tensor:
        if asks:
            assert int(batch.lengths.max()) >= 0
        return torch.empty_like(query)

    def run() -> Tensor:
        ints: dict[str, Any] = {"device": "meta", "dtype": torch.int32}
        longs: dict[str, Any] = {"device": "meta", "dtype": torch.int64}
        memory = PagedMemory(MemoryShape((2,), (16,), 9, 32), torch.bfloat16, torch.device("meta"))
        batch = PagedBatch(
            tokens=torch.zeros(5, **longs),
            positions=torch.zeros(5, **longs),
            places=torch.zeros(5, **longs),
            rows=torch.zeros(5, **longs),
            row_starts=torch.zeros(4, **ints),
            lengths=torch.zeros(3, **ints),
            tables=torch.zeros(3, 2, **ints),
            items=torch.zeros(3, 5, **ints),
            row_slots=torch.zeros(5, **ints),
            slots=0,
            memory=memory,
            attention=attend,
        )
        rotations = torch.empty(64, 1, 8, device="meta", dtype=torch.complex64)
        layers = weightless_layers()
        return run_paged(LayerOps(layers, ""), batch, rotations, None)

    if asks:
        with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
            run()
        return
    logits = run()
    assert (logits.shape, logits.dtype, logits.device.type) == ((5, VOCABULARY), torch.bfloat16, "meta")
