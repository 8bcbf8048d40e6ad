"""`Propose` for clients that drive the loop themselves. With `Verify` it gives the tokens of `Generate`."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from draft_service.concurrency import ConcurrencyLimit
from draft_service.drafters.base import DraftError
from draft_service.propose_call import ProposeCall, _propose
from draft_service.settings import DraftSettings
from examples.orchestrator import GAMMA, generate
from outrider.rpc.errors import RequestError
from protos.outrider.v1 import draft_service_pb2, model_pb2, sampling_pb2
from tests.draft_service import oracle
from tests.draft_service.calls import BLOCK, COUPLED, PROMPT, TOKENWISE, ProposeStream, sampling, write
from tests.draft_service.pairs import BREAKING_TOKEN

IDS = oracle.encode(PROMPT)
TOKENS = 30


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, BLOCK), (1.0, TOKENWISE), (1.0, BLOCK), (1.0, COUPLED)])
def test_propose_and_verify_give_the_tokens_of_generate(
    draft: grpc.Channel, verifier: grpc.Channel, temperature: float, rule: sampling_pb2.AcceptanceRule
) -> None:
    params = sampling(temperature, seed=21, rule=rule)
    tokens = list(generate(draft, verifier, IDS, params, TOKENS))
    expected = write(draft, sampling=params, gamma=GAMMA, max_new_tokens=TOKENS).ids
    same = TOKENS - GAMMA - 1  # near the limit, the proposals of `Generate` are shorter
    assert (tokens[:same], len(tokens)) == (expected[:same], TOKENS)


def test_base_and_seed_determine_the_draws_of_a_round(draft: grpc.Channel) -> None:
    """A resumed stream needs no state (invariant 2)."""

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


@pytest.mark.parametrize(
    ("reason", "code"),
    [("OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED), ("BAD_LOGITS", grpc.StatusCode.INTERNAL)],
)
async def test_a_late_drafter_may_be_asked_again(reason: str, code: grpc.StatusCode) -> None:
    async def propose(gamma: int) -> None:
        raise DraftError("no proposal within 10 s", reason=reason)

    drafting: Any = SimpleNamespace(advance=lambda tokens: None, propose=propose)
    with pytest.raises(RequestError, match="drafting failed: no proposal within 10 s") as caught:
        await _propose(drafting, draft_service_pb2.Advance(gamma=2))
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert (caught.value.retry_after is not None) == (reason == "OVERLOADED")


def test_a_proposal_that_an_error_ends_is_sent_before_the_error(draft: grpc.Channel) -> None:
    params = sampling(0.0, seed=1, logit_bias=[{"token_id": BREAKING_TOKEN, "bias": 100.0}])
    with ProposeStream(draft) as drafts:
        drafts.open(IDS, sampling=params)
        drafts.take()
        drafts.advance(1, len(IDS), [], 4)
        assert list(drafts.take().proposal.token_ids) == [BREAKING_TOKEN]
        with pytest.raises(grpc.RpcError, match=r"drafting failed: .*NaN or infinite") as caught:
            drafts.take()
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_the_log_names_an_internal_error() -> None:
    async def read() -> None:
        raise ValueError("broken")

    pair: Any = SimpleNamespace(draft=model_pb2.ModelInfo())
    context: Any = SimpleNamespace(read=read)
    limit = ConcurrencyLimit(1, max_waiting=1, contended_idle_timeout=1.0)
    with capture_logs() as logs, pytest.raises(ValueError, match="broken"):
        await ProposeCall(pair, limit, DraftSettings.model_validate({"model": "any"}), context).run()
    assert [line["status"] for line in logs] == ["INTERNAL"]
