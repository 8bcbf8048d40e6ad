"""A sequence commits what was accepted, ends where it should, and tells stale rounds from wrong ones."""

from typing import Any

import pytest

from kernels.adjustments import LogitRules, RowAdjustment
from kernels.verify import Status, VerifyResult
from outrider.rpc.errors import RequestError
from protos.outrider.v1 import sampling_pb2, speculation_pb2
from tests.verifier_service.engines import PROMPT, STOP, a_round, make
from verifier_service.sequence import Reply, TargetSequence


def judge(sequence: TargetSequence, accepted: int, next_token: int) -> None:
    current = sequence.next_round()
    assert current is not None
    result = VerifyResult(
        status=Status.OK, accepted=accepted, next_token=next_token, beta=(0.5,) * min(accepted + 1, 1)
    )
    sequence.commit(current, result, speculation_pb2.VerdictTimings(), speculation_pb2.VerifierLoad())


def verdicts(replies: list[Reply]) -> list[Any]:
    return [reply.verdict for reply in replies if reply is not None and not isinstance(reply, RequestError)]


def test_accepted_prefix_and_next_token_are_committed() -> None:
    replies: list[Reply] = []
    sequence = make(replies)
    sequence.submit(a_round(1, PROMPT, [21, 22, 23]))
    judge(sequence, accepted=2, next_token=30)
    assert sequence.tokens == [*PROMPT, 21, 22, 30]
    [verdict] = verdicts(replies)
    assert (verdict.round, verdict.base_length, verdict.judged, verdict.accepted) == (1, 3, 3, 2)
    assert list(verdict.token_ids) == [21, 22, 30]
    assert verdict.finish_reason == sampling_pb2.FINISH_REASON_UNSPECIFIED


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
def test_it_ends_at_a_stop_token_or_the_limit(
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
    assert verdicts(replies)[0].finish_reason == reason
    assert (replies[-1] is None) == (reason != sampling_pb2.FINISH_REASON_UNSPECIFIED)


def test_a_round_overtaken_by_a_verdict_is_stale() -> None:
    replies: list[Reply] = []
    sequence = make(replies)
    sequence.submit(a_round(1, PROMPT, [21, 22]))
    sequence.submit(a_round(2, [*PROMPT, 21, 22, 31], [51]))  # guessed that all pass and 31 follows
    sequence.submit(a_round(3, [*PROMPT, 21, 40], [61]))  # guessed the outcome that came
    judge(sequence, accepted=1, next_token=40)
    judge(sequence, accepted=1, next_token=70)
    assert [(v.round, v.status) for v in verdicts(replies)] == [
        (1, speculation_pb2.VERDICT_STATUS_JUDGED),
        (2, speculation_pb2.VERDICT_STATUS_STALE),
        (3, speculation_pb2.VERDICT_STATUS_JUDGED),
    ]
    assert sequence.tokens == [*PROMPT, 21, 40, 61, 70]


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ([*PROMPT, 21, 22], "base_length of round 2 is 5; the sequence has 4 tokens"),
        ([*PROMPT, 55], "prefix_hash of round 2"),
    ],
)
def test_a_wrong_base_is_refused_where_its_sender_knew_better(prefix: list[int], says: str) -> None:
    sequence = make([])
    sequence.submit(a_round(1, PROMPT))
    judge(sequence, 0, 40)
    sequence.submit(a_round(2, prefix, seen=1))
    with pytest.raises(RequestError, match=says) as caught:
        sequence.next_round()
    assert caught.value.reason == "WRONG_BASE"


def changed(row: RowAdjustment | None) -> list[int]:
    """The ids whose logits it changes."""
    return [] if row is None else row.ids[row.bias != 0].tolist()


def test_adjustments_see_the_drafted_tokens_before_them_and_forget_rejected_ones() -> None:
    sequence = make([], rules=LogitRules(presence_penalty=1.0))
    sequence.submit(a_round(1, PROMPT, [21, 22]))
    current = sequence.next_round()
    assert current is not None
    rows = sequence.proposed(current).adjustments
    assert [changed(row) for row in rows] == [[], [21], [21, 22]]
    judge(sequence, accepted=0, next_token=40)
    sequence.submit(a_round(2, [*PROMPT, 40]))
    after = sequence.next_round()
    assert after is not None
    [row] = sequence.proposed(after).adjustments
    assert changed(row) == [40]


def test_a_resumed_sequence_counts_what_was_committed() -> None:
    sequence = make([], max_new_tokens=5, committed=[31, 32, 33])
    assert sequence.written == 3
    sequence.submit(a_round(1, [*PROMPT, 31, 32, 33], [1, 2, 3, 4]))
    current = sequence.next_round()
    assert current is not None
    assert sequence.drafted(current) == (1, 2)
