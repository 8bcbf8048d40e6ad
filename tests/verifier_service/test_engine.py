"""The verifier's engine: errors in a step, isolated sequences, load, notices, lingering.

The engine is real and runs a demo model. The tests take its turns, so that none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from kernels.adjustments import Adjuster, LogitRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.model_runner import Chunk
from outrider.service.cost_model import FittedCost
from protos.outrider.v1 import verifier_service_pb2
from tests.cluster import MODELS
from tests.verifier_service.engines import Client, a_round, engine_of, make, run
from verifier_service.engine import DECODE_LOOP, Close, Drain, HalfClose, Open, Read, Remind, Submit, VerifierEngine
from verifier_service.scheduler import MAX_BACKLOG
from verifier_service.sequence import TargetSequence, seconds_to_linger

PROMPTS = [[11, 12], [13, 14, 15], [16]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(MODELS / "draft"), dtype="float32", device="cpu"))


@pytest.fixture
def engine(loaded: LoadedModel) -> VerifierEngine:
    return engine_of(loaded)


@pytest.fixture(scope="module")
def right(loaded: LoadedModel) -> list[list[int]]:
    """The outputs without failures."""
    engine = engine_of(loaded)
    return run(engine, [Client(engine, prompt) for prompt in PROMPTS])


def break_forward(engine: VerifierEngine, breaks: Callable[[], bool]) -> None:
    """Make forward passes raise while `breaks()` is true."""
    forward = engine.model_runner.forward

    def broken(chunks: Sequence[Chunk], **named: Any) -> Any:
        if breaks():
            raise RuntimeError("a pass")
        return forward(chunks, **named)

    engine.model_runner.forward = broken  # type: ignore[method-assign]


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
    engine.turn()
    assert [len(client.replies) for client in clients] == [1, 0, 0]
    first.submit()
    engine.turn()
    engine.turn()
    assert [len(client.replies) for client in clients] == [2, 1, 0], "the first has a verdict, the second is open"
    monkeypatch.setattr("verifier_service.scheduler.TURN_SECONDS", -1.0)
    engine.turn()
    assert silent.error is not None
    assert (silent.error.code.name, silent.error.reason) == ("RESOURCE_EXHAUSTED", "IDLE")
    assert len(third.replies) == 1


def test_the_load_in_a_verdict_is_that_after_the_previous_step(engine: VerifierEngine) -> None:
    """A sequence that is silent for over a second is not active."""
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


def test_a_step_is_accounted_for_under_the_next_pass_or_when_idle(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So on a GPU nothing but the commits lies between two passes."""
    client, order = Client(engine), list[str]()
    client.submit(())
    engine.turn()
    engine.turn()  # idle; the step with the prompt is no part of the cost of rounds
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
        engine.turn()
        assert len(client.verdicts) == verdicts
    assert order == ["pass", "pass", "accounts"]
    engine.turn()
    assert order == ["pass", "pass", "accounts", "accounts"]


GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1.5, top_k=40)
ALONE: list[dict[str, Any]] = [
    {"params": GREEDY},
    {"params": SAMPLED},
    {"params": SAMPLED, "rule": Rule.COUPLED},
    {"params": SAMPLED, "rule": Rule.BLOCK, "seed": 3, "stop": 46},  # its tenth token
    {"params": SAMPLED, "max_new_tokens": 5},
]


def decoded(engine: VerifierEngine, tokens: int, hows: Sequence[dict[str, Any]], *, joined: bool) -> list[Client]:
    """Clients that let the target write 20 tokens each, so many at once."""
    clients = []
    for i, how in enumerate(hows):
        own = {"max_new_tokens": 20, "seed": i, **how}
        clients.append(Client(engine, PROMPTS[i % 3], joined_verdicts=joined, **own))
    while not all(client.sequence.finished for client in clients):
        for client in clients:
            if not client.sequence.finished and not client.sequence.rounds:
                client.submit(decode=tokens)
        engine.turn()
    for client in clients:
        client.close()
    assert engine.model_runner.pool.used_blocks == 0
    return clients


@pytest.mark.parametrize("hows", [ALONE[:4], *([each] for each in ALONE)], ids=str)
def test_a_step_writes_several_tokens_of_a_decode(engine: VerifierEngine, hows: list[dict[str, Any]]) -> None:
    """The tokens of single steps, in fewer verdicts; stop tokens and limits hold. The first token is sent at once."""
    expected = decoded(engine, 7, hows, joined=False)
    engine.cost = FittedCost([(1, 1e-6)])
    found = decoded(engine, 7, hows, joined=True)
    for one, other in zip(found, expected, strict=True):
        assert one.error is None
        assert one.sequence.tokens == other.sequence.tokens
        written = list(one.sequence.opening.prompt)
        for verdict in one.verdicts:
            assert verdict.base_length == len(written)
            assert (verdict.judged, verdict.accepted, len(verdict.beta)) == (0, 0, 0)
            written += verdict.token_ids
        assert written == one.sequence.tokens
        assert len(one.verdicts[0].token_ids) == 1
        longest = max(len(each.token_ids) for each in one.verdicts)
        assert min(6, one.sequence.opening.max_new_tokens - 1) <= longest <= 7
        assert one.verdicts[-1].finish_reason == other.verdicts[-1].finish_reason


def test_a_silent_sequence_holds_nobody_to_one_token(engine: VerifierEngine) -> None:
    engine.cost = FittedCost([(1, 1e-6)])
    silent, client = Client(engine, PROMPTS[1]), Client(engine, joined_verdicts=True, max_new_tokens=40)
    silent.submit(())
    client.submit(decode=40)
    engine.turn()
    for seconds, expected in ((0.0, 2), (10.0, 40)):
        silent.sequence.judged_at -= seconds
        engine.turn()
        assert client.sequence.written == expected


def test_the_cost_of_several_tokens_in_a_row_is_that_of_their_passes(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, engine.cost = list[tuple[int, float]](), FittedCost([(1, 1e-6)])
    monkeypatch.setattr(engine.cost, "add", lambda tokens, seconds: costs.append((tokens, seconds)))
    decode: Any = engine.runner.decode
    monkeypatch.setattr(engine.runner, "decode", lambda *given: replace(decode(*given), forward_seconds=3.5))
    client = Client(engine, joined_verdicts=True, max_new_tokens=33)
    client.submit((), decode=33)
    for _ in range(2):
        engine.turn()
    assert [len(each.token_ids) for each in client.verdicts] == [1, 32]
    client = Client(engine, [11], joined_verdicts=True, max_new_tokens=8)
    client.submit((), decode=8)
    for _ in range(3):  # the last one accounts for the second
        engine.turn()
    assert costs[-1] == (1, 0.5)


@pytest.mark.parametrize("why", ["logprobs", "penalties", "a proposal", "a sequence that owes a round"])
def test_a_step_writes_one_token_of_a_decode_where_another_would_wait(engine: VerifierEngine, why: str) -> None:
    engine.cost = FittedCost([(1, 1e-6)])
    client = Client(engine, joined_verdicts=True, max_new_tokens=36)
    client.submit(decode=36)
    engine.turn()  # the first token
    if why == "logprobs":
        object.__setattr__(client.sequence.opening, "top_logprobs", 0)
    elif why == "penalties":
        client.sequence._adjuster = Adjuster(LogitRules(presence_penalty=0.5), PROMPTS[0], 2000)
        client.sequence._adjuster.push(client.sequence.tokens[-1])
    elif why in ("a proposal", "a sequence that owes a round"):
        other = Client(engine, PROMPTS[1], joined_verdicts=True)
        other.submit((7,))
        if why == "a sequence that owes a round":
            engine.turn()
    before, errors = len(client.sequence.tokens), DECODE_LOOP.errors
    engine.turn()
    assert len(client.sequence.tokens) == before + 1
    assert (client.error, DECODE_LOOP.errors) == (None, errors)


def test_tokens_in_a_row_fit_the_free_blocks(engine: VerifierEngine) -> None:
    pool, engine.cost = engine.model_runner.pool, FittedCost([(1, 1e-6)])
    client = Client(engine, [11] * (pool.block_tokens - 8), joined_verdicts=True, max_new_tokens=17)
    client.submit(decode=17)
    engine.turn()
    while pool.blocks.num_free:
        pool.grow(pool.allocate(), 1)
    engine.turn()  # of 16 tokens at most; half of them fit
    assert client.sequence.written == 9
    assert (client.error, DECODE_LOOP.errors) == (None, 0)


def test_tokens_in_a_row_take_a_bounded_time(engine: VerifierEngine) -> None:
    for seconds, expected in ((1e-4, 50), (11e-3, 9), (1.0, 1)):
        client = Client(engine, joined_verdicts=True, max_new_tokens=51)
        engine.cost = FittedCost([(1, seconds)])
        client.submit(decode=51)
        engine.turn()
        engine.turn()
        assert client.sequence.written == 1 + expected
        client.close()


def test_captured_steps_which_cannot_be_ended_are_fewer(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most(*passes: float) -> list[int]:
        return [engine.runner.most_in_a_row(each, engine.runner.seconds_joined) for each in passes]

    assert most(1e-4, 2e-3, 2.5e-3, 1.0) == [64, 50, 40, 0]
    monkeypatch.setattr(engine.model_runner, "paged_runner", object())
    assert most(1e-4, 1e-3, 2.5e-3, 1.0) == [8, 8, 3, 0]


def test_tokens_of_a_decode_wait_to_be_sent_together(engine: VerifierEngine) -> None:
    """The first one does not, nor do the last ones, nor those of a client that wants a verdict for each."""
    engine.cost = FittedCost([(1, 60e-3)])  # a row has one token
    clients = [Client(engine, joined_verdicts=joined, max_new_tokens=10) for joined in (True, False)]
    for client in clients:
        client.submit(decode=6)
    sent = []
    for waited in (0.0, 0.0, 0.0, 0.05, 0.0, 0.0):
        if engine._unsent_since is not None:
            engine._unsent_since -= waited
        engine.turn()
        sent.append([[len(each.token_ids) for each in client.verdicts] for client in clients])
    assert [joined for joined, _ in sent] == [[1], [1], [1], [1, 3], [1, 3], [1, 3, 2]]
    assert sent[-1][1] == [1] * 6
    joined, single = (client.verdicts for client in clients)
    assert [each.base_length for each in joined] == [3, 4, 7]
    assert [token for each in joined for token in each.token_ids] == [each.token_ids[0] for each in single]
    for name in ("queue_us", "forward_us", "verify_us"):
        total = sum(getattr(each.timings, name) for each in single[1:4])
        assert abs(getattr(joined[1].timings, name) - total) <= (600 if name == "queue_us" else 0)


@pytest.mark.parametrize("why", ["no other work", "an error"])
def test_tokens_that_wait_are_sent_where_nothing_follows(engine: VerifierEngine, why: str) -> None:
    engine.cost = FittedCost([(1, 1e-3)])
    client = Client(engine, joined_verdicts=True, max_new_tokens=30)
    client.submit(decode=30)
    engine.turn()
    engine.cost = FittedCost([(1, 60e-3)])
    engine.turn()
    assert [len(each.token_ids) for each in client.verdicts] == [1]
    if why == "no other work":
        client.sequence.backlog = MAX_BACKLOG
    else:
        break_forward(engine, lambda: True)
    engine.turn()
    assert [len(each.token_ids) for each in client.verdicts] == [1, 1]
    assert (client.error is not None) is (why == "an error")


@pytest.mark.parametrize("message", ["open", "submit", "close", "drain", "read", "half-close", "close at the end"])
def test_a_message_ends_a_row_after_its_current_token(
    engine: VerifierEngine, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cannot wait for its end do. The text is that of single steps."""
    (expected,) = decoded(engine, 20, ALONE[1:2], joined=False)
    other, passes, steps = Client(engine, PROMPTS[1]), count(2), engine.model_runner.steps
    engine.turn()
    messages: dict[str, Any] = {
        "open": Open(make([], prompt=PROMPTS[2])),
        "submit": Submit(other.sequence, a_round(1, other.sequence.tokens, decode=1)),
        "close": Close(other.sequence),
        "drain": Drain(),
        "read": Read(other.sequence, 0),
        "half-close": HalfClose(other.sequence),
        "close at the end": Close(expected.sequence),
    }
    can_wait = message in ("read", "half-close", "close at the end")

    def interrupted(*given: Any) -> Any:
        found = steps(*given)
        run = found.next

        def following(*rows: Any) -> torch.Tensor:
            if next(passes) == 4:
                engine.post(messages[message])
            return run(*rows)

        monkeypatch.setattr(found, "next", following)
        return found

    monkeypatch.setattr(engine.model_runner, "steps", interrupted)
    engine.cost = FittedCost([(1, 1e-6)])
    client = Client(engine, PROMPTS[0], joined_verdicts=True, max_new_tokens=20, seed=0, **ALONE[1])
    client.submit(decode=20)
    engine.turn()
    engine.turn()
    assert client.sequence.written == (20 if can_wait else 5)
    while not client.sequence.finished:
        engine.turn()
    assert client.sequence.tokens == expected.sequence.tokens
    if message == "drain":  # the next row is a whole one, and its tokens were sent with those of the first
        assert [len(each.token_ids) for each in client.verdicts] == [1, 19]


@pytest.mark.parametrize("is_at_its_end", [False, True])
def test_a_decode_loop_that_fails_harms_no_text(
    engine: VerifierEngine, is_at_its_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = decoded(engine, 7, ALONE[1:2], joined=False)

    decode, engine.cost = engine.runner.decode, FittedCost([(1, 1e-6)])

    def broken(*given: Any) -> Any:
        if is_at_its_end:
            decode(*given)
        raise RuntimeError("the loop")

    monkeypatch.setattr(engine.runner, "decode", broken)
    (found,) = decoded(engine, 7, ALONE[1:2], joined=True)
    assert found.sequence.tokens == expected.sequence.tokens


def test_bad_logits_within_a_row_end_the_sequence_after_its_sound_tokens(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = engine.model_runner.steps

    def spoilt(*given: Any) -> Any:
        found = steps(*given)
        monkeypatch.setattr(found, "next", lambda *_: torch.full((1, 2048), torch.nan), raising=True)
        return found

    client = Client(engine, joined_verdicts=True)
    client.submit(decode=4)
    engine.turn()
    monkeypatch.setattr(engine.model_runner, "steps", spoilt)
    engine.turn()
    assert client.sequence.written == 2
    monkeypatch.setattr(engine.model_runner, "forward", lambda chunks: torch.full((len(chunks), 2048), torch.nan))
    engine.cost = FittedCost([(1, 1.0)])
    engine.turn()
    assert [len(each.token_ids) for each in client.verdicts] == [1, 1]
    assert client.error is not None
    assert client.error.reason == "BAD_LOGITS"


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


def test_a_round_that_waits_for_a_step_gets_notices(engine: VerifierEngine) -> None:
    client = Client(engine)
    client.submit()
    engine.receive(Remind(client.sequence))
    assert [notice.message for notice in client.notices] == ["waiting for the next step of the target"]
    engine.turn()
    engine.receive(Remind(client.sequence))
    assert len(client.notices) == 1, "no round waits"


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
    """Take a turn that does not linger."""
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
