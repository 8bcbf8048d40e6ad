"""Who is told of a cap on γ, and when: each sequence once for each change, at its opening too, and nobody without need.

A real engine whose passes are driven by hand. The drafts take 30 ms and are never right: on no machine does that pay
where a sequence has company, so nothing here depends on how fast one is. `test_gamma_cap_services` has the same over
sockets.
"""

import time
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
from verifier_service.engine import Close, Open, Read, Submit, VerifierEngine
from verifier_service.rounds import Opening, Round
from verifier_service.sequence import Reply, TargetSequence

MODEL = Path(__file__).parents[2] / "models" / "demo" / "draft"
UNLIKELY = 1999  # a token that neither model ever writes here
PLACES = 4
MAX_GAMMA = 8
GAMMA = 5
DRAFTING_S = 0.03
ROUNDS = 40  # of each of four sequences: enough for five looks
CAP = verifier_service_pb2.NOTICE_KIND_GAMMA_CAP


def caps_of(replies: list[Reply]) -> list[int]:
    """What the notices among some replies say of γ."""
    told = [reply for reply in replies if isinstance(reply, verifier_service_pb2.VerifyResponse)]
    return [reply.notice.gamma_cap for reply in told if reply.notice.kind == CAP]


class Client:
    """A sequence, what it was told, and rounds of tokens that are never right."""

    def __init__(self, verifier: "Verifier", seed: int) -> None:
        self.replies: list[Reply] = []
        sampling = Sampling(law=SamplingParams(), logit_rules=LogitRules(), rule=Rule.COUPLED, lenience=1.0, seed=seed)
        opened = Opening(
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
        self.sequence = TargetSequence("s", opened, 2000, self.replies.append)
        self._engine = verifier.engine
        self._engine.receive(Open(self.sequence))

    @property
    def caps(self) -> list[int]:
        return caps_of(self.replies)

    @property
    def gamma(self) -> int:
        """How long its next proposal may be."""
        return min([GAMMA, *self.caps[-1:]])

    def send(self) -> None:
        """The next round; a Decode of one token where it may propose nothing."""
        sequence, gamma = self.sequence, self.gamma
        round_ = Round(
            number=sequence.last_round + 1,
            base_length=len(sequence.tokens),
            prefix_hash=PrefixHash(sequence.tokens).digest(),
            seen_round=sequence.last_round,
            tokens=(UNLIKELY,) * gamma,
            decode=0 if gamma else 1,
            arrived=time.perf_counter(),
        )
        self._engine.receive(Submit(sequence, round_))


class Verifier:
    """An engine, and what its observer was told."""

    def __init__(self, loaded: LoadedModel, *, gamma_cap: bool = True) -> None:
        self.gammas: list[int] = []
        limits = model_pb2.Limits(max_gamma=MAX_GAMMA, max_sequences=PLACES, max_sequence_tokens=1024)
        self.engine = VerifierEngine(
            ModelRunner.build(loaded, max_sequences=PLACES, max_length=1024),
            model_pb2.ModelInfo(vocab_size=2000, limits=limits),
            pass_tokens=64,
            verify_path="torch",
            observer=self,
            gamma_cap=gamma_cap,
        )
        self.engine.prepare()

    def rounds(self, clients: list[Client], times: int = 1) -> None:
        """So many rounds of each, all in one pass."""
        for _ in range(times):
            if any(client.gamma for client in clients):
                time.sleep(DRAFTING_S)
            for client in clients:
                client.send()
            work = self.engine.schedule()
            self.engine.process(work, self.engine.forward(work))
            for client in clients:
                self.engine.receive(Read(client.sequence, 1))

    def capped(self, gamma: int) -> None:
        self.gammas.append(gamma)

    def verified(self, seconds: float) -> None: ...

    def passed(self, tokens: int, sequences: int, seconds: float) -> None: ...

    def waited(self, seconds: float) -> None: ...

    def preempted(self) -> None: ...

    def checked(self, intact: bool) -> None: ...

    def judged(self, rule: Rule, drafted: int, accepted: int) -> None:
        assert accepted == 0

    def begun(self, tokens: int, cached: int) -> None: ...


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(MODEL), dtype="float32", device="cpu"))


def test_each_is_told_each_change_once_and_a_newcomer_what_holds(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    clients = [Client(verifier, seed) for seed in range(PLACES)]
    verifier.rounds(clients, ROUNDS)
    assert [client.caps for client in clients] == [[3, 1, 0]] * PLACES
    assert list(dict.fromkeys(verifier.gammas)) == [MAX_GAMMA, 3, 1, 0]
    waiting = Client(verifier, 9)
    assert waiting.sequence.slot is None
    assert waiting.caps == [0]
    verifier.engine.receive(Close(clients[0].sequence))
    verifier.rounds([*clients[1:], waiting], 3)
    assert [client.caps for client in (*clients[1:], waiting)] == [[3, 1, 0]] * (PLACES - 1) + [[0]]


def test_who_is_left_alone_is_told_that_it_is_free(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    clients = [Client(verifier, seed) for seed in range(2)]
    verifier.rounds(clients, 2 * ROUNDS)
    assert [client.caps for client in clients] == [[3, 1, 0]] * 2
    verifier.engine.receive(Close(clients[0].sequence))
    verifier.rounds(clients[1:], 2)
    assert clients[1].caps == [3, 1, 0, MAX_GAMMA]
    assert clients[0].caps == [3, 1, 0]
    assert verifier.gammas[-1] == MAX_GAMMA


def test_the_silent_are_no_company(loaded: LoadedModel) -> None:
    """A sequence that has said nothing for a second, or nothing yet, does not make another wait."""
    verifier = Verifier(loaded)
    clients = [Client(verifier, seed) for seed in range(3)]
    verifier.rounds(clients[:2])
    clients[1].sequence.judged_at -= 2.0
    verifier.rounds(clients[:1], ROUNDS)
    assert clients[0].caps == []


def test_nobody_is_told_anything_where_it_is_switched_off(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded, gamma_cap=False)
    clients = [Client(verifier, seed) for seed in range(PLACES)]
    verifier.rounds(clients, ROUNDS)
    assert [client.caps for client in clients] == [[]] * PLACES
    assert verifier.gammas == []
