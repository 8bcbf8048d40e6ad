"""The verifier's KV cache: too small to start, short while it serves, looked over when idle; and shared prefixes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from kernels.sampling import SamplingParams
from kernels.verify import Rule
from outrider.client import Client, Completion
from outrider.rpc.errors import internal
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.model_runner import Chunk
from outrider.service.metrics import Metrics
from tests.cluster import MODELS
from tests.verifier_service.engines import a_round, make
from verifier_service.app import build_engine, find_path
from verifier_service.engine import QUIET_SECONDS, Close, Open, Submit, VerifierEngine
from verifier_service.metrics import SpeculationMetrics
from verifier_service.sequence import TargetSequence
from verifier_service.settings import VerifierSettings

TARGET = str(MODELS / "target")
MANY = 8
OUTPUT = 90


def start(*flags: str) -> tuple[VerifierEngine, Metrics]:
    """An engine without its thread: the test runs the passes."""
    settings = VerifierSettings.from_command_line(
        ["--model", TARGET, "--device", "cpu", "--dtype", "float32", "--max-linger", "0", *flags],
        program="verifier_service",
    )
    metrics = Metrics()
    observer = SpeculationMetrics(metrics, "torch")
    engine, _ = build_engine(settings, find_path(settings), observer)
    observer.watch(engine.model_runner.pool, engine.scheduler)
    engine.prepare()
    return engine, metrics


def shown(metrics: Metrics, name: str, **labels: str) -> float:
    value = metrics.registry.get_sample_value(name, labels)
    assert value is not None
    return value


def begin(number: int) -> TargetSequence:
    """A sequence that is known by its number: prompt, seed and length follow from it, and whether it is greedy."""
    return make(
        [],
        prompt=[3 + (number * 31 + i * 7) % 1500 for i in range(20 + 5 * (number % 7))],
        params=SamplingParams(temperature=number % 2),
        rule=Rule.COUPLED,
        seed=number,
        stop=None,
        max_new_tokens=OUTPUT,
    )


def written(engine: VerifierEngine, numbers: list[int]) -> dict[int, list[int]]:
    """What these sequences write together. Each proposes what the target would hardly say, and Decode in between."""
    sequences = {number: begin(number) for number in numbers}
    for sequence in sequences.values():
        engine.receive(Open(sequence))
    left = dict(sequences)
    while left:
        for number, sequence in list(left.items()):
            sequence.backlog = 0
            if sequence.finished:
                engine.receive(Close(sequence))
                del left[number]
            elif not sequence.rounds:
                drafted = [number % 50 + 5, 9] if sequence.last_round % 3 else []
                again: dict[str, Any] = {} if drafted else {"decode": 2}
                asked = a_round(sequence.last_round + 1, sequence.tokens, drafted, seen=sequence.last_round, **again)
                engine.receive(Submit(sequence, replace(asked, distributions=())))
        work = engine.schedule()
        if work:
            engine.process(work, engine.forward(work))
    return {number: sequence.tokens[-OUTPUT:] for number, sequence in sequences.items()}


def test_a_text_is_the_same_alone_among_many_and_after_preemption() -> None:
    """In float32, greedy and coupled side by side. The small pool holds three of the sequences at their longest, and
    begins more of them.
    """
    flags = ("--max-sequence-tokens", "256", "--max-sequences", str(MANY))
    roomy, _ = start(*flags)
    tight, metrics = start(*flags, "--kv-cache-mb", "3", "--no-prefix-cache")
    numbers = list(range(MANY))
    alone = {number: written(roomy, [number])[number] for number in (0, 5)}
    together = written(roomy, numbers)
    assert {number: together[number] for number in alone} == alone
    assert written(tight, numbers) == together
    assert shown(metrics, "outrider_preemptions_total") >= 2
    assert len({tuple(text) for text in together.values()}) > MANY / 2, "there are many texts to confuse"
    for engine in (roomy, tight):
        assert engine.idle() is None
        assert engine.model_runner.pool.used_blocks == 0
    assert shown(metrics, "outrider_kv_integrity_checks_total", outcome="intact") == 1


def test_the_pool_is_looked_over_once_all_have_gone_and_starts_anew_where_it_is_corrupted() -> None:
    engine, metrics = start("--max-sequence-tokens", "256", "--max-sequences", "2")

    def checks(outcome: str) -> float:
        return shown(metrics, "outrider_kv_integrity_checks_total", outcome=outcome)

    written(engine, [1, 2])
    engine.step_ended = time.perf_counter()
    assert engine.idle() == pytest.approx(QUIET_SECONDS, rel=0.5), "the next request may be on its way"
    assert checks("intact") == 0
    engine.step_ended -= QUIET_SECONDS
    engine.idle()
    engine.idle()
    assert (checks("intact"), checks("corrupted")) == (1, 0)

    lost = begin(3)
    engine.receive(Open(lost))
    engine.forward(engine.schedule())
    assert engine.idle() is None, "not while there is a sequence"
    assert checks("intact") == 1
    engine.scheduler.running.remove(lost)  # a bug: it is gone, and its slot was not freed
    engine.idle()
    assert (checks("intact"), checks("corrupted")) == (1, 1)
    assert shown(metrics, "outrider_kv_blocks_used") == 0
    assert written(engine, [1, 2])
    engine.idle()
    assert (checks("intact"), checks("corrupted")) == (2, 1)


# ------------------------------------------------------------------------------------------ prompts that begin alike

SHARED = [5 + 7 * i % 900 for i in range(3 * BLOCK_TOKENS)]


def _complete(address: str, tail: list[int], **options: Any) -> Completion:
    asked = {"max_new_tokens": 12, "ignore_eos": True, "seed": 3, "gamma": 3, "cache_salt": "a test", **options}
    with Client(address) as client:
        return client.complete(SHARED + tail, **asked)


def test_a_prompt_that_begins_alike_is_not_run_again(draft_address: str) -> None:
    """In float32, by the noise of the seed: the same text, from keys and values that another request has left."""
    first = _complete(draft_address, [9, 8])
    again = _complete(draft_address, [9, 8])
    other = _complete(draft_address, [7])
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, len(SHARED))
    assert other.usage.cached_tokens == len(SHARED)
    assert again.token_ids == first.token_ids
    apart = _complete(draft_address, [7], cache_salt="another tenant")
    assert (apart.usage.cached_tokens, apart.token_ids) == (0, other.token_ids)


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_failed_sequence_leaves_is_not_used(fails: bool) -> None:
    """Its KV cache may hold NaN."""
    engine, _ = start("--max-sequences", "2", "--max-sequence-tokens", "128")
    sequence = make([], prompt=SHARED[: BLOCK_TOKENS + 1])
    engine.receive(Open(sequence))
    assert sequence.slot is not None
    engine.model_runner.forward([Chunk(sequence.slot, sequence.tokens[:-1], 0, 0)])
    if fails:
        sequence.end(internal("BAD_LOGITS", "NaN"))
    engine.receive(Close(sequence))
    assert engine.prefixes.find(SHARED) == (0 if fails else BLOCK_TOKENS)
    engine.model_runner.pool.check_integrity()
