"""Encoder–decoder pairs through both services: texts are those of transformers, with any drafter, after any failure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests import encoder_pairs
from tests.cluster import Cluster, Service, wait_healthy, wait_until
from tests.draft_service.calls import COUPLED, TOKENWISE, ProposeStream, Result, generate, sampling
from tests.encoder_pairs import FIRST_TIMESTAMP, FRAMES, MELS, START, EncoderPair, prompt_of
from tests.verifier_service.streams import Stream, error_of, opening

TOKENS = 40
KINDS = ("text", "speech")
DE_TO_EN = [START, encoder_pairs.DE, encoder_pairs.TRANSLATE, encoder_pairs.SILENT]
EN = [START, encoder_pairs.EN, encoder_pairs.TRANSCRIBE, encoder_pairs.SILENT]


@dataclass
class Running:
    """A pair and its services."""

    pair: EncoderPair
    verifier: Service
    draft: Service
    channel: grpc.Channel


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EncoderPair]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {kind: encoder_pairs.write_pair(folders[kind], is_speech=kind == "speech") for kind in KINDS}


@pytest.fixture(scope="module")
def services(pairs: dict[str, EncoderPair]) -> Iterator[dict[str, Running]]:
    """One verifier and one draft service of each pair."""
    with Cluster("--max-sequences 6") as cluster:
        verifiers = {kind: cluster.verifier(model=pair.target) for kind, pair in pairs.items()}
        drafts = {kind: cluster.draft(verifiers[kind], model=pair.draft) for kind, pair in pairs.items()}
        wait_healthy(*verifiers.values(), *drafts.values())
        channels = {kind: grpc.insecure_channel(drafts[kind].address) for kind in KINDS}
        yield {kind: Running(pairs[kind], verifiers[kind], drafts[kind], channels[kind]) for kind in KINDS}
        for channel in channels.values():
            channel.close()


def ask(
    running: Running, prompt: dict[str, Any], temperature: float = 0.0, drafter: str = "", gamma: int = 4, **fields: Any
) -> Result:
    """One text of `TOKENS` tokens; under `coupled` above temperature 0."""
    speculation = draft_service_pb2.SpeculationParams(gamma=gamma)
    if drafter:
        speculation.drafter = getattr(draft_service_pb2, f"DRAFTER_{drafter}")
    rule = COUPLED if temperature else TOKENWISE
    fields = {"sampling": sampling(temperature, seed=7, rule=rule), "max_new_tokens": TOKENS, **fields}
    message = draft_service_pb2.GenerateRequest(**prompt, speculation=speculation, **fields)
    return generate(running.channel, message)


@pytest.mark.parametrize("drafter", ["MODEL", "STAGED", "LOOKUP", "NONE"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_generate(services: dict[str, Running], kind: str, drafter: str) -> None:
    """With suppressed tokens, bad words and repeated n-grams; four texts at once."""
    running = services[kind]
    prompts = [prompt_of(running.pair, seed) for seed in range(4)]
    own: dict[str, Any] = {"transcription": {"language": "de", "task": "translate"}} if kind == "speech" else {}
    decoder_prompt = DE_TO_EN if own else [encoder_pairs.PAD]
    with ThreadPoolExecutor(len(prompts)) as threads:
        results = list(threads.map(partial(ask, running, drafter=drafter, **own), prompts))
    for prompt, result in zip(prompts, results, strict=True):
        (sample,) = result.samples
        assert sample.ids == running.pair.greedy(prompt, decoder_prompt, TOKENS)
        assert list(result.started.prompt_token_ids) == decoder_prompt
        tokens = 4 if own else 1 + len(prompt["token_ids"]["ids"])
        assert sample.end.usage.prompt_tokens == tokens
    if drafter in ("MODEL", "STAGED"):
        assert sum(result.samples[0].end.statistics.num_accepted_tokens for result in results) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_texts_are_the_same_with_any_drafter(services: dict[str, Running], kind: str) -> None:
    running = services[kind]
    prompt, other = (prompt_of(running.pair, seed) for seed in (1, 2))
    text = partial(ask, running, temperature=1.0, ignore_eos=True)
    alone = text(prompt, drafter="NONE").samples[0]
    assert len(alone.ids) == TOKENS
    assert text(other, drafter="NONE").samples[0].ids != alone.ids, "the encoder's input matters"
    for drafter, gamma in (("MODEL", 1), ("MODEL", 6), ("STAGED", 4), ("LOOKUP", 3)):
        assert text(prompt, drafter=drafter, gamma=gamma).samples[0].ids == alone.ids
    samples = text(prompt, n=3).samples
    assert samples[0].ids == alone.ids
    assert len({tuple(sample.ids) for sample in samples}) == 3
    again = text(prompt, committed_token_ids=alone.ids[:10]).samples[0]
    assert again.ids == alone.ids[10:], "a resumed text"


def test_what_the_services_say_of_their_encoders(services: dict[str, Running]) -> None:
    def answer(kind: str) -> draft_service_pb2.DraftServiceGetModelResponse:
        request = draft_service_pb2.DraftServiceGetModelRequest()
        found: draft_service_pb2.DraftServiceGetModelResponse = DraftServiceStub(services[kind].channel).GetModel(
            request
        )
        return found

    text, speech = answer("text"), answer("speech")
    expected = model_pb2.EncoderInfo(
        kind=model_pb2.ENCODER_KIND_TEXT, max_positions=64, decoder_prompt_token_ids=[encoder_pairs.PAD]
    )
    assert text.target.encoder == text.model.encoder == expected
    expected = model_pb2.EncoderInfo(
        kind=model_pb2.ENCODER_KIND_SPEECH,
        max_positions=FRAMES // 2,
        mels=MELS,
        frames=FRAMES,
        sample_rate=16_000,
        decoder_prompt_token_ids=EN,
        first_timestamp_token_id=FIRST_TIMESTAMP,
    )
    assert speech.target.encoder == speech.model.encoder == expected
    for response in (text, speech):
        assert "encoder" in response.target.features
        assert "encoder" in response.model.features


def test_hidden_sizes_change_no_text(services: dict[str, Running]) -> None:
    """Rounds and responses have one size each; the message with the audio is as large as it is."""
    running = services["speech"]
    prompt = prompt_of(running.pair, 2)
    speculation = {"gamma": 4, "fixed_size": True}
    fields: dict[str, Any] = {"sampling": sampling(1.0, seed=7, rule=COUPLED), "max_new_tokens": TOKENS}
    message = draft_service_pb2.GenerateRequest(
        **prompt, **fields, speculation=speculation, emission={"frame_bytes": 512}
    )
    assert generate(running.channel, message).samples[0].ids == ask(running, prompt, 1.0).samples[0].ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_without_draft_model_serves_a_pair(services: dict[str, Running], kind: str) -> None:
    """Its generation config and its tokenizer come from a folder."""
    own = services[kind]
    prompt = prompt_of(own.pair, 3)
    language: dict[str, Any] = {"transcription": {"language": "de"}} if kind == "speech" else {}
    with Cluster() as cluster:
        service = cluster.draft(own.verifier, model=own.pair.target, flags="--drafter lookup")
        wait_healthy(service)
        with grpc.insecure_channel(service.address) as channel:
            alone = Running(own.pair, own.verifier, service, channel)
            assert (
                ask(alone, prompt, 1.0, **language).samples[0].ids == ask(own, prompt, 1.0, **language).samples[0].ids
            )


def test_timestamps_are_written_on_request(services: dict[str, Running]) -> None:
    running = services["speech"]
    for seed in range(3):
        (sample,) = ask(running, prompt_of(running.pair, seed), 1.0, transcription={"timestamps": True}).samples
        assert FIRST_TIMESTAMP <= sample.ids[0] <= FIRST_TIMESTAMP + 20
        assert "<|" not in sample.text


def test_features_give_the_text_of_the_audio(services: dict[str, Running]) -> None:
    running = services["speech"]
    prompt = prompt_of(running.pair, 3)
    samples = np.frombuffer(prompt["audio"].samples, "<i2").astype("<f4") / 32768
    floats = input_pb2.Audio(samples=samples.tobytes(), format=input_pb2.AUDIO_FORMAT_F32LE, sample_rate=16_000)
    values = encoder_pairs.features_of(running.pair.target, samples).numpy().astype("<f4")
    features = input_pb2.LogMelFeatures(values=values.tobytes(), mels=MELS, frames=FRAMES)
    texts = [ask(running, each, 1.0).samples[0].ids for each in (prompt, {"audio": floats}, {"features": features})]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", KINDS)
def test_propose_drafts_for_an_encoders_input(services: dict[str, Running], kind: str) -> None:
    running = services[kind]
    draft = EncoderPair(running.pair.draft, running.pair.draft, running.pair.is_speech)
    prompt = prompt_of(running.pair, 4)
    decoder_prompt = EN if running.pair.is_speech else [encoder_pairs.PAD]
    with ProposeStream(running.channel) as stream:
        stream.open(decoder_prompt, sampling=sampling(0.0, seed=1), encoder_input=input_pb2.EncoderInput(**prompt))
        stream.take()
        stream.advance(1, len(decoder_prompt), [], gamma=3)
        expected = draft.greedy(prompt, decoder_prompt, 3)
        assert list(stream.take().proposal.token_ids)[: len(expected)] == expected


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("text", {"audio": {}}, "audio"),
    ("text", {"token_ids": {"ids": [1] * 65}}, "token_ids.ids"),
    ("text", {"text": "x" * 1000}, "text"),
    ("speech", {"text": "abc"}, "text"),
    ("speech", {"audio": {"samples": b"123", "format": 1, "sample_rate": 16_000}}, "audio.samples"),
    ("speech", {"audio": {"samples": bytes(40_000), "format": 1, "sample_rate": 16_000}}, "audio.samples"),
    (
        "speech",
        {"audio": {"samples": np.full(900, math.nan, "<f4").tobytes(), "format": 2, "sample_rate": 16_000}},
        "audio.samples",
    ),
    ("speech", {"audio": {"samples": b"12", "format": 1, "sample_rate": 8000}}, "audio.sample_rate"),
]


@pytest.mark.parametrize(("kind", "prompt", "field"), BAD)
def test_a_bad_input_is_refused_by_name(
    services: dict[str, Running], kind: str, prompt: dict[str, Any], field: str
) -> None:
    message = draft_service_pb2.GenerateRequest(**prompt)
    error = error_of(DraftServiceStub(services[kind].channel).Generate(message, timeout=60))
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_the_verifier_checks_inputs_itself(services: dict[str, Running]) -> None:
    bad = np.zeros((MELS, FRAMES), "<f4")
    bad[3, 5] = math.nan
    features = input_pb2.LogMelFeatures(values=bad.tobytes(), mels=MELS, frames=FRAMES)
    cases: list[tuple[input_pb2.EncoderInput | None, str]] = [
        (None, "encoder_input"),
        (input_pb2.EncoderInput(token_ids={"ids": [1]}), "encoder_input.token_ids"),
        (input_pb2.EncoderInput(features=features), "encoder_input.features.values"),
    ]
    with grpc.insecure_channel(services["speech"].verifier.address) as channel:
        for encoder_input, field in cases:
            message: verifier_service_pb2.OpenSequence = opening([START])
            message.encoder_input.CopyFrom(encoder_input) if encoder_input else None
            with Stream(channel) as stream:
                stream.open(message)
                error = error_of(stream.call)
            assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_causal_model_refuses_encoder_inputs(draft: grpc.Channel) -> None:
    message = draft_service_pb2.GenerateRequest(audio={"samples": b"12", "format": 1, "sample_rate": 16_000})
    error = error_of(DraftServiceStub(draft).Generate(message, timeout=60))
    assert error.metadata["field"] == "audio"
    with ProposeStream(draft) as stream:
        stream.open([1], encoder_input=input_pb2.EncoderInput(token_ids={"ids": [1]}))
        assert error_of(stream.call).metadata["field"] == "encoder_input"


def test_a_transcription_goes_on_at_another_verifier(pairs: dict[str, EncoderPair]) -> None:
    """The audio is sent again, and the text is that without a failure."""
    pair = pairs["speech"]
    prompts = [prompt_of(pair, seed) for seed in range(3)]
    with Cluster() as cluster:
        verifiers = [cluster.verifier(model=pair.target, fault="unhurried") for _ in range(2)]
        service = cluster.draft(*verifiers, model=pair.draft)
        wait_healthy(*verifiers, service)
        with grpc.insecure_channel(service.address) as channel, ThreadPoolExecutor(len(prompts)) as threads:
            running = Running(pair, verifiers[0], service, channel)
            text = partial(ask, running, temperature=1.0, gamma=2, ignore_eos=True, max_new_tokens=60)
            expected = [result.samples[0].ids for result in threads.map(text, prompts)]
            calls = [threads.submit(text, prompt) for prompt in prompts]

            def sequences(verifier: Service) -> float:
                return service.count("outrider_verifier_sequences", verifier=verifier.address)

            wait_until(lambda: sum(map(sequences, verifiers)) == len(prompts))
            max(verifiers, key=sequences).kill()
            samples = [call.result().samples[0] for call in calls]
    assert [sample.ids for sample in samples] == expected
    assert sum(sample.end.statistics.num_failovers for sample in samples) >= 2


def test_a_draft_without_the_targets_encoder_is_refused(services: dict[str, Running], tmp_path: Path) -> None:
    """The services do not match, and the log says why."""
    with Cluster() as cluster:
        service = cluster.draft(services["speech"].verifier, model=services["text"].pair.draft)
        wait_until(lambda: any("differ in their encoders" in line for line in service.lines))
        service.kill()
