"""What happens to hosts, while texts are written across them: services die, freeze or lose their link. No request
fails, and each text is the one of an undisturbed run.

Real processes in networks of their own. All in float32, where a seed's text does not depend on who shares a pass.
"""

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster import MODELS, wait_until
from tests.hosts.client import Answer, Request
from tests.hosts.cluster import DRAFTS, Cluster
from tests.machine import need_networks

pytestmark = pytest.mark.timeout(300)

# A text has at least LENGTH / (GAMMA + 1) rounds, each of a pass: what comes after its first round and within so many
# times SLOWLY_S comes in its middle.
LENGTH, GAMMA = 40, 2
SLOWLY_S = 0.8
STREAMS = 10


def _texts() -> list[Request]:
    """Of seeds, and at temperature 0 in turn."""
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "rule": "coupled"}]
    how = {"max_new_tokens": LENGTH, "gamma": GAMMA, "ignore_eos": True}
    return [
        Request(json.loads(lines[number])["text"], {**how, **sampling[number % 2], "seed": number})
        for number in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_networks()
    with Cluster(tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@pytest.fixture
def cluster(all_of_them: Cluster) -> Iterator[Cluster]:
    """All hosts and services, whatever happened to them in the test before."""
    yield all_of_them
    all_of_them.restore()


def _write(cluster: Cluster, strike: Callable[[], None] | None = None) -> list[Answer]:
    """Asks for all at once; `strike` is called when each has begun, and none has ended."""
    if strike is None:
        answers = [cluster.client.write(request) for request in _texts()]
    else:
        cluster.settle()
        with cluster.slowly(SLOWLY_S):
            answers = [cluster.client.write(request) for request in _texts()]
            wait_until(lambda: all(answer.token_ids or answer.ended.is_set() for answer in answers))
            strike()
            assert not any(answer.ended.is_set() for answer in answers)
    for answer in answers:
        answer.wait()
    return answers


def _known(answers: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.token_ids, answer.text) for answer in answers]


@pytest.fixture(scope="module")
def undisturbed(all_of_them: Cluster) -> list[tuple[list[int], str]]:
    """What each request gets where nothing happens."""
    answers = _write(all_of_them)
    assert sum(answer.end["resumes"] for answer in answers) == 0
    assert all(len(answer.token_ids) == LENGTH for answer in answers)
    texts = _known(answers)
    assert len({text for _, text in texts}) == STREAMS
    return texts


def _kill(cluster: Cluster, host: str) -> None:
    cluster.services[host].send(signal.SIGKILL)


def _freeze(cluster: Cluster, host: str) -> None:
    cluster.services[host].send(signal.SIGSTOP)


def _cut(cluster: Cluster, host: str) -> None:
    cluster.network.cut(host)


def _kill_draft(cluster: Cluster, host: str) -> None:
    cluster.services[DRAFTS[0]].send(signal.SIGKILL)


@pytest.mark.parametrize(
    ("happens", "reasons"),
    [
        pytest.param(_kill, {"died"}, id="a verifier is killed"),
        pytest.param(_kill_draft, set(), id="a draft is killed"),
        pytest.param(_freeze, {"silent"}, id="a verifier freezes"),
        # Without a time-out for silence, the kernel gives the connection up some seconds later.
        pytest.param(_cut, {"silent", "died"}, id="a verifier loses its link"),
    ],
)
def test_every_text_goes_on_where_a_host_fails(
    cluster: Cluster, undisturbed: list[Any], happens: Callable[[Cluster, str], None], reasons: set[str]
) -> None:
    """To the verifier that has the most sequences, or to one of the draft services."""
    switches = {reason: cluster.switches(reason) for reason in reasons}
    answers = _write(cluster, lambda: happens(cluster, cluster.verifier_with_the_most_sequences()))
    assert _known(answers) == undisturbed
    if not reasons:
        assert sum(answer.end["resumes"] for answer in answers) == STREAMS / 2, "calls go to the two in turn"
    else:
        assert sum(answer.end["failovers"] for answer in answers) >= STREAMS / 2
        assert sum(cluster.switches(reason) - before for reason, before in switches.items()) >= STREAMS / 2
        assert sum(answer.end["resumes"] for answer in answers) == 0, "the client sees a pause, and no more"
