"""Encoder–decoder drafts: proposals of the engine after any verdict, with branches and preemption; and what both
services tell, check and do of encoders.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from draft_service.drafters.engine import DraftEngine
from outrider.runtime.kv_cache import BLOCK_TOKENS
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, wait_healthy
from tests.draft_service.calls import ProposeStream, generate, sampling
from tests.draft_service.engines import Driver, engine_of, running, sequence
from tests.encoder_decoders import (
    DE,
    EN,
    FIRST_TIMESTAMP,
    FRAMES,
    MELS,
    MODELS,
    NOISE,
    POSITIONS,
    RATE,
    START,
    Pair,
    V,
    decoder_prompt,
    features,
    generated,
    inputs,
    loaded,
    logits_of,
    noise,
    serving_all,
)
from tests.verifier_service.streams import Stream, error_of, opening

GAMMA, ROUNDS = 4, 6


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("is_short", [False, True])
def test_proposals_are_the_models_likeliest_tokens(name: str, is_short: bool) -> None:
    """Four sequences in turns; verdicts accept any number of tokens. With few blocks two of them hold any."""
    coin = random.Random(3)
    own_inputs = inputs(name, 4)
    blocks = 2 * (max(-(-each.shape[-1] // BLOCK_TOKENS) for each in own_inputs) + 1)
    how: dict[str, Any] = {"blocks": blocks} if is_short else {}
    with running(engine_of(loaded(name), vocab_size=V, max_length=64, **how)) as engine:
        assert isinstance(engine, DraftEngine)
        drivers = [
            Driver(engine, sequence(temperature=0.0, prompt=[START], encoder_input=each), vocab_size=V)
            for each in own_inputs
        ]
        texts, committed = [[START] for _ in drivers], [list[int]() for _ in drivers]
        for _ in range(ROUNDS):
            for driver, own in zip(drivers, committed, strict=True):
                driver.request(GAMMA, own)
            for index, driver in enumerate(drivers):
                drafted = driver.result().token_ids
                text = texts[index]
                rows = logits_of(name, own_inputs[index], [*text, *drafted])
                assert drafted == rows[len(text) - 1 : -1].argmax(-1).tolist()
                accepted = coin.randint(0, GAMMA)
                committed[index] = [*drafted[:accepted], coin.randrange(V)]
                texts[index] += committed[index]
        for driver in drivers:
            driver.close()
    engine.cache.reset()
    engine.model_runner.pool.check_integrity()
    assert engine.model_runner.pool.used_blocks == 0


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    with serving_all(tmp_path_factory.mktemp("pairs")) as pairs:
        yield pairs


@pytest.fixture(params=["t5", "whisper"])
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def prompt_of(name: str) -> tuple[dict[str, Any], torch.Tensor]:
    """The prompt of a request, which is token ids or audio as floats, and the encoder's input."""
    if name == "whisper":
        samples = noise(0.5)
        floats = (samples / 2**15).astype("<f4").tobytes()
        audio = input_pb2.Audio(samples=floats, format=input_pb2.AUDIO_FORMAT_F32LE, sample_rate=RATE)
        return {"audio": audio}, torch.from_numpy(features(samples))
    ids = inputs(name, 3)[2]
    return {"token_ids": {"ids": ids.tolist()}}, ids


def test_what_the_services_say_of_their_encoders(pair: Pair) -> None:
    expected = model_pb2.EncoderInfo(
        kind=model_pb2.ENCODER_KIND_TEXT, max_positions=POSITIONS, decoder_prompt_token_ids=[START]
    )
    if pair.name == "whisper":
        expected = model_pb2.EncoderInfo(
            kind=model_pb2.ENCODER_KIND_SPEECH, max_positions=FRAMES // 2, mels=MELS, frames=FRAMES, sample_rate=RATE,
            decoder_prompt_token_ids=decoder_prompt("whisper"), first_timestamp_token_id=FIRST_TIMESTAMP,
        )  # fmt: skip
    with grpc.insecure_channel(pair.draft.address) as channel:
        answer = DraftServiceStub(channel).GetModel(draft_service_pb2.DraftServiceGetModelRequest())
    for model in (answer.target, answer.model):
        assert model.encoder == expected
        assert "encoder" in model.features


def test_propose_drafts_for_an_encoders_input(pair: Pair) -> None:
    prompt, encoder_input = prompt_of(pair.name)
    own = decoder_prompt(pair.name)
    expected = generated(pair.name, encoder_input, 3, own, NOISE)
    with grpc.insecure_channel(pair.draft.address) as channel, ProposeStream(channel) as stream:
        stream.open(own, sampling=sampling(0.0, seed=1), encoder_input=input_pb2.EncoderInput(**prompt))
        stream.take()
        stream.advance(1, len(own), [], gamma=3)
        assert list(stream.take().proposal.token_ids)[: len(expected)] == expected


def test_a_service_without_draft_model_serves_a_pair(pair: Pair) -> None:
    """Its generation config and its tokenizer come from a folder."""
    prompt, encoder_input = prompt_of(pair.name)
    language: dict[str, Any] = {"transcription": {"language": "de"}} if pair.name == "whisper" else {}
    expected = generated(pair.name, encoder_input, 40, decoder_prompt(pair.name, language=DE if language else EN))
    with Cluster() as cluster:
        service = cluster.draft(*pair.verifiers, model=pair.target, flags="--drafter lookup")
        wait_healthy(service)
        message = draft_service_pb2.GenerateRequest(
            **prompt, **language, sampling=sampling(0.0, seed=1), max_new_tokens=40
        )
        with grpc.insecure_channel(service.address) as channel:
            assert generate(channel, message).samples[0].ids == expected


def test_the_verifier_checks_inputs_itself(pairs: Callable[[str], Pair]) -> None:
    bad = np.zeros((MELS, FRAMES), "<f4")
    bad[3, 5] = math.nan
    features = input_pb2.LogMelFeatures(values=bad.tobytes(), mels=MELS, frames=FRAMES)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "encoder_input"),
        ({"encoder_input": {"token_ids": {"ids": [1]}}}, "encoder_input.token_ids"),
        ({"encoder_input": {"features": features}}, "encoder_input.features.values"),
    ]
    with grpc.insecure_channel(pairs("whisper").verifiers[0].address) as channel:
        for fields, field in cases:
            message = verifier_service_pb2.OpenSequence(**fields)
            message.MergeFrom(opening([START]))
            with Stream(channel) as stream:
                stream.open(message)
                error = error_of(stream.call)
            assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_causal_model_refuses_an_encoders_input(draft: grpc.Channel) -> None:
    with ProposeStream(draft) as stream:
        stream.open([1], encoder_input=input_pb2.EncoderInput(token_ids={"ids": [1]}))
        assert error_of(stream.call).metadata["field"] == "encoder_input"
