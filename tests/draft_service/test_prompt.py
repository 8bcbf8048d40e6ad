"""Prompts of encoder–decoder models: the encoder's input, the decoder's prompt, and the messages that carry them."""

import math
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from draft_service.drafters.base import DrafterKind
from draft_service.request import CheckedRequest
from draft_service.sequence import Sequence
from draft_service.settings import DraftSettings
from draft_service.validation import check_generate
from outrider.rpc.errors import RequestError
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.model_info import check_pair
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2
from tests.draft_service.calls import TOKENWISE, request, sampling
from tests.draft_service.pairs import DEMO, unserved_pair

V, RATE, MELS, FRAMES = 2048, 16_000, 20, 100
START, EN, DE, SILENT = 7, 1990, 1991, 1993
EncoderInfo = model_pb2.EncoderInfo
TEXT = EncoderInfo(kind=model_pb2.ENCODER_KIND_TEXT, max_positions=40, decoder_prompt_token_ids=[START])
SPEECH = EncoderInfo(
    kind=model_pb2.ENCODER_KIND_SPEECH,
    max_positions=FRAMES // 2,
    mels=MELS,
    frames=FRAMES,
    sample_rate=RATE,
    decoder_prompt_token_ids=[START, EN, SILENT],
    first_timestamp_token_id=SILENT + 1,
)
PROMPTS = DecoderPrompts.read(
    GenerationConfig(lang_to_id={"<|en|>": EN, "<|de|>": DE}, no_timestamps_token_id=SILENT), START
)
AUDIO = input_pb2.Audio(samples=bytes(2 * RATE), format=input_pb2.AUDIO_FORMAT_S16LE, sample_rate=RATE)
FEATURES = input_pb2.LogMelFeatures(values=bytes(4 * MELS * FRAMES), mels=MELS, frames=FRAMES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelSource(str(DEMO / "draft")))


def info(encoder: model_pb2.EncoderInfo | None, **limits: Any) -> model_pb2.ModelInfo:
    known = {"max_gamma": 8, "max_sequence_tokens": 300, "max_samples": 4, **limits}
    return model_pb2.ModelInfo(
        vocab_size=V,
        encoder=encoder,
        weights_fingerprint="f" * 64,
        limits=model_pb2.Limits(**known),
        rules=[TOKENWISE],
        default_rule=TOKENWISE,
    )


def changed(encoder: model_pb2.EncoderInfo, **fields: Any) -> model_pb2.EncoderInfo:
    result = EncoderInfo()
    result.CopyFrom(encoder)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def message(**fields: Any) -> draft_service_pb2.GenerateRequest:
    return draft_service_pb2.GenerateRequest(sampling=sampling(1.0, seed=1, rule=TOKENWISE), **fields)


def check(
    tokenizer: Tokenizer,
    given: draft_service_pb2.GenerateRequest,
    encoder: model_pb2.EncoderInfo | None,
    draft: model_pb2.EncoderInfo | None = None,
    max_message_bytes: int = 1 << 22,
    default: DrafterKind = DrafterKind.MODEL,
    **options: Any,
) -> CheckedRequest:
    """Checks a request for a target with this encoder; without `draft` the draft has the same. Options are settings."""
    pair = unserved_pair(
        tokenizer,
        info(encoder if draft is None else draft),
        info(encoder, max_message_bytes=max_message_bytes),
        default=default,
        prompts=None if encoder is None else PROMPTS,
    )
    return check_generate(given, pair, DraftSettings(model="demo", gamma=5, **options))


def test_text_and_token_ids_are_the_encoders_input(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x = 1")
    for given in (message(text="x = 1"), message(token_ids=draft_service_pb2.TokenIds(ids=ids))):
        checked = check(tokenizer, given, TEXT)
        assert checked.prompt == [START]
        assert checked.encoder_input == input_pb2.EncoderInput(token_ids=input_pb2.EncoderTokens(ids=ids))
        assert checked.prompt_tokens == len(ids) + 1
        assert checked.max_new_tokens == 256


@pytest.mark.parametrize("kind", ["audio", "features"])
def test_speech_is_the_encoders_input_as_it_was_sent(tokenizer: Tokenizer, kind: str) -> None:
    sent: Any = {"audio": AUDIO, "features": FEATURES}[kind]
    checked = check(tokenizer, message(**{kind: sent}), SPEECH)
    assert checked.prompt == [START, EN, SILENT]
    assert checked.encoder_input == input_pb2.EncoderInput(**{kind: sent})
    assert checked.prompt_tokens == 3
    opening = Sequence(checked).opening(reopened=True)
    assert opening.encoder_input == checked.encoder_input, "each verifier computes its own features"
    assert list(opening.prompt_token_ids) == checked.prompt
    assert "encoder" in opening.required_features


def test_a_model_without_encoder_opens_sequences_without_one(tokenizer: Tokenizer) -> None:
    opening = Sequence(check(tokenizer, message(text="x"), None)).opening()
    assert not opening.HasField("encoder_input")
    assert "encoder" not in opening.required_features


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"decoder_prompt_token_ids": [START, DE]}, [START, DE]),
        ({"transcription": {}}, [START, EN, SILENT]),
        ({"transcription": {"language": "de"}}, [START, DE, SILENT]),
        ({"transcription": {"language": "de", "timestamps": True}}, [START, DE]),
    ],
)
def test_decoder_prompts_of_a_request(tokenizer: Tokenizer, fields: dict[str, Any], expected: list[int]) -> None:
    assert check(tokenizer, message(audio=AUDIO, **fields), SPEECH).prompt == expected


LONG = input_pb2.Audio(samples=bytes(2 * RATE + 2), format=AUDIO.format, sample_rate=RATE)
NAN = input_pb2.LogMelFeatures(values=np.full((MELS, FRAMES), math.nan, "<f4").tobytes(), mels=MELS, frames=FRAMES)
TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("encoder", "fields", "field", "words"),
    [
        (None, {"audio": AUDIO}, "audio", "no encoder"),
        (None, {"features": FEATURES}, "features", "no encoder"),
        (None, {"text": "x", "decoder_prompt_token_ids": [1]}, "decoder_prompt_token_ids", "no encoder"),
        (None, {"text": "x", "transcription": {}}, "transcription", "no encoder"),
        (TEXT, {}, "prompt", "is not set; the model's encoder takes text: set text or token_ids"),
        (TEXT, {"audio": AUDIO}, "audio", "takes text: set text or token_ids"),
        (TEXT, {"features": FEATURES}, "features", "takes text"),
        (TEXT, {"chat": {"messages": [TURN]}}, "chat", "takes no conversation"),
        (TEXT, {"text": ""}, "text", "empty"),
        (TEXT, {"text": "x " * 700}, "text", "1400 bytes; at most 1280"),
        (TEXT, {"text": "x+" * 41}, "text", "takes 1 to 40"),
        (TEXT, {"token_ids": {"ids": [1] * 41}}, "token_ids.ids", "41 tokens; the model's encoder takes 1 to 40"),
        (TEXT, {"token_ids": {"ids": [1, V]}}, "token_ids.ids", "[1] is 2048"),
        (TEXT, {"text": "x", "transcription": {}}, "transcription", "takes text"),
        (TEXT, {"text": "x", "decoder_prompt_token_ids": [V]}, "decoder_prompt_token_ids", "[0] is 2048"),
        (TEXT, {"text": "x", "decoder_prompt_token_ids": [1] * 300}, "decoder_prompt_token_ids", "at most 300"),
        (SPEECH, {}, "prompt", "is not set; the model's encoder takes speech: set audio or features"),
        (SPEECH, {"text": "x"}, "text", "takes speech: set audio or features"),
        (SPEECH, {"token_ids": {"ids": [1]}}, "token_ids", "takes speech"),
        (SPEECH, {"audio": LONG}, "audio.samples", "16001 samples (1.00006 s); the model takes at most 16000"),
        (SPEECH, {"features": NAN}, "features.values", "[0] is nan"),
        (SPEECH, {"audio": AUDIO, "transcription": {"language": "xx"}}, "transcription.language", "de, en"),
        (
            SPEECH,
            {"audio": AUDIO, "transcription": {}, "decoder_prompt_token_ids": [1]},
            "decoder_prompt_token_ids",
            "are both set",
        ),
    ],
)
def test_an_invalid_prompt_is_refused_by_name(
    tokenizer: Tokenizer, encoder: model_pb2.EncoderInfo | None, fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check(tokenizer, message(**fields), encoder)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("INVALID_FIELD", field)
    assert words in caught.value.message
    assert field in caught.value.message


def test_features_must_be_those_of_both_models(tokenizer: Tokenizer) -> None:
    """Of audio each service computes its own."""
    draft = changed(SPEECH, mels=MELS + 1)
    assert check(tokenizer, message(audio=AUDIO), SPEECH, draft).speculation.drafter is DrafterKind.MODEL
    with pytest.raises(RequestError, match=r"features\.mels is 20; it must be 21"):
        check(tokenizer, message(features=FEATURES), SPEECH, draft)


@pytest.mark.parametrize(
    ("target", "draft", "fields"),
    [
        (SPEECH, changed(SPEECH, frames=FRAMES - 1), {"audio": AUDIO}),
        (TEXT, changed(TEXT, max_positions=3), {"token_ids": {"ids": [1] * 4}}),
    ],
)
def test_the_target_writes_alone_what_is_too_long_for_the_draft(
    tokenizer: Tokenizer, target: model_pb2.EncoderInfo, draft: model_pb2.EncoderInfo, fields: dict[str, Any]
) -> None:
    found = check(tokenizer, message(**fields), target, draft).speculation
    assert (found.drafter, found.gamma) == (DrafterKind.NONE, 0)
    found = check(tokenizer, message(**fields), target, draft, default=DrafterKind.LOOKUP).speculation
    assert (found.drafter, found.gamma) == (DrafterKind.LOOKUP, 5)


def test_speech_beyond_the_verifiers_message_limit_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"audio has 320\d\d bytes; at most \d+: .* at most 40000 bytes") as caught:
        check(tokenizer, message(audio=AUDIO), SPEECH, max_message_bytes=40_000)
    assert caught.value.metadata["max_message_bytes"] == "40000"
    assert check(tokenizer, message(audio=AUDIO), SPEECH, max_message_bytes=1 << 17).encoder_input is not None


@pytest.mark.parametrize(
    ("draft", "target", "words"),
    [
        (None, TEXT, "no encoder against .*an encoder of text"),
        (TEXT, None, "an encoder of text against .*no encoder"),
        (SPEECH, TEXT, "an encoder of speech against .*an encoder of text"),
    ],
)
def test_a_pair_has_encoders_of_one_kind(
    draft: model_pb2.EncoderInfo | None, target: model_pb2.EncoderInfo | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_pair(info(draft), info(target))
    assert caught.value.reason == "PAIR_MISMATCH"
    check_pair(info(changed(SPEECH, mels=80)), info(SPEECH))
    without_model = info(None)
    without_model.weights_fingerprint = ""
    check_pair(without_model, info(TEXT))


def test_max_prompt_tokens_bounds_the_encoders_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt has 9 tokens; at most 8: shorten it, or raise --max-prompt-tokens"):
        check(tokenizer, request([1] * 9), TEXT, max_prompt_tokens=8)
