"""The first tokens of a decoder, by generation configs as they are published."""

from typing import Any

import pytest
from transformers import GenerationConfig

from outrider.rpc.errors import RequestError
from outrider.service.decoder_prompt import DecoderPrompts
from protos.outrider.v1 import draft_service_pb2

START, EN, DE, TRANSLATE, TRANSCRIBE, SILENT = 50258, 50259, 50261, 50358, 50359, 50363
MULTILINGUAL: dict[str, Any] = {
    "decoder_start_token_id": START,
    "lang_to_id": {"<|de|>": DE, "<|en|>": EN},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "no_timestamps_token_id": SILENT,
}


def prompts(**config: Any) -> DecoderPrompts:
    return DecoderPrompts.read(GenerationConfig(**config), 7)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [7]),
        ({"decoder_start_token_id": 0}, [0]),
        (MULTILINGUAL, [START, EN, TRANSCRIBE, SILENT]),
        (MULTILINGUAL | {"language": "de", "task": "translate"}, [START, DE, TRANSLATE, SILENT]),
        (MULTILINGUAL | {"language": "<|de|>"}, [START, DE, TRANSCRIBE, SILENT]),
        (MULTILINGUAL | {"language": "german"}, [START, DE, TRANSCRIBE, SILENT]),
        (MULTILINGUAL | {"language": "German", "task": "transcribe"}, [START, DE, TRANSCRIBE, SILENT]),
        (MULTILINGUAL | {"forced_decoder_ids": [[1, None], [2, TRANSCRIBE]]}, [START, EN, TRANSCRIBE, SILENT]),
        (MULTILINGUAL | {"forced_decoder_ids": [[1, DE], [2, TRANSLATE]]}, [START, DE, TRANSLATE, SILENT]),
        (
            {"decoder_start_token_id": 50257, "no_timestamps_token_id": 50362, "forced_decoder_ids": [[1, 50362]]},
            [50257, 50362],
        ),
        ({"decoder_start_token_id": 2, "forced_decoder_ids": [[1, 11], [2, 12]]}, [2, 11, 12]),
    ],
)
def test_default_prompts(config: dict[str, Any], expected: list[int]) -> None:
    assert prompts(**config).tokens() == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [START, EN, TRANSCRIBE, SILENT]),
        ({"language": "de"}, [START, DE, TRANSCRIBE, SILENT]),
        ({"language": "<|DE|>", "task": "translate"}, [START, DE, TRANSLATE, SILENT]),
        ({"language": "en", "timestamps": True}, [START, EN, TRANSCRIBE]),
    ],
)
def test_prompts_of_a_transcription(fields: dict[str, Any], expected: list[int]) -> None:
    assert prompts(**MULTILINGUAL).transcription(draft_service_pb2.Transcription(**fields)) == expected


@pytest.mark.parametrize(
    ("config", "fields", "field", "words"),
    [
        (MULTILINGUAL, {"language": "xx"}, "language", "is 'xx'; the model offers de, en"),
        (MULTILINGUAL, {"task": "sing"}, "task", "is 'sing'; the model offers transcribe, translate"),
        ({}, {"language": "en"}, "language", "is 'en'; the model offers none"),
        ({}, {"task": "transcribe"}, "task", "is 'transcribe'; the model offers none"),
        ({}, {"timestamps": True}, "timestamps", "timestamps is set; the model writes none"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(
    config: dict[str, Any], fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prompts(**config).transcription(draft_service_pb2.Transcription(**fields))
    assert caught.value.metadata["field"] == f"transcription.{field}"
    assert words in caught.value.message
