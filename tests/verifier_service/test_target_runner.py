"""A captured pass gives the results of an eager one, with either verification path.

Captures repeat their Python calls here, and Triton's kernels are interpreted.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from kernels.logprobs import SCORED_ROWS, prompt_logprobs
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, Rule, VerifyResult
from outrider.runtime.cuda_graph import Capturer, GraphRunner
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import EAGER, AttentionChoice
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.sampling import MAX_TOP_LOGPROBS
from tests.cluster import MODELS, Cluster
from verifier_service import target_runner as target_runner_module
from verifier_service.target_runner import MAX_DECODE_TOKENS, ScoredTokens, TargetRunner, verify_rows

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")
PAGED = AttentionChoice(EAGER, "to be captured")
SEQUENCES, GAMMA, V = 3, 3, 2048
PARAMS = [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0), SamplingParams(top_p=0.9)]
RULES = [Rule.TOKENWISE, Rule.BLOCK, Rule.COUPLED]


@pytest.fixture(scope="module")
def packed() -> ModelRunner:
    loaded = load_model(ModelSource(str(MODELS / "target"), dtype="float32", device="cpu"))
    model = TorchRunner.build(loaded, SEQUENCES + 1, 64, attention=PAGED)
    torch.set_num_threads(1)
    return model


def target_runner(packed: ModelRunner, path: str, *, graphs: bool) -> TargetRunner:
    if isinstance(packed.paged_runner, GraphRunner):
        packed.paged_runner = packed.paged_runner.eager
    found = TargetRunner(packed, vocab_size=min(V, packed.loaded.vocab_size), verify_path=path)
    if graphs:
        bounds: dict[str, Any] = {"seconds": 1e3, "most_bytes": 1 << 30}
        with_kernels = path == "triton"
        found.loop.capture(
            Capturer(), sequences=SEQUENCES, tokens=MAX_DECODE_TOKENS, with_kernels=with_kernels, **bounds
        )
        summary = packed.capture(Capturer(), max_sequences=SEQUENCES, widest=GAMMA + 1, max_batch_tokens=64, **bounds)
        assert "sizes" in summary
    return found


def rounds(packed: ModelRunner, judged: TargetRunner, seed: int) -> list[VerifyResult]:
    """Rounds of a few sequences, one after the other; rejected tokens are rolled back."""
    rng = random.Random(seed)
    texts = [[rng.randrange(V) for _ in range(rng.randint(2, 6))] for _ in range(SEQUENCES + 1)]
    slots = [packed.pool.allocate() for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        packed.forward([Chunk(slot, text[:-1], 0, len(text) - 1)])
    results = []
    for step in range(6):
        present = rng.sample(range(len(slots)), SEQUENCES + 1 if step == 3 else rng.randint(1, SEQUENCES))
        chunks, proposals = [], []
        for i in present:
            drafted = tuple(rng.choices(range(V), k=rng.randint(0, GAMMA)))
            if rng.random() < 0.5 and drafted:  # sometimes the target's own token
                best = packed.forward([Chunk(slots[i], texts[i][-1:], len(texts[i]) - 1, 0)])[0, :V].argmax()
                packed.pool.rollback(slots[i], len(texts[i]) - 1)
                drafted = (int(best), *drafted[1:])
            params = PARAMS[3] if step == 5 else rng.choice(PARAMS[:3])
            rule = rng.choice(RULES)
            q = () if rule is Rule.COUPLED else (None,) * len(drafted)
            proposals.append(Proposed(drafted, q, params, seed=seed + i, base_length=len(texts[i]), rule=rule))
            chunks.append(Chunk(slots[i], [texts[i][-1], *drafted], len(texts[i]) - 1, 0))
        output = judged(chunks, proposals)
        assert min(output.forward_seconds, output.verify_seconds) >= 0
        results += output.results
        for i, proposal, result in zip(present, proposals, output.results, strict=True):
            texts[i] += [*proposal.tokens[: result.accepted], result.next_token]
            packed.pool.rollback(slots[i], len(texts[i]) - 1)
    for slot in slots:
        packed.pool.free(slot)
    return results


@pytest.mark.parametrize("path", ["torch", pytest.param("triton", marks=NEEDS_TRITON)])
def test_captured_passes_equal_eager_ones(packed: ModelRunner, path: str) -> None:
    """Bit for bit, including rounds with filters and a pass that fits no graph."""
    eager = rounds(packed, target_runner(packed, path, graphs=False), 3)
    captured = target_runner(packed, path, graphs=True)
    assert isinstance(packed.paged_runner, GraphRunner)
    replayed: list[int] = []

    def counted(replay: Callable[[], None]) -> None:
        replayed.append(1)
        replay()

    for each in packed.paged_runner._captured:
        object.__setattr__(each, "replay", partial(counted, each.replay))
    found = rounds(packed, captured, 3)
    assert len(replayed) > 4
    assert {each.accepted for each in found} >= {0, 1}
    assert [replace(each, beta=()) for each in found] == [replace(each, beta=()) for each in eager]


def test_an_impossible_verify_path_is_one_line_and_exit_code_2() -> None:
    with Cluster() as cluster:
        service = cluster.verifier(flags="--verify-path triton", env={"TRITON_INTERPRET": ""})
        assert service.process.wait(60) == 2
    service.stop()  # which reads its output to the end
    assert not service.logged("listening")
    assert service.plain_lines() == [
        "verifier_service: --verify-path triton: triton cannot verify on cpu: it needs a CUDA device, "
        "or TRITON_INTERPRET=1 in the environment to interpret it, slowly; use --verify-path auto"
    ]


def test_scores_of_a_captured_step_are_those_of_an_eager_one(packed: ModelRunner) -> None:
    """All rows of a piece from a prompt's beginning have logits, so a graph may run it, beside a round."""
    prompt, found = list(range(40, 49)), []
    for graphs in (False, True):
        runner = target_runner(packed, "torch", graphs=graphs)
        round_, piece = packed.pool.allocate(), packed.pool.allocate()
        alone = Proposed(tokens=(), q=(), params=SamplingParams(temperature=0), seed=0, base_length=1)
        chunks = [Chunk(round_, [7], 0, 0), Chunk(piece, prompt[:-1], 0, 0)]
        step = runner(chunks, [alone], scored=[ScoredTokens(prompt[1:], 2)])
        found.append((step.results, step.scores))
        for slot in (round_, piece):
            packed.pool.free(slot)
    (results, scores), (captured_results, captured_scores) = found
    assert captured_results == results
    for one, other in zip(scores[0] or (), captured_scores[0] or (), strict=True):
        assert (one.token, one.top_ids) == (other.token, other.top_ids)
        assert (one.raw, *one.top_raw) == pytest.approx((other.raw, *other.top_raw), abs=1e-4)
    assert [each.token for each in scores[0] or ()] == prompt[1:]


@pytest.mark.parametrize("rows", [1, 2 * SCORED_ROWS])
def test_the_profiling_run_verifies_and_scores(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the largest slice, so that its memory is measured."""
    scored: list[int] = []

    def count(logits: torch.Tensor, tokens: list[int], top: int) -> object:
        scored.extend(tokens)
        assert top == MAX_TOP_LOGPROBS
        return prompt_logprobs(logits, tokens, top)

    monkeypatch.setattr(target_runner_module, "prompt_logprobs", count)
    verify_rows(torch.zeros(rows, 30), "torch")
    assert len(scored) == min(rows, SCORED_ROWS)
