"""Encoder–decoder models in the verifier's engine: the text, one encoder a step, preemption, failures."""

from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.torch_runner import TorchRunner
from protos.outrider.v1 import model_pb2
from tests.encoder_decoders import MODELS, START, V, inputs, likeliest, loaded
from tests.verifier_service.engines import Client, run
from verifier_service.engine import VerifierEngine

TOKENS = 24


def engine_of(name: str, *, blocks: int | None = None) -> VerifierEngine:
    """An engine of four sequences."""
    limits = model_pb2.Limits(max_gamma=4, max_sequences=4, max_sequence_tokens=64)
    engine = VerifierEngine(
        TorchRunner.build(loaded(name), max_sequences=4, max_length=64, blocks=blocks),
        model_pb2.ModelInfo(vocab_size=V, limits=limits),
        max_batch_tokens=64,
        verify_path="torch",
    )
    engine.prepare()
    return engine


def client(engine: VerifierEngine, encoder_input: torch.Tensor, **opening: Any) -> Client:
    how: dict[str, Any] = {"params": SamplingParams(temperature=0), "max_new_tokens": TOKENS, **opening}
    return Client(engine, [START], encoder_input=encoder_input, **how)


@pytest.mark.parametrize("name", list(MODELS))
def test_texts_are_the_models_likeliest_tokens(name: str) -> None:
    """With few blocks: two of the four hold any, and others are preempted."""
    own_inputs = inputs(name, 4)
    encoder_blocks = max(-(-max(each.shape[-1] // (each.dim()), 1) // BLOCK_TOKENS) for each in own_inputs)
    engine = engine_of(name, blocks=2 * (encoder_blocks + 1))
    texts = run(engine, [client(engine, each) for each in own_inputs])
    assert [len(text) for text in texts] == [TOKENS] * 4
    assert texts == [likeliest(name, each, text) for each, text in zip(own_inputs, texts, strict=True)]


@pytest.mark.parametrize("name", list(MODELS))
def test_equal_decoder_prompts_share_nothing(name: str) -> None:
    """Keys and values of a decoder depend on the encoder's input, too."""
    prompt = [START, *[5 + number % 3 for number in range(BLOCK_TOKENS + 1)]]
    one, other = inputs(name, 2)
    engine, fresh = engine_of(name), engine_of(name)
    run(engine, [Client(engine, prompt, encoder_input=one)])
    found = run(engine, [Client(engine, prompt, encoder_input=other)])
    assert found == run(fresh, [Client(fresh, prompt, encoder_input=other)])


def test_a_step_runs_one_encoder_and_all_rounds() -> None:
    engine = engine_of("whisper")
    clients = [client(engine, each) for each in inputs("whisper", 4)]
    for each in clients:
        each.submit()
    encoders, sequences = [], []
    for _ in range(4):
        work = engine.schedule()
        encoders.append(sum(item.encodes for item in work))
        sequences.append(len(work))
        engine.step(work)
        for each in clients:
            if not each.sequence.rounds:
                each.submit()
    assert encoders == [1, 1, 1, 1]
    assert sequences == [1, 2, 3, 4]


def test_an_encoder_that_gives_nan_ends_its_sequence_alone() -> None:
    engine = engine_of("whisper")
    good, bad = inputs("whisper", 2)
    clients = [client(engine, good), client(engine, bad * torch.nan)]
    texts = run(engine, clients)
    assert len(texts[0]) == TOKENS
    assert texts[0] == likeliest("whisper", good, texts[0])
    assert clients[1].error is not None
    assert "NaN" in str(clients[1].error)
