"""A step of the verifier's engine: what fails in it ends one sequence at most, and what only watches ends none.

The engine is real and runs the demo draft; its turns are driven by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.rpc.errors import RequestError
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.service.best_effort import COMPONENTS, Component
from outrider.service.sampling import Sampling
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2, verifier_service_pb2
from tests.cluster import MODELS
from verifier_service.engine import Close, Open, Remind, Submit, VerifierEngine
from verifier_service.request import Opening, Round
from verifier_service.sequence import Reply, TargetSequence

VOCABULARY = 2000
PROMPTS = [[11, 12], [13, 14, 15], [16]]
TOKENS = 6


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(MODELS / "draft"), dtype="float32", device="cpu"))


class Client:
    """A sequence, and the replies that have left for it."""

    def __init__(self, engine: VerifierEngine, prompt: Sequence[int], *, isolated: bool = False) -> None:
        sampling = Sampling(SamplingParams(temperature=0), LogitRules(), Rule.TOKENWISE, lenience=1.0, seed=1)
        opening = Opening(
            request_id="r",
            cache_salt="",
            prompt=list(prompt),
            committed=[],
            sampling=sampling,
            seed=1,
            logit_rules=LogitRules(),
            stop_token_ids=frozenset(),
            max_new_tokens=TOKENS,
            top_logprobs=-1,
            isolated=isolated,
        )
        self.replies: list[Reply] = []
        self.sequence = TargetSequence("s", opening, VOCABULARY, self.replies.append)
        self._engine = engine
        engine.receive(Open(self.sequence))

    def submit(self, drafted: tuple[int, ...] = (7, 8)) -> None:
        tokens = self.sequence.tokens
        round_ = Round(
            number=self.sequence.last_round + 1,
            base_length=len(tokens),
            prefix_hash=PrefixHash(tokens).digest(),
            seen_round=self.sequence.last_round,
            tokens=drafted,
            laws=(None,) * len(drafted),
        )
        self._engine.receive(Submit(self.sequence, round_))

    def close(self) -> None:
        self._engine.receive(Close(self.sequence))

    @property
    def error(self) -> RequestError | None:
        return next((reply for reply in self.replies if isinstance(reply, RequestError)), None)


class Verifier:
    """An engine whose turns are driven by hand."""

    def __init__(self, loaded: LoadedModel) -> None:
        limits = model_pb2.Limits(max_gamma=4, max_sequences=4, max_sequence_tokens=64)
        self.engine = VerifierEngine(
            ModelRunner.build(loaded, max_sequences=4, max_length=64),
            model_pb2.ModelInfo(vocab_size=VOCABULARY, limits=limits),
            pass_tokens=64,
            verify_path="torch",
        )
        self.engine.prepare()
        self.clients: list[Client] = []

    def open(self, prompt: Sequence[int], *, isolated: bool = False) -> Client:
        client = Client(self.engine, prompt, isolated=isolated)
        self.clients.append(client)
        return client

    def run(self) -> list[list[int]]:
        """Sends rounds and takes turns until all sequences are over; returns what each has written."""
        for _ in range(100):
            if all(client.sequence.finished for client in self.clients):
                break
            for client in self.clients:
                if not client.sequence.finished and not client.sequence.rounds:
                    client.submit()
            self.engine.turn()
            for client in self.clients:
                if client.sequence.finished and client.sequence.slot is not None:
                    client.close()
        assert all(client.sequence.finished for client in self.clients)
        assert self.engine.model_runner.pool.used_blocks == 0
        self.engine.model_runner.pool.check_integrity()
        return [client.sequence.tokens[len(client.sequence.opening.prompt) :] for client in self.clients]


@pytest.fixture(scope="module")
def right(loaded: LoadedModel) -> list[list[int]]:
    """What the prompts are continued with where nothing fails."""
    verifier = Verifier(loaded)
    for prompt in PROMPTS:
        verifier.open(prompt)
    return verifier.run()


def break_passes(verifier: Verifier, breaks: Callable[[Sequence[Chunk]], bool]) -> list[int]:
    """Has the passes that `breaks` says raise; returns a list that fills with the sizes of all of them."""
    forward, sizes = verifier.engine.model_runner.forward, list[int]()

    def broken(chunks: Sequence[Chunk], **named: Any) -> Any:
        sizes.append(len(chunks))
        if breaks(chunks):
            raise RuntimeError("a pass")
        return forward(chunks, **named)

    verifier.engine.model_runner.forward = broken  # type: ignore[method-assign]
    return sizes


# ------------------------------------------------------------------------------------------------- a step that fails


def test_a_sequence_that_breaks_every_step_takes_no_other_with_it(loaded: LoadedModel, right: list[list[int]]) -> None:
    verifier = Verifier(loaded)
    poisoned = verifier.open([1999, 3])
    for prompt in PROMPTS:
        verifier.open(prompt)
    sizes = break_passes(verifier, lambda chunks: any(1999 in chunk.tokens for chunk in chunks))
    assert verifier.run()[1:] == right
    assert poisoned.error is not None
    assert poisoned.error.reason == "STEP_FAILED"
    assert sizes[:5] == [4, 1, 1, 1, 1], "the step, and then each of its sequences alone, once"


def test_a_step_that_fails_once_harms_no_sequence(loaded: LoadedModel, right: list[list[int]]) -> None:
    """Also where there is one sequence alone."""
    for prompts, expected in ((PROMPTS, right), (PROMPTS[:1], right[:1])):
        verifier, failures = Verifier(loaded), [True]
        for prompt in prompts:
            verifier.open(prompt)
        break_passes(verifier, lambda chunks: bool(failures and failures.pop()))  # noqa: B023
        assert verifier.run() == expected


def test_where_every_sequence_fails_the_verifier_is_at_fault(loaded: LoadedModel) -> None:
    """So they may go on at another one; a lone sequence that fails twice is at fault itself."""
    verifier = Verifier(loaded)
    clients = [verifier.open(prompt) for prompt in PROMPTS]
    break_passes(verifier, lambda chunks: True)
    verifier.run()
    assert [client.error.reason for client in clients if client.error] == ["NO_VERIFIER"] * 3
    verifier = Verifier(loaded)
    alone = verifier.open(PROMPTS[0])
    break_passes(verifier, lambda chunks: True)
    verifier.run()
    assert alone.error is not None
    assert alone.error.reason == "STEP_FAILED"


def test_a_failed_verification_leaves_rounds_and_cache_lengths_as_they_were(
    loaded: LoadedModel, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Verifier(loaded)
    clients = [verifier.open(prompt) for prompt in PROMPTS]
    for client in clients:
        client.submit()
    monkeypatch.setattr("verifier_service.target_runner.verify", lambda *arguments: 1 / 0)
    work = verifier.engine.schedule()
    pool = verifier.engine.model_runner.pool
    before = [pool.length(item.chunk.slot) for item in work], [len(client.sequence.rounds) for client in clients]
    with pytest.raises(ZeroDivisionError):
        verifier.engine.forward(work)
    assert ([pool.length(item.chunk.slot) for item in work], [len(c.sequence.rounds) for c in clients]) == before
    monkeypatch.undo()
    assert verifier.run() == right


def test_an_error_in_one_commit_ends_that_sequence_alone(
    loaded: LoadedModel, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Verifier(loaded)
    broken, *others = (verifier.open(prompt) for prompt in (PROMPTS[0], *PROMPTS))
    settle = verifier.engine.scheduler.settle

    def fail(sequence: TargetSequence) -> None:
        if sequence is broken.sequence:
            raise RuntimeError("a bug")
        settle(sequence)

    monkeypatch.setattr(verifier.engine.scheduler, "settle", fail)
    assert verifier.run()[1:] == right
    assert broken.error is not None
    assert broken.error.reason == "INTERNAL"
    assert not any(client.error for client in others)


def test_an_error_outside_of_a_step_ends_the_engine_and_says_why(loaded: LoadedModel) -> None:
    """Its state is unknown then: the process ends, and its sequences go on at other verifiers."""
    verifier = Verifier(loaded)
    verifier.engine.scheduler.plan = lambda rounds: 1 / 0  # type: ignore[assignment, return-value]
    verifier.engine.start()
    assert isinstance(verifier.engine.lost, Future)
    assert verifier.engine.lost.result(timeout=60) == "ZeroDivisionError: division by zero"
    assert not verifier.open(PROMPTS[0]).replies, "a sequence that ended with an error would not go on elsewhere"


# ------------------------------------------------------------------------------------------------ isolated sequences


def test_an_isolated_sequence_has_steps_to_itself_until_its_first_verdict(
    loaded: LoadedModel, right: list[list[int]]
) -> None:
    """Every other step at most is an isolated one's: neither the second isolated sequence nor the others starve."""
    verifier = Verifier(loaded)
    isolated = [verifier.open(prompt, isolated=True) for prompt in PROMPTS[:2]]
    for prompt in PROMPTS[:2]:
        verifier.open(prompt)
    steps: list[set[int]] = []
    forward = verifier.engine.forward

    def noted(work: Any) -> Any:
        steps.append(
            {verifier.clients.index(c) for item in work for c in verifier.clients if c.sequence is item.sequence}
        )
        return forward(work)

    verifier.engine.forward = noted  # type: ignore[method-assign]
    assert verifier.run() == [*right[:2], *right[:2]]
    assert steps[:4] == [{0}, {0, 2, 3}, {1}, {0, 1, 2, 3}]
    assert not any(client.sequence.is_isolated for client in isolated)


def test_an_isolated_sequence_is_open_when_its_turn_begins(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time: whose process ends has ended it. A sequence that holds its turn without a round loses it."""
    verifier = Verifier(loaded)
    first, silent, third = clients = [verifier.open(prompt, isolated=True) for prompt in PROMPTS]
    for client in clients:
        client.sequence.opened = verifier_service_pb2.VerifyResponse(opened=verifier_service_pb2.Opened())
    verifier.engine.turn()
    assert [len(client.replies) for client in clients] == [1, 0, 0]
    verifier.engine.receive(Remind(third.sequence))
    assert isinstance(notice := third.replies.pop(), verifier_service_pb2.VerifyResponse)
    assert (notice.notice.kind, notice.notice.queue_position) == (verifier_service_pb2.NOTICE_KIND_QUEUED, 1)
    first.submit()
    verifier.engine.turn()
    verifier.engine.turn()
    assert [len(client.replies) for client in clients] == [2, 1, 0], "a verdict for the first, and the second is open"
    verifier.engine.turn()
    assert not silent.error
    monkeypatch.setattr("verifier_service.scheduler.TURN_SECONDS", -1.0)
    verifier.engine.turn()
    assert silent.error is not None
    assert (silent.error.code.name, silent.error.reason) == ("RESOURCE_EXHAUSTED", "IDLE")
    assert len(third.replies) == 1


# ---------------------------------------------------------------------------------------------- replies and accounting


def test_replies_leave_in_one_call_after_all_commits(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    clients = [verifier.open(prompt) for prompt in PROMPTS]
    flushed: list[list[int]] = []
    verifier.engine.flush = lambda: flushed.append([c.sequence.backlog for c in clients])
    for client in clients:
        client.submit()
    verifier.engine.turn()
    assert flushed[0] == [0, 0, 0], "rounds that were overtaken would be answered before the step"
    assert flushed[1] == [1, 1, 1], "the first flush after the step has the verdicts of all"


def test_the_load_in_a_verdict_is_that_after_the_step_before(loaded: LoadedModel) -> None:
    verifier = Verifier(loaded)
    first = verifier.open(PROMPTS[0])
    first.submit()
    verifier.engine.turn()
    second = verifier.open(PROMPTS[1])
    for client in (first, second):
        client.submit()
    verifier.engine.turn()
    loads = [reply.verdict.load.running for reply in first.replies if not isinstance(reply, RequestError) and reply]
    assert loads == [0, 1]


ENGINE_COMPONENTS = [
    "cost_model", "engine_metrics", "kv_check", "linger", "load", "prefix_cache", "queued_notices",
]  # fmt: skip


@pytest.mark.parametrize("name", ENGINE_COMPONENTS)
def test_a_component_that_raises_fails_no_text(
    name: str, loaded: LoadedModel, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it raises at once or after it has done its work."""
    run = Component.run

    def injected(self: Component, call: Callable[[], Any], default: Any) -> Any:
        def raises() -> Any:
            calls.append(self.name)
            if len(calls) % 2:
                call()
            raise RuntimeError("injected")

        return run(self, raises if self.name == name else call, default)

    calls: list[str] = []
    monkeypatch.setattr(Component, "run", injected)
    before = COMPONENTS[name].errors
    verifier = Verifier(loaded)
    verifier.engine.observer = Observing()
    verifier.engine._max_linger = 1e-9
    for prompt in PROMPTS:
        verifier.open(prompt)
    verifier.open(PROMPTS[0])
    assert len(verifier.engine.scheduler.running) == 4
    late = verifier.open(PROMPTS[1])  # waits for one of the four places
    assert verifier.run() == [*right, right[0], right[1]]
    assert not late.error
    verifier.engine.pass_ended -= 60.0
    verifier.engine.idle()
    assert COMPONENTS[name].errors - before == len(calls) > 0


class Observing:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None
