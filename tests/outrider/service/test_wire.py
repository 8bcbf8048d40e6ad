"""The largest messages fit into the default limit of the services, and computed sizes are not below real ones."""

from typing import Any

import pytest

from draft_service.prompt import OPENING_BYTES, TOKEN_BYTES
from outrider.service.sampling import MAX_STOP_TOKEN_IDS, MAX_TOKEN_LIST, MAX_TOP_LOGPROBS
from outrider.service.settings import ServiceSettings
from outrider.service.wire import bytes_with_logits, pad
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2

LIMIT = ServiceSettings.model_fields["max_message_bytes"].default
TOKENS, GAMMA, SUPPORT = 1 << 20, 16, 256
NAMES: dict[str, Any] = {"request_id": "γ" * 128, "cache_salt": "γ" * 128}


def opening(last: int) -> verifier_service_pb2.VerifyRequest:
    """The largest one without tokens, of a vocabulary with `last` as its last token."""
    sampling = sampling_pb2.SamplingParams(
        temperature=0.7,
        seed=2**64 - 1,
        banned_token_ids=[last] * MAX_TOKEN_LIST,
        logit_bias=[sampling_pb2.LogitBias(token_id=last, bias=-1.5)] * MAX_TOKEN_LIST,
    )
    stop = [last] * MAX_STOP_TOKEN_IDS
    found = verifier_service_pb2.OpenSequence(sampling=sampling, stop_token_ids=stop, max_new_tokens=last, **NAMES)
    return verifier_service_pb2.VerifyRequest(sequence_id="γ" * 128, open=found)


def proposal(**distribution: Any) -> verifier_service_pb2.VerifyRequest:
    message = speculation_pb2.Proposal(
        round=1 << 20,
        base_length=TOKENS,
        prefix_hash=bytes(8),
        token_ids=[2**31 - 1] * GAMMA,
        distributions=[speculation_pb2.TokenDistribution(**distribution)] * GAMMA,
        seen_round=1 << 20,
    )
    return verifier_service_pb2.VerifyRequest(sequence_id="γ" * 128, proposal=message)


@pytest.mark.parametrize("last", [99, 151_935, 2**31 - 1])
def test_a_million_tokens_fit(last: int) -> None:
    message = opening(last)
    assert message.ByteSize() < OPENING_BYTES
    message.open.prompt_token_ids.extend([last] * (TOKENS // 2))
    message.open.committed_token_ids.extend([last] * (TOKENS // 2))
    assert message.ByteSize() <= OPENING_BYTES + TOKEN_BYTES * TOKENS < LIMIT


@pytest.mark.parametrize("size", [151_936, 262_144])
def test_proposals_fit(size: int) -> None:
    sparse = speculation_pb2.SparseDistribution(token_ids=bytes(4 * SUPPORT), weights=bytes(2 * SUPPORT))
    logits = proposal(logits=speculation_pb2.DenseLogits(values=bytes(2 * size)))
    assert proposal(sparse=sparse).ByteSize() < logits.ByteSize() <= bytes_with_logits(GAMMA, size) < LIMIT


def test_verdicts_fit() -> None:
    logprob = sampling_pb2.TokenLogprob(token_id=2**31 - 1, raw=-1.5, adjusted=-1.5)
    verdict = speculation_pb2.Verdict(
        token_ids=[2**31 - 1] * (GAMMA + 1),
        beta=[0.5] * GAMMA,
        logprobs=[sampling_pb2.PositionLogprobs(token=logprob, top=[logprob] * MAX_TOP_LOGPROBS)] * (GAMMA + 1),
    )
    assert verifier_service_pb2.VerifyResponse(sequence_id="γ" * 128, verdict=verdict).ByteSize() < LIMIT


@pytest.mark.parametrize("size", [64, 256])
def test_a_message_of_any_length_is_padded(size: int) -> None:
    """Also if the gap is smaller than an empty entry."""
    for length in range(300):
        message = verifier_service_pb2.VerifyRequest(sequence_id="x" * length)
        pad(message, size)
        assert message.ByteSize() % size == 0
        assert message.sequence_id == "x" * length
