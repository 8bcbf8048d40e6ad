"""Padding to the byte, and how large a message may become: against protobuf's own sizes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.service.wire import largest, pad, room
from protos.outrider.v1 import draft_service_pb2, speculation_pb2, verifier_service_pb2


@pytest.mark.parametrize("kind", [draft_service_pb2.GenerateResponse, verifier_service_pb2.VerifyResponse])
def test_every_size_is_reached_to_the_byte(kind: type) -> None:
    """Also where one piece alone would jump over it: its length takes two bytes from 128 on, and three from 16,384."""
    for size in itertools.chain(range(8, 600), range(16_370, 16_400)):
        message = kind()
        pad(message, size)
        assert message.ByteSize() == size


@given(st.text(max_size=400), st.integers(40, 300))
@settings(max_examples=200, deadline=None)
def test_a_larger_message_takes_the_next_multiple_that_it_can_have(text: str, size: int) -> None:
    message = draft_service_pb2.GenerateResponse(chunk=draft_service_pb2.GenerateChunk(text=text))
    before, fits = message.ByteSize(), room(message, size)
    pad(message, size)
    assert message.ByteSize() % size == 0
    assert message.ByteSize() - before <= size + 1
    assert fits == (message.ByteSize() == size)
    assert message.chunk.text == text


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_no_verdict_is_larger_than_it_may_become(data: st.DataObject) -> None:
    gamma, top = data.draw(st.integers(0, 16)), data.draw(st.integers(0, 3))
    numbers = st.integers(0, 2**32 - 1)
    verdict = speculation_pb2.Verdict(
        round=data.draw(numbers),
        base_length=data.draw(numbers),
        status=speculation_pb2.VERDICT_STATUS_JUDGED,
        judged=data.draw(numbers),
        accepted=data.draw(numbers),
        token_ids=data.draw(st.lists(numbers, min_size=gamma + 1, max_size=gamma + 1)),
        beta=[0.7] * gamma,
        timings=speculation_pb2.VerdictTimings(queue_us=data.draw(numbers), forward_us=data.draw(numbers)),
        load=speculation_pb2.VerifierLoad(running=data.draw(numbers), kv_usage=0.3, pass_fixed_us=5.0),
    )
    for token in verdict.token_ids:
        at = verdict.logprobs.add()
        at.token.token_id, at.token.raw = token, -1.5
        for _ in range(top):
            at.top.add(token_id=token, raw=-2.5, adjusted=-3.5)
    message = verifier_service_pb2.VerifyResponse(sequence_id="n" * 20, verdict=verdict)
    counts = {"sequence_id": 20, "token_ids": gamma + 1, "beta": gamma, "logprobs": gamma + 1, "top": top, "opened": 0}
    most = largest(message.DESCRIPTOR, counts=counts, most=8)
    assert message.ByteSize() <= most
    full = dict.fromkeys(("round", "base_length", "judged", "accepted"), 2**32 - 1)
    for name, value in full.items():
        setattr(verdict, name, value)
    verdict.token_ids[:] = [2**32 - 1] * (gamma + 1)
    full_message = verifier_service_pb2.VerifyResponse(sequence_id="n" * 20, verdict=verdict)
    assert most - full_message.ByteSize() < 120 + 12 * (gamma + 1) * (top + 1), "and it is not far off"
