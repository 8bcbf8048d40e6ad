"""The decoder in C computes what transformers computes, and a row's result depends on its own sequence alone."""

import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernels import cpu_decoder as decoder
from kernels.sampling import NO_LOGITS, UNSURE, Draw, Sample, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.llama_loader import processor_flags
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner


def runs(dtype: torch.dtype) -> bool:
    return decoder.can_run(dtype, torch.device("cpu"), hidden=16, head_dim=16)


def needs(name: str) -> pytest.MarkDecorator:
    why = f"no decoder in C for {name}: no compiler, or no instructions"
    return pytest.mark.skipif(not runs(getattr(torch, name)), reason=why)


needs_bfloat16 = needs("bfloat16")
by_dtype = pytest.mark.parametrize("dtype", [pytest.param(each, marks=needs(each)) for each in ("bfloat16", "float32")])

SHAPE: dict[str, Any] = {
    "vocab_size": 97,  # not a multiple of a vector
    "hidden_size": 48,
    "intermediate_size": 99,  # not a multiple of a panel
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "llama, biases": lambda: transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "llama, 6 heads of 80": lambda: transformers.LlamaConfig(
        **SHAPE | {"num_attention_heads": 6, "head_dim": 80}, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "llama, 64 units": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 128, "vocab_size": 128},
        num_key_value_heads=2,
    ),
    "mistral, window": lambda: transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=21),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen2, a window in some layers": lambda: transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=2, use_sliding_window=True, sliding_window=21, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, num_key_value_heads=2),
}
# Of the norm of the logits. Inputs of products are rounded to the dtype, and the weights here amplify that.
CLOSE = {"bfloat16": 0.03, "float32": 1e-5}


def checkpoint(name: str, folder: Path) -> Path:
    """A model with random weights and biases, in bfloat16."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if each.endswith("bias"):
                weight.normal_(std=0.3)
            elif "norm" in each:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=2.0 / weight.size(-1) ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: checkpoint(name, tmp_path_factory.mktemp("model")) for name in CONFIGS}


def runner(folder: Path, dtype: str = "bfloat16", *, fuse: bool = True) -> ModelRunner:
    return ModelRunner.build(load_model(ModelSource(str(folder), dtype=dtype, device="cpu")), 8, 256, fuse=fuse)


def tokens_of(count: int, seed: int, vocab_size: int = 97) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def run(model: ModelRunner, sequences: Sequence[Sequence[int]], widths: Sequence[int]) -> list[Tensor]:
    """The logits of all positions of each sequence, in passes over `widths[i]` tokens of sequence i."""
    slots = [model.pool.allocate() for _ in sequences]
    found: list[list[Tensor]] = [[] for _ in sequences]
    while True:
        chunks, owners = [], []
        for i, (slot, tokens, width) in enumerate(zip(slots, sequences, widths, strict=True)):
            start = model.pool.length(slot)
            if piece := tokens[start : start + width]:
                chunks.append(Chunk(slot, piece, start, 0))
                owners.append(i)
        if not chunks:
            break
        logits = model.logits(chunks).split([len(chunk.tokens) for chunk in chunks])
        for i, rows in zip(owners, logits, strict=True):
            found[i].append(rows.clone())
    for slot in slots:
        model.pool.free(slot)
    return [torch.cat(rows) for rows in found]


def test_the_library_is_there_where_it_can_be() -> None:
    flags = processor_flags()
    can_be = sys.platform == "linux" and shutil.which("gcc") and {"avx512bw", "avx512dq", "avx512vl"} <= set(flags)
    assert runs(torch.float32) or not can_be
    assert runs(torch.bfloat16) or not (can_be and "avx512_bf16" in flags)


@by_dtype
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, dtype: str, folders: dict[str, Path]) -> None:
    """Over several blocks of the KV cache, with ragged passes; in bfloat16 nearer to float32 than transformers."""
    ours, exact = runner(folders[name], dtype), runner(folders[name], "float32", fuse=False)
    assert isinstance(ours.program, FusedDecoder)
    assert ours.program.cpu_decoder is not None
    sequences = [tokens_of(count, count) for count in (3 * BLOCK_TOKENS + 7, 41, 1)]
    wanted = run(exact, sequences, [200, 200, 200])
    plain = run(runner(folders[name], dtype, fuse=False), sequences, [200, 200, 200])
    for found, right, rounded in zip(run(ours, sequences, [13, 7, 1]), wanted, plain, strict=True):
        error = (found - right).norm() / right.norm()
        assert error < CLOSE[dtype]
        assert dtype == "float32" or error < (rounded - right).norm() / right.norm()


@by_dtype
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_depends_on_its_sequence_alone(name: str, dtype: str, folders: dict[str, Path]) -> None:
    """Bit for bit: the width of a pass, the other sequences, the number of threads and free blocks change nothing."""
    model, saved = runner(folders[name], dtype), torch.get_num_threads()
    sequences = [tokens_of(count, count) for count in (90, 70, 33, 5, 2, 1)]
    wanted = [run(model, [tokens], [1])[0] for tokens in sequences]
    model.pool.by_head.stores[0].fill_(torch.nan)  # type: ignore[union-attr]
    try:
        for threads, widths in (
            (1, (90, 70, 33, 5, 2, 1)),
            (1, (6, 7, 8, 2, 1, 1)),
            (2, (1, 13, 4, 1, 1, 1)),
            (3, (90,) * 6),
        ):
            torch.set_num_threads(threads)
            for found, right in zip(run(model, sequences, widths), wanted, strict=True):
                assert torch.equal(found, right)
    finally:
        torch.set_num_threads(saved)


@needs_bfloat16
def test_only_wanted_rows_have_logits(folders: dict[str, Path]) -> None:
    model = runner(folders["llama"])
    tokens = tokens_of(20, 1)
    (whole,) = run(model, [tokens], [20])
    first, second = model.pool.allocate(), model.pool.allocate()
    found = model.logits([Chunk(first, tokens[:8], 0, 6), Chunk(second, tokens[:5], 0, 5)])
    assert torch.equal(found, whole[6:8])
    assert model.logits([Chunk(first, tokens[8:12], 8, 4)]).shape == (0, 97)
    assert torch.equal(model.logits([Chunk(first, tokens[12:], 12, 7)]), whole[19:])


@by_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(value: float, dtype: str, folders: dict[str, Path]) -> None:
    loaded = load_model(ModelSource(str(folders["qwen3"]), dtype=dtype, device="cpu"))
    model = ModelRunner.build(loaded, 8, 256)
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[7] = value  # the program reads the same memory
    good, bad = [8, 9, 10, 11], [8, 7, 10, 11]
    found = run(model, [bad, good, bad], [4, 4, 2])
    assert found[0].isnan().any(1).tolist() == found[2].isnan().any(1).tolist() == [False, True, True, True]
    assert torch.equal(found[1], run(model, [good], [1])[0])


# ------------------------------------------------------------------------------------------------------- decode loop

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.05),
    SamplingParams(temperature=1e-300),
    SamplingParams(temperature=4.0),  # many tokens are equally likely, more than `max_support`
    SamplingParams(temperature=1.4, top_k=9),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=4.0, top_p=0.95),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.9, min_p=0.02),
]
WIDE = 3001
"""Tokens of a larger vocabulary, most of which are improbable."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model in which each token has a twin with the same logit, WIDE / 2 ids above it."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(**SHAPE | {"vocab_size": WIDE}, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        head = torch.randn(WIDE // 2 + 1, 48) * 3 / 48**0.5
        model.lm_head.weight.copy_(head.repeat(2, 1)[:WIDE])
    folder = tmp_path_factory.mktemp("wide")
    model.to(torch.bfloat16).save_pretrained(folder)
    return load_model(ModelSource(str(folder), dtype="bfloat16", device="cpu"))


@pytest.fixture(scope="module")
def wide_floats(wide: LoadedModel) -> LoadedModel:
    """The same in float32."""
    return load_model(ModelSource(wide.name, dtype="float32", device="cpu"))


def one_by_one(loop: DecodeLoop, slot: int, chunk: list[int], draws: Sequence[Draw]) -> list[Sample]:
    """As the loop, in Python: a pass and a sample for each token."""
    model = loop.model_runner
    samples = list[Sample]()
    for draw in draws:
        logits = model.logits([Chunk(slot, chunk, model.pool.length(slot), len(chunk) - 1)])
        samples += loop._drawn(loop.without_mask(logits), [draw])
        if samples[-1].token < 0:
            break
        chunk = [samples[-1].token]
    return samples


def assert_alike(mine: Sample, theirs: Sample, config: SparseConfig) -> None:
    """The same token, from weights that differ by 1 at most; where sums of float32 differ, so may the least tokens."""
    assert mine.token == theirs.token
    assert (mine.q is None) is (theirs.q is None)
    if mine.q is None or theirs.q is None:
        return
    assert list(mine.q.ids) == sorted(set(mine.q.ids.tolist()))
    assert mine.q.total == int(mine.q.weights.sum(dtype=int))
    assert mine.q.weights.min() >= 1
    assert len(mine.q.ids) <= config.max_support
    ours = dict(zip(mine.q.ids.tolist(), mine.q.weights.tolist(), strict=True))
    others = dict(zip(theirs.q.ids.tolist(), theirs.q.weights.tolist(), strict=True))
    assert all(abs(ours[token] - others[token]) <= 1 for token in ours.keys() & others.keys())
    extra = ours.keys() ^ others.keys()
    least = min(*ours.values(), *others.values())
    assert len(extra) <= 1, (extra, len(ours))
    assert all(ours.get(token, others.get(token)) <= least + 1 for token in extra)


@needs_bfloat16
@pytest.mark.parametrize("config", [SparseConfig(), SparseConfig(keep_mass=0.9, max_support=40), SparseConfig(1.0, 7)])
@pytest.mark.parametrize("by_noise", [False, True])
@pytest.mark.parametrize("model_of", ["wide", "wide_floats"])
def test_the_loop_draws_the_tokens_of_single_steps(
    model_of: str, by_noise: bool, config: SparseConfig, request: pytest.FixtureRequest
) -> None:
    """By uniforms and by noise; several sequences, which draw different numbers of tokens with different parameters."""
    model = ModelRunner.build(request.getfixturevalue(model_of), 24, 256)
    loop, rng = DecodeLoop(model, WIDE - 4, config), random.Random(1)
    prompts = [rng.choices(range(WIDE), k=rng.randint(1, 40)) for _ in PARAMS]
    draws: list[list[Draw]] = []
    for i, params in enumerate(PARAMS):
        count = 1 + i * 5 % 7
        shared = [(i, len(prompts[i]) + j) if by_noise else None for j in range(count)]
        draws.append([Draw(params, rng.random(), noise) for noise in shared])
    ours, theirs = ([model.pool.allocate() for _ in PARAMS] for _ in range(2))
    found = loop.decode([Chunk(slot, tokens, 0, 0) for slot, tokens in zip(ours, prompts, strict=True)], draws)
    for i, samples in enumerate(found):
        wanted = one_by_one(loop, theirs[i], prompts[i], draws[i])
        assert len(samples) == len(wanted) == len(draws[i])
        for mine, right in zip(samples, wanted, strict=True):
            assert_alike(mine, right, config)
            assert (mine.scores is None) is (right.scores is None)
            if mine.scores is not None and right.scores is not None and draws[i][0].params.is_greedy:
                assert torch.equal(mine.scores, right.scores)
            elif mine.scores is not None and right.scores is not None:  # up to a factor
                assert torch.allclose(mine.scores / mine.scores.min(), right.scores / right.scores.min(), atol=1e-5)
        assert model.pool.length(ours[i]) == model.pool.length(theirs[i])
        after = [model.logits([Chunk(slot[i], [5], model.pool.length(slot[i]), 0)]) for slot in (ours, theirs)]
        assert torch.equal(*after)


@needs_bfloat16
@pytest.mark.parametrize("model_of", ["wide", "wide_floats"])
@pytest.mark.parametrize("by_noise", [False, True])
def test_a_target_draws_from_the_whole_distribution(
    by_noise: bool, model_of: str, request: pytest.FixtureRequest
) -> None:
    """As verification draws. Some draw a quarter of all tokens, where q̂ holds 256 of 3,001; and the ends of u."""
    model = ModelRunner.build(request.getfixturevalue(model_of), 24, 256)
    loop, rng, every = DecodeLoop(model, WIDE - 4, None), random.Random(3), [*PARAMS, SamplingParams(top_k=2500)]
    ends, beyond = [0.0, 1.0 - 2.0**-53], set[int]()
    for repetition in range(6):
        slots = [[model.pool.allocate() for _ in every] for _ in range(2)]
        prompts = [rng.choices(range(WIDE), k=rng.randint(1, 20)) for _ in every]
        draws: list[list[Draw]] = []
        for i, params in enumerate(every, repetition * len(every)):
            uniforms = [rng.choice(ends) if rng.random() < 0.2 else rng.random() for _ in range(12)]
            draws.append([Draw(params, u, (i, 40 + j) if by_noise else None) for j, u in enumerate(uniforms)])
        found = loop.decode([Chunk(slot, each, 0, 0) for slot, each in zip(slots[0], prompts, strict=True)], draws)
        for slot, prompt, own, samples in zip(slots[1], prompts, draws, found, strict=True):
            wanted = one_by_one(loop, slot, prompt, own)
            assert [each.token for each in samples] == [each.token for each in wanted]
            assert all(each.q is None and each.scores is None for each in samples)
            beyond |= {each.token for each in samples}
        for slot in (*slots[0], *slots[1]):
            model.pool.free(slot)
    assert len(beyond) > 200


@needs_bfloat16
def test_a_uniform_at_the_edge_of_two_tokens_draws_the_second(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of 128 tokens with equal logits; sums of 1/128 are exact."""
    equal = AutoModelForCausalLM.from_pretrained(folders["llama, 64 units"], dtype=torch.bfloat16)
    with torch.no_grad():
        equal.lm_head.weight.copy_(equal.lm_head.weight[:1].expand(128, -1))
    equal.save_pretrained(tmp_path)
    model = ModelRunner.build(load_model(ModelSource(str(tmp_path), dtype="bfloat16", device="cpu")), 1, 256)
    draws = [Draw(SamplingParams(), token / 128) for token in range(128)]
    (samples,) = DecodeLoop(model, 128, None).decode([Chunk(model.pool.allocate(), [5], 0, 0)], [draws])
    assert [each.token for each in samples] == list(range(128))


@needs_bfloat16
@pytest.mark.parametrize("config", [SparseConfig(), None])
def test_the_loop_ends_a_sequence_after_a_stop_token(config: SparseConfig | None, wide: LoadedModel) -> None:
    model = ModelRunner.build(wide, 4, 256)
    loop, slots = DecodeLoop(model, WIDE, config), [model.pool.allocate() for _ in range(2)]
    chunks = [Chunk(slot, [11, 12 + slot], 0, 1) for slot in slots]
    draws = [[Draw(SamplingParams(), 0.1 * i) for i in range(1, 8)]] * 2
    first, second = ([each.token for each in own] for own in loop.decode(chunks, draws))
    for slot in slots:
        model.pool.rollback(slot, 0)
    found = loop.decode(chunks, draws, [{first[3], WIDE}, {WIDE}])
    ended = first[: first.index(first[3]) + 1]
    other = second if config else second[: len(ended)]  # a target's loop ends for all
    assert [[each.token for each in own] for own in found] == [ended, other]
    assert [model.pool.length(slot) for slot in slots] == [1 + len(own) for own in found]


@needs_bfloat16
@pytest.mark.parametrize("config", [SparseConfig(), None])
def test_an_interrupted_loop_ends_after_a_token(config: SparseConfig | None, wide: LoadedModel) -> None:
    model = ModelRunner.build(wide, 4, 256)
    loop, slots = DecodeLoop(model, WIDE, config), [model.pool.allocate() for _ in range(2)]
    chunks = [Chunk(slot, [11, 12 + slot], 0, 1) for slot in slots]
    draws = [[Draw(SamplingParams(), 0.1 * i) for i in range(1, 8)]] * 2
    whole = loop.decode(chunks, draws)
    for slot in slots:
        model.pool.rollback(slot, 0)
    loop.interrupt.set()
    found = loop.decode(chunks, draws)
    assert [[each.token for each in own] for own in found] == [[own[0].token] for own in whole]
    assert [model.pool.length(slot) for slot in slots] == [2, 2]
    loop.interrupt.clear()
    rest = loop.decode(
        [Chunk(s, [own[0].token], 2, 0) for s, own in zip(slots, found, strict=True)], [draws[0][1:]] * 2
    )
    assert [[each.token for each in own] for own in rest] == [[each.token for each in own[1:]] for own in whole]


@needs_bfloat16
def test_a_uniform_at_the_edge_of_a_cell_draws_the_next_token(wide: LoadedModel) -> None:
    model = ModelRunner.build(wide, 4, 256)
    loop, slot = DecodeLoop(model, WIDE, SparseConfig()), model.pool.allocate()

    def draw(u: float) -> Sample:
        model.pool.rollback(slot, 0)
        return loop.decode([Chunk(slot, [11, 12], 0, 1)], [[Draw(SamplingParams(), u)]])[0][0]

    q = draw(0.0).q
    assert q is not None
    edges = q.weights.cumsum(dtype=int)[:-1].tolist()
    assert len(edges) > 10
    for i, edge in enumerate(edges):
        u = -(-(edge << 53) // q.total) / 2.0**53  # the least uniform of the cell
        assert draw(u).token == q.ids[i + 1] == q.token_at(u)
        assert draw(u - 2.0**-53).token == q.ids[i]


@needs_bfloat16
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)])
@pytest.mark.parametrize("by_noise", [False, True])
def test_the_loop_stops_where_the_draft_is_unsure(params: SamplingParams, by_noise: bool, wide: LoadedModel) -> None:
    model = ModelRunner.build(wide, 4, 256)
    loop, lengths = DecodeLoop(model, WIDE, SparseConfig()), set[int]()
    for bound in (0.9, 2.0, 3.0, 4.0, 5.0, 9.0):
        one, other = model.pool.allocate(), model.pool.allocate()
        bounds = [9.0, *[bound] * 5]  # a request's bound does not hold for the first token
        draws = [Draw(params, 0.37, (3, 2 + i) if by_noise else None, each) for i, each in enumerate(bounds)]
        (samples,) = loop.decode([Chunk(one, [11, 12], 0, 1)], [draws])
        wanted = one_by_one(loop, other, [11, 12], draws)
        assert [each.token for each in samples] == [each.token for each in wanted]
        assert samples[-1].token == UNSURE or len(samples) == 6
        lengths.add(len(samples))
        model.pool.free(one)
        model.pool.free(other)
    assert len(lengths) > 1


@needs_bfloat16
def test_the_loop_stops_at_bad_logits(folders: dict[str, Path]) -> None:
    """The other sequences go on, and none draws the mask token."""
    loaded = load_model(ModelSource(str(folders["qwen3"]), dtype="bfloat16", device="cpu"))
    model = ModelRunner.build(loaded, 8, 256)
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[7] = torch.nan  # the program reads the same memory
    loop = DecodeLoop(model, 97, SparseConfig())
    slots = [model.pool.allocate() for _ in range(3)]
    for params in (SamplingParams(temperature=0), SamplingParams()):
        draws = [[Draw(params, 0.2)] * 4] * 3
        chunks = [Chunk(slot, [8, token], 0, 1) for slot, token in zip(slots, (7, 9, 10), strict=True)]
        found = loop.decode(chunks, draws)
        assert [each.token for each in found[0]] == [NO_LOGITS]
        assert [len(each) for each in found[1:]] == [4, 4]
        favourite = found[1][0].token
        for slot in slots:
            model.pool.rollback(slot, 0)
        loaded.mask_token = favourite
        (found[1],) = loop.decode(chunks[1:2], draws[:1])
        assert favourite not in [each.token for each in found[1]]
        loaded.mask_token = None
        for slot in slots:
            model.pool.rollback(slot, 0)


@needs_bfloat16
def test_a_forked_process_runs_it_too(folders: dict[str, Path]) -> None:
    """It has none of the threads that its parent started."""
    model, saved = runner(folders["llama"]), torch.get_num_threads()
    sequences = [tokens_of(30, 1)]
    try:
        torch.set_num_threads(2)
        (wanted,) = run(model, sequences, [30])
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(run(model, sequences, [4])[0], wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(saved)


@needs_bfloat16
def test_wrong_products_are_refused_at_the_start(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original = decoder.panels
    monkeypatch.setattr(decoder, "panels", lambda weight: original(weight.roll(1, 0)))
    with pytest.raises(CheckpointError, match="gives other logits when fused than in transformers"):
        runner(folders["llama"])


@needs_bfloat16
def test_a_paged_cache_needs_another_program(folders: dict[str, Path]) -> None:
    loaded = load_model(ModelSource(str(folders["llama"]), dtype="bfloat16", device="cpu"))
    fuse_model(loaded)
    with pytest.raises(ValueError, match="fused for a KV cache by head"):
        fuse_model(loaded, paged=True)


def by_torch(folder: Path) -> None:
    program = fuse_model(load_model(ModelSource(str(folder), dtype="bfloat16", device="cpu")))
    assert isinstance(program, FusedDecoder)
    assert program.cpu_decoder is None


def test_torch_runs_what_it_cannot(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no multiple of a vector, a dtype without instructions, and any model without the library."""
    config = transformers.LlamaConfig(**SHAPE | {"head_dim": 12}, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    by_torch(tmp_path)
    if runs(torch.bfloat16):
        with monkeypatch.context() as patch:  # a processor without AVX512-BF16
            patch.setattr(decoder.library(), "decoder_supported", lambda: 1)
            by_torch(folders["llama"])
            assert runs(torch.float32)
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    for spec in (None, ModuleSpec("kernels._cpu_decoder", None, origin=str(other))):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        decoder.library.cache_clear()
        try:
            by_torch(folders["llama"])
        finally:
            decoder.library.cache_clear()
