"""Log-probabilities of prompts in the verifier's engine: those of transformers, in any pieces and batch, and once each.

In float32, on the demo target. `tests/draft_service/test_prompt_logprobs.py` has them through both services.
"""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from outrider.runtime.kv_cache import BLOCK_TOKENS
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.metrics import Metrics
from outrider.service.wire import PROMPT_POSITIONS
from protos.outrider.v1 import model_pb2, sampling_pb2, verifier_service_pb2
from tests.draft_service.oracle import logits
from tests.draft_service.pairs import BREAKING_TOKEN, DEMO, write_awkward_draft
from tests.verifier_service.engines import Client, run
from verifier_service.engine import HalfClose, StepSummary, VerifierEngine
from verifier_service.metrics import SpeculationMetrics
from verifier_service.scheduler import IDLE_SECONDS

V, LENGTH = 2048, 700
TOLERANCE = 1e-4
# A long prompt has several messages and, in small steps, many pieces; the first has nothing to score.
PROMPT_LENGTHS = (1, 2, 3, BLOCK_TOKENS + 1, 200, 2 * PROMPT_POSITIONS + 1)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelSource(str(DEMO / "target"), dtype="float32", device="cpu"))


def engine_of(
    loaded: LoadedModel, *, batch: int = 48, blocks: int | None = None, metrics: Metrics | None = None
) -> VerifierEngine:
    """An engine of eight sequences, without its thread."""
    limits = model_pb2.Limits(max_gamma=4, max_sequences=8, max_sequence_tokens=LENGTH)
    engine = VerifierEngine(
        TorchRunner.build(loaded, max_sequences=8, max_length=LENGTH, blocks=blocks),
        model_pb2.ModelInfo(vocab_size=V, limits=limits),
        max_batch_tokens=batch,
        verify_path="torch",
    )
    if metrics is not None:
        engine.observer = SpeculationMetrics(metrics, "torch")
    engine.prepare()
    return engine


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(5, 1900), k=length)


def parts_of(client: Client) -> list[sampling_pb2.PromptLogprobs]:
    """The parts, all of which come before the first verdict."""
    replies = [each for each in client.replies if isinstance(each, verifier_service_pb2.VerifyResponse)]
    kinds = [reply.WhichOneof("kind") for reply in replies if not reply.HasField("notice")]
    assert kinds == sorted(kinds), "prompt_logprobs, then verdicts"
    return [reply.prompt_logprobs for reply in replies if reply.HasField("prompt_logprobs")]


def assert_scores(parts: Sequence[sampling_pb2.PromptLogprobs], prompt: Sequence[int], top: int) -> None:
    """Each position once, in order, with transformers' own log-probabilities."""
    found: list[sampling_pb2.PositionLogprobs] = []
    for part in parts:
        assert part.first_position == len(found) + 1, "neither missing nor twice"
        assert 1 <= len(part.logprobs) <= PROMPT_POSITIONS
        found += part.logprobs
    assert [each.token.token_id for each in found] == list(prompt[1:])
    if not found:
        return
    expected = log_probabilities(tuple(prompt))[:-1]
    assert_close([[each.token.raw] for each in found], expected.gather(1, torch.tensor(prompt[1:])[:, None]))
    tops = [[one.raw for one in each.top] for each in found]
    assert_close(tops, expected.topk(top).values)
    assert_close(tops, expected.gather(1, torch.tensor([[one.token_id for one in each.top] for each in found]).long()))
    for each in found:
        for one in (each.token, *each.top):
            assert one.adjusted == one.raw
            if one.token_id == each.token.token_id:
                assert one.raw == each.token.raw, "the very same float"


def assert_close(found: list[list[float]], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0.0, atol=TOLERANCE)


@cache
def log_probabilities(prompt: tuple[int, ...]) -> torch.Tensor:
    """Those of transformers after each token, `[T, V]`."""
    return torch.log_softmax(logits(list(prompt)).double(), -1)


def test_scores_are_those_of_transformers_with_any_pieces_and_neighbours(loaded: LoadedModel) -> None:
    """Greedy tokens of the prompt are sometimes the top ones. Other sequences have rounds and prompts of their own."""
    prompts = [prompt_of(length, length) for length in PROMPT_LENGTHS]
    prompts[4][150:] = logits(prompts[4][:150])[-1:].argmax(-1).tolist() * 50
    texts: list[list[list[int]]] = []
    for batch in (5, 48, 1024):
        engine = engine_of(loaded, batch=batch)
        before = Client(engine, prompt_of(90, 7), params=SamplingParams(), max_new_tokens=16)
        scored = [
            Client(engine, prompt, top_prompt_logprobs=top, params=SamplingParams(temperature=1), seed=top)
            for prompt, top in zip(prompts, (0, 3, 20, 0, 2, 1), strict=True)
        ]
        behind = Client(engine, prompt_of(90, 8), params=SamplingParams(), max_new_tokens=16)
        texts.append(run(engine, [before, *scored, behind]))
        for client, prompt, top in zip(scored, prompts, (0, 3, 20, 0, 2, 1), strict=True):
            assert_scores(parts_of(client), prompt, top)
        assert parts_of(before) == parts_of(behind) == []
    assert texts[0] == texts[1] == texts[2]
    engine = engine_of(loaded)
    plain = [
        Client(engine, prompt, params=SamplingParams(temperature=1), seed=top)
        for prompt, top in zip(prompts, (0, 3, 20, 0, 2, 1), strict=True)
    ]
    assert run(engine, plain) == texts[0][1:-1], "scoring changes no text"


def test_the_prefix_cache_is_written_and_not_read(loaded: LoadedModel) -> None:
    engine, prompt = engine_of(loaded), prompt_of(100)
    for _ in range(2):
        client = Client(engine, prompt, top_prompt_logprobs=1)
        run(engine, [client])
        assert_scores(parts_of(client), prompt, 1)
        assert engine.prefixes.find(prompt) == 96


def test_positions_are_scored_again_but_not_sent_twice_after_preemption(loaded: LoadedModel) -> None:
    """The older sequence grows until no block is free, while the newer one is in the middle of its prompt."""
    metrics = Metrics()
    engine = engine_of(loaded, batch=16, blocks=24, metrics=metrics)
    older = Client(engine, prompt_of(62), params=SamplingParams(temperature=1), max_new_tokens=80)
    prompt = prompt_of(640, 9)
    newer = Client(engine, prompt, top_prompt_logprobs=1)
    sent = 0
    for _ in range(300):
        before = len(parts_of(newer))
        for client in (older, newer):
            client.sequence.num_written = client.sequence.num_replies
            if not client.sequence.finished and not client.sequence.rounds:
                client.submit()
        engine.run_once()
        if metrics.registry.get_sample_value("outrider_preemptions_total"):
            sent = before
            break
    assert sent > 3, "in the middle"
    assert newer.sequence.slot is not None
    assert engine.model_runner.pool.length(newer.sequence.slot) == 0
    run(engine, [older, newer])
    assert_scores(parts_of(newer), prompt, 1)


def test_positions_stay_once_whenever_the_sequence_loses_its_blocks(loaded: LoadedModel) -> None:
    """As in a preemption, after any number of pieces; also right after the last one, when the cache may be read."""
    prompt = prompt_of(3 * BLOCK_TOKENS + 3)
    for turns in (1, 3, 6, 7):
        engine = engine_of(loaded, batch=17)
        run(engine, [Client(engine, prompt)])  # fills the prefix cache
        client = Client(engine, prompt, top_prompt_logprobs=0)
        client.submit()
        for _ in range(turns):
            engine.run_once()
        if not client.sequence.finished and client.sequence.slot is not None:
            engine.model_runner.pool.rollback(client.sequence.slot, 0)
        run(engine, [client])
        assert_scores(parts_of(client), prompt, 0)


def test_a_step_with_scores_counts_as_one_with_prompts(loaded: LoadedModel) -> None:
    """Its cost must not enter the cost of rounds, even if all its rows have logits."""
    engine = engine_of(loaded)
    plain = Client(engine, prompt_of(4))
    plain.submit()
    engine.run_once()
    plain.submit()
    for scored in (False, True):
        if scored:
            Client(engine, prompt_of(9), top_prompt_logprobs=0)
        work = engine.schedule()
        assert all(item.chunk.logits_from == 0 for item in work)
        assert len(work) == 1 + scored
        output = engine.forward(work)
        assert StepSummary(work, output, None).is_of_rounds is not scored
        for item in work:
            engine.model_runner.pool.rollback(item.chunk.slot, item.chunk.start)


def test_bad_logits_of_a_prompt_end_its_sequence_alone(tmp_path: Path) -> None:
    broken = load_model(ModelSource(str(write_awkward_draft(tmp_path / "model")), dtype="float32", device="cpu"))
    limits: dict[str, Any] = {"max_sequences": 4, "max_length": 64}
    engine = VerifierEngine(
        TorchRunner.build(broken, **limits),
        model_pb2.ModelInfo(vocab_size=V, limits=model_pb2.Limits(max_gamma=4, max_sequences=4)),
        max_batch_tokens=64,
        verify_path="torch",
    )
    engine.prepare()
    sound, bad = (
        Client(engine, [5, 6, 7, middle, 9, 10], top_prompt_logprobs=3, max_new_tokens=2)
        for middle in (8, BREAKING_TOKEN)
    )
    run(engine, [sound, bad])
    assert bad.error is not None
    assert bad.error.reason == "BAD_LOGITS"
    assert parts_of(bad) == []
    assert sound.error is None
    assert sum(len(part.logprobs) for part in parts_of(sound)) == 5


def test_a_client_that_sends_no_rounds_gets_all_positions(loaded: LoadedModel) -> None:
    engine, prompt = engine_of(loaded), prompt_of(100)
    client = Client(engine, prompt, top_prompt_logprobs=0)
    engine.receive(HalfClose(client.sequence))
    for _ in range(3):
        engine.run_once()
    assert_scores(parts_of(client), prompt, 0)
    assert client.replies[-1] is None, "the stream ends well"


def test_a_client_that_does_not_read_pauses_its_sequence(loaded: LoadedModel) -> None:
    engine, prompt = engine_of(loaded, batch=5), prompt_of(LENGTH - 10)
    client = Client(engine, prompt, top_prompt_logprobs=0)
    client.submit()
    for _ in range(200):
        engine.run_once()
    assert 64 <= len(parts_of(client)) <= 65, "of 138 pieces"
    idle = client.sequence.idle_seconds(client.sequence.replied_at + 2 * IDLE_SECONDS)
    assert idle == pytest.approx(2 * IDLE_SECONDS), "others may take its blocks"
    run(engine, [client])
    assert_scores(parts_of(client), prompt, 0)
