"""Many rounds in a row, drafted by our own sampler with the verifier's own seed, against the target by χ².

Every emitted token is a sample of the target's distribution, whatever the draft believes and whatever came before. The
vocabulary has 16 tokens, since a large one hides shared noise, and the draft ranks them in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from kernels import verify as verification
from kernels.rng import Domain, uniforms
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule
from tests.kernels.cases import gaussian
from tests.kernels.mutants import by_absolute_position, shared_noise
from tests.kernels.paths import verify

V = 16
LEVEL = 1e-6  # seeds are fixed: a failure is a defect and no bad luck
TARGET = SamplingParams(temperature=1.2, top_k=12)
WHOLE = SparseConfig(keep_mass=1.0)
Z = gaussian(12, V, scale=1.3)
P: np.ndarray = probabilities(Z[None], TARGET, torch.float64)[0].numpy()


@dataclass(frozen=True)
class Run:
    tokens: np.ndarray  # [sequences, n]
    accepts_first: float  # of its rounds, how many accepted their first draft
    rounds: int
    beta: float


def _reversed(config: SparseConfig) -> SparseDistribution:
    q = probabilities(Z.sort().values[Z.argsort(descending=True).argsort()][None], SamplingParams())
    return sparsify(q, config)[0]


def _run(
    q: SparseDistribution,
    n: int,
    z: torch.Tensor = Z,
    *,
    sequences: int = 64,
    gamma: int = 3,
    rule: Rule = Rule.TOKENWISE,
    path: str | None = None,
    drawn_from: SparseDistribution | None = None,
) -> Run:
    """Generate `n` tokens a sequence, each on a seed of its own that draft and verifier share.

    Each token has the target's logits `z` `[V]` and the draft's `q`, or what it is `drawn_from` without saying so.
    """
    seeds = torch.arange(1000, 1000 + sequences)
    logits = z.expand(sequences * (gamma + 1), len(z))
    emitted: list[list[int]] = [[] for _ in range(sequences)]
    accepts_first = rounds = 0
    while min(len(each) for each in emitted) < n:
        lengths = torch.tensor([5 + len(each) for each in emitted])
        draws = uniforms(seeds[:, None], lengths[:, None], torch.arange(gamma), Domain.DRAFT).tolist()
        drafts = [tuple((drawn_from or q).token_at(u) for u in row) for row in draws]
        proposals = [
            Proposed(tokens, (q,) * gamma, TARGET, int(seed), int(length), rule)
            for tokens, seed, length in zip(drafts, seeds, lengths, strict=True)
        ]
        for tokens, proposal, each in zip(emitted, proposals, verify(logits, proposals, path), strict=True):
            tokens.extend((*proposal.tokens[: each.accepted], each.next_token))
            accepts_first += each.accepted > 0
            rounds += 1
    # A length fixed beforehand: one that follows from the draws would choose among them.
    return Run(np.array([each[:n] for each in emitted]), accepts_first / rounds, rounds, each.beta[0])


def _pvalue(counts: np.ndarray, p: np.ndarray) -> float:
    """Return the p-value of χ², with cells of fewer than 5 expected counts merged; 0 where an impossible one is met."""
    expected = p * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    merged = np.append(counts[~small], counts[small].sum()), np.append(expected[~small], expected[small].sum())
    possible = merged[1] > 0
    return float(stats.chisquare(merged[0][possible], merged[1][possible]).pvalue)


def _tokens(run: Run) -> float:
    return _pvalue(np.bincount(run.tokens.flatten(), minlength=V), P)


def _pairs(run: Run) -> float:
    """Return the p-value of neighbours: pairs that do not overlap, so that they are independent."""
    even = run.tokens[:, : run.tokens.shape[1] // 2 * 2].reshape(-1, 2)
    return _pvalue(np.bincount(even[:, 0] * V + even[:, 1], minlength=V * V), np.outer(P, P).flatten())


@pytest.mark.parametrize("n", [160, pytest.param(420, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("config", "rule"),
    [(WHOLE, Rule.TOKENWISE), (SparseConfig(max_support=8), Rule.TOKENWISE), (WHOLE, Rule.BLOCK)],
    ids=["whole", "truncated", "block"],
)
def test_every_emitted_token_has_the_targets_distribution(config: SparseConfig, rule: Rule, n: int) -> None:
    """At level 1e-6 and 15 cells, a total variation of 0.05 (10,240 tokens) is seen 999 times in 1,000; with the 26,880
    of `-m slow` one of 0.03.
    """
    run = _run(_reversed(config), n, rule=rule)
    assert _tokens(run) > LEVEL
    assert _pairs(run) > LEVEL
    if rule is Rule.TOKENWISE:
        assert 0.1 < run.beta < 0.9
        error = (run.beta * (1 - run.beta) / run.rounds) ** 0.5
        assert run.accepts_first == pytest.approx(run.beta, abs=5 * error)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_the_compiled_kernels_keep_the_distribution_too(rule: Rule) -> None:
    """262,144 tokens: at level 1e-6, a total variation of 0.01 is seen 999 times in 1,000."""
    run = _run(_reversed(WHOLE), n=256, sequences=1024, rule=rule, path="triton")
    assert _tokens(run) > LEVEL
    assert _pairs(run) > LEVEL


def test_block_without_the_round_in_the_counter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejected tokens of a round then decide the draws of the next. Two tokens, and a draft that is sure of one:
    found by search, this moves the text by a total variation of 0.05; 10,240 tokens see 0.04.
    """
    p = np.array([0.48, 0.52])
    z = torch.tensor(p).log().float() * TARGET.temperature
    (q,) = sparsify(torch.tensor([[0.01, 0.99]]), WHOLE)

    def pvalue() -> float:
        run = _run(q, 80, z, sequences=128, gamma=4, rule=Rule.BLOCK)
        return _pvalue(np.bincount(run.tokens.flatten(), minlength=2), p)

    assert pvalue() > LEVEL
    monkeypatch.setattr(verification, "uniform", by_absolute_position)
    assert pvalue() < LEVEL


def test_noise_shared_between_drafting_and_acceptance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "uniform", shared_noise)
    assert _tokens(_run(_reversed(WHOLE), n=60)) < LEVEL
