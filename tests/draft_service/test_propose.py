"""`Propose` for clients that drive the loop themselves: with `Verify` by hand it writes what `Generate` writes."""

import grpc
import pytest

from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, verifier_service_pb2
from tests.draft_service import oracle
from tests.draft_service.calls import BLOCK, COUPLED, PROMPT, TOKENWISE, ProposeStream, sampling, write
from tests.verifier_service.streams import Stream

IDS = oracle.encode(PROMPT)
SEED, GAMMA, TOKENS = 21, 4, 24


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, BLOCK), (1.0, TOKENWISE), (1.0, BLOCK), (1.0, COUPLED)])
def test_proposals_judged_by_hand_give_the_text_of_generate(
    draft: grpc.Channel, verifier: grpc.Channel, temperature: float, rule: sampling_pb2.AcceptanceRule
) -> None:
    params = sampling(temperature, seed=SEED, rule=rule)
    expected = write(draft, sampling=params, gamma=GAMMA, max_new_tokens=TOKENS, ignore_eos=True)
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=IDS, sampling=params, max_new_tokens=TOKENS, ignore_eos=True
    )
    tokens: list[int] = []
    with ProposeStream(draft) as drafts, Stream(verifier) as judge:
        drafts.open(IDS, sampling=params)
        opened = drafts.take().opened
        assert (opened.limits.max_gamma, opened.rule) == (16, rule)
        judge.open(opening)
        committed: list[int] = []
        base, number, finished = len(IDS), 0, False
        while not finished:
            number += 1
            drafts.advance(number, base, committed, min(GAMMA, TOKENS - len(tokens) - 1))
            proposal = drafts.take().proposal
            base += len(committed)
            assert (proposal.round, proposal.base_length) == (number, base)
            assert len(proposal.distributions) == (0 if rule == COUPLED else len(proposal.token_ids))
            assert proposal.prefix_hash == PrefixHash([*IDS, *tokens]).digest()
            judge.send(verifier_service_pb2.VerifyRequest(sequence_id="s", proposal=proposal))
            verdict = judge.verdict()
            committed = list(verdict.token_ids)
            tokens += committed
            finished = verdict.finish_reason != sampling_pb2.FINISH_REASON_UNSPECIFIED
    assert tokens == expected.ids


def test_the_same_round_is_drawn_again_alike_and_the_next_one_afresh(draft: grpc.Channel) -> None:
    """A resumed stream needs no state: base and seed say all (invariant 2)."""

    def proposals(committed: list[int], *advances: list[int]) -> list[list[int]]:
        with ProposeStream(draft) as drafts:
            drafts.open(IDS, committed_token_ids=committed)
            drafts.take()
            base, drafted = len(IDS) + len(committed), []
            for number, more in enumerate(([], *advances), start=1):
                drafts.advance(number, base, more, 6)
                base += len(more)
                drafted.append(list(drafts.take().proposal.token_ids))
            return drafted

    first, second = proposals([], [5, 6])
    assert proposals([5, 6]) == [second]
    assert proposals([]) == [first]
