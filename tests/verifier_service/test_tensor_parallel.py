"""A target on two ranks, as a service: the texts of one rank; if a rank is lost, the other ends soon, with the reason.

Real processes, with gloo on CPUs.
"""

import signal
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from outrider.client import Chunk, Client, Finished, Options
from outrider.runtime.kv_cache import BLOCK_TOKENS
from tests.cluster import Cluster, wait_healthy
from tests.exactness import mixed_requests
from tests.exactness.mixed_requests import Request
from tests.exactness.pairs import write_demo_like
from tests.outrider.runtime.two_ranks import ended_within, reason, two_ranks
from tests.verifier_service.streams import PROMPT, Stream, error_of, opening

SOON_S = 20.0  # within which ranks end unless they hang
REQUESTS, TOKENS, PROMPT_CHARS = 9, 48, 90
GAMMA = 4  # the same for all, so that sequences grow together until the pool is full
TIGHT, ROOMY = ("--max-sequence-tokens", "160"), ("--kv-cache-mb", "2")
LONG = 480  # tokens: a rank is killed before they are written


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two ranks can share the target's heads. They are large, so that few tokens fill the pool."""
    return write_demo_like(tmp_path_factory.mktemp("pair"), head_dim=256)


def test_two_ranks_write_the_texts_of_one_and_drain_together(checkpoints: tuple[Path, Path]) -> None:
    """Greedy and seeded requests, more than the pool can hold at once; and a prompt is scored. Then, during a text,
    all ranks get a signal.
    """
    short = [each for each in mixed_requests.requests() if len(each.prompt) <= PROMPT_CHARS][:REQUESTS]
    requests = [replace(each, options=each.options | Options(max_new_tokens=TOKENS, gamma=GAMMA)) for each in short]
    with Cluster() as cluster, two_ranks(checkpoints[0], *TIGHT, fault="crowded") as ranks:
        one = cluster.verifier(model=checkpoints[0], flags=TIGHT)
        plain, front = (
            cluster.draft(verifier, model=checkpoints[1], flags="--kv-cache-mb 32") for verifier in (one, ranks[0])
        )
        wait_healthy(one, ranks[0], plain, front)
        alone = mixed_requests.texts(plain.address, requests, together=False, salt="alone")
        for _ in range(5):  # the machine's speed decides how many run at once
            assert mixed_requests.texts(front.address, requests, together=True, salt="together") == alone
            if ranks[0].count("outrider_preemptions_total"):
                break
        assert ranks[0].count("outrider_preemptions_total") >= 1
        # The second of two texts after one prompt, one after the other, begins with its first block.
        twice = [Request([7 * i for i in range(1, BLOCK_TOKENS + 2)], Options(seed=1, max_new_tokens=4))] * 2
        with_prefix = [
            mixed_requests.texts(each.address, twice, together=False, salt="prefix") for each in (plain, front)
        ]
        assert with_prefix[0] == with_prefix[1]
        assert ranks[0].count("outrider_prefix_cache_hits_total") >= BLOCK_TOKENS
        scores = []
        for service in (plain, front):
            with Client(service.address, timeout=60.0) as client:
                completion = client.complete("def area(radius):\n", prompt_logprobs=1, max_new_tokens=1)
            scores.append([each.token.raw for each in completion.prompt_logprobs])
        assert len(scores[0]) > 1
        assert scores[1] == pytest.approx(scores[0], abs=1e-4)
        with Client(front.address, timeout=60.0) as client:
            events = client.generate(requests[0].prompt, **requests[0].options)
            next(event for event in events if isinstance(event, Chunk))
            for rank in reversed(ranks):
                rank.end()
            assert len([event for event in events if isinstance(event, Finished)]) == 1
        assert ended_within(SOON_S, ranks) == [0, 0]
        assert [reason(each) for each in ranks] == ["", ""]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other(checkpoints: tuple[Path, Path], victim: int) -> None:
    with two_ranks(checkpoints[0], *ROOMY) as ranks, grpc.insecure_channel(ranks[0].address) as channel:
        ranks[0].wait_healthy()
        with Stream(channel) as stream:
            stream.open(opening(max_new_tokens=LONG))
            stream.decode(1, PROMPT, tokens=LONG)
            stream.verdict()
            ranks[victim].process.kill()
            other = ranks[1 - victim]
            assert ended_within(SOON_S, [other]) == [1]
            assert reason(other) == f"verifier_service: rank {victim} is lost: it closed its connection"
            error = error_of(stream.call)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        has_reason = victim == 1  # rank 0 lives to send it
        assert ("call another one" in error.message) == has_reason
        assert error.reason == ("NO_VERIFIER" if has_reason else "UNSPECIFIED"), (
            "not DRAINING: a sequence may be the cause"
        )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_ends_the_other(checkpoints: tuple[Path, Path], victim: int) -> None:
    with two_ranks(checkpoints[0], *ROOMY, "--rank-timeout", "2") as ranks:
        ranks[0].wait_healthy()
        ranks[victim].process.send_signal(signal.SIGSTOP)
        other = ranks[1 - victim]
        assert ended_within(SOON_S, [other]) == [1]
        assert reason(other) == f"verifier_service: rank {victim} is lost: it sent nothing for 2 s"
        ranks[victim].process.kill()
