"""A sequence: committed tokens, its end, stale and wrong rounds, penalties."""

from typing import Any

import pytest

from kernels.verify import Status, TokenLogprobs, VerifyResult
from outrider.rpc.errors import RequestError
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from tests.verifier_service.engines import PROMPT, STOP, a_round, make
from verifier_service.sequence import Reply, TargetSequence


def judge(sequence: TargetSequence, accepted: int, next_token: int) -> None:
    current = sequence.next_round()
    assert current is not None
    result = VerifyResult(
        status=Status.OK,
        accepted=accepted,
        next_token=next_token,
        beta=(0.5,) * min(accepted + 1, 1),
        logprobs=tuple(TokenLogprobs(token, -1.0, -1.0, (), (), ()) for token in range(accepted + 1)),
    )
    sequence.commit(current, result, (), speculation_pb2.VerdictTimings, speculation_pb2.VerifierLoad())


def verdicts(replies: list[Reply]) -> list[Any]:
    return [reply.verdict for reply in replies if isinstance(reply, verifier_service_pb2.VerifyResponse)]


@pytest.mark.parametrize(
    ("drafted", "accepted", "next_token", "written", "reason"),
    [
        ([21, STOP, 23], 3, 30, [21, STOP], sampling_pb2.FINISH_REASON_STOP_TOKEN),  # inside the accepted part
        ([21, 22], 1, STOP, [21, STOP], sampling_pb2.FINISH_REASON_STOP_TOKEN),  # the target's own
        ([21, STOP], 1, 30, [21, 30], sampling_pb2.FINISH_REASON_UNSPECIFIED),  # a rejected one ends nothing
        ([1, 2, 3, 4, 5, 6], 4, 7, [1, 2, 3, 4], sampling_pb2.FINISH_REASON_LENGTH),  # drafted beyond the limit
        ([1, 2, 3], 3, STOP, [1, 2, 3, STOP], sampling_pb2.FINISH_REASON_STOP_TOKEN),  # both at once
    ],
)
def test_accepted_tokens_and_the_next_are_committed_up_to_a_stop_token_or_the_limit(
    drafted: list[int], accepted: int, next_token: int, written: list[int], reason: int
) -> None:
    replies: list[Reply] = []
    sequence = make(replies, max_new_tokens=4)
    sequence.submit(a_round(1, PROMPT, drafted))
    current = sequence.next_round()
    assert current is not None
    assert len(sequence.drafted(current)) <= 4
    judge(sequence, accepted, next_token)
    assert sequence.tokens == PROMPT + written
    verdict = verdicts(replies)[0]
    assert (verdict.finish_reason, list(verdict.token_ids)) == (reason, written)
    assert verdict.accepted == min(accepted, len(written))
    assert len(verdict.logprobs) == len(written)
    assert (replies[-1] is None) == (reason != sampling_pb2.FINISH_REASON_UNSPECIFIED)


def test_a_round_overtaken_by_a_verdict_is_stale() -> None:
    replies: list[Reply] = []
    sequence = make(replies)
    sequence.submit(a_round(1, PROMPT, [21, 22]))
    sequence.submit(a_round(2, [*PROMPT, 21, 22, 31], [51]))  # for the outcome: all accepted, then 31
    sequence.submit(a_round(3, [*PROMPT, 21, 40], [61]))  # for the outcome that came
    judge(sequence, accepted=1, next_token=40)
    judge(sequence, accepted=1, next_token=70)
    assert [(v.round, v.status) for v in verdicts(replies)] == [
        (1, speculation_pb2.VERDICT_STATUS_JUDGED),
        (2, speculation_pb2.VERDICT_STATUS_STALE),
        (3, speculation_pb2.VERDICT_STATUS_JUDGED),
    ]
    assert sequence.tokens == [*PROMPT, 21, 40, 61, 70]


@pytest.mark.parametrize("guess", [[40, 55], [40, 41, 42]])
def test_a_round_overtaken_by_the_last_verdict_of_a_decode_is_stale(guess: list[int]) -> None:
    """Its sender had read the first one."""
    replies: list[Reply] = []
    sequence = make(replies)
    sequence.submit(a_round(1, PROMPT, decode=2))
    judge(sequence, 0, 40)
    sequence.submit(a_round(2, [*PROMPT, *guess], seen=0))
    judge(sequence, 0, 41)
    assert sequence.next_round() is None
    assert [(v.round, v.status) for v in verdicts(replies)] == [
        (1, speculation_pb2.VERDICT_STATUS_JUDGED),
        (1, speculation_pb2.VERDICT_STATUS_JUDGED),
        (2, speculation_pb2.VERDICT_STATUS_STALE),
    ]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (
            [*PROMPT, 21, 22],
            "base_length of round 2 is 5; it must be the number of tokens of prompt and committed output, 4",
        ),
        (PROMPT, "base_length of round 2 is 3; it must be .* 4"),
        ([*PROMPT, 55], "prefix_hash of round 2"),
    ],
)
def test_a_wrong_base_is_an_error_if_its_sender_has_seen_the_last_verdict(prefix: list[int], words: str) -> None:
    sequence = make([])
    sequence.submit(a_round(1, PROMPT))
    judge(sequence, 0, 40)
    sequence.submit(a_round(2, prefix, seen=1))
    with pytest.raises(RequestError, match=words) as caught:
        sequence.next_round()
    assert caught.value.reason == "WRONG_BASE"
