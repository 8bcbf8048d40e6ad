"""Edge cases of the acceptance rules, for every implementation. `test_enumeration` has their distributions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import verify_torch
from kernels.adjustments import Adjuster, LogitRules
from kernels.sampling import SamplingParams
from kernels.sigmoid import EXCLUDED, DraftLogits, SigmoidScales
from kernels.verify import Proposed, Rule, Status
from tests.kernels import reference
from tests.kernels.cases import GREEDY, LAST, coupled, logits_of, propose, sparse
from tests.kernels.paths import HOST, PATHS, verify

EVEN, HALF, EIGHTHS = sparse({0: 1, 1: 1, 2: 1, 3: 1}), sparse({0: 1, 1: 1}), sparse({0: 1, 1: 2, 2: 4, 3: 1})
RISING, EQUALS_EIGHTHS = [0.1, 0.2, 0.3, 0.4], [0.125, 0.25, 0.5, 0.125]
OUTSIDE = (-1, 4, 2**40, -(2**62))
SCALES = SigmoidScales(-1.0, 3.0)


@dataclass(frozen=True)
class Is:
    """An expected result; None allows any value."""

    accepted: int
    next_token: int | None = None
    beta: tuple[float, ...] | None = None
    status: Status = Status.OK


BAD = Is(0, -1, (), Status.BAD_LOGITS)
Case = tuple[Sequence[Sequence[float]] | Tensor, list[tuple[Proposed, Is]]]
"""Rows as probabilities or (a tensor) as logits, filled up to γ+1 with zeros; proposals and their results."""


def block(tokens: tuple[int, ...], q: Any, accept: tuple[float, ...], resample: float = 0.5) -> Proposed:
    return propose(tokens, q, accept, resample, rule=Rule.BLOCK)


def sigmoid(
    tokens: tuple[int, ...], drafts: Sequence[Sequence[float] | None], *uniforms: Any,
    params: SamplingParams | None = None, scales: SigmoidScales = SCALES,
) -> Proposed:  # fmt: skip
    q = tuple(None if v is None else DraftLogits(torch.tensor(v, dtype=torch.float16)) for v in drafts)
    return propose(tokens, q, *uniforms, params=params or SamplingParams(), rule=Rule.SIGMOID, sigmoid=scales)


def sigma(z: float, scales: SigmoidScales = SCALES) -> float:
    return 1 / (1 + math.exp(-(z - scales.alpha) / (scales.beta - scales.alpha)))


def _rest() -> Case:
    z, v = (2.0, -1.0, 3.0, 0.5), (1.0, 4.0, 0.0, 0.0)
    rest = [max(0.0, sigma(a) - sigma(b)) for a, b in zip(z, v, strict=True)]
    first, second = rest[0] / sum(rest), (rest[0] + rest[2]) / sum(rest)
    uniforms = ((0.0, 0), (first - 1e-5, 0), (first + 1e-5, 2), (second - 1e-5, 2), (second + 1e-5, 3))
    return torch.tensor([z]), [(sigmoid((1,), [v], (LAST,), u), Is(0, x, ())) for u, x in uniforms]


CASES: dict[str, Case] = {
    "a token of probability zero is rejected at u = 0": (
        [[0.0, 0.5, 0.5, 0.0]],
        [(propose((3,), (sparse({1: 1, 3: 2}),), (0.0,), 0.9), Is(0, 2))],
    ),
    "a token outside the vocabulary is rejected": (
        [RISING] * 2,
        [
            (propose((x, 1), (q, EVEN), (0.0, 0.0), 0.999, rule=rule), Is(0, 3))
            for x, q, rule in product(OUTSIDE, (None, sparse({1: 3, 2: 1})), (Rule.TOKENWISE, Rule.BLOCK))
        ],
    ),
    "equal distributions leave no residual, and the target is drawn from": (
        torch.tensor([EQUALS_EIGHTHS], dtype=torch.float64).log(),
        [
            (propose((-1,), (EIGHTHS,), (0.5,), 0.9, rule=rule), Is(0, 3, status=Status.ZERO_RESIDUAL))
            for rule in (Rule.TOKENWISE, Rule.BLOCK)
        ],
    ),
    "the ends of the uniform draw no impossible token": (
        [[0.0, 0.0, 0.2, 0.0, 0.8, 0.0, 0.0]],
        [(propose(resample=0.0), Is(0, 2)), (propose(resample=LAST), Is(0, 4))],
    ),
    "a uniform on an edge takes the later token": (
        torch.zeros(1, 4),
        [(propose(resample=u), Is(0, x)) for u, x in ((0.25, 1), (0.5, 2), (0.75, 3))],
    ),
    "bad logits of a row after a rejection do not count": (
        torch.tensor([[0.0, 2.2], [0.0, 2.2], [math.nan, 0.0]]),
        [(propose((1, 0), accept=(0.0, 0.99), params=params), Is(1)) for params in (SamplingParams(), GREEDY)],
    ),
    "bans that leave no token make bad logits": (
        [[0.2, 0.3, 0.5]],
        [(propose(adjustments=(Adjuster(LogitRules(banned_tokens=(0, 1, 2)), [], 3).row(),)), BAD)],
    ),
    "greedy decoding accepts the argmax alone, whatever q is, under every rule": (
        [[0.2, 0.5, 0.3]] * 3,
        [
            *(
                (propose((1, 2), (q, q), (LAST, 0.0), params=GREEDY, rule=rule), Is(1, 1, beta))
                for rule in (Rule.TOKENWISE, Rule.BLOCK)
                for q, beta in ((None, (1.0, 0.0)), (sparse({1: 1, 2: 9}), (0.1, 0.1)))
            ),
            *((coupled((1, 2), seed, 9, GREEDY), Is(1, 1, ())) for seed in range(3)),
            *((sigmoid((1, 2), (v, v), (LAST, 0.0), params=GREEDY), Is(1, 1, ())) for v in (None, [9.0, 0, 0])),
        ],
    ),
    "ties at the maximum go to the lowest id": (
        torch.tensor([[1.0, 3.0, 3.0, 3.0]]).expand(3, 4),
        [(propose((1, 2), params=GREEDY), Is(1, 1))],
    ),
    "lenient greedy decoding accepts p(x) ≥ l · max p": (  # [L A.5]; p(x)/max p is 0.6, then 0.4, then 0
        [[0.3, 0.5, 0.2], [0.3, 0.5, 0.2], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]],
        [
            (propose((0, 2, 0), params=GREEDY, lenience=lenience), Is(accepted, 1))
            for lenience, accepted in ((1.0, 0), (0.61, 0), (0.59, 1), (0.2, 2))
        ],
    ),
    "a later success overrides an earlier failure": (
        # p(0)/q̂(0) is 1.6, then 0.4: h_1 = P_1 = 1, since p is as far below q̂ at 0 as it is above it at 1.
        [[0.8, 0.2, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0]],
        [(block((0, 0), (HALF, HALF), (LAST, u)), Is(accepted)) for u, accepted in ((0.41, 1), (0.39, 2))],
    ),
    "equal distributions accept all, without a residual to divide by": (
        [EQUALS_EIGHTHS] * 4,
        [(block((2, 0, 3), (EIGHTHS,) * 3, (u,) * 3), Is(3, beta=(1.0,) * 3)) for u in (0.0, 0.5, 1 - 1e-6)],
    ),
    "a token of probability zero ends the block": (
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]],
        [
            (block((0, 2), (HALF, sparse({2: 1, 3: 1})), (0.0, 0.0), 0.7), Is(1, 3)),
            (block((2, 3), (sparse({0: 1, 2: 1}), sparse({2: 1, 3: 1})), (0.0, 0.0), 0.7), Is(0, 1)),
        ],
    ),
    "a block without reach does not end at u = 0": (  # P_1 is 1/2, and no token of the second row has p/2 above q̂
        torch.zeros(2, 4),
        [(block((0, 0), (HALF, EVEN), (0.0, LAST)), Is(0))],
    ),
    "a block of small weight still leaves its residual": (  # P_1 = 2e-7; all of token 3 is left of the second p
        [[1e-7, 1 - 1e-7, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]],
        [(block((0, 1), (HALF, HALF), (0.0, LAST)), Is(1, 3))],
    ),
    "a bad row counts while the block can still grow": (
        torch.tensor([[0.0, 0.0, -9.0], [math.nan, 0.0, -9.0], [0.0, 0.0, 0.0]]),
        [
            (block((0, 0), (HALF, HALF), (LAST, LAST)), BAD),
            (block((5, 0), (sparse({0: 1, 2: 1}), HALF), (LAST, LAST)), Is(0)),
        ],
    ),
    "a coupled token outside the vocabulary is rejected": (
        [[0.25] * 4] * 2,
        [(coupled((x,), 1, 1), Is(0)) for x in OUTSIDE[:3]],
    ),
    "a bad row counts where coupling meets it": (
        torch.tensor([[0.0, -math.inf], [math.nan, 0.0], [0.0, 0.0]]),
        [(coupled((0, 0), 1, 1), BAD), (coupled((1, 0), 1, 1), Is(0, 0))],
    ),
    "sigmoid acceptance is strict": (  # σ is 1/2 at α and 1 far above β, in any precision
        torch.zeros(2, 2),
        [
            (sigmoid((1,), [(0.0, 6e4)], (u,), scales=SigmoidScales(0.0, 1.0)), expected)
            for u, expected in ((0.5, Is(0, status=Status.ZERO_RESIDUAL)), (0.5 - 2**-53, Is(1)))
        ],
    ),
    "a token that the draft excluded is rejected, and the residual there is all of p̂": (
        torch.tensor([[1.0, 1.0, 1.0]]),
        [(sigmoid((1,), [(1.0, EXCLUDED, 1.0)], (0.0,), u), Is(0, 1)) for u in (0.0, 0.5, LAST)],
    ),
    "banned tokens have no score": (
        torch.tensor([[1.0, -math.inf, 1.0]]),
        [(sigmoid((1,), [(0.0, 5.0, 1.0)], (0.0,)), Is(0, 0))],
    ),
    "the residual of p̂ is drawn from, in order of id": _rest(),
    "after the last draft the softmax is drawn from": (
        logits_of([[1.0, 0.0], [0.25, 0.75]]),
        [(sigmoid((0,), [(0.0, 0.0)], (0.0,), u), Is(1, x)) for u, x in ((0.24, 0), (0.26, 1))],
    ),
    "without a residual of p̂ the softmax is drawn from": (
        torch.tensor([[1.0, 1.0, 2.0]]),
        [
            (sigmoid((x,), [(9.0, 9.0, 9.0)], (0.0,), u), Is(0, next_token, status=Status.ZERO_RESIDUAL))
            for x in OUTSIDE
            for u, next_token in ((0.0, 0), (LAST, 2))
        ],
    ),
    "a bad row counts where sigmoid meets it": (
        torch.tensor([[0.0, 0.0], [math.nan, 0.0]]),
        [
            (sigmoid((0, 1), [(0.0, 0.0)] * 2, (0.0, 0.0)), BAD),
            (sigmoid((-1, 1), [(0.0, 0.0)] * 2, (0.0, 0.0)), Is(0, status=Status.ZERO_RESIDUAL)),
            (sigmoid((0,), [(0.0, 0.0)], (0.0,)), BAD),
        ],
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_edge(name: str, path: str) -> None:
    given, pairs = CASES[name]
    z = given if isinstance(given, Tensor) else logits_of(given)
    rows = [torch.cat((z, z.new_zeros(3, z.shape[1])))[: proposed.gamma + 1] for proposed, _ in pairs]
    results = verify(torch.cat(rows), [proposed for proposed, _ in pairs], path)
    for number, (result, (_, expected)) in enumerate(zip(results, pairs, strict=True)):
        assert (result.status, result.accepted) == (expected.status, expected.accepted), number
        allowed = range(z.shape[1]) if expected.next_token is None else [expected.next_token]
        assert result.next_token in allowed, number
        assert expected.beta is None or result.beta == pytest.approx(expected.beta), number


@pytest.mark.parametrize("path", HOST)
def test_acceptance_at_equality_is_detected(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = reference if path == "reference" else verify_torch
    monkeypatch.setattr(module, "accepts", lambda u, lenience, q, p: q > 0 and u * lenience * q <= p)
    with pytest.raises(AssertionError):
        test_edge("a token of probability zero is rejected at u = 0", path)


@pytest.mark.parametrize("path", HOST)
@pytest.mark.parametrize(("lenience", "temperature"), [(1.0, 1.0), (0.8, 0.5)])
@pytest.mark.parametrize("scales", [SCALES, SigmoidScales(2.0, 2.25), SigmoidScales(-1e5, 1e5)])
def test_sigmoid_accepts_below_the_ratio_of_scores(
    path: str, lenience: float, temperature: float, scales: SigmoidScales
) -> None:
    """The target's logits are divided by the temperature here; the draft's come so."""
    z, params = torch.tensor([[-2.0, 0.5, 1.0], [0.0, 0.0, 0.0]]), SamplingParams(temperature=temperature)
    edge = sigma(0.5 / temperature, scales) / sigma(5.0, scales) / lenience
    for u, accepted in ((edge * (1 - 1e-12), 1), (edge * (1 + 1e-12), 0)):
        if u < 1:
            proposed = sigmoid((1,), [(0.0, 5.0, -5.0)], (u,), params=params, scales=scales)
            (result,) = verify(z, [replace(proposed, lenience=lenience)], path)
            assert (result.accepted, result.beta) == (accepted, ())


FILTERED = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("params", "at"),
    [(SamplingParams(), 0), (SamplingParams(), 2), (GREEDY, 0), (FILTERED, 1)],
)
def test_a_bad_row_ends_its_own_sequence_alone(path: str, params: SamplingParams, at: int) -> None:
    nan, inf = math.nan, math.inf
    z = logits_of([[0.1, 0.7, 0.1, 0.1]] * 18).view(6, 3, 4)
    z[1:5, at] = torch.tensor([[0.0, nan, 1.0, 2.0], [nan] * 4, [-inf] * 4, [0.0, 1.0, inf, 2.0]])
    proposed = propose((1, 1), accept=(0.0, 0.0), params=params, top_logprobs=2)
    first, *bad, last = verify(z.view(18, 4), [proposed] * 6, path)
    assert first == last
    assert (first.status, first.accepted) == (Status.OK, 2)
    for each in bad:
        assert (each.status, each.accepted, each.next_token, each.logprobs) == (Status.BAD_LOGITS, 0, -1, ())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [1.0, 1e-40])
def test_extreme_logits_have_a_distribution(path: str, temperature: float) -> None:
    z = torch.tensor([[65504.0, -65504.0, 65504.0], [-3.4e38, 3.4e38, -math.inf], [0.0, 0.0, 0.0]])
    proposed = propose(resample=0.75, params=SamplingParams(temperature=temperature))
    assert [each.next_token for each in verify(z, [proposed] * 3, path)] == [2, 1, 2]
