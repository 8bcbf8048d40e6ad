"""Many rounds in a row, drafted with the verifier's own seed, against the target by χ².

Every emitted token is a sample of the target's distribution, for any draft and any text before it. The vocabulary has
16 tokens, since a large one hides shared noise, and the draft ranks them in reverse.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels import rng
from kernels import verify as verification
from kernels.rng import Domain
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution
from kernels.verify import Proposed, Rule
from outrider.evaluation.chisquare import goodness_of_fit
from tests.kernels.cases import gaussian, sparsify
from tests.kernels.paths import C, verify
from tests.kernels.uniforms import uniforms

V = 16
LEVEL = 1e-6  # seeds are fixed: a failure is a defect and no bad luck
TARGET = SamplingParams(temperature=1.2, top_k=12)
WHOLE = SparseConfig(keep_mass=1.0)
Z = gaussian(12, V, scale=1.3)
P: np.ndarray = probabilities(Z[None], TARGET, torch.float64)[0].numpy()


@dataclass(frozen=True)
class Run:
    tokens: np.ndarray  # [sequences, n]
    accepts_first: float  # share of the rounds that accepted their first draft
    rounds: int
    beta: float


def reversed_draft(config: SparseConfig) -> SparseDistribution:
    q = probabilities(Z.sort().values[Z.argsort(descending=True).argsort()][None], SamplingParams())
    return sparsify(q, config)[0]


def generate(
    q: SparseDistribution,
    n: int,
    z: torch.Tensor = Z,
    *,
    sequences: int = 64,
    gamma: int = 3,
    rule: Rule = Rule.TOKENWISE,
    path: str | None = None,
) -> Run:
    """Generate `n` tokens a sequence with the target's logits `z` `[V]` and the draft's `q` for each token.

    Each sequence has a seed, which draft and verifier share.
    """
    seeds = torch.arange(1000, 1000 + sequences)
    logits = z.expand(sequences * (gamma + 1), len(z))
    emitted: list[list[int]] = [[] for _ in range(sequences)]
    accepts_first = rounds = 0
    prompt = 5
    lengths = prompt + torch.arange(n)
    draws = uniforms(seeds[:, None, None], lengths[:, None], torch.arange(gamma), Domain.DRAFT).tolist()
    while running := [s for s in range(sequences) if len(emitted[s]) < n]:
        proposals = [
            Proposed(tuple(map(q.token_at, draws[s][at])), (q,) * gamma, TARGET, int(seeds[s]), prompt + at, rule)
            for s, at in ((s, len(emitted[s])) for s in running)
        ]
        results = verify(logits[: len(running) * (gamma + 1)], proposals, path)
        for s, proposal, each in zip(running, proposals, results, strict=True):
            emitted[s].extend((*proposal.tokens[: each.accepted], each.next_token))
            accepts_first += each.accepted > 0
            rounds += 1
    # A length fixed beforehand: one that follows from the draws would choose among them.
    return Run(np.array([each[:n] for each in emitted]), accepts_first / rounds, rounds, each.beta[0])


def token_p_value(run: Run, p: np.ndarray = P) -> float:
    return goodness_of_fit(np.bincount(run.tokens.flatten(), minlength=len(p)), p).p_value


def pair_p_value(run: Run) -> float:
    """Return the p-value of neighbours, in pairs that do not overlap, so that they are independent."""
    even = run.tokens[:, : run.tokens.shape[1] // 2 * 2].reshape(-1, 2)
    return goodness_of_fit(np.bincount(even[:, 0] * V + even[:, 1], minlength=V * V), np.outer(P, P).ravel()).p_value


@pytest.mark.parametrize("n", [160, pytest.param(420, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("config", "rule"),
    [(WHOLE, Rule.TOKENWISE), (SparseConfig(max_support=8), Rule.BLOCK)],
    ids=["whole, tokenwise", "truncated, block"],
)
@pytest.mark.parametrize("path", ["torch", C])
def test_every_emitted_token_has_the_targets_distribution(config: SparseConfig, rule: Rule, n: int, path: str) -> None:
    """At level 1e-6 and 15 cells, 10,240 tokens detect a total variation of 0.05 with 99.9 %; the 26,880 of `-m slow`
    one of 0.03.
    """
    run = generate(reversed_draft(config), n, rule=rule, path=path)
    assert min(token_p_value(run), pair_p_value(run)) > LEVEL
    if rule is Rule.TOKENWISE:
        assert 0.1 < run.beta < 0.9
        error = (run.beta * (1 - run.beta) / run.rounds) ** 0.5
        assert run.accepts_first == pytest.approx(run.beta, abs=5 * error)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK])
def test_the_compiled_kernels_keep_the_distribution_too(rule: Rule) -> None:
    """262,144 tokens: at level 1e-6 they detect a total variation of 0.01 with 99.9 %."""
    run = generate(reversed_draft(WHOLE), n=256, sequences=1024, rule=rule, path="triton")
    assert min(token_p_value(run), pair_p_value(run)) > LEVEL


def test_block_without_the_round_in_the_counter_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejected tokens of a round then decide the draws of the next. Two tokens, and a draft that is sure of one:
    found by search, this moves the text by a total variation of 0.05; 10,240 tokens detect 0.04.
    """
    p = np.array([0.48, 0.52])
    z = torch.tensor(p).log().float() * TARGET.temperature
    (q,) = sparsify(torch.tensor([[0.01, 0.99]]), WHOLE)

    def p_value() -> float:
        return token_p_value(generate(q, 80, z, sequences=128, gamma=4, rule=Rule.BLOCK, path="torch"), p)

    def by_position(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
        return rng.uniform(seed, base_length + index, 0, domain, draw)

    assert p_value() > LEVEL
    monkeypatch.setattr(verification, "uniform", by_position)
    assert p_value() < LEVEL


def test_noise_shared_between_drafting_and_acceptance_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_draft(seed: int, base_length: int, index: int, domain: Domain, draw: int = 0) -> float:
        return rng.uniform(seed, base_length, index, Domain.DRAFT, draw)

    monkeypatch.setattr(verification, "uniform", of_the_draft)
    assert token_p_value(generate(reversed_draft(WHOLE), n=60, path="torch")) < LEVEL
