"""The verifier's KV cache: preemption, checks when idle, reset if corrupted, and prefixes that requests share."""

import time
from collections.abc import Iterable

import pytest

from kernels.sampling import SamplingParams
from outrider.client import Client, Completion
from outrider.rpc.errors import internal
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.model_runner import Chunk
from outrider.service.metrics import Metrics
from tests.cluster import MODELS
from tests.verifier_service import engines
from tests.verifier_service.engines import make, run
from verifier_service.app import build_engine, choose_verify_path
from verifier_service.engine import QUIET_SECONDS, Close, Open, VerifierEngine
from verifier_service.metrics import SpeculationMetrics
from verifier_service.settings import VerifierSettings

TARGET = str(MODELS / "target")
SHARED = [5 + 7 * i % 900 for i in range(3 * BLOCK_TOKENS)]


def start(max_sequences: int, *flags: str) -> tuple[VerifierEngine, Metrics]:
    """An engine without its thread."""
    always = f"--model {TARGET} --device cpu --dtype float32 --max-linger 0 --max-sequence-tokens 256"
    settings = VerifierSettings.from_command_line(
        [*always.split(), "--max-sequences", str(max_sequences), *flags], program="verifier_service"
    )
    metrics = Metrics()
    engine, _ = build_engine(settings, choose_verify_path(settings))
    engine.observer = observer = SpeculationMetrics(metrics, "torch")
    observer.watch(engine.model_runner.pool, engine.scheduler)
    engine.prepare()
    return engine, metrics


def test_texts_are_the_same_alone_among_others_and_after_preemption() -> None:
    """In float32, at temperatures 0 and 1. The small pool holds three of the sequences at their longest."""

    def texts(engine: VerifierEngine, numbers: Iterable[int]) -> list[list[int]]:
        return run(
            engine,
            [
                engines.Client(
                    engine,
                    [3 + (number * 31 + index * 7) % 1500 for index in range(20 + 5 * (number % 7))],
                    params=SamplingParams(temperature=number % 2),
                    seed=number,
                    max_new_tokens=45,
                )
                for number in numbers
            ],
        )

    roomy, _ = start(8)
    tight, metrics = start(8, "--kv-cache-mb", "2", "--no-prefix-cache")
    together = texts(roomy, range(8))
    assert [*texts(roomy, [0]), *texts(roomy, [5])] == [together[0], together[5]]
    assert texts(tight, range(8)) == together
    assert (metrics.registry.get_sample_value("outrider_preemptions_total") or 0) >= 2
    assert len({tuple(text) for text in together}) > 4


def test_the_idle_pool_is_checked_once_and_reset_if_corrupted() -> None:
    engine, metrics = start(2)

    def checks() -> list[float | None]:
        name = "outrider_kv_integrity_checks_total"
        return [metrics.registry.get_sample_value(name, {"outcome": outcome}) for outcome in ("intact", "corrupted")]

    run(engine, [engines.Client(engine) for _ in range(2)])
    engine.step_ended = time.perf_counter()
    assert engine.idle() == pytest.approx(QUIET_SECONDS, rel=0.5), "another request may come soon"
    assert checks() == [0, 0]
    engine.step_ended -= QUIET_SECONDS
    engine.idle()
    engine.idle()
    assert checks() == [1, 0]

    lost = make([])
    engine.receive(Open(lost))
    engine.forward(engine.schedule())
    assert engine.idle() is None
    assert checks() == [1, 0], "not while there is a sequence"
    engine.scheduler.running.remove(lost)  # a bug: the sequence is gone, and its slot is not free
    engine.idle()
    assert checks() == [1, 1]
    assert metrics.registry.get_sample_value("outrider_kv_blocks_used") == 0
    run(engine, [engines.Client(engine)])
    engine.step_ended -= QUIET_SECONDS
    engine.idle()
    assert checks() == [2, 1]


def _complete(address: str, tail: list[int], salt: str = "a test") -> Completion:
    with Client(address) as client:
        return client.complete(SHARED + tail, max_new_tokens=12, ignore_eos=True, seed=3, gamma=3, cache_salt=salt)


def test_requests_share_the_kv_cache_of_a_prefix_and_a_salt(draft_address: str) -> None:
    """In float32, with the noise of the seed, the tokens are the same."""
    first, again, other = (_complete(draft_address, tail) for tail in ([9, 8], [9, 8], [7]))
    assert [each.usage.cached_tokens for each in (first, again, other)] == [0, len(SHARED), len(SHARED)]
    assert again.token_ids == first.token_ids
    apart = _complete(draft_address, [7], "another tenant")
    assert (apart.usage.cached_tokens, apart.token_ids) == (0, other.token_ids)


@pytest.mark.parametrize("fails", [True, False])
def test_blocks_of_a_failed_sequence_are_not_shared(fails: bool) -> None:
    """They may hold NaN."""
    engine, _ = start(2)
    sequence = make([], prompt=SHARED[: BLOCK_TOKENS + 1])
    engine.receive(Open(sequence))
    assert sequence.slot is not None
    engine.model_runner.forward([Chunk(sequence.slot, sequence.tokens[:-1], 0, 0)])
    if fails:
        sequence.end(internal("BAD_LOGITS", "NaN"))
    engine.receive(Close(sequence))
    assert engine.prefixes.find(SHARED) == (0 if fails else BLOCK_TOKENS)
    engine.model_runner.pool.check_integrity()
