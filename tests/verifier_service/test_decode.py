"""`Decode`: several tokens of each sequence in a step, sent together.

The engine is real and runs a demo model. The tests take its turns, so that none waits.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from kernels.adjustments import Adjuster, LogitRules
from kernels.generation_rules import GenerationRules
from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.runtime.batch import Chunk
from outrider.service.fitted_cost import FittedCost
from outrider.service.metrics import Metrics
from tests.verifier_service.engines import PROMPTS, Client, a_round, break_forward, make
from verifier_service.engine import DECODE_LOOP, Close, Drain, HalfClose, Open, Read, Submit, VerifierEngine
from verifier_service.metrics import SpeculationMetrics
from verifier_service.sequence import MAX_BACKLOG

PATIENT: dict[str, Any] = {"joined_verdicts": True, "seconds_joined": 1000.0}
"""Tokens wait for longer than any test takes."""
GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=1.5, top_k=40)
ALONE: list[dict[str, Any]] = [
    {"params": GREEDY},
    {"params": SAMPLED},
    {"params": SAMPLED, "rule": Rule.COUPLED},
    {"params": SAMPLED, "rule": Rule.BLOCK, "seed": 3, "stop": 46},  # its tenth token
    {"params": SAMPLED, "max_new_tokens": 5},
    {"params": SAMPLED, "rules": LogitRules(repetition_penalty=1.8, frequency_penalty=0.7)},
    {"params": SAMPLED, "rule": Rule.COUPLED, "rules": LogitRules(presence_penalty=2.0, banned_tokens=(5,))},
    {"params": GREEDY, "rules": LogitRules(stop_token_ids=tuple(range(40, 90)), min_new_tokens=17), "stop": 46},
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
        engine.run_once()
    for client in clients:
        client.close()
    assert engine.model_runner.pool.used_blocks == 0
    return clients


def in_rows_and_alone(engine: VerifierEngine, hows: Sequence[dict[str, Any]]) -> list[tuple[Client, Client]]:
    """Each client where steps may write several tokens, and where they write one: with the same tokens."""
    expected = decoded(engine, 7, hows, joined=False)
    engine.cost = FittedCost([(1, 1e-6)])
    pairs = list(zip(decoded(engine, 7, hows, joined=True), expected, strict=True))
    for one, other in pairs:
        assert one.error is None
        assert one.sequence.tokens == other.sequence.tokens
    return pairs


@pytest.mark.parametrize("hows", [ALONE[:4], *([each] for each in ALONE)], ids=str)
def test_a_step_writes_several_tokens_of_a_decode(engine: VerifierEngine, hows: list[dict[str, Any]]) -> None:
    """The tokens of single steps, in fewer verdicts; stop tokens and limits hold. The first token is sent at once."""
    for one, other in in_rows_and_alone(engine, hows):
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


@pytest.mark.parametrize(
    "needs",
    [
        {"rules": LogitRules(generation=GenerationRules(no_repeat_ngram_size=2))},
        {"top_logprobs": 1},
        {"reports_probabilities": True},
    ],
    ids=["rules of generate", "log-probabilities", "probabilities"],
)
def test_a_sequence_that_needs_more_than_the_decode_loop_is_not_drawn_by_it(
    engine: VerifierEngine, needs: dict[str, Any]
) -> None:
    """Beside one that could be: both have the tokens of single steps, and each token has its log-probabilities."""
    hows = [{"params": SAMPLED}, {"params": SAMPLED, **needs}]
    for one, other in in_rows_and_alone(engine, hows):
        reports = [sum(len(each.logprobs) for each in client.verdicts) for client in (one, other)]
        assert reports == [20 if one.sequence.opening.top_logprobs >= 0 else 0] * 2


def test_a_silent_sequence_holds_nobody_to_one_token(engine: VerifierEngine) -> None:
    engine.cost = FittedCost([(1, 1e-6)])
    silent, client = Client(engine, PROMPTS[1]), Client(engine, **PATIENT, max_new_tokens=40)
    silent.submit(())
    client.submit(decode=40)
    engine.run_once()
    for seconds, expected in ((0.0, 2), (10.0, 40)):
        silent.sequence.judged_at -= seconds
        engine.run_once()
        assert client.sequence.written == expected


def test_others_write_several_tokens_beside_a_paused_sequence(engine: VerifierEngine) -> None:
    engine.cost = FittedCost([(1, 1e-6)])
    stuck = Client(engine, PROMPTS[1], **PATIENT, max_new_tokens=40)
    client = Client(engine, **PATIENT, max_new_tokens=40)
    for each in (stuck, client):
        each.submit(decode=40)
    engine.run_once()
    stuck.sequence.num_replies += MAX_BACKLOG
    engine.run_once()
    assert (stuck.sequence.written, client.sequence.written) == (1, 40)


def test_the_cost_of_several_tokens_in_a_row_is_that_of_their_passes(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the cost model, and in the metrics."""
    costs, engine.cost = list[tuple[int, float]](), FittedCost([(1, 1e-6)])
    metrics = Metrics()
    engine.observer = SpeculationMetrics(metrics, "torch")
    monkeypatch.setattr(engine.cost, "add", lambda tokens, seconds: costs.append((tokens, seconds)))
    decode: Any = engine.target_runner.decode
    monkeypatch.setattr(engine.target_runner, "decode", lambda *given: replace(decode(*given), forward_seconds=3.5))
    client = Client(engine, joined_verdicts=True, max_new_tokens=33)
    client.submit((), decode=33)
    for _ in range(2):
        engine.run_once()
    assert [len(each.token_ids) for each in client.verdicts] == [1, 32]
    client = Client(engine, [11], joined_verdicts=True, max_new_tokens=8)
    client.submit((), decode=8)
    for _ in range(3):  # the last one accounts for the second
        engine.run_once()
    assert costs[-1] == (1, 0.5)
    shown = {
        name: metrics.registry.get_sample_value(f"outrider_{name}")
        for name in ("step_tokens_total", "step_sequences_total", "step_forward_seconds_count")
    }
    assert shown == {"step_tokens_total": 41 + 2, "step_sequences_total": 41, "step_forward_seconds_count": 41}


@pytest.mark.parametrize("why", ["logprobs", "rules of generate", "a proposal", "a sequence that owes a round"])
def test_a_step_writes_one_token_of_a_decode_where_another_would_wait(engine: VerifierEngine, why: str) -> None:
    engine.cost = FittedCost([(1, 1e-6)])
    client = Client(engine, joined_verdicts=True, max_new_tokens=36)
    client.submit(decode=36)
    engine.run_once()  # the first token
    if why == "logprobs":
        object.__setattr__(client.sequence.opening, "top_logprobs", 0)
    elif why == "rules of generate":
        rules = LogitRules(generation=GenerationRules(no_repeat_ngram_size=3))
        client.sequence.adjuster = Adjuster(rules, PROMPTS[0], 2000, client.sequence.tokens[len(PROMPTS[0]) :])
    elif why in ("a proposal", "a sequence that owes a round"):
        other = Client(engine, PROMPTS[1], joined_verdicts=True)
        other.submit((7,))
        if why == "a sequence that owes a round":
            engine.run_once()
    before, errors = len(client.sequence.tokens), DECODE_LOOP.errors
    engine.run_once()
    assert len(client.sequence.tokens) == before + 1
    assert (client.error, DECODE_LOOP.errors) == (None, errors)


def test_tokens_in_a_row_fit_the_free_blocks(engine: VerifierEngine) -> None:
    pool, engine.cost = engine.model_runner.pool, FittedCost([(1, 1e-6)])
    client = Client(engine, [11] * (pool.block_tokens - 8), joined_verdicts=True, max_new_tokens=17)
    client.submit(decode=17)
    engine.run_once()
    while pool.blocks.num_free:
        pool.grow(pool.allocate(), 1)
    engine.run_once()  # of 16 tokens at most; half of them fit
    assert client.sequence.written == 9
    assert (client.error, DECODE_LOOP.errors) == (None, 0)


def test_tokens_in_a_row_take_a_bounded_time(engine: VerifierEngine) -> None:
    for seconds, expected in ((1e-4, 50), (11e-3, 9), (1.0, 1)):
        client = Client(engine, joined_verdicts=True, max_new_tokens=51)
        engine.cost = FittedCost([(1, seconds)])
        client.submit(decode=51)
        engine.run_once()
        engine.run_once()
        assert client.sequence.written == 1 + expected
        client.close()


def test_tokens_of_a_decode_wait_to_be_sent_together(engine: VerifierEngine) -> None:
    """The first one does not, nor do the last ones, nor those of a client that wants a verdict for each.

    Those of another client may wait for longer, and of the last client the first one, too.
    """
    engine.cost = FittedCost([(1, 600.0)])  # a row has one token
    patient: list[dict[str, Any]] = [PATIENT, PATIENT | {"seconds_joined": 1e6}, PATIENT | {"joins_first": True}]
    hows = [patient[0], {"joined_verdicts": False}, *patient[1:]]
    clients = [Client(engine, **how, max_new_tokens=10) for how in hows]
    for client in clients:
        client.submit(decode=6)
    sent = list[list[list[int]]]()
    for waited in (0.0, 0.0, 0.0, 500.0, 0.0, 0.0):
        for client in clients:
            if client.sequence.unsent is not None:
                client.sequence.unsent.due -= waited
        clients[0].sequence.judged_at -= 10.0 * bool(sent)  # it has waited for each step
        engine.run_once()
        sent.append([[len(each.token_ids) for each in client.verdicts] for client in clients])
    assert [each[0] for each in sent] == [[1], [1], [1], [1, 3], [1, 3], [1, 3, 2]]
    assert sent[-1][1:] == [[1] * 6, [1, 5], [4, 2]]
    joined, single = (client.verdicts for client in clients[:2])
    assert [each.timings.joined_us > 0 for each in joined] == [False, True, True]
    assert not any(each.timings.joined_us for each in single)
    assert [each.base_length for each in joined] == [3, 4, 7]
    assert [token for each in joined for token in each.token_ids] == [each.token_ids[0] for each in single]
    for name in ("forward_us", "verify_us"):
        assert getattr(joined[1].timings, name) == sum(getattr(each.timings, name) for each in single[1:4])
    assert joined[1].timings.queue_us // 10_000_000 == 3


@pytest.mark.parametrize(("waited", "sent"), [(0.0, []), (2000.0, [1])])
def test_a_first_token_does_not_wait_if_its_prompt_took_as_long(
    engine: VerifierEngine, waited: float, sent: list[int]
) -> None:
    """A draft service moves the sequence away from a verifier that is silent for too long."""
    engine.cost = FittedCost([(1, 600.0)])
    client = Client(engine, **PATIENT, joins_first=True, max_new_tokens=10)
    client.submit(decode=6, arrived=time.perf_counter() - waited)
    engine.run_once()
    assert [len(each.token_ids) for each in client.verdicts] == sent


def test_tokens_of_all_that_wait_as_long_are_sent_with_the_first_that_must(engine: VerifierEngine) -> None:
    engine.cost = FittedCost([(1, 600.0)])
    clients = [Client(engine, **PATIENT, max_new_tokens=10) for _ in range(2)]
    for client in clients:
        client.submit(decode=6)
    for _ in range(3):
        engine.run_once()
    assert clients[0].sequence.unsent is not None
    clients[0].sequence.unsent.due -= 500.0
    engine.run_once()
    assert [[len(each.token_ids) for each in client.verdicts] for client in clients] == [[1, 3]] * 2


@pytest.mark.parametrize("why", ["no other work", "an error"])
def test_tokens_that_wait_are_sent_where_nothing_follows(engine: VerifierEngine, why: str) -> None:
    engine.cost = FittedCost([(1, 1e-3)])
    client = Client(engine, **PATIENT, max_new_tokens=30)
    client.submit(decode=30)
    engine.run_once()
    engine.cost = FittedCost([(1, 600.0)])
    engine.run_once()
    assert [len(each.token_ids) for each in client.verdicts] == [1]
    if why == "no other work":
        client.sequence.num_replies += MAX_BACKLOG
    else:
        break_forward(engine, lambda: True)
    engine.run_once()
    assert [len(each.token_ids) for each in client.verdicts] == [1, 1]
    assert (client.error is not None) is (why == "an error")


@pytest.mark.parametrize("message", ["open", "submit", "close", "drain", "read", "half-close", "close at the end"])
def test_a_message_ends_a_row_after_its_current_token(
    engine: VerifierEngine, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cannot wait for its end do. The text is that of single steps."""
    (expected,) = decoded(engine, 20, ALONE[1:2], joined=False)
    other, passes, logits = Client(engine, PROMPTS[1]), count(1), engine.model_runner.logits
    engine.run_once()
    messages: dict[str, Any] = {
        "open": Open(make([], prompt=PROMPTS[2])),
        "submit": Submit(other.sequence, a_round(1, other.sequence.tokens, decode=1)),
        "close": Close(other.sequence),
        "drain": Drain(),
        "read": Read(other.sequence),
        "half-close": HalfClose(other.sequence),
        "close at the end": Close(expected.sequence),
    }
    can_wait = message in ("read", "half-close", "close at the end")

    def interrupted(chunks: Sequence[Chunk]) -> torch.Tensor:
        if next(passes) == 4:
            engine.post(messages[message])
        return logits(chunks)

    monkeypatch.setattr(engine.model_runner, "logits", interrupted)
    engine.cost = FittedCost([(1, 1e-6)])
    client = Client(engine, PROMPTS[0], **PATIENT, max_new_tokens=20, seed=0, **ALONE[1])
    client.submit(decode=20)
    engine.run_once()
    engine.run_once()
    assert client.sequence.written == (20 if can_wait else 5)
    while not client.sequence.finished:
        engine.run_once()
    assert client.sequence.tokens == expected.sequence.tokens
    if message == "drain":  # the next row is a whole one, and its tokens were sent with those of the first
        assert [len(each.token_ids) for each in client.verdicts] == [1, 19]


@pytest.mark.parametrize("is_at_its_end", [False, True])
def test_a_decode_loop_that_fails_harms_no_text(
    engine: VerifierEngine, is_at_its_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = decoded(engine, 7, ALONE[1:2], joined=False)

    decode, engine.cost = engine.target_runner.decode, FittedCost([(1, 1e-6)])

    def broken(*given: Any) -> Any:
        if is_at_its_end:
            decode(*given)
        raise RuntimeError("the loop")

    monkeypatch.setattr(engine.target_runner, "decode", broken)
    (found,) = decoded(engine, 7, ALONE[1:2], joined=True)
    assert found.sequence.tokens == expected.sequence.tokens


def test_bad_logits_within_a_row_end_the_sequence_after_its_sound_tokens(
    engine: VerifierEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, logits = count(1), engine.model_runner.logits

    def spoilt(chunks: Sequence[Chunk]) -> torch.Tensor:
        return logits(chunks) if next(passes) == 1 else torch.full((1, 2048), torch.nan)

    client = Client(engine, joined_verdicts=True)
    client.submit(decode=4)
    engine.run_once()
    monkeypatch.setattr(engine.model_runner, "logits", spoilt)
    engine.run_once()
    assert client.sequence.written == 2
    monkeypatch.setattr(engine.model_runner, "forward", lambda chunks: torch.full((len(chunks), 2048), torch.nan))
    engine.cost = FittedCost([(1, 1.0)])
    engine.run_once()
    assert [len(each.token_ids) for each in client.verdicts] == [1, 1]
    assert client.error is not None
    assert client.error.reason == "BAD_LOGITS"
