"""The distribution of texts is the target's while γ follows what was accepted in the rounds before.

A Markov chain of 8 tokens, a draft that likes others, and for each text an `Adaptive` policy of its own that remembers
few rounds and has no margin, so that γ follows the last rounds as closely as it can, over the whole range. Drafts,
verdicts and policies are the services' own code; times are given, not measured, so the texts are the same each time.

Power (`chisquare` has the derivation): 24,000 tokens of 400 texts, over the cells of the 8 distributions, notice a
total variation of 0.03 at a level of 0.1 % with a power of 99 %. The mutants let the length of a proposal depend on
what may not decide it (invariant 4), once it has been drafted: on its tokens, and on the draws that it will be accepted
by.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import pytest
import torch

from draft_service import speculation, statistics
from draft_service.speculation import Adaptive
from draft_service.statistics import AcceptanceStatistics, CostModel, JudgedRound
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule, verify
from outrider.service.cost_model import CostLine
from tests.exactness import chisquare
from tests.exactness.chisquare import Array, Fit

V = 8
GAMMA = 5
LENGTH = 60
TEXTS = 400
LEVEL, POWER, DISTANCE = 1e-3, 0.99, 0.03
REFUTED = 1e-9
STEP_COST = CostLine(fixed=1.0, per_token=0.0)
DRAFT_STEP = 0.35  # in steps of the target: the best γ is 0 at α = 0.3, 1 at 0.5, 3 at 0.8

Drop = Callable[["Text", list[int]], list[int]]


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a few rounds, no margin, and a probe after each token of the target's own."""
    for name, value in {"OWN_GAIN": 1.0, "OWN_MARGIN": 1.0, "KNOWN_ROUNDS": 1}.items():
        monkeypatch.setattr(speculation, name, value)
    for name, value in {
        "BEGIN_GAIN": 1.0,
        "SAME": 0.0,
        "FIRM_ROUNDS": 1,
        "FIRST_ROUNDS": 1,
        "PAUSE": 1,
        "PRIOR_WEIGHT": 0.5,
        "SHARED_WEIGHT": 0.5,
        "REMEMBERED": 3,
        "REMEMBERED_OF_ONE": 3,
    }.items():
        monkeypatch.setattr(statistics, name, value)


@dataclass
class Text:
    """One text, its policy, and the γ of its rounds."""

    seed: int
    policy: Adaptive
    tokens: list[int] = field(default_factory=lambda: [0])
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Chain:
    """The target's transitions `[V, V]` and the draft's."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.logits = torch.randn(V, V, generator=generator) * 1.5
        drafted = 0.6 * self.logits + torch.randn(V, V, generator=generator)
        self.q: list[SparseDistribution] = sparsify(drafted.softmax(-1), SparseConfig())
        self.p: Array = self.logits.double().softmax(-1).numpy()

    def draft(self, text: Text) -> list[int]:
        """γ tokens, each from its q̂ (invariants 1 and 2)."""
        drafted: list[int] = []
        for index in range(text.policy.next(GAMMA)):
            last = [*text.tokens, *drafted][-1]
            drafted.append(self.q[last].token_at(uniform(text.seed, len(text.tokens), index, Domain.DRAFT)))
        return drafted

    def write(self, rule: Rule, texts: int, drop: Drop = lambda text, drafted: drafted) -> list[Text]:
        """Texts of `LENGTH` tokens and a few more; `drop` is what is sent of what was drafted."""
        all_texts = [Text(1000 + number, _policy()) for number in range(texts)]
        while unfinished := [text for text in all_texts if len(text.tokens) <= LENGTH]:
            sent = [drop(text, self.draft(text)) for text in unfinished]
            rows = [
                token for text, drafted in zip(unfinished, sent, strict=True) for token in [text.tokens[-1], *drafted]
            ]
            proposals = [
                Proposed(
                    tokens=tuple(drafted),
                    q=tuple(self.q[last] for last in [text.tokens[-1], *drafted][:-1]),
                    params=SamplingParams(),
                    seed=text.seed,
                    base_length=len(text.tokens),
                    rule=rule,
                )
                for text, drafted in zip(unfinished, sent, strict=True)
            ]
            for text, drafted, result in zip(unfinished, sent, verify(self.logits[rows], proposals), strict=True):
                text.tokens += [*drafted[: result.accepted], result.next_token]
                self._observe(text, len(drafted), result.accepted)
        return all_texts

    def _observe(self, text: Text, gamma: int, accepted: int) -> None:
        text.gammas.append(gamma)
        text.accepted.append(accepted)
        text.policy.observe(
            JudgedRound(
                gamma=gamma,
                drafted=gamma,
                judged=min(accepted + 1, gamma),
                accepted=accepted,
                overhead=gamma * DRAFT_STEP,
                at_verifier=STEP_COST.fixed,
                step=STEP_COST,
                tokens=gamma + 1,
            )
        )

    def fit(self, texts: list[Text]) -> Fit:
        """How well the first `LENGTH` tokens of the texts fit the target's distribution."""
        tokens = np.array([text.tokens[: LENGTH + 1] for text in texts])
        counts = np.bincount((tokens[:, :-1] * V + tokens[:, 1:]).ravel(), minlength=V * V).reshape(V, V)
        return chisquare.table_fit(counts, self.p)


def _policy() -> Adaptive:
    return Adaptive(GAMMA, ceiling=GAMMA, statistics=AcceptanceStatistics(), costs=CostModel())


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK], ids=lambda rule: rule.value)
def test_the_distribution_is_the_targets_while_gamma_follows_acceptance(chain: Chain, rule: Rule) -> None:
    texts = chain.write(rule, TEXTS)
    fit = chain.fit(texts)
    gammas = np.bincount([gamma for text in texts for gamma in text.gammas], minlength=GAMMA + 1)
    print(fit, gammas)
    assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=POWER) <= DISTANCE
    assert fit.p_value > LEVEL
    assert (gammas > 0.03 * gammas.sum()).sum() >= 4, "γ did not move much"
    after = [
        [gamma for text in texts for gamma, before in zip(text.gammas[1:], text.accepted, strict=False) if before == n]
        for n in (0, 3)
    ]
    assert np.mean(after[1]) > np.mean(after[0]) + 0.5, "γ did not follow acceptance"


def _looks_at_tokens(text: Text, drafted: list[int]) -> list[int]:
    """The proposal ends before the first token that looks a poor one."""
    return list(takewhile(lambda token: token % 2 == 0, drafted))


def _looks_at_draws(text: Text, drafted: list[int]) -> list[int]:
    """The proposal ends before the first token that the round to come will be hard on."""
    draws = [uniform(text.seed, len(text.tokens), index, Domain.ACCEPT) for index in range(len(drafted))]
    return [token for token, _ in takewhile(lambda pair: pair[1] < 0.6, zip(drafted, draws, strict=True))]


@pytest.mark.parametrize(
    ("rule", "drop"),
    [
        (Rule.TOKENWISE, _looks_at_tokens),
        (Rule.BLOCK, _looks_at_draws),
        pytest.param(Rule.TOKENWISE, _looks_at_draws, marks=pytest.mark.slow),
        pytest.param(Rule.BLOCK, _looks_at_tokens, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.value if isinstance(value, Rule) else value.__name__,
)
def test_a_gamma_that_looks_at_its_own_round_is_noticed(chain: Chain, rule: Rule, drop: Drop) -> None:
    fit = chain.fit(chain.write(rule, TEXTS // 2, drop))
    print(fit)
    assert fit.p_value < REFUTED
