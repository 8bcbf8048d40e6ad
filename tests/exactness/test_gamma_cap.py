"""The text's law while the cap on γ moves from round to round, after what was accepted before: it is the target's.

A Markov chain of 8 tokens, a draft that likes others, and for each text a `GammaCap` of its own whose means are short
and whose margin is none, so that its γ follows its own last rounds as closely as it can, over the whole range. Drafts,
verdicts and caps are the services' own code; times are given, not measured, so the texts are the same each time.

Power (`chisquare` has the derivation): 24,000 tokens of 400 texts, over the cells of the 8 laws, notice a total
variation of 0.03 at a level of 0.1 % with a power of 99 %. The mutants let the length of a proposal depend on what may
not decide it (invariant 4), once it has been drafted: on its tokens, and on the draws that it will be accepted by.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import pytest
import torch

from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule, verify
from outrider.service.cost_model import CostLine
from tests.exactness import chisquare
from tests.exactness.chisquare import Array, Fit
from verifier_service import gamma_cap
from verifier_service.gamma_cap import GammaCap

V = 8
GAMMA = 5
LENGTH = 60
TEXTS = 400
LEVEL, POWER, DISTANCE = 1e-3, 0.99, 0.03
REFUTED = 1e-9
LINE = CostLine(fixed=1.0, per_token=0.0)
DRAFT_STEP = 0.35  # in passes: the best γ is 0 at α = 0.3, 1 at 0.5, 3 at 0.8

Drop = Callable[["Text", list[int]], list[int]]


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over a few rounds, a look at every one, and no time at 0 without a probe."""
    for name, value in {
        "MARGIN": 0.0,
        "LEAST_ROUNDS": 1,
        "ROUNDS_PER_LOOK": 0,
        "RECENT_ROUND": 1 / 3,
        "FIRST_ROUNDS": 1,
        "PROBE_AFTER": 1,
    }.items():
        monkeypatch.setattr(gamma_cap, name, value)


@dataclass
class Text:
    """One text, its cap, and the γ of its rounds."""

    seed: int
    tokens: list[int] = field(default_factory=lambda: [0])
    caps: GammaCap = field(default_factory=GammaCap)
    gammas: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def gamma(self) -> int:
        cap = self.caps.of(self.seed)
        return GAMMA if cap is None else min(cap, GAMMA)


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
        for index in range(text.gamma):
            last = [*text.tokens, *drafted][-1]
            drafted.append(self.q[last].token_at(uniform(text.seed, len(text.tokens), index, Domain.DRAFT)))
        return drafted

    def write(self, rule: Rule, texts: int, drop: Drop = lambda text, drafted: drafted) -> list[Text]:
        """Texts of `LENGTH` tokens and a few more; `drop` is what is sent of what was drafted."""
        all_texts = [Text(1000 + number) for number in range(texts)]
        while unfinished := [text for text in all_texts if len(text.tokens) <= LENGTH]:
            sent = [drop(text, self.draft(text)) for text in unfinished]
            rows = [
                token for text, drafted in zip(unfinished, sent, strict=True) for token in [text.tokens[-1], *drafted]
            ]
            proposals = [
                Proposed(
                    tokens=tuple(drafted),
                    q=tuple(self.q[last] for last in [text.tokens[-1], *drafted][:-1]),
                    law=SamplingParams(),
                    seed=text.seed,
                    base_length=len(text.tokens),
                    rule=rule,
                )
                for text, drafted in zip(unfinished, sent, strict=True)
            ]
            for text, drafted, result in zip(unfinished, sent, verify(self.logits[rows], proposals), strict=True):
                text.tokens += [*drafted[: result.accepted], result.next_token]
                self._tell(text, len(drafted), result.accepted)
        return all_texts

    def _tell(self, text: Text, gamma: int, accepted: int) -> None:
        turnaround = gamma * DRAFT_STEP
        text.gammas.append(gamma)
        text.accepted.append(accepted)
        text.caps.add(
            text.seed,
            drafted=gamma,
            judged=min(accepted + 1, gamma),
            accepted=accepted,
            turnaround=turnaround,
            whole=turnaround + LINE.fixed,
        )
        text.caps.look({text.seed: len(text.tokens), "company": 1 << 20}, LINE)

    def fit(self, texts: list[Text]) -> Fit:
        """How well the first `LENGTH` tokens of the texts fit the target's law."""
        tokens = np.array([text.tokens[: LENGTH + 1] for text in texts])
        counts = np.bincount((tokens[:, :-1] * V + tokens[:, 1:]).ravel(), minlength=V * V).reshape(V, V)
        return chisquare.table_fit(counts, self.p)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.BLOCK], ids=lambda rule: rule.value)
def test_the_law_is_the_targets_while_the_cap_follows_what_was_accepted(chain: Chain, rule: Rule) -> None:
    texts = chain.write(rule, TEXTS)
    fit = chain.fit(texts)
    gammas = np.bincount([gamma for text in texts for gamma in text.gammas], minlength=GAMMA + 1)
    print(fit, gammas)
    assert chisquare.detectable(fit.df, fit.n, level=LEVEL, power=POWER) <= DISTANCE
    assert fit.p_value > LEVEL
    assert (gammas > 0.03 * gammas.sum()).sum() >= 4, "the cap did not move much"
    after = [
        [gamma for text in texts for gamma, before in zip(text.gammas[1:], text.accepted, strict=False) if before == n]
        for n in (0, 3)
    ]
    assert np.mean(after[1]) > np.mean(after[0]) + 0.5, "the cap did not follow what was accepted"


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
def test_a_cap_that_looks_at_the_round_it_caps_is_noticed(chain: Chain, rule: Rule, drop: Drop) -> None:
    fit = chain.fit(chain.write(rule, TEXTS // 2, drop))
    print(fit)
    assert fit.p_value < REFUTED
