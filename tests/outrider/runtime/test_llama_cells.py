"""What leaves llama.cpp's cells: all sequences by a reset, and NaN with the sequences of its time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.runtime.batch import Chunk
from outrider.runtime.llama_cpp import LlamaRunner
from tests.gguf_files import save_tokenizer, write_gguf
from tests.outrider.runtime import tiny
from tests.outrider.runtime.test_llama_cpp import build
from tests.outrider.runtime.tiny import VOCABULARY

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


def test_nan_of_a_sequence_does_not_outlive_those_of_its_time(runner: LlamaRunner) -> None:
    """They are lost: without flash attention each pass reads all cells, also those that no sequence holds."""
    one, other = runner.pool.allocate(), runner.pool.allocate()
    fresh = runner.logits([Chunk(one, TOKENS, 0, 0)])
    assert runner.logits([Chunk(other, [BAD], 0, 0)]).isnan().all()
    for slot in (other, one):
        runner.pool.free(slot)
    assert torch.equal(runner.logits([Chunk(runner.pool.allocate(), TOKENS, 0, 0)]), fresh)
    runner.pool.check_integrity()
