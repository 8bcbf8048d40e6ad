"""Who waits is told so, again and again, by the engine itself; and who was in progress elsewhere waits before others.

A real engine whose passes are driven by hand, as in `test_gamma_cap_notices`; over sockets in `test_service`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from protos.outrider.v1 import verifier_service_pb2
from tests.verifier_service.test_gamma_cap_notices import MODEL, PLACES, Client, Verifier
from verifier_service.engine import Close, Drain, Open, Remind
from verifier_service.sequence import TargetSequence

QUEUED, DRAINING = verifier_service_pb2.NOTICE_KIND_QUEUED, verifier_service_pb2.NOTICE_KIND_DRAINING


@pytest.fixture(scope="module")
def verifier_model() -> LoadedModel:
    return load_model(ModelSource(str(MODEL), dtype="float32", device="cpu"))


@pytest.fixture
def verifier(verifier_model: LoadedModel) -> Verifier:
    return Verifier(verifier_model, gamma_cap=False)


def notices(client: Client, kind: verifier_service_pb2.NoticeKind = QUEUED) -> list[verifier_service_pb2.Notice]:
    told = [reply for reply in client.replies if isinstance(reply, verifier_service_pb2.VerifyResponse)]
    return [reply.notice for reply in told if reply.WhichOneof("kind") == "notice" and reply.notice.kind == kind]


def opened_again(verifier: Verifier) -> Client:
    """A client whose sequence was in progress elsewhere."""
    client = Client(verifier, 99)
    verifier.engine.receive(Close(client.sequence))
    client.replies.clear()
    opening = replace(client.sequence.opening, resumed=True)
    client.sequence = TargetSequence("again", opening, 2000, client.replies.append)
    verifier.engine.receive(Open(client.sequence))
    return client


def test_who_waits_for_a_place_is_told_how_many_are_before_it_whenever_it_is_reminded(verifier: Verifier) -> None:
    clients = [Client(verifier, seed) for seed in range(PLACES + 2)]
    assert [len(notices(client)) for client in clients] == [0] * PLACES + [1, 1]
    for _ in range(2):
        for client in clients:
            verifier.engine.receive(Remind(client.sequence))
    assert [len(notices(client)) for client in clients] == [0] * PLACES + [3, 3]
    assert {notice.queue_position for notice in notices(clients[-1])} == {1}
    verifier.engine.receive(Close(clients[0].sequence))
    for client in clients[PLACES:]:
        verifier.engine.receive(Remind(client.sequence))
    assert [len(notices(client)) for client in clients[PLACES:]] == [3, 4], "the first has a place, and owes a round"
    assert notices(clients[-1])[-1].queue_position == 0


def test_who_has_a_place_and_waits_for_a_pass_is_told_so_too(verifier: Verifier) -> None:
    """As one whose blocks were taken does, or whose prompt is long: the round is here, and no pass has judged it."""
    client = Client(verifier, 1)
    client.send()
    verifier.engine.receive(Remind(client.sequence))
    (notice,) = notices(client)
    assert (notice.queue_position, notice.message) == (0, "its round waits for what is to be run before it")
    work = verifier.engine.schedule()
    verifier.engine.process(work, verifier.engine.forward(work))
    verifier.engine.receive(Remind(client.sequence))
    verifier.engine.receive(Close(client.sequence))
    verifier.engine.receive(Remind(client.sequence))
    assert len(notices(client)) == 1, "nothing is owed any more"


def test_who_was_in_progress_elsewhere_has_its_place_before_all_who_begin(verifier: Verifier) -> None:
    running = [Client(verifier, seed) for seed in range(PLACES)]
    fresh = [Client(verifier, 10 + seed) for seed in range(2)]
    again = [opened_again(verifier), opened_again(verifier)]
    order = [*again, *fresh]
    assert [notices(client)[0].queue_position for client in again] == [0, 1]
    for place, client in enumerate(running):
        verifier.engine.receive(Close(client.sequence))
        assert order[place].sequence.slot is not None
        assert all(client.sequence.slot is None for client in order[place + 1 :])


def test_who_slips_in_while_the_verifier_drains_is_told_so(verifier: Verifier) -> None:
    inside = Client(verifier, 1)
    verifier.engine.receive(Drain())
    late = Client(verifier, 2)
    assert [len(notices(client, DRAINING)) for client in (inside, late)] == [1, 1]
