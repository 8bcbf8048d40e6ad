"""On the wire, the privacy options hide how many tokens each round commits.

Under `coupled` the text of a seed is the same with every drafter. Most tokens of `model` are accepted, next to none of
`random`: the same text, with different accepted counts to hide. Sizes are read at a proxy on either side of a real
draft service; `test_frames` has the times, on a fake clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.cli.processes import Pair
from outrider.client import Client, Completion, InvalidRequest
from tests.cluster import Cluster
from tests.proxy import Proxy, Segment, Way, data_frames

PROMPT = "def area(radius):\n"
TEXT: dict[str, Any] = {"temperature": 1.0, "seed": 11, "rule": "coupled", "max_new_tokens": 24, "gamma": 4}
FRAMES: dict[str, Any] = {"frame_bytes": 512, "frame_pace": 0.05}
DRAFTERS = ("model", "random")
GRPC_PREFIX = 5  # bytes before each message, in a DATA frame


@dataclass
class Watched:
    """A draft service between two proxies: `outer` towards the client, `inner` towards the verifier."""

    client: Client
    outer: Proxy
    inner: Proxy

    def complete(self, **options: Any) -> tuple[Completion, list[Segment], list[Segment]]:
        """A completion, and the bytes that passed each proxy."""
        with self.outer.recording() as outside, self.inner.recording() as inside:
            completion = self.client.complete(PROMPT, **{**TEXT, "request_id": "watched", **options})
        return completion, outside, inside


@pytest.fixture(scope="module")
def watched(demo_pair: Pair) -> Iterator[Watched]:
    with Proxy(demo_pair.verifier.address) as inner, Cluster() as cluster:
        draft = cluster.draft(inner.address)
        draft.wait_healthy()
        with Proxy(draft.address) as outer, Client(outer.address, timeout=60) as client:
            watched = Watched(client, outer, inner)
            for drafter in DRAFTERS:
                watched.complete(drafter=drafter)  # opens connections, fills caches
            yield watched


@pytest.mark.parametrize("rule", ["coupled", "tokenwise", "block"])
def test_fixed_size_rounds_have_one_size_in_each_direction(watched: Watched, rule: str) -> None:
    """With any support of the distributions in a proposal, and with log-probabilities in the verdicts."""
    sizes: dict[Way, set[int]] = {Way.UP: set(), Way.DOWN: set()}
    for drafter in DRAFTERS:
        completion, _, inside = watched.complete(
            drafter=drafter, rule=rule, fixed_size_rounds=True, logprobs=3, max_new_tokens=16
        )
        rounds = data_frames(inside, Way.UP)[1:]  # after the opening
        assert len(rounds) >= completion.statistics.num_rounds
        sizes[Way.UP] |= {frame.size for frame in rounds}
        sizes[Way.DOWN] |= {frame.size for frame in data_frames(inside, Way.DOWN)}
    assert [len(each) for each in sizes.values()] == [1, 1]


PLAIN: dict[str, dict[str, Any]] = {
    "greedy, with logprobs": {"temperature": 0, "logprobs": 4},
    "stop string": {"stop": ["return"], "max_new_tokens": 64},
    "three samples": {"n": 3},
    "resumed, a long prompt": {"committed_token_ids": [258, 395] * 400, "max_new_tokens": 832},
}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN.keys())
def test_privacy_changes_neither_text_nor_tokens(watched: Watched, options: dict[str, Any]) -> None:
    plain, _, _ = watched.complete(**options)
    hidden, _, _ = watched.complete(**options, **FRAMES, fixed_size_rounds=True)
    for one, other in zip(plain.samples, hidden.samples, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert (one.stop, one.origins) == (other.stop, other.origins)
        assert one.usage.completion_tokens == other.usage.completion_tokens
        assert [at.token.token_id for at in one.logprobs] == [at.token.token_id for at in other.logprobs]


def test_frames_of_the_minimum_size_hold_every_response(watched: Watched) -> None:
    """The error about a smaller frame gives the minimum, which includes log-probabilities and a stop string."""
    options: dict[str, Any] = {"logprobs": 5, "stop": ["\n\n\n\n"]}
    with pytest.raises(InvalidRequest) as caught:
        watched.complete(frame_bytes=1, **options)
    minimum = int(caught.value.metadata["minimum"])
    for drafter in DRAFTERS:
        plain, _, _ = watched.complete(drafter=drafter, **options)
        hidden, outside, _ = watched.complete(drafter=drafter, frame_bytes=minimum, **options)
        assert (hidden.text, hidden.token_ids) == (plain.text, plain.token_ids)
        assert len(hidden.logprobs) == len(plain.logprobs)
        sizes = {frame.size for frame in data_frames(outside, Way.DOWN)}  # a multiple if frames left together
        assert {size % (minimum + GRPC_PREFIX) for size in sizes} == {0}
