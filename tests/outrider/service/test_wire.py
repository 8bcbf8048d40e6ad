"""The computed size limits hold for the largest messages, and a server allows as much by default."""

import json
from pathlib import Path
from typing import Any

from draft_service.app import message_limit, short_of
from draft_service.settings import DraftSettings
from outrider.service.sampling import MAX_TOKEN_LIST, MAX_TOP_LOGPROBS
from outrider.service.settings import ServiceSettings
from outrider.service.wire import (
    LEAST_LIMIT,
    bytes_with_logits,
    largest_generate_request,
    largest_verify_message,
    server_limit,
)
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2, verifier_service_pb2
from tests.cluster import MODELS
from verifier_service.app import message_limit as verifier_limit
from verifier_service.settings import VerifierSettings

V, TOKENS, GAMMA, SUPPORT, STOPS = 151_936, 8192, 16, 256, 64
LAST = V - 1
LIMITS: dict[str, int] = {
    "sequence_tokens": TOKENS,
    "max_gamma": GAMMA,
    "max_support": SUPPORT,
}

SAMPLING = sampling_pb2.SamplingParams(
    temperature=0.7,
    seed=2**64 - 1,
    banned_token_ids=[LAST] * MAX_TOKEN_LIST,
    logit_bias=[sampling_pb2.LogitBias(token_id=LAST, bias=-1.5)] * MAX_TOKEN_LIST,
)
COMMON: dict[str, Any] = {
    "sampling": SAMPLING,
    "stop_token_ids": [LAST] * STOPS,
    "request_id": "γ" * 128,
    "cache_salt": "γ" * 128,
}
OPENING = verifier_service_pb2.VerifyRequest(
    sequence_id="γ" * 128,
    open=verifier_service_pb2.OpenSequence(
        prompt_token_ids=[LAST] * (TOKENS // 2), committed_token_ids=[LAST] * (TOKENS // 2), **COMMON
    ),
)
LOGPROB = sampling_pb2.TokenLogprob(token_id=LAST, raw=-1.5, adjusted=-1.5)
VERDICT = verifier_service_pb2.VerifyResponse(
    sequence_id="γ" * 128,
    verdict=speculation_pb2.Verdict(
        token_ids=[LAST] * (GAMMA + 1),
        beta=[0.5] * GAMMA,
        logprobs=[sampling_pb2.PositionLogprobs(token=LOGPROB, top=[LOGPROB] * MAX_TOP_LOGPROBS)] * (GAMMA + 1),
    ),
)


def proposal(**distribution: Any) -> verifier_service_pb2.VerifyRequest:
    message = speculation_pb2.Proposal(
        round=1 << 20,
        base_length=TOKENS,
        prefix_hash=bytes(8),
        token_ids=[LAST] * GAMMA,
        distributions=[speculation_pb2.TokenDistribution(**distribution)] * GAMMA,
        seen_round=1 << 20,
    )
    return verifier_service_pb2.VerifyRequest(sequence_id="γ" * 128, proposal=message)


def test_every_message_of_a_verify_stream_fits_and_the_largest_decides() -> None:
    sparse = largest_verify_message(**LIMITS, vocab_size=None)
    dense = largest_verify_message(**LIMITS, vocab_size=V)
    distribution = speculation_pb2.SparseDistribution(token_ids=bytes(4 * SUPPORT), weights=bytes(2 * SUPPORT))
    for message in (OPENING, proposal(sparse=distribution), VERDICT):
        assert message.ByteSize() <= sparse
    assert OPENING.ByteSize() > sparse / 3
    logits = speculation_pb2.DenseLogits(values=bytes(2 * V))
    assert sparse < proposal(logits=logits).ByteSize() <= dense == bytes_with_logits(GAMMA, V)
    assert server_limit(sparse) == LEAST_LIMIT
    assert dense < server_limit(sparse, dense) < 1.01 * dense
    assert server_limit(2**40) == 2**31 - 1  # gRPC takes no more


def test_the_longest_generate_request_fits() -> None:
    size = largest_generate_request(sequence_tokens=TOKENS, max_stop_strings=16, max_stop_chars=256)
    text = "x" * (16 * TOKENS)
    prompts: list[dict[str, Any]] = [
        {"text": text},
        {"token_ids": draft_service_pb2.TokenIds(ids=[LAST] * TOKENS), "committed_token_ids": [LAST] * TOKENS},
        {"chat": draft_service_pb2.ChatPrompt(messages=[draft_service_pb2.ChatMessage(role="user", content=text)])},
    ]
    for prompt in prompts:
        assert draft_service_pb2.GenerateRequest(**prompt, **COMMON, stop=["γ" * 256] * 16).ByteSize() <= size


def settings_of(kind: type[ServiceSettings], model: Path) -> Any:
    return kind.from_command_line(["--model", str(model)], program="test")


def test_a_server_allows_the_messages_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": V}}))
    draft, verifier = settings_of(DraftSettings, tmp_path), settings_of(VerifierSettings, tmp_path)
    for limit in (message_limit(draft), verifier_limit(verifier)):
        assert bytes_with_logits(GAMMA, V) < limit < 1.01 * bytes_with_logits(GAMMA, V)
    assert message_limit(draft.model_copy(update={"drafter": "lookup"})) == LEAST_LIMIT  # no logits of its own
    assert message_limit(draft.model_copy(update={"max_message_bytes": 1 << 17})) == 1 << 17
    assert verifier_limit(settings_of(VerifierSettings, MODELS / "target")) == LEAST_LIMIT
    assert short_of(draft, TOKENS) == 0
    assert short_of(draft, 10_000_000) > 0
