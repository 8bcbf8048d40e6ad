"""The acceptance rules, edge by edge, for every implementation alike. Their distributions: `test_enumeration`."""

from __future__ import annotations

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
from kernels.dense import EXCLUDED, DraftLogits, SigmoidScales
from kernels.sampling import SamplingParams
from kernels.verify import Proposed, Rule, Status
from tests.kernels import reference
from tests.kernels.cases import GREEDY, LAST, coupled, logits_of, propose, sparse
from tests.kernels.mutants import accepts_equality
from tests.kernels.paths import HOST, PATHS, verify

EVEN, HALF, EIGHTHS = sparse({0: 1, 1: 1, 2: 1, 3: 1}), sparse({0: 1, 1: 1}), sparse({0: 1, 1: 2, 2: 4, 3: 1})
RISING, EQUALS_EIGHTHS = [0.1, 0.2, 0.3, 0.4], [0.125, 0.25, 0.5, 0.125]
OUTSIDE = (-1, 4, 2**40, -(2**62))
SCALES = SigmoidScales(-1.0, 3.0)
SCALES_OF_W = tuple(SigmoidScales(-(10.0**n), 10.0**n) for n in (1, 3, 4, 5))


@dataclass(frozen=True)
class Is:
    """An expected result; None where any value will do."""

    accepted: int
    next_token: int | None = None
    beta: tuple[float, ...] | None = None
    status: Status = Status.OK


BAD = Is(0, -1, (), Status.BAD_LOGITS)
Case = tuple[Sequence[Sequence[float]] | Tensor, list[tuple[Proposed, Is]]]
"""Rows as probabilities or (a tensor) as logits, filled up to γ+1 with even ones; proposals and their results."""


def block(tokens: tuple[int, ...], q: Any, accept: tuple[float, ...], resample: float = 0.5) -> Proposed:
    return propose(tokens, q, accept, resample, rule=Rule.BLOCK)


def sigmoid(
    tokens: tuple[int, ...], drafts: Sequence[Sequence[float] | None], *uniforms: Any,
    params: SamplingParams | None = None, scales: SigmoidScales = SCALES,
) -> Proposed:  # fmt: skip
    q = tuple(None if v is None else DraftLogits(torch.tensor(v, dtype=torch.float16)) for v in drafts)
    return propose(tokens, q, *uniforms, law=params or SamplingParams(), rule=Rule.SIGMOID, sigmoid=scales)


def sigma(z: float, scales: SigmoidScales = SCALES) -> float:
    return 1 / (1 + math.exp(-(z - scales.alpha) / (scales.beta - scales.alpha)))


def around(*edges: float, step: float = 1e-6) -> list[tuple[float, int]]:
    """Return uniforms just below and above each edge, with the number of edges below them."""
    return [(edge + side, i + (side > 0)) for i, edge in enumerate(edges) for side in (-step, step)]


# ------------------------------------------------------------------------------------------------- tokenwise and greedy

TOKENWISE: dict[str, Case] = {
    "a token of probability zero is rejected at u = 0": (
        [[0.0, 0.5, 0.5, 0.0]],
        [(propose((3,), (sparse({1: 1, 3: 2}),), (0.0,), 0.9), Is(0, 2))],
    ),
    "a token outside the vocabulary is rejected": (
        [RISING],
        [(propose((x,), (q,), (0.0,), 0.999), Is(0, 3)) for x, q in product(OUTSIDE, (None, sparse({1: 3, 2: 1})))],
    ),
    "a token outside its own support is rejected": (
        [RISING],
        [(propose((0,), (sparse({1: 1, 2: 1}),), (0.0,)), Is(0))],
    ),
    "support outside the vocabulary is not read": (
        [RISING],
        [(propose((2,), (sparse({-7: 1, 0: 1, 2: 1, 900: 1}),), (0.999,), 0.0), Is(1, 0, (0.35,)))],
    ),
    "equal distributions accept": (
        [EQUALS_EIGHTHS],
        [(propose((2,), (EIGHTHS,), (u,)), Is(1, beta=(1.0,))) for u in (0.0, 0.5, 1 - 1e-6)],
    ),
    "equal distributions leave no residual, and the target is drawn from": (
        torch.tensor([EQUALS_EIGHTHS], dtype=torch.float64).log(),
        [
            (propose((-1,), (EIGHTHS,), (0.5,), 0.9, rule=rule), Is(0, 3, status=Status.ZERO_RESIDUAL))
            for rule in (Rule.TOKENWISE, Rule.BLOCK)
        ],
    ),
    "one-hot distributions accept where they agree, and there alone": (
        [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]],
        [
            *((propose((1,), (q,), (LAST,)), Is(1, 1, (1.0,))) for q in (None, sparse({1: 65535}))),
            *((propose((2,), (q,), (0.0,)), Is(0, 1, (0.0,))) for q in (None, sparse({2: 1}))),
        ],
    ),
    "disjoint supports reject, and the target is drawn from": (
        [[0.0, 0.0, 0.5, 0.5]],
        [(propose((0,), (HALF,), (0.0,), u), Is(0, x, (0.0,))) for u, x in ((0.0, 2), (0.3, 2), (LAST, 3))],
    ),
    "the ends of the uniform draw no impossible token": (
        [[0.0, 0.0, 0.2, 0.0, 0.8, 0.0, 0.0]],
        [(propose(resample=0.0), Is(0, 2)), (propose(resample=LAST), Is(0, 4))],
    ),
    "a uniform on an edge takes the later token": (
        torch.zeros(1, 4),
        [(propose(resample=u), Is(0, x)) for u, x in ((0.25, 1), (0.5, 2), (0.75, 3))],
    ),
    "after a rejection the residual is drawn from": (  # positive at tokens 2 and 3 alone, by 0.1 and 0.3
        [RISING],
        [
            (propose((0,), (sparse({0: 4, 1: 3, 2: 2, 3: 1}),), (0.3,), u), Is(0, x))
            for u, x in ((0.0, 2), (0.249, 2), (0.251, 3), (LAST, 3))
        ],
    ),
    "beta is of the rows up to the stopping one": (
        [[0.5, 0.5]] * 4,
        [
            (propose((0, 0, 0), (HALF, sparse({0: 3, 1: 1}), HALF), accept), expected)
            for accept, expected in (
                ((0.5, 0.9, 0.0), Is(1, beta=(1.0, 0.75))),
                ((0.5, 0.1, 0.0), Is(3, beta=(1.0, 0.75, 1.0))),
            )
        ],
    ),
    "lenience loosens acceptance and beta alone": (
        [[0.1, 0.9]],
        [
            (propose((0,), (HALF,), (0.39,)), Is(0, 1, (0.6,))),
            (propose((0,), (HALF,), (0.39,), lenience=0.5), Is(1, beta=(0.7,))),
        ],
    ),
    "bad logits that are not needed spoil nothing": (
        torch.tensor([[0.0, 2.2], [0.0, 2.2], [math.nan, 0.0]]),
        [(propose((1, 0), accept=(0.0, 0.99), law=params), Is(1)) for params in (SamplingParams(), GREEDY)],
    ),
    "bans that leave no token make bad logits": (
        [[0.2, 0.3, 0.5]],
        [(propose(adjustments=(Adjuster(LogitRules(banned_tokens=(0, 1, 2)), [], 3).row(),)), BAD)],
    ),
    "greedy decoding accepts the argmax alone, whatever q is, under every rule": (
        [[0.2, 0.5, 0.3]] * 3,
        [
            *(
                (propose((1, 2), (q, q), (LAST, 0.0), law=GREEDY, rule=rule), Is(1, 1, beta))
                for rule in (Rule.TOKENWISE, Rule.BLOCK)
                for q, beta in ((None, (1.0, 0.0)), (sparse({1: 1, 2: 9}), (0.1, 0.1)))
            ),
            *((coupled((1, 2), seed, 9, GREEDY), Is(1, 1, ())) for seed in range(3)),
            *((sigmoid((1, 2), (v, v), (LAST, 0.0), params=GREEDY), Is(1, 1, ())) for v in (None, [9.0, 0, 0])),
        ],
    ),
    "ties at the maximum go to the lowest id": (
        torch.tensor([[1.0, 3.0, 3.0, 3.0]]).expand(3, 4),
        [(propose((1, 2), law=GREEDY), Is(1, 1))],
    ),
    "lenient greedy decoding accepts p(x) ≥ l · max p": (  # [L A.5]; p(x)/max p is 0.6, then 0.4, then 0
        [[0.3, 0.5, 0.2], [0.3, 0.5, 0.2], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]],
        [
            (propose((0, 2, 0), law=GREEDY, lenience=lenience), Is(accepted, 1))
            for lenience, accepted in ((1.0, 0), (0.61, 0), (0.59, 1), (0.2, 2))
        ],
    ),
    "lenient greedy decoding sums beta over what would be accepted": (
        [[0.3, 0.5, 0.2], [1.0, 0.0, 0.0]],
        [(propose((0,), (sparse({0: 2, 1: 1, 2: 7}),), law=GREEDY, lenience=0.5), Is(1, beta=(0.3,)))],
    ),
}

# ---------------------------------------------------------------------------------------------------- block and coupled

BLOCK: dict[str, Case] = {
    "a later success takes back an earlier failure": (
        # p(0)/q̂(0) is 1.6, then 0.4: h_1 = P_1 = 1, as what p lacks of q̂ at 0 it exceeds it by at 1.
        [[0.8, 0.2, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0]],
        [(block((0, 0), (HALF, HALF), (LAST, u)), Is(accepted)) for u, accepted in ((0.41, 1), (0.39, 2))],
    ),
    "a shorter block ends at h": (  # P_1 = 0.4; Z = Σ max(0.4 p_2 - q̂_2, 0) = 0.32, all at token 2; h_1 = 0.32 / 0.92
        [[0.2, 0.8, 0.0, 0.0], [0.1, 0.1, 0.8, 0.0]],
        [
            (block((0, 1), (HALF, HALF), (u, LAST), 0.6), Is(0, 1) if is_above else Is(1, 2))
            for u, is_above in around(0.32 / 0.92, step=1e-4)
        ],
    ),
    "equal distributions accept all, with no remainder to divide by": (
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
    "a token outside the vocabulary ends the block": (
        [RISING] * 3,
        [(block((x, 3), (EVEN, EVEN), (0.0, 0.0), LAST), Is(0, 3)) for x in OUTSIDE],
    ),
    "a block of small weight still leaves its residual": (  # P_1 = 2e-7; all of token 3 is left of the second p
        [[1e-7, 1 - 1e-7, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]],
        [(block((0, 1), (HALF, HALF), (0.0, LAST)), Is(1, 3))],
    ),
    "point masses are distributions": (  # P_1 = 0.5, Z = 0.5 (1 - 0.25), h_1 = 0.375/0.875; P_2 = 0.125
        [[0.5, 0.5], [0.25, 0.75]],
        [
            (block((0, 0), (None, None), u), Is(accepted))
            for u, accepted in (((0.0, 0.124), 2), ((0.428, 0.126), 1), ((0.429, 0.126), 0))
        ],
    ),
    "after a success P · p less q̂ is drawn from": (  # P_1 = 0.5: only token 1 is left, by 0.05; h_1 = 0.05/0.55
        [[0.25, 0.75, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]],
        [
            (block((0, 0), (HALF, sparse({0: 13, 1: 2, 2: 3, 3: 2})), (0.09, LAST), u), Is(1, 1))
            for u in (0.0, 0.9, LAST)
        ],
    ),
    "a bad row counts while the block can still grow": (
        torch.tensor([[0.0, 0.0, -9.0], [math.nan, 0.0, -9.0], [0.0, 0.0, 0.0]]),
        [
            (block((0, 0), (HALF, HALF), (LAST, LAST)), BAD),
            (block((5, 0), (sparse({0: 1, 2: 1}), HALF), (LAST, LAST)), Is(0)),
        ],
    ),
    "a bad row after the last draft counts where all are accepted": (
        torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]]),
        [(block((0,), (sparse({0: 1}),), (0.4,)), BAD), (block((0,), (sparse({0: 1}),), (0.6,)), Is(0))],
    ),
    "beta is of the rows up to the stopping one of a block": (
        [[0.5, 0.5]] * 4,
        [
            (block((0, 0, 0), (HALF, sparse({0: 3, 1: 1}), HALF), accept), expected)
            for accept, expected in (
                ((0.5, LAST, LAST), Is(1, beta=(1.0, 0.75))),
                ((0.5, 0.1, 0.0), Is(3, beta=(1.0, 0.75, 1.0))),
            )
        ],
    ),
}

COUPLED: dict[str, Case] = {
    "a coupled token outside the vocabulary is rejected": (
        [[0.25] * 4] * 2,
        [(coupled((x,), 1, 1), Is(0)) for x in OUTSIDE[:3]],
    ),
    "a bad row counts where coupling meets it": (
        torch.tensor([[0.0, -math.inf], [math.nan, 0.0], [0.0, 0.0]]),
        [(coupled((0, 0), 1, 1), BAD), (coupled((1, 0), 1, 1), Is(0, 0))],
    ),
}

# -------------------------------------------------------------------------------------------------------------- sigmoid


def _halved() -> Case:
    """At temperature 0.5, in acceptance and in what is left after a failure, at the precision of float32."""
    z, v, params = (-2.0, 0.5, 1.0), (-9.0, 1.5, 1.0), SamplingParams(temperature=0.5)
    p, q = [sigma(each / 0.5) for each in z], [sigma(each) for each in v]
    edge = (p[0] - q[0]) / (p[0] - q[0] + p[2] - q[2])
    return torch.tensor([z] * 2), [
        *((sigmoid((1,), [v], (u,), params=params), Is(1 - over)) for u, over in around(p[1] / q[1])),
        *((sigmoid((1,), [v], (LAST,), u, params=params), Is(0, 2 * over)) for u, over in around(edge)),
    ]


def _wide() -> Case:
    """With these scales the mark of exclusion, read as a logit, would have a score of 0.48."""
    scales = SigmoidScales(-6e4, 0.0)
    whole, part = sigma(0.0, scales), sigma(0.0, scales) - sigma(-6e4, scales)
    return torch.zeros(2, 3), [
        (sigmoid((-1,), [(0.0, EXCLUDED, -6e4)], (0.5,), u, scales=scales), Is(0, 1 + over))
        for u, over in around(whole / (whole + part))
    ]


def _rest(scales: SigmoidScales) -> Case:
    z, v = (2.0, -1.0, 3.0, 0.5), (1.0, 4.0, 0.0, 0.0)
    rest = [max(0.0, sigma(a, scales) - sigma(b, scales)) for a, b in zip(z, v, strict=True)]
    edges = around(rest[0] / sum(rest), (rest[0] + rest[2]) / sum(rest))
    return torch.tensor([z]), [
        (sigmoid((1,), [v], (LAST,), u, scales=scales), Is(0, (0, 2, 3)[place], ())) for u, place in ((0.0, 0), *edges)
    ]


def _softmax_drawn() -> Case:
    """The softmax has temperature and filters: here tokens 0 and 1 alone."""
    params = SamplingParams(temperature=0.5, top_k=2)
    uniforms = ((0.0, 0), *around(1 / (1 + math.e), step=1e-5), (LAST, 1))
    return torch.tensor([[0.5, 1.0, 0.0]] * 2), [
        (sigmoid((token,), [v], (LAST,), u, params=params), Is(0, x, status=Status.ZERO_RESIDUAL))
        for v, token in (((1.0, 2.0, 0.0), -1), ((1.5, 2.0, 9.0), 2))
        for u, x in uniforms
    ]


def _after_the_last(gamma: int) -> Case:
    params, z = SamplingParams(temperature=0.5), torch.zeros(gamma + 1, 3)
    z[gamma] = torch.tensor([0.5, 1.0, 0.0])
    first, second, _ = torch.softmax(z[gamma].double() / 0.5, -1).cumsum(-1).tolist()
    return z, [
        (sigmoid((0,) * gamma, [[0.0] * 3] * gamma, None, u, params=params), Is(gamma, x))
        for u, x in ((0.0, 0), *around(first, second, step=1e-5))
    ]


SIGMOID: dict[str, Case] = {
    "the temperature divides the target's logits alone": _halved(),
    "sigmoid acceptance is strict": (  # σ is 1/2 at α and 1 far above β, in any precision
        torch.zeros(2, 2),
        [
            (sigmoid((1,), [(0.0, 6e4)], (u,), scales=SigmoidScales(0.0, 1.0)), expected)
            for u, expected in ((0.5, Is(0, status=Status.ZERO_RESIDUAL)), (0.5 - 2**-53, Is(1)))
        ],
    ),
    "what the draft excluded is refused, and the residual there is all of p̂": (
        torch.tensor([[1.0, 1.0, 1.0]]),
        [(sigmoid((1,), [(1.0, EXCLUDED, 1.0)], (0.0,), u), Is(0, 1)) for u in (0.0, 0.5, LAST)],
    ),
    "an excluded token has no score, however wide the scales": _wide(),
    "banned tokens have no score": (
        torch.tensor([[1.0, -math.inf, 1.0]]),
        [(sigmoid((1,), [(0.0, 5.0, 1.0)], (0.0,)), Is(0, 0))],
    ),
    "what the target's filters drop is neither accepted nor drawn": (
        torch.tensor([[3.0, 2.5, 0.0, 0.0]] * 2),
        [
            (sigmoid((2,), [(-9.0, -9.0, 0.0, -9.0)], (0.0,), u, params=params), Is(0, x))
            for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.8), SamplingParams(min_p=0.2))
            for u, x in ((0.0, 0), (LAST, 1))
        ],
    ),
    "under sigmoid too a token outside the vocabulary is rejected": (
        torch.tensor([[1.0, 1.0, 2.0]]),
        [(sigmoid((x,), [(1.0, 1.0, 1.0)], (0.0,)), Is(0, 2)) for x in (-1, 3, 2**40, -(2**62))],
    ),
    **{f"the rest is drawn from in order of id: {scales}": _rest(scales) for scales in (SCALES, *SCALES_OF_W)},
    "where nothing is left the target's softmax is drawn from": _softmax_drawn(),
    **{f"after {gamma} accepted drafts the softmax is drawn from": _after_the_last(gamma) for gamma in (0, 2)},
    **{
        f"a logit of {bad} counts where sigmoid meets it": (
            torch.tensor([[0.0, 0.0], [bad, 0.0]]),
            [
                (sigmoid((0, 1), [(0.0, 0.0)] * 2, (0.0, 0.0)), BAD),
                (sigmoid((-1, 1), [(0.0, 0.0)] * 2, (0.0, 0.0)), Is(0, status=Status.ZERO_RESIDUAL)),
                (sigmoid((0,), [(0.0, 0.0)], (0.0,)), BAD),
            ],
        )
        for bad in (math.nan, math.inf)
    },
}
CASES = TOKENWISE | BLOCK | COUPLED | SIGMOID


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_edge(name: str, path: str) -> None:
    given, judgements = CASES[name]
    z = given if isinstance(given, Tensor) else logits_of(given)
    rows = [torch.cat((z, z.new_zeros(3, z.shape[1])))[: proposed.gamma + 1] for proposed, _ in judgements]
    results = verify(torch.cat(rows), [proposed for proposed, _ in judgements], path)
    for number, (result, (_, expected)) in enumerate(zip(results, judgements, strict=True)):
        assert (result.status, result.accepted) == (expected.status, expected.accepted), number
        assert result.next_token in (range(z.shape[1]) if expected.next_token is None else [expected.next_token]), (
            number
        )
        assert expected.beta is None or result.beta == pytest.approx(expected.beta), number


@pytest.mark.parametrize("path", HOST)
def test_acceptance_at_equality_is_noticed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference if path == "reference" else verify_torch, "accepts", accepts_equality)
    with pytest.raises(AssertionError):
        test_edge("a token of probability zero is rejected at u = 0", path)


@pytest.mark.parametrize("path", HOST)
def test_block_judges_one_draft_as_tokenwise_does(path: str) -> None:
    z = logits_of([RISING, [0.25] * 4])
    for token, u, resample in product(range(4), (0.0, 0.39, 0.41, 0.79, 0.81, LAST), (0.0, 0.3, 0.7, LAST)):
        one = block((token,), (EVEN,), (u,), resample)
        assert verify(z, [one], path) == verify(z, [replace(one, rule=Rule.TOKENWISE)], path)


@pytest.mark.parametrize("path", HOST)
@pytest.mark.parametrize(("lenience", "temperature"), [(1.0, 1.0), (0.8, 0.5), (1.0, 4.0)])
@pytest.mark.parametrize("scales", [SCALES, SigmoidScales(2.0, 2.25), *SCALES_OF_W])
def test_sigmoid_accepts_below_the_ratio_of_scores(
    path: str, lenience: float, temperature: float, scales: SigmoidScales
) -> None:
    """The target's logits are divided by the temperature here; the draft's come so."""
    z, params = torch.tensor([[-2.0, 0.5, 1.0], [0.0, 0.0, 0.0]]), SamplingParams(temperature=temperature)
    edge = sigma(0.5 / temperature, scales) / sigma(5.0, scales) / lenience
    for u, over in around(edge, step=edge * 1e-12):
        if u < 1:
            proposed = sigmoid((1,), [(0.0, 5.0, -5.0)], (u,), params=params, scales=scales)
            (result,) = verify(z, [replace(proposed, lenience=lenience)], path)
            assert (result.accepted, result.beta) == (1 - over, ())


FILTERED = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("params", "at"),
    [(SamplingParams(), 0), (SamplingParams(), 1), (SamplingParams(), 2), (GREEDY, 0), (GREEDY, 2), (FILTERED, 1)],
)
def test_a_bad_row_spoils_its_own_sequence_alone(path: str, params: SamplingParams, at: int) -> None:
    nan, inf = math.nan, math.inf
    z = logits_of([[0.1, 0.7, 0.1, 0.1]] * 18).view(6, 3, 4)
    z[1:5, at] = torch.tensor([[0.0, nan, 1.0, 2.0], [nan] * 4, [-inf] * 4, [0.0, 1.0, inf, 2.0]])
    proposed = propose((1, 1), accept=(0.0, 0.0), law=params, top_logprobs=2)
    first, *bad, last = verify(z.view(18, 4), [proposed] * 6, path)
    assert first == last
    assert (first.status, first.accepted) == (Status.OK, 2)
    for each in bad:
        assert (each.status, each.accepted, each.next_token, each.logprobs) == (Status.BAD_LOGITS, 0, -1, ())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [1.0, 1e-40, 0.5])
def test_extreme_logits_have_a_distribution(path: str, temperature: float) -> None:
    z = torch.tensor([[65504.0, -65504.0, 65504.0], [-3.4e38, 3.4e38, -math.inf], [0.0, 0.0, 0.0]])
    proposed = propose(resample=0.75, law=SamplingParams(temperature=temperature))
    assert [each.next_token for each in verify(z, [proposed] * 3, path)] == [2, 1, 2]


@pytest.mark.parametrize("path", PATHS)
def test_no_proposals_give_no_results(path: str) -> None:
    assert verify(torch.empty(0, 7), [], path) == []
