"""The verifier's engine: errors in a step, isolated sequences, load, notices, lingering.

The engine is real and runs a demo model. The tests take its turns, so that none waits.
"""

import time
from typing import Any

import pytest

from outrider.runtime.loader import LoadedModel
from outrider.service.fitted_cost import FittedCost
from protos.outrider.v1 import verifier_service_pb2
from tests.verifier_service.engines import PROMPTS, Client, a_round, break_forward, engine_of, run
from verifier_service.engine import HalfClose, Remind, Submit, VerifierEngine
from verifier_service.sequence import MAX_BACKLOG, TargetSequence, seconds_to_linger


@pytest.fixture(scope="module")
def right(loaded: LoadedModel) -> list[list[int]]:
    """The outputs without failures."""
    engine = engine_of(loaded)
    return run(engine, [Client(engine, prompt) for prompt in PROMPTS])


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_that_fails_once_harms_no_sequence(engine: VerifierEngine, right: list[list[int]], size: int) -> None:
    failures = [True]
    break_forward(engine, lambda: bool(failures and failures.pop()))
    assert run(engine, [Client(engine, prompt) for prompt in PROMPTS[:size]]) == right[:size]


@pytest.mark.parametrize(("size", "reason"), [(3, "NO_VERIFIER"), (1, "STEP_FAILED")])
def test_an_error_of_every_sequence_is_the_verifiers(engine: VerifierEngine, size: int, reason: str) -> None:
    """So all may continue at another verifier. A lone sequence that fails twice is itself at fault."""
    clients = [Client(engine, prompt) for prompt in PROMPTS[:size]]
    break_forward(engine, lambda: True)
    run(engine, clients)
    assert [client.error.reason for client in clients if client.error] == [reason] * size


def test_a_failed_verification_changes_neither_rounds_nor_cache_lengths(
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


def test_an_isolated_sequence_has_steps_to_itself_until_its_first_verdict(
    engine: VerifierEngine, right: list[list[int]]
) -> None:
    """At most every other step is an isolated one, so that no sequence starves."""
    clients = [Client(engine, PROMPTS[i % 2], isolated=i < 2) for i in range(4)]
    steps: list[set[int]] = []
    forward = engine.forward

    def recorded(work: Any) -> Any:
        steps.append({i for item in work for i, client in enumerate(clients) if client.sequence is item.sequence})
        return forward(work)

    engine.forward = recorded  # type: ignore[method-assign]
    assert run(engine, clients) == [*right[:2], *right[:2]]
    assert steps[:4] == [{0}, {0, 2, 3}, {1}, {0, 1, 2, 3}]


def test_isolated_sequences_may_bring_their_first_round(engine: VerifierEngine, right: list[list[int]]) -> None:
    clients = [
        Client(engine, PROMPTS[i], isolated=is_isolated, first_round=a_round(1, PROMPTS[i], decode=2))
        for i, is_isolated in ((0, True), (1, True), (0, False))
    ]
    assert all(len(client.sequence.rounds) == 1 for client in clients)
    assert run(engine, clients) == [right[0], right[1], right[0]]
    assert all(client.verdicts[0].round == 1 for client in clients)


def test_isolated_sequences_open_one_at_a_time(engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is known which of them ends a process. A turn without a round ends."""
    first, silent, third = clients = [Client(engine, prompt, isolated=True) for prompt in PROMPTS]
    for client in clients:
        client.sequence.opened = verifier_service_pb2.VerifyResponse(opened=verifier_service_pb2.Opened())
    engine.run_once()
    assert [len(client.replies) for client in clients] == [1, 0, 0]
    first.submit()
    engine.run_once()
    engine.run_once()
    assert [len(client.replies) for client in clients] == [2, 1, 0], "the first has a verdict, the second is open"
    monkeypatch.setattr("verifier_service.scheduler.TURN_SECONDS", -1.0)
    engine.run_once()
    assert silent.error is not None
    assert (silent.error.code.name, silent.error.reason) == ("RESOURCE_EXHAUSTED", "IDLE")
    assert len(third.replies) == 1


def test_the_load_in_a_verdict_is_that_after_the_previous_step(engine: VerifierEngine) -> None:
    """A sequence that is silent for over a second is not active."""
    first, second, _ = (Client(engine, prompt) for prompt in PROMPTS)
    for clients in ([first], [first, second], [first, second]):
        for client in clients:
            client.submit(())
        engine.run_once()
    assert [verdict.load.running for verdict in first.verdicts] == [0, 3, 3]
    assert [verdict.load.active for verdict in first.verdicts] == [1, 2, 2]
    second.sequence.judged_at -= 10.0
    for _ in range(2):
        first.submit(())
        engine.run_once()
    assert first.verdicts[-1].load.active == 1


def test_a_round_that_waited_for_hours_gets_its_verdict(engine: VerifierEngine) -> None:
    """Its time in the queue is the longest that the verdict can hold."""
    client = Client(engine)
    client.submit(arrived=time.perf_counter() - 7200)
    engine.run_once()
    assert client.error is None
    assert [verdict.timings.queue_us for verdict in client.verdicts] == [2**32 - 1]


def test_a_step_is_accounted_for_under_the_next_pass_or_when_idle(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So on a GPU nothing but the commits lies between two passes."""
    client, order = Client(engine), list[str]()
    client.submit(())
    engine.run_once()
    engine.run_once()  # idle; the step with the prompt is no part of the cost of rounds
    forward, add = engine.model_runner.forward, engine.cost.add

    def forward_and_note(chunks: Any) -> Any:
        order.append("pass")
        return forward(chunks)

    def add_and_note(tokens: int, seconds: float) -> None:
        order.append("accounts")
        add(tokens, seconds)

    monkeypatch.setattr(engine.model_runner, "forward", forward_and_note)
    monkeypatch.setattr(engine.cost, "add", add_and_note)
    for verdicts in (2, 3):
        client.submit(())
        engine.run_once()
        assert len(client.verdicts) == verdicts
    assert order == ["pass", "pass", "accounts"]
    engine.run_once()
    assert order == ["pass", "pass", "accounts", "accounts"]


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


@pytest.mark.parametrize("scores", [False, True])
def test_a_round_or_a_prompt_to_score_that_waits_for_a_step_gets_notices(engine: VerifierEngine, scores: bool) -> None:
    client = Client(engine, top_prompt_logprobs=0 if scores else -1)
    if not scores:
        client.submit()
    engine.receive(Remind(client.sequence))
    assert [notice.message for notice in client.notices] == ["waiting for the next step of the target"]
    engine.run_once()
    engine.receive(Remind(client.sequence))
    assert len(client.notices) == 1, "nothing waits"


TURNAROUND = 50.0  # seconds; the test itself takes much less


@pytest.mark.parametrize(
    ("due", "bound", "expected"),
    [
        ([10.5, 11.0], 2.0, 1.0),
        ([10.5, 11.5], 2.0, 0.5),  # the second is too late, counted from 9
        ([9.5], 2.0, 0.0),  # overdue
        ([10.5], 1.0, 0.0),
    ],
)
def test_a_step_waits_for_the_last_sequence_within_its_bound(due: list[float], bound: float, expected: float) -> None:
    assert seconds_to_linger(10.0, 9.0, due, bound) == expected


def step(engine: VerifierEngine) -> None:
    """One iteration that does not linger."""
    work = engine.schedule()
    engine.process(work, engine.forward(work))


def client_with_turnaround(engine: VerifierEngine) -> Client:
    """A sequence whose second round came after `TURNAROUND`."""
    client = Client(engine, max_new_tokens=32)
    client.submit(())
    step(engine)
    client.submit((), arrived=client.sequence.judged_at + TURNAROUND)
    step(engine)
    return client


def test_a_step_lingers_for_sequences_with_a_known_turnaround_only(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, max_linger=1000.0)
    engine.cost = FittedCost([(1, 1000.0)])
    first, second = client_with_turnaround(engine), client_with_turnaround(engine)
    Client(engine).submit(())
    step(engine)  # its turnaround is unknown
    assert engine.linger() == 0, "no round waits"
    first.submit(())
    assert 0 < engine.linger() <= 2 * TURNAROUND
    engine.receive(HalfClose(second.sequence))
    assert engine.linger() == 0


@pytest.mark.parametrize(("max_linger", "fixed"), [(0.0, 1000.0), (1.0, 1000.0), (1000.0, 1.0)])
def test_a_step_lingers_within_its_bound_and_its_fixed_cost(
    loaded: LoadedModel, max_linger: float, fixed: float
) -> None:
    engine = engine_of(loaded, max_linger=max_linger)
    engine.cost = FittedCost([(1, fixed)])
    first, _ = client_with_turnaround(engine), client_with_turnaround(engine)
    first.submit(())
    assert engine.linger() == 0


def test_overtaken_rounds_of_a_client_that_does_not_read_wait(engine: VerifierEngine) -> None:
    """Else it could have any number of answers in memory. The stream limits the rounds that wait."""
    client = Client(engine)
    client.submit()
    engine.run_once()
    sequence = client.sequence
    sequence.num_replies += MAX_BACKLOG
    for number in range(2, 6):
        engine.receive(Submit(sequence, a_round(number, [])))
    engine.run_once()
    assert (len(sequence.rounds), len(client.verdicts)) == (4, 1)
    sequence.num_written = sequence.num_replies
    engine.run_once()
    assert (len(sequence.rounds), len(client.verdicts)) == (0, 5)
