"""What leaves llama.cpp's cells: all sequences by a reset, and NaN with the sequences of its time."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.adjustments import Adjuster, LogitRules
from kernels.sampling import NO_LOGITS, Draw, SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime.batch import Chunk
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.llama_cpp import LlamaRunner
from tests.gguf_files import build, save_tokenizer, write_gguf
from tests.outrider.runtime import tiny
from tests.outrider.runtime.tiny import VOCABULARY

pytest.importorskip("llama_cpp", reason="the extra `llama` is not installed: make test-llama")
pytest.importorskip("gguf", reason="the extra `llama` is not installed: make test-llama")

BAD, TOKENS = 50, [5, 6, 7]


@pytest.fixture
def runner(tmp_path: Path) -> LlamaRunner:
    """Of a model in float32 for which the token `BAD` is NaN."""
    folder = tiny.save(tiny.FAMILIES["llama"](), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return build(write_gguf(folder))


def test_reset_drops_all_sequences(runner: LlamaRunner) -> None:
    fresh = runner.logits([Chunk(runner.pool.allocate(), TOKENS, 0, 0)])
    runner.pool.reset()
    runner.pool.check_integrity()
    assert torch.equal(runner.logits([Chunk(runner.pool.allocate(), TOKENS, 0, 0)]), fresh)


def _by_a_pass(runner: LlamaRunner, slot: int) -> None:
    assert runner.logits([Chunk(slot, [BAD], 0, 0)]).isnan().all()


def _by_the_decode_loop(runner: LlamaRunner, slot: int) -> None:
    adjuster = Adjuster(LogitRules(logit_bias=((BAD, 1e9),)), [], VOCABULARY)
    draws = [[Draw(SamplingParams(temperature=0))] * 3]
    (samples,) = DecodeLoop(runner, VOCABULARY, SparseConfig()).decode([Chunk(slot, [4], 0, 0)], draws, (), [adjuster])
    assert [each.token for each in samples] == [BAD, NO_LOGITS]


@pytest.mark.parametrize("poison", [_by_a_pass, _by_the_decode_loop])
def test_nan_of_a_sequence_does_not_outlive_those_of_its_time(
    poison: Callable[[LlamaRunner, int], None], runner: LlamaRunner
) -> None:
    """They are lost: without flash attention each pass reads all cells, also those that no sequence holds."""
    one, other = runner.pool.allocate(), runner.pool.allocate()
    fresh = runner.logits([Chunk(one, TOKENS, 0, 0)])
    poison(runner, other)
    for slot in (other, one):
        runner.pool.free(slot)
    assert torch.equal(runner.logits([Chunk(runner.pool.allocate(), TOKENS, 0, 0)]), fresh)
    runner.pool.check_integrity()
