"""The cap on γ through a real verifier: many streams are told one, a lone one is not.

The drafts are nearly never right: on no machine does that pay where a sequence has company, so nothing here depends on
how fast one is.
"""

import time
from contextlib import ExitStack

import grpc

from protos.outrider.v1 import verifier_service_pb2
from tests.verifier_service.streams import PROMPT, Stream, opening

UNLIKELY = 1999  # a token that the target never writes here
MAX_GAMMA = 16  # of the verifier, as it is told nothing else
GAMMA = 5
DRAFTING_S = 0.03
DECODED = 16
ROUNDS = 40  # of each of four sequences: enough for five looks


class Proposer:
    """A stream that proposes what is never right, no more than it is told to, and at 0 lets the target write."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._prefix = list(PROMPT)
        self._round = 0
        self._owed = 0  # verdicts
        self.caps: list[int] = []
        self.proposed: list[int] = []
        stream.open(opening(max_new_tokens=900))

    @property
    def gamma(self) -> int:
        """How long its next proposal may be."""
        return min([GAMMA, *self.caps[-1:]])

    def send(self) -> None:
        if self._owed:
            return
        self._round += 1
        if gamma := self.gamma:
            self._owed = 1
            self.proposed.append(gamma)
            self._stream.propose(self._round, self._prefix, [UNLIKELY] * gamma, seen=self._round - 1)
        else:
            self._owed = DECODED
            self._stream.decode(self._round, self._prefix, DECODED, seen=self._round - 1)

    def read(self) -> None:
        """One verdict."""
        self._owed -= 1
        while (reply := self._stream.take()).WhichOneof("kind") != "verdict":
            if reply.notice.kind == verifier_service_pb2.NOTICE_KIND_GAMMA_CAP:
                self.caps.append(reply.notice.gamma_cap)
        assert reply.verdict.accepted == 0
        self._prefix += reply.verdict.token_ids


def lock_step(proposers: list[Proposer], rounds: int) -> None:
    for _ in range(rounds):
        if any(proposer.gamma for proposer in proposers):
            time.sleep(DRAFTING_S)
        for proposer in proposers:
            proposer.send()
        for proposer in proposers:
            proposer.read()


def test_many_streams_are_capped_step_by_step_and_a_lone_one_is_not(verifier_address: str) -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(verifier_address))
        streams = [stack.enter_context(Stream(channel)) for _ in range(5)]
        lone = Proposer(streams[0])
        lock_step([lone], ROUNDS)
        assert lone.caps == []
        assert set(lone.proposed) == {GAMMA}

        many = [lone, *map(Proposer, streams[1:4])]
        lock_step(many, ROUNDS)
        assert [proposer.caps for proposer in many] == [[3, 1, 0]] * 4

        late = Proposer(streams[4])
        lock_step([*many, late], 1)
        assert late.caps == [0]

        for stream in streams[1:]:
            stream.call.cancel()
        for _ in range(8):  # the verifier learns of the ends in its own time, but it does
            if lone.gamma:
                break
            time.sleep(0.2)
            lock_step([lone], ROUNDS)
        assert lone.caps == [3, 1, 0, MAX_GAMMA]
        lock_step([lone], DECODED + 1)
        assert lone.proposed[-1] == GAMMA
