"""Encoder–decoder models of several shapes: through the verifier's engine, 1,000 tokens of each are those of
transformers' `generate`, in float32.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    MarianConfig,
    MarianMTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from kernels.adjustments import LogitRules
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.tokenizer import load_tokenizer
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.model_info import describe
from protos.outrider.v1 import model_pb2
from tests.encoder_decoders import EN, EOS, PAD, START, bart_like, randomise, t5, tokenizer
from tests.verifier_service.engines import Client
from verifier_service.engine import VerifierEngine

TEXTS, TOKENS = 8, 125
GAMMA = 7
LONG = 136
"""Positions of a decoder."""
VOCABULARY = 90
RULES = {
    "decoder_start_token_id": START, "pad_token_id": PAD, "eos_token_id": EOS,
    "suppress_tokens": [EOS], "no_repeat_ngram_size": 2,
}  # fmt: skip
"""Texts neither end nor go round in circles."""

_t5 = partial(t5, n_positions=LONG)
_bart = partial(
    bart_like, BartForConditionalGeneration, BartConfig, max_position_embeddings=LONG, forced_eos_token_id=None
)
_marian = partial(bart_like, MarianMTModel, MarianConfig, max_position_embeddings=LONG, forced_eos_token_id=None)
_whisper = partial(
    bart_like, WhisperForConditionalGeneration, WhisperConfig, max_target_positions=LONG, bos_token_id=EOS,
    eos_token_id=EOS, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip


def _with_own_head(model: Any) -> Any:
    """The output layer of a loaded Flan-T5 is not the embedding."""
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


SHAPES: dict[str, Callable[[], Any]] = {
    "t5, tied, few buckets": lambda: _t5(
        d_model=40, d_kv=24, num_heads=3, num_layers=1, num_decoder_layers=4, relative_attention_num_buckets=12,
        relative_attention_max_distance=40,
    ),
    "t5, gated, no scale": lambda: _t5(
        d_model=48, d_kv=4, num_heads=6, num_layers=2, num_decoder_layers=1, feed_forward_proj="gated-silu",
        tie_word_embeddings=False, relative_attention_max_distance=100,
    ),
    "t5, gated, own head": lambda: _with_own_head(
        _t5(num_heads=2, d_kv=16, feed_forward_proj="gated-gelu", tie_word_embeddings=False, layer_norm_epsilon=1e-3)
    ),
    "bart, scaled": lambda: _bart(
        d_model=48, encoder_layers=1, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=6,
        scale_embedding=True, activation_function="relu",
    ),
    "bart, wide": lambda: _bart(
        d_model=64, encoder_layers=2, decoder_layers=1, encoder_attention_heads=8, decoder_attention_heads=2,
        encoder_ffn_dim=96, tie_word_embeddings=False,
    ),
    "marian, no scale": lambda: _marian(
        d_model=40, encoder_layers=3, decoder_layers=2, decoder_attention_heads=2, activation_function="swish"
    ),
    "marian, two vocabularies": lambda: _marian(
        d_model=32, encoder_layers=1, decoder_layers=2, scale_embedding=True, share_encoder_decoder_embeddings=False,
        vocab_size=VOCABULARY + 25, decoder_vocab_size=VOCABULARY,
    ),
    "whisper, 80 mels, scaled": lambda: _whisper(
        d_model=48, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=6,
        num_mel_bins=80, max_source_positions=60, scale_embedding=True,
    ),
    "whisper, 128 mels": lambda: _whisper(
        d_model=64, encoder_layers=3, decoder_layers=1, encoder_attention_heads=8, decoder_attention_heads=4,
        num_mel_bins=128, max_source_positions=33, activation_function="relu",
    ),
}  # fmt: skip


def made(name: str) -> Any:
    """A model with random weights, biases and norms."""
    torch.manual_seed(3)
    model = SHAPES[name]().eval()
    randomise(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() == 1 or name == "final_logits_bias":
            tensor.data += 0.2 * torch.randn_like(tensor)
        if "embed_positions" in name and getattr(model.config, "scale_embedding", False) and tensor.requires_grad:
            tensor.data *= model.config.d_model**0.5  # as large as the other embedding
    model.generation_config = GenerationConfig(**RULES)
    return model


def inputs(model: Any) -> torch.Tensor:
    """Of `TEXTS` encoders, all of one length."""
    config = model.config
    if config.model_type == "whisper":
        return torch.randn(TEXTS, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.randint(EN, config.vocab_size, (TEXTS, 60))


def generated(model: Any, encoder_inputs: torch.Tensor) -> list[list[int]]:
    """By transformers, with its cache."""
    key = "input_ids" if encoder_inputs.dim() == 2 else "input_features"
    how: dict[str, Any] = {key: encoder_inputs, "decoder_input_ids": torch.full((TEXTS, 1), START)}
    # The cache that it makes itself has as many layers as the encoder.
    how["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.inference_mode():  # Whisper's own `generate` cuts windows
        written = GenerationMixin.generate(model, **how, do_sample=False, max_new_tokens=TOKENS)
    return [row[1:] for row in written.tolist()]


def written(loaded: LoadedModel, encoder_inputs: torch.Tensor, drafts: list[list[int]]) -> list[list[int]]:
    """By the engine, all at once. Up to `GAMMA` tokens of a text's draft are proposed. In half of the proposals one of
    them is changed.
    """
    runner = TorchRunner.build(loaded, max_sequences=TEXTS, max_length=LONG)
    limits = model_pb2.Limits(max_gamma=GAMMA, max_sequences=TEXTS, max_sequence_tokens=LONG)
    model = model_pb2.ModelInfo(vocab_size=loaded.vocab_size, limits=limits)
    engine = VerifierEngine(runner, model, max_batch_tokens=128, verify_path="torch")
    engine.prepare()
    coin = random.Random(1)
    rules = LogitRules(generation=loaded.generation_rules, max_new_tokens=TOKENS)
    clients = [
        Client(engine, [START], encoder_input=each, rules=rules, max_new_tokens=TOKENS) for each in encoder_inputs
    ]
    while not all(client.sequence.finished for client in clients):
        for client, draft in zip(clients, drafts, strict=True):
            client.sequence.num_written = client.sequence.num_replies
            if not client.sequence.finished and not client.sequence.rounds:
                begin = len(client.sequence.tokens) - 1
                drafted = draft[begin : begin + coin.randint(1, GAMMA)]
                if coin.random() < 0.5:
                    drafted[coin.randrange(len(drafted))] = coin.randrange(loaded.vocab_size)
                client.submit(drafted)
        assert not any(client.error for client in clients)
        engine.run_once()
    return [client.sequence.tokens[1:] for client in clients]


@pytest.mark.parametrize("name", list(SHAPES))
def test_texts_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """1,000 tokens, from a checkpoint."""
    model = made(name)
    model.save_pretrained(tmp_path)
    encoder_inputs = inputs(model)
    expected = generated(model, encoder_inputs)
    assert [len(text) for text in expected] == [TOKENS] * TEXTS
    assert len(set(map(tuple, expected))) == TEXTS, "the encoder's input matters"
    assert min(len(set(text)) for text in expected) > 11
    loaded = load_model(ModelSource(str(tmp_path), dtype="float32", device="cpu"))
    assert written(loaded, encoder_inputs, expected) == expected


def test_a_service_refuses_two_vocabularies(tmp_path: Path) -> None:
    made("marian, two vocabularies").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(CheckpointError, match="two vocabularies, of 115 tokens in the encoder and 90 in the decoder"):
        describe(load_model(source), load_tokenizer(source), limits=model_pb2.Limits(), features=[])
