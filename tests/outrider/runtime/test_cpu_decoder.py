"""The decoder in C computes what transformers computes, and a row's result depends on its own sequence alone."""

import ctypes
import os
import random
import shutil
import subprocess
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
from outrider.runtime.errors import CheckpointError
from outrider.runtime.fused_decoder import FusedDecoder, fuse_model
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.llama_loader import processor_flags
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.model_runner import Chunk
from outrider.runtime.torch_runner import TorchRunner

HAS_LIBRARY = decoder.library() is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="no decoder in C: no compiler, or no instructions")
by_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(each, marks=needs_library) for each in ("bfloat16", "float32")]
)

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


def runner(folder: Path, dtype: str = "bfloat16", *, fuse: bool = True) -> TorchRunner:
    return TorchRunner.build(load_model(ModelSource(str(folder), dtype=dtype, device="cpu")), 8, 256, fuse=fuse)


def tokens_of(count: int, seed: int, vocab_size: int = 97) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def run(model: TorchRunner, sequences: Sequence[Sequence[int]], widths: Sequence[int]) -> list[Tensor]:
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
    flags = set(processor_flags())
    assert HAS_LIBRARY or not shutil.which("gcc")
    if HAS_LIBRARY:
        has_avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
        built = "avx512" if has_avx512 else "avx2" if {"avx2", "fma"} <= flags else "any"
        assert f"_cpu_{built}." in decoder.library()._name
        assert (decoder.library().decoder_supported() == 3) is (has_avx512 and "avx512_bf16" in flags)


def can_be_loaded(name: str) -> bool:
    return decoder._loaded(name) is not None


by_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=pytest.mark.skipif(not can_be_loaded(name), reason="not built, or no instructions"))
        for name in decoder._LIBRARIES
    ],
)
"""On a processor with AVX512, all three."""
SLOWER = [name for name in decoder._LIBRARIES if can_be_loaded(name)][1:]
"""The libraries that a service here does not use."""


@by_dtype
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, dtype: str, folders: dict[str, Path]) -> None:
    """Over several blocks of the KV cache, with ragged passes; in bfloat16 nearer to float32 than transformers."""
    unfused = runner(folders[name], dtype, fuse=False)
    sequences = [tokens_of(count, count) for count in (3 * BLOCK_TOKENS + 7, 41, 1)]
    plain = run(unfused, sequences, [200, 200, 200])
    wanted = plain
    if dtype != "float32":
        wanted = run(runner(folders[name], "float32", fuse=False), sequences, [200, 200, 200])
    ours = TorchRunner.build(unfused.loaded, 8, 256)
    assert isinstance(ours.program, FusedDecoder)
    assert ours.program.cpu_decoder is not None
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
            (2, (9, 1, 1, 1, 1, 1)),  # passes over 14 to 9 rows, as sequences end
            (3, (90,) * 6),
        ):
            torch.set_num_threads(threads)
            for found, right in zip(run(model, sequences, widths), wanted, strict=True):
                assert torch.equal(found, right)
    finally:
        torch.set_num_threads(saved)


@needs_library
def test_only_wanted_rows_have_logits(folders: dict[str, Path]) -> None:
    model = runner(folders["llama"])
    tokens = tokens_of(20, 1)
    (whole,) = run(model, [tokens], [20])
    first, second = model.pool.allocate(), model.pool.allocate()
    found = model.logits([Chunk(first, tokens[:8], 0, 6), Chunk(second, tokens[:5], 0, 5)])
    assert torch.equal(found, whole[6:8])
    assert model.logits([Chunk(first, tokens[8:12], 8, 4)]).shape == (0, 97)
    assert torch.equal(model.logits([Chunk(first, tokens[12:], 12, 7)]), whole[19:])


def embedding_of(model: TorchRunner) -> Tensor:
    """The embedding that the decoder reads."""
    assert isinstance(model.program, FusedDecoder)
    assert model.program.cpu_decoder is not None
    return next(each for each in model.program.cpu_decoder._kept if each.shape == (97, 48))


@by_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(value: float, dtype: str, folders: dict[str, Path]) -> None:
    model = runner(folders["qwen3"], dtype)
    with torch.inference_mode():
        embedding_of(model)[7] = value
    good, bad = [8, 9, 10, 11], [8, 7, 10, 11]
    found = run(model, [bad, good, bad], [4, 4, 2])
    assert found[0].isnan().any(1).tolist() == found[2].isnan().any(1).tolist() == [False, True, True, True]
    assert torch.equal(found[1], run(model, [good], [1])[0])


@needs_library
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


@needs_library
def test_wrong_products_are_refused_at_the_start(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original = decoder.panels
    monkeypatch.setattr(decoder, "panels", lambda weight: original(weight.roll(1, 0)))
    with pytest.raises(CheckpointError, match="gives other logits when fused than in transformers"):
        runner(folders["llama"])


@needs_library
def test_a_paged_cache_needs_another_program(folders: dict[str, Path]) -> None:
    loaded = load_model(ModelSource(str(folders["llama"]), dtype="bfloat16", device="cpu"))
    fuse_model(loaded)
    with pytest.raises(ValueError, match="fused for a KV cache by head"):
        fuse_model(loaded, paged=True)


# ----------------------------------------------------------------------------------------------------- kinds of weights


@by_library
@pytest.mark.parametrize("name", ["llama, biases", "llama, 6 heads of 80", "qwen3"])
def test_the_bits_do_not_depend_on_how_weights_are_kept(
    name: str, library: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 or in float32; and a model of dtype bfloat16 is run in float32 where AVX512-BF16 is missing."""
    loaded = decoder._loaded(library)
    monkeypatch.setattr(decoder, "library", lambda: loaded)
    sequences = [tokens_of(count, count) for count in (BLOCK_TOKENS + 7, 41, 1)]
    kept = runner(folders[name], "float32")
    assert embedding_dtype(kept) == kept.loaded.model.model.embed_tokens.weight.dtype == torch.bfloat16
    wanted = run(kept, sequences, [9, 26, 1])
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "weights_dtype", lambda weights: torch.float32)
        exact = runner(folders[name], "float32")
    assert embedding_dtype(exact) == torch.float32
    assert kept.loaded.weight_bytes == pytest.approx(
        exact.loaded.weight_bytes / 2, rel=0.05
    )  # but for norms and biases
    monkeypatch.setattr(loaded, "decoder_supported", lambda: 2)
    without_dot = runner(folders[name], "bfloat16")
    for model, widths in ((exact, [9, 26, 1]), (exact, [5, 3, 1]), (without_dot, [7, 2, 1])):
        for found, right in zip(run(model, sequences, widths), wanted, strict=True):
            assert torch.equal(found, right)


def embedding_dtype(model: TorchRunner) -> torch.dtype:
    assert isinstance(model.program, FusedDecoder)
    return model.program._weights_dtype


def test_weights_are_kept_in_bfloat16_if_no_value_changes() -> None:
    weights = [torch.randn(2050, 32).bfloat16().float(), torch.tensor([[torch.inf, torch.nan, -0.0, 2.0**-133]])]
    assert decoder.weights_dtype(weights) == torch.bfloat16
    weights[0][2049, 31] *= 1 + 2**-10
    assert decoder.weights_dtype(weights) == torch.float32
    assert decoder.weights_dtype([torch.ones(2, 2, dtype=torch.bfloat16)]) == torch.bfloat16


@by_library
def test_each_library_gives_the_logits_of_transformers(
    library: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "library", lambda: decoder._loaded(library))
    sequences = [tokens_of(count, count) for count in (BLOCK_TOKENS + 7, 41)]
    ours, exact = (runner(folders["qwen3"], "float32", fuse=fuse) for fuse in (True, False))
    for found, right in zip(run(ours, sequences, [30, 7]), run(exact, sequences, [30, 7]), strict=True):
        assert float((found - right).norm() / right.norm()) < CLOSE["float32"]


def by_torch(folder: Path) -> None:
    program = fuse_model(load_model(ModelSource(str(folder), dtype="bfloat16", device="cpu")))
    assert isinstance(program, FusedDecoder)
    assert program.cpu_decoder is None


def test_torch_runs_what_it_cannot(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no multiple of a vector, and any model without the library."""
    config = transformers.LlamaConfig(**SHAPE | {"head_dim": 12}, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    by_torch(tmp_path)
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    for spec in (None, ModuleSpec("kernels._cpu_avx2", None, origin=str(other))):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        decoder.library.cache_clear()
        try:
            by_torch(folders["llama"])
        finally:
            decoder.library.cache_clear()


@pytest.mark.skipif(not (HAS_LIBRARY and shutil.which("gcc")), reason="no library, or no compiler")
@pytest.mark.parametrize("missing", [None, "decoder_supported", "decoder_loop_sizes", "verify_sizes", "valid_supports"])
def test_a_library_that_lacks_a_function_is_ignored(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an old one does; its structures have the right sizes here."""
    source, built = tmp_path / "old.c", tmp_path / "old.so"
    bodies = dict.fromkeys(decoder._FUNCTIONS, "return 1;")
    for name, count in (("decoder_sizes", 4), ("decoder_loop_sizes", 5), ("verify_sizes", 1)):
        sizes = (ctypes.c_int32 * count)()
        getattr(decoder.library(), name)(sizes)
        bodies[name] = "".join(f"sizes[{i}] = {size};" for i, size in enumerate(sizes)) + "return 0;"
    if missing is not None:
        del bodies[missing]
    source.write_text("".join(f"int {name}(int *sizes) {{ {body} }}\n" for name, body in bodies.items()))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=str(built)))
    assert (decoder._loaded("kernels._cpu_avx2") is None) is (missing is not None)
