"""Streams that a verifier has to end: what is sent, and what the error says. For `test_service`."""

from typing import Any

import grpc

from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from tests.verifier_service.streams import PROMPT, Stream, opening

COUPLED = sampling_pb2.ACCEPTANCE_RULE_COUPLED


def _unnamed(stream: Stream) -> None:
    stream.open()
    stream.send(verifier_service_pb2.VerifyRequest(sequence_id=stream.sequence_id))


def _foreign(stream: Stream) -> None:
    stream.open()
    stream.sequence_id = "another"
    stream.decode(1, PROMPT)


def _opened_twice(stream: Stream) -> None:
    stream.open()
    stream.open()


def _unknown_feature(stream: Stream) -> None:
    message = opening()
    message.required_features.append("telepathy")
    stream.open(message)


def _own_support(stream: Stream) -> None:
    stream.open()
    stream.send(
        verifier_service_pb2.VerifyRequest(
            sequence_id="s",
            proposal=speculation_pb2.Proposal(
                round=1,
                base_length=4,
                prefix_hash=b"\0" * 8,
                token_ids=[9],
                distributions=[
                    speculation_pb2.TokenDistribution(
                        sparse=speculation_pb2.SparseDistribution(token_ids=b"\1\0\0\0", weights=b"\1\0")
                    )
                ],
            ),
        )
    )


GARBAGE = b"\xff" * 4
INVALID, FAILED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION

BAD_STREAMS: list[tuple[Any, grpc.StatusCode, str, str]] = [
    (lambda s: s.decode(1, PROMPT), INVALID, "OUT_OF_ORDER", "must be OpenSequence"),
    (lambda s: s.close_sending(), INVALID, "OUT_OF_ORDER", "before OpenSequence"),
    (lambda s: s.send(GARBAGE), INVALID, "INVALID_FIELD", "4 bytes cannot be decoded"),
    (lambda s: (s.open(), s.send(GARBAGE)), INVALID, "INVALID_FIELD", "4 bytes cannot be decoded"),
    (_opened_twice, INVALID, "OUT_OF_ORDER", "second OpenSequence"),
    (_unnamed, INVALID, "INVALID_FIELD", "kind is not set"),
    (_foreign, INVALID, "INVALID_FIELD", "'another'"),
    (_unknown_feature, FAILED, "UNKNOWN_FEATURE", "telepathy"),
    (_own_support, INVALID, "INVALID_FIELD", "not in its own support"),
    (lambda s: s.open(opening([])), INVALID, "INVALID_FIELD", "prompt_token_ids is empty"),
    (lambda s: s.open(opening([2048])), INVALID, "INVALID_FIELD", "is 2048"),
    (lambda s: s.open(opening([1] * 1020)), INVALID, "INVALID_FIELD", "a sequence holds 1024"),
    (lambda s: (s.open(), s.decode(1, [*PROMPT, 1])), INVALID, "WRONG_BASE", "base_length of round 1 is 5"),
    (lambda s: (s.open(), s.decode(1, [9, 9, 9, 9])), INVALID, "WRONG_BASE", "prefix_hash"),
    (lambda s: (s.open(), s.propose(1, PROMPT, [1] * 17)), INVALID, "INVALID_FIELD", "17"),
    (lambda s: (s.open(), s.propose(1, PROMPT, [1, 2], tells_laws=False)), INVALID, "INVALID_FIELD", "takes 2"),
    (
        lambda s: (s.open(opening(rule=COUPLED)), s.propose(1, PROMPT, [1, 2])),
        INVALID,
        "INVALID_FIELD",
        "2 entries for 2 token_ids; the rule coupled takes 0",
    ),
]
