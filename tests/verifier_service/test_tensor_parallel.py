"""A target on two ranks, as a service: the texts of one rank, and a prompt and clear end when a rank is gone.

The processes are real, the ranks are gloo's on CPUs, and the sockets are sockets.
"""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.client import Chunk, Client, Finished, Options
from tests.cluster import MODELS, Cluster, wait_healthy
from tests.exactness import mixed_requests
from tests.outrider.runtime import tiny
from tests.outrider.runtime.two_ranks import ended_within, reason, two_ranks
from tests.verifier_service.streams import PROMPT, Stream, opening

SOON_S = 20.0  # ranks that nothing holds up have ended by then: with a hang they would not at all
REQUESTS, TOKENS, PROMPT_CHARS = 9, 56, 90
GAMMA = 4  # by one γ they grow side by side, until the pool has no room for them
POOL = ("--max-sequence-tokens", "160")
DEMO_TOKENS = 2048
LONG = 480  # tokens of a text that cannot be done before a rank is killed


class Checkpoints(NamedTuple):
    """A target whose heads two ranks can share, and a draft that is often of its opinion."""

    target: Path
    draft: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("pair")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 128}
    config = LlamaConfig(
        vocab_size=DEMO_TOKENS, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=0, pad_token_id=0, **shape,
    )  # fmt: skip
    made = Checkpoints(tiny.save(config, folder / "target", seed=1), folder / "draft")
    draft = LlamaForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    with torch.no_grad():
        draft.lm_head.weight.add_(0.05 * torch.randn(draft.lm_head.weight.shape, generator=torch.manual_seed(5)))
    draft.save_pretrained(made.draft)
    for each in (made.target, made.draft):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODELS / "target" / name, each / name)
    return made


def test_two_ranks_write_the_texts_of_one_and_drain_together(checkpoints: Checkpoints) -> None:
    """Greedy and by seeds; in company that is too many for the pool, and begins alike the second time. Then all ranks
    get a signal, as from torchrun, while a text is being written.
    """
    short = [each for each in mixed_requests.requests() if len(each.prompt) <= PROMPT_CHARS][:REQUESTS]
    asked = [replace(each, options=each.options | Options(max_new_tokens=TOKENS, gamma=GAMMA)) for each in short]
    with Cluster() as cluster, two_ranks(checkpoints.target, *POOL) as ranks:
        one = cluster.verifier(model=checkpoints.target, flags=POOL)
        plain, front = (
            cluster.draft(verifier, model=checkpoints.draft, flags="--kv-cache-mb 32") for verifier in (one, ranks[0])
        )
        wait_healthy(one, ranks[0], plain, front)
        alone = mixed_requests.texts(plain.address, asked, together=False, salt="alone")
        for _ in range(5):  # as often as it takes: how many are there at once is the machine's affair too
            assert mixed_requests.texts(front.address, asked, together=True, salt="in company") == alone
            counts = [ranks[0].count(f"outrider_{name}_total") for name in ("preemptions", "prefix_cache_hits")]
            if all(counts):
                break
        assert min(counts) >= 1
        with Client(front.address, timeout=60.0) as client:
            events = client.generate(asked[0].prompt, **asked[0].options)
            next(event for event in events if isinstance(event, Chunk))
            for rank in reversed(ranks):
                rank.end()
            assert len([event for event in events if isinstance(event, Finished)]) == 1
        assert ended_within(SOON_S, ranks) == [0, 0]
        assert [reason(each) for each in ranks] == ["", ""]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_at_work_ends_the_other(checkpoints: Checkpoints, victim: int) -> None:
    with two_ranks(checkpoints.target) as ranks, grpc.insecure_channel(ranks[0].address) as channel:
        ranks[0].wait_healthy()
        with Stream(channel) as stream:
            stream.open(opening(max_new_tokens=LONG))
            stream.decode(1, PROMPT, tokens=LONG)
            stream.verdict()
            ranks[victim].process.kill()
            other = ranks[1 - victim]
            assert ended_within(SOON_S, [other]) == [1]
            assert reason(other) == f"verifier_service: rank {victim} is lost: it closed its connection"
            with pytest.raises(grpc.RpcError) as ended:
                list(iter(stream.verdict, None))
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        told = victim == 1  # rank 0 is there to say so
        assert ("try another one" in (ended.value.details() or "")) == told


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_stands_still_ends_the_other(checkpoints: Checkpoints, victim: int) -> None:
    with two_ranks(checkpoints.target, "--rank-timeout", "2") as ranks:
        ranks[0].wait_healthy()
        ranks[victim].process.send_signal(signal.SIGSTOP)
        other = ranks[1 - victim]
        assert ended_within(SOON_S, [other]) == [1]
        assert reason(other) == f"verifier_service: rank {victim} is lost: it sent nothing for 2 s"
        ranks[victim].process.kill()


def test_what_two_ranks_cannot_share_ends_both() -> None:
    with two_ranks(MODELS / "target") as ranks:
        assert ended_within(SOON_S, ranks) == [1, 1]
        for each in ranks:
            assert "--tensor-parallel-size 2: " in reason(each)
            assert "has 5 attention heads and 1 of keys and values" in reason(each)
