"""What happens to hosts, while texts are written across them: services die, freeze, lose their link, are restarted one
after the other, and get new certificates. No request fails, and each text is the one of an undisturbed run.

Real processes in networks of their own. All in float32, where a seed's text does not depend on who shares a pass.
"""

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.certificates import Authority
from tests.cluster import MODELS, wait_until
from tests.hosts.client import Answer, Load, Request
from tests.hosts.cluster import CLIENT, CONNECTION_AGE_S, DRAFTS, HOSTS, VERIFIERS, Cluster
from tests.machine import need_networks

pytestmark = pytest.mark.timeout(300)

# A text has at least LENGTH / (GAMMA + 1) rounds, each of a pass: what comes after its first round and within so many
# times SLOWLY_S comes in its middle.
LENGTH, GAMMA = 40, 2
SLOWLY_S = 0.8
STREAMS = 10

# For texts that come and go all the while.
SHORT, WORKERS = 8, 3
BRISKLY_S = 0.1


def _requests(count: int, length: int) -> list[Request]:
    """Of seeds, and at temperature 0 in turn."""
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "rule": "coupled"}]
    how = {"max_new_tokens": length, "gamma": GAMMA, "ignore_eos": True}
    return [
        Request(json.loads(lines[number])["text"], {**how, **sampling[number % 2], "seed": number})
        for number in range(count)
    ]


TEXTS = _requests(STREAMS, LENGTH)


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


def _write(cluster: Cluster, requests: list[Request], strike: Callable[[], None] | None = None) -> list[Answer]:
    """Asks for all at once; `strike` is called when each has begun, and none has ended."""
    if strike is None:
        answers = [cluster.client.write(request) for request in requests]
    else:
        cluster.settle()
        with cluster.slowly(SLOWLY_S):
            answers = [cluster.client.write(request) for request in requests]
            wait_until(lambda: all(answer.token_ids or answer.ended.is_set() for answer in answers))
            strike()
            assert not any(answer.ended.is_set() for answer in answers)
    for answer in answers:
        answer.wait()
    return answers


def _known(answers: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.token_ids, answer.text) for answer in answers]


def _sum(answers: list[Answer], what: str) -> int:
    return sum(answer.end[what] for answer in answers)


@pytest.fixture(scope="module")
def undisturbed(all_of_them: Cluster) -> list[tuple[list[int], str]]:
    """What each request gets where nothing happens."""
    answers = _write(all_of_them, TEXTS)
    assert _sum(answers, "resumes") == 0
    assert all(len(answer.token_ids) == LENGTH for answer in answers)
    texts = _known(answers)
    assert len({text for _, text in texts}) == STREAMS
    return texts


# ------------------------------------------------------------------------------------------------------- one is lost


def _kill(cluster: Cluster, host: str) -> None:
    cluster.signal(host, signal.SIGKILL)


def _freeze(cluster: Cluster, host: str) -> None:
    cluster.signal(host, signal.SIGSTOP)


def _cut(cluster: Cluster, host: str) -> None:
    cluster.network.cut(host)


def _kill_draft(cluster: Cluster, host: str) -> None:
    cluster.signal(DRAFTS[0], signal.SIGKILL)


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
    answers = _write(cluster, TEXTS, lambda: happens(cluster, cluster.verifier_with_the_most_sequences()))
    assert _known(answers) == undisturbed
    if not reasons:
        assert _sum(answers, "resumes") == STREAMS / 2, "calls go to the two in turn"
    else:
        assert _sum(answers, "failovers") >= STREAMS / 2
        assert sum(cluster.switches(reason) - before for reason, before in switches.items()) >= STREAMS / 2
        assert _sum(answers, "resumes") == 0, "the client sees a pause, and no more"


# ----------------------------------------------------------------------------------------------------- none is lost


@pytest.fixture(scope="module")
def short(all_of_them: Cluster) -> tuple[list[Request], list[Any]]:
    """Requests of short texts, and what they get where nothing happens."""
    requests = _requests(2 * WORKERS, SHORT)
    return requests, _known(_write(all_of_them, requests))


def _as_ever(load: Load, known: list[Any]) -> None:
    load.check()
    for number, answer in load.texts:
        assert (answer.token_ids, answer.text) == known[number]


def test_certificates_and_their_authority_are_replaced(
    cluster: Cluster, short: tuple[list[Request], list[Any]]
) -> None:
    """As `docs/operations.md` has it. In the end nobody believes the old authority, and connections are made anew."""
    requests, known = short
    old, new = cluster.authority, Authority(cluster.authority.pem.parent / "new", "new")
    former = {name: old.issue(name) for name in ("clients", "drafts")}
    anew = 1.5 * CONNECTION_AGE_S
    with cluster.slowly(BRISKLY_S), Load(cluster.client, requests, WORKERS) as load:
        load.goes_on()
        for host in HOSTS:
            cluster.trust(host, old, new)
        load.goes_on(anew)
        made = {host: cluster.certify(host, new) for host in HOSTS}
        load.goes_on(anew)
        for host in HOSTS:
            cluster.trust(host, new)
        load.goes_on(anew)
    _as_ever(load, known)
    for host in (*VERIFIERS, *DRAFTS):
        assert cluster.client.shown_at(cluster.at(host)) == made[host].cert.read_text(), host
    for host, name in ((VERIFIERS[0], "drafts"), (DRAFTS[0], "clients")):
        tls = {**cluster.tls(CLIENT, HOSTS[host]), "cert": str(former[name].cert), "key": str(former[name].key)}
        said = cluster.client.get_model_status(cluster.at(host), tls, verifier=host in VERIFIERS)
        assert said.startswith("UNAVAILABLE"), f"what the old authority vouched for: {said}"


@pytest.mark.slow
def test_services_are_restarted_one_after_the_other(cluster: Cluster, short: tuple[list[Request], list[Any]]) -> None:
    """A verifier's sequences leave it before it does, and a draft service finishes its requests."""
    requests, known = short
    cluster.settle()
    lost = cluster.switches("died")
    with cluster.slowly(BRISKLY_S), Load(cluster.client, requests, WORKERS) as load:

        def restart(host: str) -> None:
            cluster.signal(host, signal.SIGTERM)
            assert cluster.services[host].process.wait(60) == 0
            cluster.start(host)
            load.goes_on()

        load.goes_on()
        for host in VERIFIERS:
            restart(host)
        assert cluster.switches("died") == lost
        before = len(load.texts)
        for host in DRAFTS:
            restart(host)
        assert not [answer for _, answer in load.texts[before:] if not answer.error and answer.end["resumes"]]
    _as_ever(load, known)


def test_only_drafts_reach_verifiers_and_only_clients_reach_drafts(cluster: Cluster) -> None:
    shown = {host: cluster.tls(host, "") for host in (VERIFIERS[0], DRAFTS[0], CLIENT)}
    answers = {
        (who, to): cluster.client.get_model_status(
            cluster.at(to), {**tls, "name": HOSTS[to]}, verifier=to in VERIFIERS
        ).split(":")[0]
        for who, tls in shown.items()
        for to in (VERIFIERS[1], DRAFTS[1])
    }
    admitted = {(DRAFTS[0], VERIFIERS[1]), (CLIENT, DRAFTS[1])}
    assert answers == {pair: "OK" if pair in admitted else "PERMISSION_DENIED" for pair in answers}
