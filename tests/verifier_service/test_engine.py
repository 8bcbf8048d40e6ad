"""The verifier's engine: an error in a step ends one sequence at most, queued sequences get notices, steps linger.

The engine is real and runs a demo model; its turns are driven by hand, so that no test waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk
from outrider.service.cost_model import FittedCost
from protos.outrider.v1 import verifier_service_pb2
from tests.cluster import MODELS
from tests.verifier_service.engines import Client, engine_of
from verifier_service.engine import HalfClose, Remind, VerifierEngine
from verifier_service.sequence import TargetSequence, seconds_to_linger

PROMPTS = [[11, 12], [13, 14, 15], [16]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(MODELS / "draft"), dtype="float32", device="cpu"))


@pytest.fixture
def engine(loaded: LoadedModel) -> VerifierEngine:
    return engine_of(loaded)


def run(engine: VerifierEngine, clients: Sequence[Client]) -> list[list[int]]:
    """Sends rounds and takes turns until all sequences are over; returns what each has written."""
    for _ in range(100):
        if all(client.sequence.finished for client in clients):
            break
        for client in clients:
            if not client.sequence.finished and not client.sequence.rounds:
                client.submit()
        engine.turn()
        for client in clients:
            if client.sequence.finished and client.sequence.slot is not None:
                client.close()
    assert all(client.sequence.finished for client in clients)
    assert engine.model_runner.pool.used_blocks == 0
    engine.model_runner.pool.check_integrity()
    return [client.sequence.tokens[len(client.sequence.opening.prompt) :] for client in clients]


@pytest.fixture(scope="module")
def right(loaded: LoadedModel) -> list[list[int]]:
    """What the prompts are continued with where nothing fails."""
    engine = engine_of(loaded)
    return run(engine, [Client(engine, prompt) for prompt in PROMPTS])


def break_passes(engine: VerifierEngine, breaks: Callable[[Sequence[Chunk]], bool]) -> list[int]:
    """Has the passes that `breaks` says raise; returns a list that fills with the sizes of all of them."""
    forward, sizes = engine.model_runner.forward, list[int]()

    def broken(chunks: Sequence[Chunk], **named: Any) -> Any:
        sizes.append(len(chunks))
        if breaks(chunks):
            raise RuntimeError("a pass")
        return forward(chunks, **named)

    engine.model_runner.forward = broken  # type: ignore[method-assign]
    return sizes


# ------------------------------------------------------------------------------------------------- a step that fails


def test_a_sequence_that_breaks_every_step_takes_no_other_with_it(
    engine: VerifierEngine, right: list[list[int]]
) -> None:
    clients = [Client(engine, prompt) for prompt in ([1999, 3], *PROMPTS)]
    sizes = break_passes(engine, lambda chunks: any(1999 in chunk.tokens for chunk in chunks))
    assert run(engine, clients)[1:] == right
    assert clients[0].error is not None
    assert clients[0].error.reason == "STEP_FAILED"
    assert sizes[:5] == [4, 1, 1, 1, 1], "the step, and then each of its sequences alone, once"


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_that_fails_once_harms_no_sequence(engine: VerifierEngine, right: list[list[int]], size: int) -> None:
    failures = [True]
    break_passes(engine, lambda chunks: bool(failures and failures.pop()))
    assert run(engine, [Client(engine, prompt) for prompt in PROMPTS[:size]]) == right[:size]


@pytest.mark.parametrize(("size", "reason"), [(3, "NO_VERIFIER"), (1, "STEP_FAILED")])
def test_where_every_sequence_fails_the_verifier_is_at_fault(engine: VerifierEngine, size: int, reason: str) -> None:
    """So they may go on at another one; a lone sequence that fails twice is at fault itself."""
    clients = [Client(engine, prompt) for prompt in PROMPTS[:size]]
    break_passes(engine, lambda chunks: True)
    run(engine, clients)
    assert [client.error.reason for client in clients if client.error] == [reason] * size


def test_a_failed_verification_leaves_rounds_and_cache_lengths_as_they_were(
    engine: VerifierEngine, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, pool = [Client(engine, prompt) for prompt in PROMPTS], engine.model_runner.pool
    for client in clients:
        client.submit()
    monkeypatch.setattr("verifier_service.target_runner.verify", lambda *arguments: 1 / 0)
    work = engine.schedule()
    before = [pool.length(item.chunk.slot) for item in work]
    with pytest.raises(ZeroDivisionError):
        engine.forward(work)
    assert [pool.length(item.chunk.slot) for item in work] == before
    monkeypatch.undo()
    assert run(engine, clients) == right


def test_an_error_in_one_commit_ends_that_sequence_alone(
    engine: VerifierEngine, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, *others = clients = [Client(engine, prompt) for prompt in (PROMPTS[0], *PROMPTS)]
    settle = engine.scheduler.settle

    def fail(sequence: TargetSequence) -> None:
        if sequence is broken.sequence:
            raise RuntimeError("a bug")
        settle(sequence)

    monkeypatch.setattr(engine.scheduler, "settle", fail)
    assert run(engine, clients)[1:] == right
    assert broken.error is not None
    assert broken.error.reason == "INTERNAL"
    assert not any(client.error for client in others)


def test_an_error_outside_of_a_step_ends_the_engine_and_says_why(engine: VerifierEngine) -> None:
    """Its state is unknown then: the process ends, and its sequences go on at other verifiers."""
    engine.scheduler.plan = lambda rounds: 1 / 0  # type: ignore[assignment, return-value]
    engine.start()
    assert isinstance(engine.lost, Future)
    assert engine.lost.result(timeout=60) == "ZeroDivisionError: division by zero"
    assert not Client(engine).replies, "a sequence that ended with an error would not go on elsewhere"


# ------------------------------------------------------------------------------------------------ isolated sequences


def test_an_isolated_sequence_has_steps_to_itself_until_its_first_verdict(
    engine: VerifierEngine, right: list[list[int]]
) -> None:
    """Every other step at most is an isolated one's: neither the second isolated sequence nor the others starve."""
    clients = [Client(engine, PROMPTS[i % 2], isolated=i < 2) for i in range(4)]
    steps: list[set[int]] = []
    forward = engine.forward

    def noted(work: Any) -> Any:
        steps.append({i for item in work for i, client in enumerate(clients) if client.sequence is item.sequence})
        return forward(work)

    engine.forward = noted  # type: ignore[method-assign]
    assert run(engine, clients) == [*right[:2], *right[:2]]
    assert steps[:4] == [{0}, {0, 2, 3}, {1}, {0, 1, 2, 3}]


def test_an_isolated_sequence_is_open_when_its_turn_begins(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time: whose process ends has ended it. A sequence that holds its turn without a round loses it."""
    first, silent, third = clients = [Client(engine, prompt, isolated=True) for prompt in PROMPTS]
    for client in clients:
        client.sequence.opened = verifier_service_pb2.VerifyResponse(opened=verifier_service_pb2.Opened())
    engine.turn()
    assert [len(client.replies) for client in clients] == [1, 0, 0]
    first.submit()
    engine.turn()
    engine.turn()
    assert [len(client.replies) for client in clients] == [2, 1, 0], "a verdict for the first, and the second is open"
    monkeypatch.setattr("verifier_service.scheduler.TURN_SECONDS", -1.0)
    engine.turn()
    assert silent.error is not None
    assert (silent.error.code.name, silent.error.reason) == ("RESOURCE_EXHAUSTED", "IDLE")
    assert len(third.replies) == 1


# ------------------------------------------------------------------------------------------------------ load, notices


def test_the_load_in_a_verdict_is_that_after_the_step_before(engine: VerifierEngine) -> None:
    """The load counts active sequences: one that is silent for over a second is not active."""
    first, second, _ = (Client(engine, prompt) for prompt in PROMPTS)
    for clients in ([first], [first, second], [first, second]):
        for client in clients:
            client.submit(())
        engine.turn()
    assert [verdict.load.running for verdict in first.verdicts] == [0, 3, 3]
    assert first.verdicts[-1].load.active == 2
    second.sequence.judged_at -= 10.0
    for _ in range(2):
        first.submit(())
        engine.turn()
    assert first.verdicts[-1].load.active == 1


def test_a_queued_sequence_gets_its_position_with_each_notice(engine: VerifierEngine) -> None:
    clients = [Client(engine) for _ in range(6)]
    for _ in range(2):
        for client in clients:
            engine.receive(Remind(client.sequence))
    assert [[notice.queue_position for notice in client.notices] for client in clients] == [[]] * 4 + [[0] * 3, [1] * 3]
    clients[0].close()
    engine.receive(Remind(clients[-1].sequence))
    assert clients[-1].notices[-1].queue_position == 0
    assert {notice.kind for notice in clients[-1].notices} == {verifier_service_pb2.NOTICE_KIND_QUEUED}


def test_a_sequence_that_waits_for_a_step_gets_notices_too(engine: VerifierEngine) -> None:
    client = Client(engine)
    client.submit()
    engine.receive(Remind(client.sequence))
    assert [notice.message for notice in client.notices] == ["the round waits for its step"]
    engine.turn()
    engine.receive(Remind(client.sequence))
    assert len(client.notices) == 1, "nothing is owed any more"


def test_who_was_in_progress_elsewhere_has_its_place_before_all_who_begin(engine: VerifierEngine) -> None:
    running, fresh = [Client(engine) for _ in range(4)], [Client(engine) for _ in range(2)]
    again = [Client(engine, resumed=True) for _ in range(2)]
    order = [*again, *fresh]
    assert [client.notices[0].queue_position for client in again] == [0, 1]
    for index, client in enumerate(running):
        client.close()
        assert [each.sequence.slot is not None for each in order] == [True] * (index + 1) + [False] * (3 - index)


# ----------------------------------------------------------------------------------------------------------- lingering

TURNAROUND = 50.0  # seconds: so long that what the test itself takes is nothing


@pytest.mark.parametrize(
    ("due", "bound", "expected"),
    [
        ([10.5, 11.0], 2.0, 1.0),
        ([10.5, 11.5], 2.0, 0.5),  # the second is beyond what pays, counted from 9
        ([9.5], 2.0, 0.0),  # late: the step does not wait for it
        ([10.5], 1.0, 0.0),
    ],
)
def test_the_last_that_pays_is_waited_for(due: list[float], bound: float, expected: float) -> None:
    assert seconds_to_linger(10.0, 9.0, due, bound) == expected


def step(engine: VerifierEngine) -> None:
    """A turn that does not linger."""
    work = engine.schedule()
    engine.process(work, engine.forward(work))


def answering(engine: VerifierEngine) -> Client:
    """A sequence that has answered after `TURNAROUND` once."""
    client = Client(engine, max_new_tokens=32)
    client.submit(())
    step(engine)
    client.submit((), arrived=client.sequence.judged_at + TURNAROUND)
    step(engine)
    return client


def test_a_pass_waits_for_who_is_about_to_answer_and_for_nobody_else(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, max_linger=1000.0)
    engine.cost = FittedCost([(1, 1000.0)])
    first, second = answering(engine), answering(engine)
    Client(engine).submit(())
    step(engine)  # its turnaround is unknown
    assert engine.linger() == 0, "nothing to hold back"
    first.submit(())
    assert 0 < engine.linger() <= 2 * TURNAROUND
    engine.receive(HalfClose(second.sequence))
    assert engine.linger() == 0


@pytest.mark.parametrize(("max_linger", "fixed"), [(0.0, 1000.0), (1.0, 1000.0), (1000.0, 1.0)])
def test_a_pass_waits_within_its_bound_and_its_own_fixed_cost(
    loaded: LoadedModel, max_linger: float, fixed: float
) -> None:
    engine = engine_of(loaded, max_linger=max_linger)
    engine.cost = FittedCost([(1, fixed)])
    first, _ = answering(engine), answering(engine)
    first.submit(())
    assert engine.linger() == 0
