"""Many rounds in a row, drafted by our own sampler with the verifier's own seed, against the target's law by χ².

Every emitted token is a sample of the target's law, whatever the draft believes and whatever came before. The
vocabulary has 16 tokens, since a large one hides shared noise, and the draft ranks them in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

from kernels import verify as verification
from kernels.rng import Domain, uniforms
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule
from tests.kernels.mutants import by_absolute_position, shared_noise
from tests.kernels.paths import verify

V = 16
LEVEL = 1e-6  # seeds are fixed: a failure is a defect and no bad luck
TARGET = SamplingParams(temperature=1.2, top_k=12)


@dataclass(frozen=True)
class Run:
    """What several sequences emitted, one row each, and what became of the first draft of each round."""

    tokens: np.ndarray  # [sequences, n]
    first_accepted: int
    rounds: int
    beta: float


def _run(
    config: SparseConfig,
    n: int,
    sequences: int = 64,
    gamma: int = 3,
    rule: Rule = Rule.TOKENWISE,
    path: str | None = None,
) -> Run:
    """Generate `n` tokens a sequence, each on a seed of its own that draft and verifier share."""
    z = _logits()
    reversed_ranks = z.sort().values[z.argsort(descending=True).argsort()]
    (q,) = sparsify(probabilities(reversed_ranks[None], SamplingParams()), config)
    return _run_with(z, q, n, sequences, gamma, rule, path)


def _run_with(
    z: torch.Tensor, q: SparseDistribution, n: int, sequences: int, gamma: int, rule: Rule, path: str | None = None
) -> Run:
    # z: [V]; each token has the same target, and its draft the same law.
    seeds = torch.arange(1000, 1000 + sequences)
    logits = z.expand(sequences * (gamma + 1), len(z))
    emitted: list[list[int]] = [[] for _ in range(sequences)]
    first_accepted = rounds = 0
    while min(len(each) for each in emitted) < n:
        lengths = torch.tensor([5 + len(each) for each in emitted])
        draws = uniforms(seeds[:, None], lengths[:, None], torch.arange(gamma), Domain.DRAFT).tolist()
        proposals = [
            replace(_proposal(q, row, int(seed), int(length)), rule=rule)
            for row, seed, length in zip(draws, seeds, lengths, strict=True)
        ]
        for tokens, proposal, each in zip(emitted, proposals, verify(logits, proposals, path), strict=True):
            tokens.extend((*proposal.tokens[: each.accepted], each.next_token))
            first_accepted += each.accepted > 0
            rounds += 1
    # A length fixed beforehand: one that follows from the draws would choose among them.
    return Run(np.array([each[:n] for each in emitted]), first_accepted, rounds, each.beta[0])


def _proposal(q: SparseDistribution, draws: list[float], seed: int, base_length: int) -> Proposed:
    return Proposed(tuple(q.token_at(u) for u in draws), (q,) * len(draws), TARGET, seed, base_length)


def _logits() -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(12)) * 1.3


def _target() -> np.ndarray:
    p: np.ndarray = probabilities(_logits()[None], TARGET, torch.float64)[0].numpy()
    return p


def _pvalue(counts: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of χ², with cells of fewer than 5 expected counts merged; 0 where an impossible one is met."""
    expected = law * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    merged = np.append(counts[~small], counts[small].sum()), np.append(expected[~small], expected[small].sum())
    possible = merged[1] > 0
    return float(stats.chisquare(merged[0][possible], merged[1][possible]).pvalue)


def _single(run: Run) -> float:
    return _pvalue(np.bincount(run.tokens.flatten(), minlength=V), _target())


def _pairs(run: Run) -> float:
    """Return the p-value of neighbours: pairs that do not overlap, so that they are independent."""
    even = run.tokens[:, : run.tokens.shape[1] // 2 * 2].reshape(-1, 2)
    law = np.outer(_target(), _target()).flatten()
    return _pvalue(np.bincount(even[:, 0] * V + even[:, 1], minlength=V * V), law)


@pytest.mark.parametrize(
    ("config", "n"),
    [
        (SparseConfig(keep_mass=1.0), 160),
        (SparseConfig(max_support=8), 160),
        pytest.param(SparseConfig(keep_mass=1.0), 420, marks=pytest.mark.slow),
    ],
    ids=["whole", "truncated", "whole, more"],
)
def test_every_emitted_token_has_the_targets_law(config: SparseConfig, n: int) -> None:
    """At level 1e-6 and 15 cells, a total variation of 0.05 (10,240 tokens) is seen 999 times in 1,000; with the 26,880
    of `-m slow` one of 0.03.
    """
    run = _run(config, n)
    assert _single(run) > LEVEL
    assert _pairs(run) > LEVEL
    assert 0.1 < run.beta < 0.9
    # Five standard errors of the first draft's acceptance.
    error = (run.beta * (1 - run.beta) / run.rounds) ** 0.5
    assert run.first_accepted / run.rounds == pytest.approx(run.beta, abs=5 * error)


@pytest.mark.parametrize("n", [160, pytest.param(420, marks=pytest.mark.slow)])
def test_block_keeps_the_law_over_several_rounds(n: int) -> None:
    """10,240 tokens: at level 1e-6, a total variation of 0.05 is seen 999 times in 1,000; with the 26,880 of `-m slow`
    one of 0.03.
    """
    run = _run(SparseConfig(keep_mass=1.0), n=n, rule=Rule.BLOCK)
    assert _single(run) > LEVEL
    assert _pairs(run) > LEVEL


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_the_compiled_kernels_keep_the_law_too(rule: Rule) -> None:
    """262,144 tokens: at level 1e-6, a total variation of 0.01 is seen 999 times in 1,000."""
    run = _run(SparseConfig(keep_mass=1.0), n=256, sequences=1024, rule=rule, path="triton")
    assert _single(run) > LEVEL
    assert _pairs(run) > LEVEL


def test_block_with_the_round_left_out_of_the_counter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round throws away then decides what the next one draws. Two tokens, and a draft that knows one of them:
    a law found by search, where this moves the text by a total variation of 0.05; 10,240 tokens see 0.04.
    """
    law = np.array([0.48, 0.52])
    z = torch.tensor(law).log().float() * TARGET.temperature
    (q,) = sparsify(torch.tensor([[0.01, 0.99]]), SparseConfig(keep_mass=1.0))

    def pvalue() -> float:
        run = _run_with(z, q, n=80, sequences=128, gamma=4, rule=Rule.BLOCK)
        return _pvalue(np.bincount(run.tokens.flatten(), minlength=2), law)

    assert pvalue() > LEVEL
    monkeypatch.setattr(verification, "uniform", by_absolute_position)
    assert pvalue() < LEVEL


def test_noise_shared_between_drafting_and_acceptance_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "uniform", shared_noise)
    run = _run(SparseConfig(keep_mass=1.0), n=60)
    assert _single(run) < LEVEL


def test_draft_laws_taken_before_truncation_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts come from four tokens, and their proposals claim the whole law."""
    (whole,) = sparsify(torch.softmax(torch.linspace(0, 2, V), -1)[None], SparseConfig(keep_mass=1.0))
    (cut,) = sparsify(torch.softmax(torch.linspace(0, 2, V), -1)[None], SparseConfig(max_support=4))

    def claiming(q: SparseDistribution, draws: list[float], seed: int, base_length: int) -> Proposed:
        return Proposed(tuple(cut.token_at(u) for u in draws), (whole,) * len(draws), TARGET, seed, base_length)

    monkeypatch.setitem(globals(), "_proposal", claiming)
    assert _single(_run(SparseConfig(), n=60)) < LEVEL
