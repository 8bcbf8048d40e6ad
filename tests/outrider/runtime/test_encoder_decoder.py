"""Encoder–decoder models in packed batches give the logits of transformers."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from outrider.runtime.encoder_decoder import SPEECH
from outrider.runtime.loader import LoadedModel, adopt
from outrider.runtime.model_runner import Chunk, ModelRunner

V = 67
TOKENS = 60
SEQUENCES = 6
START = 1


def t5(**changes: Any) -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=V, decoder_start_token_id=START, **(sizes | changes)))


def bart_like(model: Callable[[Any], Any], config: Callable[..., Any], **changes: Any) -> Any:
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 96,
        "decoder_start_token_id": START, "pad_token_id": 0, "forced_eos_token_id": None,
    }  # fmt: skip
    return model(config(vocab_size=V, **(sizes | changes)))


def whisper(**changes: Any) -> Any:
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_mel_bins": 20,
        "max_source_positions": 50, "max_target_positions": 80, "decoder_start_token_id": START, "pad_token_id": 0,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    return WhisperForConditionalGeneration(WhisperConfig(vocab_size=V, **(sizes | changes)))


MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "t5, gated, untied": lambda: t5(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, relative_attention_num_buckets=8, num_heads=2
    ),
    "bart": lambda: bart_like(BartForConditionalGeneration, BartConfig),
    "marian": lambda: bart_like(MarianMTModel, MarianConfig, scale_embedding=True),
    "whisper": whisper,
}


def build(name: str) -> Any:
    torch.manual_seed(7)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # large enough for attention to matter
        if parameter.dim() > 1:
            parameter.data.normal_(0, 2 * (parameter.shape[0] / parameter.numel()) ** 0.5)
    return model


def inputs_of(loaded: LoadedModel) -> list[torch.Tensor]:
    assert loaded.encoder is not None
    generator = torch.Generator().manual_seed(5)
    info = loaded.encoder.info
    if info.kind == SPEECH:
        return [torch.randn(info.mels, info.frames, generator=generator) for _ in range(SEQUENCES)]
    return [torch.randint(3, V, (3 + 5 * i,), generator=generator) for i in range(SEQUENCES)]


def logits_of(model: Any, inputs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """`[tokens, V]` by the model's own forward."""
    name = "input_ids" if inputs.dim() == 1 else "input_features"
    with torch.inference_mode():
        return model(**{name: inputs[None]}, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", list(MODELS))
def test_packed_batches_give_the_logits_of_transformers(name: str) -> None:
    """Texts in pieces of any length, several in a batch, with drafts that are rolled back; one begins anew."""
    model = build(name)
    loaded = adopt(copy.deepcopy(model), name, "x")
    runner, coin = ModelRunner.build(loaded, 2 * SEQUENCES, 80), random.Random(1)
    pool, inputs = runner.pool, inputs_of(loaded)
    slots = [pool.allocate() for _ in inputs]
    for slot, each in zip(slots, inputs, strict=True):
        runner.encode(slot, each)
    texts = [[START, *(coin.randrange(V) for _ in range(TOKENS - 1))] for _ in inputs]
    found = [torch.zeros(TOKENS, V) for _ in inputs]
    for step in range(200):
        if step == 10:  # as after preemption
            pool.rollback(slots[2], 0)
            runner.encode(slots[2], inputs[2])
        chunks, wanted = [], []
        for index in coin.sample(range(SEQUENCES), coin.randint(1, SEQUENCES)):
            slot = slots[index]
            start = pool.length(slot)
            own = texts[index][start : start + coin.randint(1, 7)]
            if own:
                rejected = [coin.randrange(V) for _ in range(coin.randint(0, 3))]
                chunks.append(Chunk(slot, [*own, *rejected], start, 0))
                wanted.append((index, start, len(own)))
        if not chunks:
            continue
        rows = runner.forward(chunks).split([len(chunk.tokens) for chunk in chunks])
        for (index, start, count), own_rows in zip(wanted, rows, strict=True):
            found[index][start : start + count] = own_rows[:count]
            pool.rollback(slots[index], start + count)
    for index, text in enumerate(texts):
        assert pool.length(slots[index]) == TOKENS
        torch.testing.assert_close(found[index], logits_of(model, inputs[index], text), rtol=1e-4, atol=1e-3)
        other = logits_of(model, inputs[index - 1], text)
        assert (other - found[index]).abs().max() > 0.1, "the encoder's input matters"
    for slot in slots:
        pool.free(slot)
    pool.check_integrity()
    assert pool.used_blocks == 0


def test_a_sequence_whose_encoder_has_not_run_is_refused() -> None:
    runner = ModelRunner.build(adopt(build("t5"), "t5", "x"), 2, 80)
    slot = runner.pool.allocate()
    for _ in range(2):  # without an encoder, and with an empty one
        with pytest.raises(ValueError, match="the encoder of slot 0 has not run"):
            runner.forward([Chunk(slot, [START], 0, 0)])
        runner.pool.add_encoder(slot, 7) if runner.pool.encoder_slot(slot) is None else None


def test_a_fork_keeps_its_encoder() -> None:
    """As a branch of the outcome cache, which outlives the sequence's own slot."""
    model = build("bart")
    loaded = adopt(copy.deepcopy(model), "bart", "x")
    runner = ModelRunner.build(loaded, 4, 80)
    pool, inputs = runner.pool, inputs_of(loaded)[3]
    slot = pool.allocate()
    runner.encode(slot, inputs)
    runner.forward([Chunk(slot, [START, 5, 6], 0, 0)])
    fork = pool.fork(slot)
    pool.free(slot)
    other = runner.allocate_for_trial()
    runner.forward([Chunk(other, [START] * 40, 0, 0)])
    rows = runner.forward([Chunk(fork, [7, 8], 3, 0)])
    torch.testing.assert_close(rows, logits_of(model, inputs, [START, 5, 6, 7, 8])[3:], rtol=1e-4, atol=1e-3)
    pool.free(fork)
    pool.free(other)
    pool.check_integrity()
    assert pool.used_blocks == 0
