"""Who waits is told so, again and again, by the engine itself; and who was in progress elsewhere waits before others.

A real engine whose steps are driven by hand; over sockets in `test_service`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import ModelRunner
from outrider.service.sampling import Sampling
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2, verifier_service_pb2
from verifier_service.engine import Close, Drain, Open, Remind, Submit, VerifierEngine
from verifier_service.request import Opening, Round
from verifier_service.sequence import Reply, TargetSequence

QUEUED, DRAINING = verifier_service_pb2.NOTICE_KIND_QUEUED, verifier_service_pb2.NOTICE_KIND_DRAINING


MODEL = Path(__file__).parents[2] / "models" / "demo" / "draft"
PLACES = 4


class Client:
    """A sequence, and the replies to it."""

    def __init__(self, verifier: Verifier, seed: int) -> None:
        self.replies: list[Reply] = []
        sampling = Sampling(law=SamplingParams(), logit_rules=LogitRules(), rule=Rule.COUPLED, lenience=1.0, seed=seed)
        opening = Opening(
            request_id="r",
            cache_salt="",
            prompt=[11, 12],
            committed=[],
            sampling=sampling,
            seed=seed,
            logit_rules=LogitRules(),
            stop_token_ids=frozenset(),
            max_new_tokens=900,
            top_logprobs=-1,
        )
        self.sequence = TargetSequence("s", opening, 2000, self.replies.append)
        self._engine = verifier.engine
        self._engine.receive(Open(self.sequence))

    @property
    def active(self) -> int:
        """What its last verdict told."""
        return next(
            reply.verdict.load.active
            for reply in reversed(self.replies)
            if isinstance(reply, verifier_service_pb2.VerifyResponse) and reply.HasField("verdict")
        )

    def send(self) -> None:
        """The next round: a Decode of one token."""
        sequence = self.sequence
        round_ = Round(
            number=sequence.last_round + 1,
            base_length=len(sequence.tokens),
            prefix_hash=PrefixHash(sequence.tokens).digest(),
            seen_round=sequence.last_round,
            decode=1,
            arrived=time.perf_counter(),
        )
        self._engine.receive(Submit(sequence, round_))


class Verifier:
    """An engine."""

    def __init__(self, loaded: LoadedModel) -> None:
        limits = model_pb2.Limits(max_gamma=8, max_sequences=PLACES, max_sequence_tokens=1024)
        self.engine = VerifierEngine(
            ModelRunner.build(loaded, max_sequences=PLACES, max_length=1024),
            model_pb2.ModelInfo(vocab_size=2000, limits=limits),
            pass_tokens=64,
            verify_path="torch",
        )
        self.engine.prepare()

    def step(self, *clients: Client) -> None:
        """One round of each, all in one step."""
        for client in clients:
            client.send()
        self.engine.turn()


@pytest.fixture(scope="module")
def verifier_model() -> LoadedModel:
    return load_model(ModelSource(str(MODEL), dtype="float32", device="cpu"))


@pytest.fixture
def verifier(verifier_model: LoadedModel) -> Verifier:
    return Verifier(verifier_model)


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


def test_sequences_that_take_part_are_told_in_the_next_verdict(verifier: Verifier) -> None:
    """One that has said nothing for over a second, or nothing yet, is no load."""
    first, second, _ = (Client(verifier, seed) for seed in range(3))
    verifier.step(first, second)
    verifier.step(first, second)
    assert (first.active, second.active) == (2, 2)
    second.sequence.judged_at -= 10.0
    verifier.step(first)
    verifier.step(first)
    assert first.active == 1
