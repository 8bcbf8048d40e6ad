"""Hosts fail while texts are written across them: services die, freeze or lose their link. No request fails, and each
text is the one of an undisturbed run.

Real processes in networks of their own. All in float32, where the text of a seed does not depend on the batch.
"""

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster import MODELS, wait_until
from tests.hosts.cluster import DRAFTS, Cluster, Request, Text
from tests.machine import need_networks

pytestmark = pytest.mark.timeout(300)

# A text has at least LENGTH / (GAMMA + 1) rounds of a step each: an event after its first round and within so many
# times STEP_S is in its middle.
LENGTH, GAMMA = 24, 2
STEP_S = 1.0
STREAMS = 10


def _requests() -> list[Request]:
    """With a seed, and at temperature 0 in turn."""
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "rule": "coupled"}]
    options = {"max_new_tokens": LENGTH, "gamma": GAMMA, "ignore_eos": True}
    return [
        (json.loads(lines[number])["text"], {**options, **sampling[number % 2], "seed": number})
        for number in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_networks()
    with Cluster(tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """All hosts and services, whatever happened to them in the test before."""
    shared_cluster.restore()
    return shared_cluster


def _known(texts: list[Text]) -> list[tuple[list[int], str]]:
    return [(text.token_ids, text.text) for text in texts]


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Cluster) -> list[tuple[list[int], str]]:
    """The text of each request where nothing happens."""
    with shared_cluster.writing(_requests()) as texts:
        pass
    assert sum(text.resumes for text in texts) == 0
    assert all(len(text.token_ids) == LENGTH for text in texts)
    assert len({text.text for text in texts}) == STREAMS
    return _known(texts)


@pytest.mark.parametrize(
    ("fail", "reasons"),
    [
        # Without a timeout for silence, the kernel gives the connection up some seconds later.
        pytest.param(
            lambda cluster, host: cluster.network.cut(host), {"silent", "died"}, id="a verifier loses its link"
        ),
        pytest.param(
            lambda cluster, host: cluster.services[host].send(signal.SIGKILL), {"died"}, id="a verifier is killed"
        ),
        pytest.param(
            lambda cluster, host: cluster.services[DRAFTS[0]].send(signal.SIGKILL),
            set(),
            id="a draft is killed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda cluster, host: cluster.services[host].send(signal.SIGSTOP),
            {"silent"},
            id="a verifier freezes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_text_goes_on_where_a_host_fails(
    cluster: Cluster, undisturbed: list[Any], fail: Callable[[Cluster, str], None], reasons: set[str]
) -> None:
    """The verifier that has the most sequences, or one of the draft services."""
    cluster.settle()
    switches = {reason: cluster.switches(reason) for reason in reasons}
    with cluster.writing(_requests(), step_seconds=STEP_S) as texts:
        wait_until(lambda: all(text.token_ids or text.ended for text in texts))
        fail(cluster, cluster.verifier_with_the_most_sequences())
        assert not any(text.ended for text in texts)
    assert _known(texts) == undisturbed
    if not reasons:
        assert sum(text.resumes for text in texts) == STREAMS / 2, "calls go to the two in turn"
    else:
        assert sum(text.failovers for text in texts) >= STREAMS / 2
        assert sum(cluster.switches(reason) - before for reason, before in switches.items()) >= STREAMS / 2
        assert sum(text.resumes for text in texts) == 0, "the client sees a pause, and no more"
