"""llama.cpp behind the interface of the first runtime: GGUF files, their tokenizers, and steps of many sequences."""

import copy
import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.engine import OUTCOME_CACHE
from draft_service.drafters.staged import Staging
from draft_service.settings import DraftSettings
from kernels.cpu_decoder import library as decoder_library
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import Rule
from outrider.runtime import gguf_convert, gguf_tokenizer, llama_loader
from outrider.runtime.block_pool import PoolExhausted
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.errors import CheckpointError, UnsupportedModel
from outrider.runtime.gguf_convert import convert
from outrider.runtime.llama_cpp import LlamaRunner
from outrider.runtime.llama_loader import library, load_gguf, load_gguf_tokenizer
from outrider.runtime.loader import ModelSource
from outrider.runtime.model_runner import Chunk
from outrider.runtime.tokenizer import load_tokenizer
from outrider.service.loading import build_model_runner, load
from outrider.service.settings import SettingsError
from tests.cluster import MODELS, wait_until
from tests.draft_service.engines import running
from tests.draft_service.test_outcome_cache import GAMMA, Driver, Eager, opening
from tests.gguf_files import FAMILIES, GEMMA3, TEMPLATE, TEXTS, build, save_tokenizer, write_gguf
from tests.outrider.runtime import tiny
from tests.outrider.runtime.steps import random_steps, reference_logits
from tests.outrider.runtime.tiny import VOCABULARY, Reference
from verifier_service.settings import VerifierSettings

pytest.importorskip("llama_cpp", reason="the extra `llama` is not installed: make test-llama")
pytest.importorskip("gguf", reason="the extra `llama` is not installed: make test-llama")

# llama.cpp reads GELU from a table in float16 on a CPU, also between tensors of float32.
NEAR = {"gemma3": 1e-3, "gpt2": 1e-3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family, with a tokenizer."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny.save(FAMILIES[name](), tmp_path_factory.mktemp(name))
            save_tokenizer(made[name], VOCABULARY, chat_template=TEMPLATE)
        return made[name]

    return get


def test_a_model_whose_windows_no_layer_has_runs(tmp_path: Path) -> None:
    config = copy.deepcopy(GEMMA3)
    config.layer_types = ["full_attention"] * 3
    save_tokenizer(tiny.save(config, tmp_path), VOCABULARY)
    runner, tokens = build(write_gguf(tmp_path)), list(range(3, 20))
    found = runner.logits([Chunk(runner.pool.allocate(), tokens, 0, 0)])
    allowed = NEAR["gemma3"] * float(found.abs().max())
    torch.testing.assert_close(found, Reference(tmp_path)(tokens), rtol=0, atol=allowed)


def test_rotary_embeddings_do_not_depend_on_the_cells_of_all_sequences(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with other factors for contexts above 32 positions."""
    write_tokenizer = gguf_convert._write_tokenizer

    def with_factors(writer: Any, *others: Any) -> None:
        write_tokenizer(writer, *others)
        writer.add_string("llama.rope.scaling.type", "longrope")
        writer.add_rope_scaling_orig_ctx_len(32)
        for name, factor in (("long", 8), ("short", 1)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.full(4, factor, np.float32))

    monkeypatch.setattr(gguf_convert, "_write_tokenizer", with_factors)
    convert(str(folders("llama")), tmp_path / "long.gguf", "f32")
    runner, tokens = build(tmp_path / "long.gguf"), list(range(3, 30))
    assert runner.loaded.context_length == runner.max_length == 32
    found = runner.logits([Chunk(runner.pool.allocate(), tokens, 0, 0)])
    assert torch.allclose(found, Reference(folders("llama"))(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "most"), [("llama", 256), ("gemma3", 128)], ids=["llama", "a window"])
def test_more_sequences_than_llama_cpp_holds_are_refused_at_the_start(
    name: str, most: int, folders: Callable[[str], Path]
) -> None:
    path = write_gguf(folders(name))
    loaded, _ = load_gguf(ModelSource(str(path), device="cpu"))
    settings = VerifierSettings.from_command_line(
        ["--model", str(path), "--max-sequences", str(most + 1)], program="verifier_service"
    )
    with pytest.raises(SettingsError, match=f"--max-sequences is {most + 1}; llama.cpp holds {most} sequences"):
        build_model_runner(settings, loaded, 64, max_batch_tokens=64)


def test_no_layers_of_a_file_are_left_out(folders: Callable[[str], Path]) -> None:
    path = write_gguf(folders("llama"))
    flags = ["--model", str(path), "--verifier", "127.0.0.1:1", "--skip-layers", "1"]
    settings = DraftSettings.from_command_line(flags, program="draft_service")
    with pytest.raises(CheckpointError, match=r"--skip-layers 1: llama\.cpp runs all layers"):
        load(settings)


def test_there_is_room_for_the_sequences_and_forks_of_a_service(folders: Callable[[str], Path]) -> None:
    path = write_gguf(folders("llama"))
    loaded, _ = load_gguf(ModelSource(str(path), device="cpu"))
    settings = VerifierSettings.from_command_line(
        ["--model", str(path), "--max-sequences", "2"], program="verifier_service"
    )
    runner = build_model_runner(settings, loaded, 128, max_batch_tokens=64, forks=2).model_runner
    for _ in range(2):
        slot = runner.pool.allocate()
        runner.forward([Chunk(slot, [1, 2, 3], 0, 0)])
        for _ in range(2):
            runner.pool.fork(slot)
    with pytest.raises(PoolExhausted, match="holds 6 sequences at most"):
        runner.pool.fork(slot)


def test_branches_of_the_outcome_cache_leave_llama_cpps_sequences_to_others(folders: Callable[[str], Path]) -> None:
    """A sequence and its branches hold all 10 when another one comes; then the branches of both want more."""
    loaded, _ = load_gguf(ModelSource(str(write_gguf(folders("llama"))), device="cpu"))
    runner = LlamaRunner(loaded, blocks=64, max_length=64, sequences=10, threads=1)
    parts: dict[str, Any] = {"config": SparseConfig(), "prefill_tokens": 16, "staging": Staging(0, VOCABULARY)}
    errors = OUTCOME_CACHE.errors
    with running(Eager(runner, vocab_size=VOCABULARY, threads=1, prefix_cache=False, **parts)) as engine:
        drivers = [Driver(engine, replace(opening(1.0, Rule.TOKENWISE), prompt=[5, 17, 30])) for _ in range(2)]
        for driver in drivers:
            driver.propose(GAMMA)
            wait_until(lambda: engine.look(lambda: not runner._pool._free_sequences and not engine.cache.leaving))
    assert OUTCOME_CACHE.errors == errors
    runner.pool.check_integrity()


@pytest.mark.parametrize("name", FAMILIES)
def test_any_steps_give_the_logits_of_transformers(name: str, folders: Callable[[str], Path]) -> None:
    """Prompts, single tokens, forks, rollbacks, rows without logits; several windows long."""
    found, wanted = random_steps(build(write_gguf(folders(name))), seed=1, steps=24, counts=(1, 1, 1, 2, 4, 7, 24))
    expected = reference_logits(Reference(folders(name)), wanted)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, torch.float32)
        size = float(theirs.abs().max()) if len(theirs) else 0.0
        assert torch.allclose(mine, theirs, rtol=0, atol=NEAR.get(name, 2e-5) * max(1.0, size)), step


@pytest.mark.parametrize(("kind", "near"), [("f16", 0.01), ("bf16", 0.05), ("q8_0", 0.05)])
def test_other_types_stay_near_float32(kind: str, near: float, folders: Callable[[str], Path]) -> None:
    exact, rounded = (
        torch.cat(random_steps(build(write_gguf(folders("llama"), each)), 3)[0]) for each in ("f32", kind)
    )
    distance = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < distance.median() <= near


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_greedy_text_of_each_family_is_that_of_transformers(name: str, folders: Callable[[str], Path]) -> None:
    """5 texts of 56 tokens in float32: 1,400 in all. Two logits are a tie if they differ by less than rounding."""
    runner, texts = (
        build(write_gguf(folders(name)), length=64),
        [[nth, 7, 5 * nth + 1, 3, 11, 2, 90, 8] for nth in range(5)],
    )
    slots = [runner.pool.allocate() for _ in texts]
    while len(texts[0]) < 64:
        held = [runner.pool.length(slot) for slot in slots]
        chunks = [
            Chunk(slot, text[at:], at, len(text) - at - 1) for slot, text, at in zip(slots, texts, held, strict=True)
        ]
        for text, token in zip(texts, runner.forward(chunks).argmax(1).tolist(), strict=True):
            text.append(token)
    ties, reference = 0, Reference(folders(name))
    for text in texts:
        rows = reference(text)[7:-1]
        gaps = rows.max(1).values - rows[torch.arange(len(rows)), text[8:]]
        assert gaps.max() <= NEAR.get(name, 2e-5) * rows.abs().max()
        ties += int((gaps > 0).sum())
    print(f"{name}: {ties} ties")
    assert ties <= 2


def test_other_sequences_and_widths_change_a_text_at_near_ties_only(tmp_path: Path) -> None:
    """The demo target in bfloat16: 8 × 96 positions one by one, with 7 other sequences, and 6 at a time."""
    convert(str(MODELS / "target"), tmp_path / "target.gguf", "bf16")
    runner = build(tmp_path / "target.gguf", length=128)
    generator = torch.Generator().manual_seed(0)
    texts = [[*map(int, torch.randint(2048, (96,), generator=generator))] for _ in range(8)]

    def run(text: list[int], width: int) -> torch.Tensor:
        slot = runner.pool.allocate()
        found = [runner.logits([Chunk(slot, text[at : at + width], at, 0)]) for at in range(0, len(text), width)]
        runner.pool.free(slot)
        return torch.cat(found)

    alone = torch.stack([run(text, 1) for text in texts])
    slots = [runner.pool.allocate() for _ in texts]
    steps = [[Chunk(slot, [text[at]], at, 0) for slot, text in zip(slots, texts, strict=True)] for at in range(96)]
    together = torch.stack([runner.logits(step) for step in steps], 1)
    for slot in slots:
        runner.pool.free(slot)
    wide = torch.stack([run(text, 6) for text in texts])
    for name, other in (("together", together), ("wide", wide)):
        distance = (other - alone).abs().amax(-1)
        flips = int((other.argmax(-1) != alone.argmax(-1)).sum())
        print(f"{name}: {flips} of {distance.numel()} differ; logits by {distance.max():.3g}")
        assert distance.max() < 0.5
        assert flips <= 16


def test_prompts_of_any_length_beside_other_sequences_keep_their_logits(tmp_path: Path) -> None:
    """The demo target in bfloat16. A pass of many rows takes several calls of llama.cpp; rows keep their order."""
    convert(str(MODELS / "target"), tmp_path / "target.gguf", "bf16")
    runner = build(tmp_path / "target.gguf", length=128)
    generator = torch.Generator().manual_seed(1)
    counts, wanted = (70, 1, 64, 30, 5, 40, 3), (1, 1, 4, 0, 5, 2, 3)
    texts = [[*map(int, torch.randint(2048, (count,), generator=generator))] for count in counts]

    def chunks() -> list[Chunk]:
        return [
            Chunk(runner.pool.allocate(), text, 0, len(text) - rows) for text, rows in zip(texts, wanted, strict=True)
        ]

    alone = [runner.logits([chunk]) for chunk in chunks()]
    runner.pool.reset()
    together = runner.logits(chunks())
    assert torch.allclose(together, torch.cat(alone), rtol=0, atol=0.1)


@pytest.mark.parametrize(("kind", "near"), [("Q8_0", 0.02), ("Q4_K_M", 0.15)])
def test_files_that_llama_cpp_quantises_stay_near_their_model(kind: str, near: float, tmp_path: Path) -> None:
    llama_cpp = library()
    convert(str(MODELS / "target"), tmp_path / "bf16.gguf", "bf16")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    names = [str(tmp_path / f"{each}.gguf").encode() for each in ("bf16", kind)]
    assert llama_cpp.llama_model_quantize(*names, parameters) == 0
    tokens = [*range(20, 84)]
    exact, rounded = (
        runner.logits([Chunk(runner.pool.allocate(), tokens, 0, 0)])
        for runner in (build(tmp_path / f"{each}.gguf", length=64) for each in ("bf16", kind))
    )
    distance = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < distance.median() <= near
    small, large = (load_gguf_tokenizer(ModelSource(str(tmp_path / f"{each}.gguf"))) for each in (kind, "bf16"))
    assert small.fingerprint == large.fingerprint  # so it may draft for its own model


def test_steps_of_several_sequences_give_the_logits_of_single_passes(folders: Callable[[str], Path]) -> None:
    runner = build(write_gguf(folders("llama")))
    texts = [runner.pool.allocate(), runner.pool.allocate()]
    first, second = texts
    found = [
        runner.logits(chunks)
        for chunks in (
            [Chunk(first, [1, 2, 3], 0, 2), Chunk(second, [4, 5], 0, 1)],
            [Chunk(first, [6], 3, 0), Chunk(second, [7], 2, 0)],
            [Chunk(second, [8], 3, 0)],
        )
    ]
    alone = [runner.logits([Chunk(runner.pool.allocate(), text, 0, 0)]) for text in ([1, 2, 3, 6], [4, 5, 7, 8])]
    assert torch.allclose(found[0], torch.stack([alone[0][2], alone[1][1]]), atol=1e-5)
    assert torch.allclose(found[1], torch.stack([alone[0][3], alone[1][2]]), atol=1e-5)
    assert torch.allclose(found[2][0], alone[1][3], atol=1e-5)
    for slot in texts:
        runner.pool.rollback(slot, 0)
        assert torch.allclose(runner.logits([Chunk(slot, [1, 2, 3, 6], 0, 0)]), alone[0], atol=1e-5)
    runner.pool.check_integrity()


HOW = {
    "greedy": (SamplingParams(temperature=0.0), False),
    "by uniforms": (SamplingParams(top_k=20), False),
    "by noise": (SamplingParams(temperature=0.8), True),
}


def loops(runner: LlamaRunner, config: SparseConfig | None) -> tuple[DecodeLoop, list[int], list[Chunk]]:
    """A decode loop, and chunks of three sequences; one of them follows a fork."""
    first = runner.pool.allocate()
    runner.forward([Chunk(first, [1, 2, 3], 0, 3)])
    slots = [first, runner.pool.fork(first), runner.pool.allocate()]
    chunks = [Chunk(slots[0], [4], 3, 0), Chunk(slots[1], [5, 6], 3, 2), Chunk(slots[2], [7, 8, 9], 0, 0)]
    return DecodeLoop(runner, VOCABULARY - 2, config), slots, chunks


@pytest.mark.parametrize("config", [SparseConfig(max_support=9), None])
@pytest.mark.parametrize("how", HOW)
def test_the_loop_in_c_draws_the_tokens_of_python(
    how: str, config: SparseConfig | None, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of several lengths, one of which ends at a stop token; then the next logits of each.

    A target's loop ends there for all.
    """
    params, by_noise = HOW[how]
    draws = [
        [Draw(params, 0.13 * (i + 3 * j) % 1, (j, 40 + i) if by_noise else None) for i in range(n)]
        for j, n in enumerate((7, 1 if config else 6, 5))
    ]
    stops: list[set[int]] = [set(), set(), set()]
    found = list[Any]()
    for in_c in (False, False, True):
        runner = build(write_gguf(folders("llama")))
        assert runner.has_loop_in_c(3) is (decoder_library() is not None)
        with monkeypatch.context() as patch:
            if not in_c:
                patch.setattr(runner, "has_loop_in_c", lambda _: False)
            loop, slots, chunks = loops(runner, config)
            samples = loop.decode(chunks, draws, stops)
        runner.pool.check_integrity()
        stops[0] = {samples[0][min(3, len(samples[0]) - 1)].token}
        lengths = [runner.pool.length(slot) for slot in slots]
        after = [runner.logits([Chunk(slot, [5], length, 0)]) for slot, length in zip(slots, lengths, strict=True)]
        found.append((samples, lengths, torch.cat(after)))
    _, (theirs, *right), (mine, *own) = found
    assert len(theirs[0]) <= 4
    assert [len(own) for own in theirs[1:]] == ([1, 5] if config else [len(theirs[0])] * 2)
    for ours, others in zip(mine, theirs, strict=True):
        assert [each.token for each in ours] == [each.token for each in others]
        assert [each.q is None for each in ours] == [each.q is None for each in others]
        for one, other in zip(ours, others, strict=True):
            assert (one.scores is None) is (other.scores is None)
            if one.scores is not None and other.scores is not None:  # of noise: up to a factor
                scale = other.scores.abs().max() / one.scores.abs().max() if by_noise else 1.0
                assert torch.allclose(one.scores * scale, other.scores, rtol=1e-4, atol=1e-5)
    assert own[0] == right[0]
    assert torch.allclose(own[1], right[1], atol=1e-5)


def test_an_interrupted_loop_ends_after_a_token(folders: Callable[[str], Path]) -> None:
    runner = build(write_gguf(folders("llama")))
    loop, slots, chunks = loops(runner, None)
    loop.interrupt.set()
    assert [len(own) for own in loop.decode(chunks, [[Draw(SamplingParams())] * 6] * 3)] == [1, 1, 1]
    assert [runner.pool.length(slot) for slot in slots] == [4, 5, 3]
    runner.pool.check_integrity()


@pytest.mark.parametrize(("code", "error"), [(-3, RuntimeError), (1, PoolExhausted)])
def test_a_pass_that_fails_in_the_loop_changes_no_length(
    code: int, error: type[Exception], folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(write_gguf(folders("llama")))
    loop, slots, chunks = loops(runner, None)
    decode, passes = library().llama_decode, list[int]()

    def failing(context: int, batch: Any) -> int:
        passes.append(batch.n_tokens)
        return code if len(passes) == 3 else int(decode(context, batch))

    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, library().llama_batch)
    with monkeypatch.context() as patch:
        patch.setattr(runner._llama_cpp, "llama_decode", kind(failing))
        with pytest.raises(error, match="3 rows"):
            loop.decode(chunks, [[Draw(SamplingParams(temperature=0.0))] * 6] * 3)
    assert passes == [6, 3, 3]
    assert [runner.pool.length(slot) for slot in slots] == [3, 3, 0]
    runner.pool.check_integrity()
    assert [len(own) for own in loop.decode(chunks, [[Draw(SamplingParams())] * 6] * 3)] == [6, 6, 6]


def test_a_full_pool_is_exhausted_before_llama_cpp_is(folders: Callable[[str], Path]) -> None:
    runner = build(write_gguf(folders("llama")), sequences=4, length=64)
    held = [runner.pool.allocate() for _ in range(4)]
    for slot in held:
        runner.forward([Chunk(slot, [1] * 64, 0, 64)])
    slot = runner.pool.allocate()
    with pytest.raises(PoolExhausted, match="of 8 are free"):
        runner.forward([Chunk(slot, [1], 0, 0)])
    assert runner.pool.length(slot) == 0
    runner.pool.free(held[0])
    assert runner.forward([Chunk(slot, [1], 0, 0)]).shape == (1, VOCABULARY)
    runner.pool.check_integrity()


def test_a_failed_pass_changes_no_length(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build(write_gguf(folders("llama")))
    slot = runner.pool.allocate()
    runner.forward([Chunk(slot, [1, 2, 3], 0, 3)])
    with monkeypatch.context() as patch:
        patch.setattr(runner._llama_cpp, "llama_decode", lambda *_: -3)
        with pytest.raises(RuntimeError, match="llama_decode returned -3"):
            runner.forward([Chunk(slot, [4, 5], 3, 0)])
    assert runner.pool.length(slot) == 3
    runner.pool.check_integrity()
    runner.forward([Chunk(slot, [4, 5], 3, 0)])


# ----------------------------------------------------------------------------------------------------------- tokenizers


def test_llama_cpps_vocabulary_is_that_of_the_checkpoint(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a GGUF file that others converted, without the checkpoint's own tokenizer in it."""
    from outrider.runtime.gguf import read

    def without(path: Path) -> tuple[dict[str, object], list[str]]:
        metadata, tensors = read(path)
        return {key: value for key, value in metadata.items() if key != "tokenizer.huggingface.json"}, tensors

    monkeypatch.setattr("outrider.runtime.llama_loader.read", without)
    theirs = load_tokenizer(ModelSource(str(folders("llama"))))
    _, ours = load_gguf(ModelSource(str(write_gguf(folders("llama"))), device="cpu"))
    assert isinstance(ours, gguf_tokenizer.LlamaTokenizer)
    assert ours.vocabulary() == theirs.vocabulary()
    assert ours.fingerprint == theirs.fingerprint
    assert ours.eos_token_ids == theirs.eos_token_ids
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip), text
    chat = [{"role": "user", "content": "the hat"}, {"role": "tool", "content": "an"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    moody = {"mood": "an"}
    assert ours.encode_chat(chat, moody) == theirs.encode_chat(chat, moody) != ours.encode_chat(chat)


# --------------------------------------------------------------------------------------------------------------- errors


def test_each_failure_is_one_clear_line(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    whole = write_gguf(folders("llama")).read_bytes()

    def failure(content: bytes, name: str = "model.gguf") -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load_gguf(ModelSource(str(tmp_path / name), device="cpu"))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "cannot load" in failure(whole[: len(whole) // 2])
    unknown = whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama", 1)
    assert "unknown model architecture: 'lxama'" in failure(unknown)
    with pytest.raises(CheckpointError, match="--device is cuda; llama-cpp-python is built for the CPU alone"):
        load_gguf(ModelSource(str(write_gguf(folders("llama"))), device="cuda"))


@pytest.mark.parametrize("architecture", ["llada", "llama-embed", "llama"])
def test_a_model_that_does_not_write_token_by_token_is_refused(
    architecture: str, tmp_path: Path, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of diffusion and embeddings have the tensors of Llama. The last differs in one entry alone."""
    write_shape, path = gguf_convert._write_shape, tmp_path / "model.gguf"

    def of_embeddings(writer: Any, *others: Any) -> None:
        write_shape(writer, *others)
        if architecture == "llama":
            writer.add_causal_attention(False)

    written = replace(gguf_convert._ARCHITECTURES["llama"], name=architecture)
    monkeypatch.setitem(gguf_convert._ARCHITECTURES, "llama", written)
    monkeypatch.setattr(gguf_convert, "_write_shape", of_embeddings)
    convert(str(folders("llama")), path, "f32")
    with pytest.raises(UnsupportedModel, match="as a model of embeddings or of diffusion, which does not write"):
        build(path)


def test_a_build_for_another_processor_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = llama_loader.processor_flags()
    if "avx" not in flags:
        pytest.skip("the processor has no AVX")
    monkeypatch.setattr(llama_loader, "processor_flags", lambda: flags - {"avx", "avx512f"})
    library.cache_clear()
    with pytest.raises(CheckpointError, match=r"is built for AVX.*, which this processor lacks: pip install .*binary"):
        library()
    monkeypatch.undo()
    library.cache_clear()
