"""The rule `sigmoid`, edge by edge, for the oracle and the fast path alike, and its joint law against the formula.

It is lossy: what is tested here is that it is the rule of [W 3.2.2], and not that it keeps the target's law.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.dense import EXCLUDED, DraftLogits, SigmoidScales
from kernels.sampling import SamplingParams
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule, Status
from tests.kernels.cases import proposed_of
from tests.kernels.laws import World, chance_of, in_dyads, joint_law, random_world, total_variation
from tests.kernels.paths import HOST, PATHS, verify
from tests.kernels.test_enumeration import PATHS as ENUMERATED

LAST = 1 - 2**-53
SCALES = SigmoidScales(-1.0, 3.0)
SCALES_OF_W = tuple(SigmoidScales(-(10.0**n), 10.0**n) for n in (1, 3, 4, 5))


def _logits(*values: float) -> DraftLogits:
    return DraftLogits(torch.tensor(values, dtype=torch.float16))


def _proposed(
    tokens: tuple[int, ...],
    q: tuple[DraftLogits | None, ...],
    accept: tuple[float, ...] | None = None,
    resample: float = 0.5,
    law: SamplingParams | None = None,
    scales: SigmoidScales = SCALES,
) -> Proposed:
    return proposed_of(tokens, q, accept, resample, law, rule=Rule.SIGMOID, sigmoid=scales)


def _sigma(z: float, scales: SigmoidScales = SCALES) -> float:
    return 1 / (1 + math.exp(-(z - scales.alpha) / (scales.beta - scales.alpha)))


# --------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("path", HOST)
@pytest.mark.parametrize(("lenience", "temperature"), [(1.0, 1.0), (0.8, 0.5), (1.0, 4.0)])
@pytest.mark.parametrize("scales", [SCALES, SigmoidScales(2.0, 2.25), *SCALES_OF_W])
def test_a_token_stands_below_the_ratio_of_sigmoids(
    path: str, lenience: float, temperature: float, scales: SigmoidScales
) -> None:
    """The target's logits are divided by the temperature here; the draft's come so."""
    z = torch.tensor([[-2.0, 0.5, 1.0], [0.0, 0.0, 0.0]])
    draft = _logits(0.0, 5.0, -5.0)
    edge = _sigma(0.5 / temperature, scales) / _sigma(5.0, scales) / lenience
    for u, accepted in ((edge * (1 - 1e-12), 1), (edge * (1 + 1e-12), 0)):
        if u < 1:
            proposed = replace(
                _proposed((1,), (draft,), (u,), law=SamplingParams(temperature=temperature), scales=scales),
                lenience=lenience,
            )
            (result,) = verify(z, [proposed], path)
            assert (result.accepted, result.beta) == (accepted, ())


@pytest.mark.parametrize("path", PATHS)
def test_the_temperature_divides_the_targets_logits_alone(path: str) -> None:
    """In the test and in what is left after a failure, at a precision that float32 has."""
    rows, draft, law = torch.tensor([[-2.0, 0.5, 1.0]] * 2), _logits(-9.0, 1.5, 1.0), SamplingParams(temperature=0.5)
    p, q = [_sigma(z / 0.5) for z in (-2.0, 0.5, 1.0)], [_sigma(v) for v in (-9.0, 1.5, 1.0)]
    for u, accepted in ((p[1] / q[1] - 1e-6, 1), (p[1] / q[1] + 1e-6, 0)):
        (result,) = verify(rows, [_proposed((1,), (draft,), (u,), law=law)], path)
        assert result.accepted == accepted
    edge = (p[0] - q[0]) / (p[0] - q[0] + p[2] - q[2])
    for u, expected in ((edge - 1e-6, 0), (edge + 1e-6, 2)):
        (result,) = verify(rows, [_proposed((1,), (draft,), (LAST,), u, law)], path)
        assert (result.accepted, result.next_token) == (0, expected)


@pytest.mark.parametrize("path", PATHS)
def test_the_test_is_strict(path: str) -> None:
    """σ is 1/2 at α and 1 far above β, in any precision: u · 1 < 1/2 and no more."""
    z = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    scales = SigmoidScales(0.0, 1.0)
    for u, accepted in ((0.5, 0), (0.5 - 2**-53, 1)):
        (result,) = verify(z, [_proposed((1,), (_logits(0.0, 6e4),), (u,), scales=scales)], path)
        assert result.accepted == accepted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("law", [SamplingParams(top_k=2), SamplingParams(top_p=0.8), SamplingParams(min_p=0.2)])
def test_what_the_targets_filters_drop_is_neither_accepted_nor_drawn(path: str, law: SamplingParams) -> None:
    z = torch.tensor([[3.0, 2.5, 0.0, 0.0]] * 2)
    for resample in (0.0, 0.5, LAST):
        proposed = _proposed((2,), (_logits(-9.0, -9.0, 0.0, -9.0),), (0.0,), resample, law)
        (result,) = verify(z, [proposed], path)
        assert (result.accepted, result.status) == (0, Status.OK)
        assert result.next_token in (0, 1)


@pytest.mark.parametrize("path", PATHS)
def test_what_the_draft_excluded_has_no_share_in_the_draft(path: str) -> None:
    """Its q̂ is 0, so that it is refused as a draft, and the residual there is all of p̂."""
    z = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    draft = _logits(1.0, EXCLUDED, 1.0)
    for resample in (0.0, 0.5, LAST):
        (result,) = verify(z, [_proposed((1,), (draft,), (0.0,), resample)], path)
        assert (result.accepted, result.next_token, result.status) == (0, 1, Status.OK)


@pytest.mark.parametrize("path", PATHS)
def test_an_excluded_token_has_no_share_though_the_scales_be_wide(path: str) -> None:
    """With these scales the mark of exclusion, read as a logit, would come to a score of 0.48."""
    scales = SigmoidScales(-6e4, 0.0)
    whole, part = _sigma(0.0, scales), _sigma(0.0, scales) - _sigma(-6e4, scales)
    edge = whole / (whole + part)
    for u, expected in ((edge - 1e-6, 1), (edge + 1e-6, 2)):
        proposed = _proposed((-1,), (_logits(0.0, EXCLUDED, -6e4),), (0.5,), u, scales=scales)
        (result,) = verify(torch.zeros(2, 3), [proposed], path)
        assert (result.accepted, result.next_token) == (0, expected)


@pytest.mark.parametrize("path", PATHS)
def test_banned_tokens_have_no_score(path: str) -> None:
    z = torch.tensor([[1.0, -math.inf, 1.0], [0.0, 0.0, 0.0]])
    (result,) = verify(z, [_proposed((1,), (_logits(0.0, 5.0, 1.0),), (0.0,), 0.5)], path)
    assert (result.accepted, result.next_token) == (0, 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [-1, 3, 2**40, -(2**62)])
def test_a_token_outside_the_vocabulary_is_rejected(path: str, token: int) -> None:
    z = torch.tensor([[1.0, 1.0, 2.0]] * 2)
    (result,) = verify(z, [_proposed((token,), (_logits(1.0, 1.0, 1.0),), (0.0,))], path)
    assert (result.accepted, result.next_token) == (0, 2)


# ------------------------------------------------------------------------------------------------ the next token


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scales", [SCALES, *SCALES_OF_W])
def test_the_next_token_is_drawn_from_what_is_left_in_order_of_id(path: str, scales: SigmoidScales) -> None:
    z, v = (2.0, -1.0, 3.0, 0.5), (1.0, 4.0, 0.0, 0.0)
    rest = [max(0.0, _sigma(a, scales) - _sigma(b, scales)) for a, b in zip(z, v, strict=True)]
    first, second = rest[0] / sum(rest), (rest[0] + rest[2]) / sum(rest)
    rows = torch.tensor([z, z])
    for u, expected in ((0.0, 0), (first - 1e-6, 0), (first + 1e-6, 2), (second - 1e-6, 2), (second + 1e-6, 3)):
        (result,) = verify(rows, [_proposed((1,), (_logits(*v),), (LAST,), u, scales=scales)], path)
        assert (result.accepted, result.next_token, result.status) == (0, expected, Status.OK)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("v", "token"), [((1.0, 2.0, 0.0), -1), ((1.5, 2.0, 9.0), 2)])
def test_where_nothing_is_left_the_targets_law_is_drawn_from(path: str, v: tuple[float, ...], token: int) -> None:
    """That law is a softmax, with temperature and filters: here tokens 0 and 1 alone."""
    law = SamplingParams(temperature=0.5, top_k=2)
    z = torch.tensor([[0.5, 1.0, 0.0]] * 2)
    edge = 1 / (1 + math.e)
    for u, expected in ((0.0, 0), (edge - 1e-5, 0), (edge + 1e-5, 1), (LAST, 1)):
        (result,) = verify(z, [_proposed((token,), (_logits(*v),), (LAST,), u, law)], path)
        assert (result.accepted, result.status, result.next_token) == (0, Status.ZERO_RESIDUAL, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gamma", [0, 2])
def test_after_the_last_draft_the_next_token_has_the_targets_law(path: str, gamma: int) -> None:
    z = torch.zeros(gamma + 1, 3)
    z[gamma] = torch.tensor([0.5, 1.0, 0.0])
    proposed = _proposed((0,) * gamma, (_logits(0.0, 0.0, 0.0),) * gamma, law=SamplingParams(temperature=0.5))
    p = torch.softmax(z[gamma].double() / 0.5, -1).cumsum(-1).tolist()
    for u, expected in ((0.0, 0), (p[0] - 1e-5, 0), (p[0] + 1e-5, 1), (p[1] - 1e-5, 1), (p[1] + 1e-5, 2)):
        given = replace(proposed, uniforms=replace(proposed.uniforms, resample=u))  # type: ignore[type-var]
        (result,) = verify(z, [given], path)
        assert (result.accepted, result.status, result.next_token) == (gamma, Status.OK, expected)


@pytest.mark.parametrize("path", PATHS)
def test_greed_is_as_under_any_rule(path: str) -> None:
    z = torch.tensor([[0.2, 0.5, 0.3]] * 3)
    for q in (None, _logits(9.0, 0.0, 0.0)):
        (result,) = verify(z, [_proposed((1, 2), (q, q), (LAST, 0.0), law=SamplingParams(temperature=0))], path)
        assert (result.accepted, result.next_token, result.beta) == (1, 1, ())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_counts_where_it_is_met(path: str, bad: float) -> None:
    z = torch.zeros(9, 2)
    z[1, 0] = z[4, 0] = z[8, 0] = bad
    q = (_logits(0.0, 0.0), _logits(0.0, 0.0))
    walked, stopped = _proposed((0, 1), q, (0.0, 0.0)), _proposed((-1, 1), q, (0.0, 0.0))
    met, spared, at_last = verify(z, [walked, stopped, walked], path)
    assert [each.status for each in (met, spared, at_last)] == [
        Status.BAD_LOGITS,
        Status.ZERO_RESIDUAL,
        Status.BAD_LOGITS,
    ]
    assert spared.accepted == 0


# ----------------------------------------------------------------------------------------------- the draft's side


def test_draft_logits_are_scaled_filtered_and_in_sixteen_bits() -> None:
    z = torch.tensor([[1.0, 3.0, 2.0, -math.inf], [-1e9, 1e9, 0.0, 0.0]])
    scaled, filtered = (draft_logits(z, law) for law in (SamplingParams(temperature=0.5), SamplingParams(top_k=2)))
    assert scaled[0].values.tolist() == [2.0, 6.0, 4.0, EXCLUDED]
    assert scaled[1].values.tolist() == [-65472.0, 65504.0, 0.0, 0.0]  # what 16 bits hold, and not excluded
    assert filtered[0].values.tolist() == [EXCLUDED, 3.0, 2.0, EXCLUDED]
    assert scaled[0].values.dtype == torch.float16
    with pytest.raises(ValueError, match="temperature is 0"):
        draft_logits(z, SamplingParams(temperature=0))


# ------------------------------------------------------------------------------------------------------------ its law


@pytest.mark.parametrize("path", ENUMERATED)
@pytest.mark.parametrize(
    ("scales", "lenience", "law"),
    [
        (SigmoidScales(-1.0, 1.0), 1.0, SamplingParams()),
        (SigmoidScales(-10, 10), 0.7, SamplingParams(temperature=1.5, top_k=3)),
        (SigmoidScales(-1e4, 1e4), 1.0, SamplingParams()),
    ],
    ids=["plain", "lenient and filtered", "wide"],
)
def test_the_joint_law_of_accepted_and_tokens_is_as_the_formula_says(
    path: str, scales: SigmoidScales, lenience: float, law: SamplingParams
) -> None:
    verify_by, bound, bisections = ENUMERATED[path]
    world = _world(11, scales, lenience, law)
    expected = _formula(world)
    assert expected.sum() == pytest.approx(1, abs=1e-12)
    assert expected.sum(axis=(1, 2, 3)).min() > 1e-5  # each outcome has its share
    # Bisection places each edge of the oracle's next token to 1e-13.
    assert total_variation(joint_law(verify_by, world, bisections=bisections), expected) < max(bound, 5e-12)


def _world(seed: int, scales: SigmoidScales, lenience: float, law: SamplingParams) -> World:
    """Return a world whose draft claims logits of its own, higher than the target's by 1, and excludes two tokens."""
    world = random_world(seed, config=SparseConfig(keep_mass=1.0), lenience=lenience, rule=Rule.SIGMOID)
    source = torch.Generator().manual_seed(seed)

    def said() -> DraftLogits:
        v = (torch.randn(4, generator=source) * 2 + 1).half()
        return DraftLogits(v)

    first, second = said(), [said() for _ in range(4)]
    first.values[3] = second[1].values[0] = EXCLUDED
    return replace(
        world,
        q=(in_dyads(world.q[0]), tuple(in_dyads(each) for each in world.q[1])),
        draft_logits=(first, second),
        sigmoid=scales,
        law=law,
    )


def _formula(world: World) -> np.ndarray:
    """Return the law of (accepted, tokens), `[3, 4, 4, 4]`, from p̂, q̂, q and p, with no uniform in sight."""
    assert world.draft_logits is not None
    first = _round(world, world.logits[0], world.draft_logits[0])
    law = np.zeros((3, 4, 4, 4))
    for x1 in range(4):
        q1 = chance_of(world.q[0], x1)
        law[0, :, 0, 0] += q1 * (1 - first[0][x1]) * first[1]
        second = _round(world, world.logits[1][x1], world.draft_logits[1][x1])
        for x2 in range(4):
            both = q1 * first[0][x1] * chance_of(world.q[1][x1], x2)
            law[1, x1, :, 0] += both * (1 - second[0][x2]) * second[1]
            law[2, x1, x2] += both * second[0][x2] * _softmax(world, world.logits[2][x1, x2])
    return law


def _round(world: World, z: Tensor, draft: DraftLogits) -> tuple[np.ndarray, np.ndarray]:
    """Return the chance that each token is accepted, and the law of the next token where one is not, `[4]` each."""
    assert world.sigmoid is not None
    T, least = world.law.temperature, z.sort().values[-world.law.top_k if world.law.top_k else 0].item()
    p = np.array([_sigma(each / T, world.sigmoid) if each >= least else 0.0 for each in z.tolist()])
    v = draft.values.tolist()
    q = np.array([0.0 if each == EXCLUDED else _sigma(each, world.sigmoid) for each in v])
    stands = np.array([min(1.0, a / (b * world.lenience)) if b > 0 else 0.0 for a, b in zip(p, q, strict=True)])
    rest = np.maximum(0, p - q)
    return stands, rest / rest.sum() if rest.sum() > 0 else _softmax(world, z)


def _softmax(world: World, z: Tensor) -> np.ndarray:
    T, least = world.law.temperature, z.sort().values[-world.law.top_k if world.law.top_k else 0].item()
    e = np.array([math.exp(each / T) if each >= least else 0.0 for each in z.tolist()])
    return np.asarray(e / e.sum())


def test_with_the_scales_of_the_paper_nearly_all_is_accepted_and_the_law_is_the_drafts() -> None:
    """[W] uses ±1e4 where it summarises. The first token then has the draft's law, and not the target's."""
    world = _world(11, SigmoidScales(-1e4, 1e4), 1.0, SamplingParams())
    whole = replace(world, draft_logits=_without_exclusions(world))
    law = _formula(whole)
    first = law[0, :, 0, 0] + law[1].sum(axis=(1, 2)) + law[2].sum(axis=(1, 2))
    p = world.target.sum(axis=(1, 2))
    q = np.array([chance_of(world.q[0], x) for x in range(4)])
    assert law[2].sum() > 0.999
    assert total_variation(q, p) > 0.2
    assert total_variation(first, p) == pytest.approx(total_variation(q, p), abs=1e-3)


def _without_exclusions(world: World) -> tuple[DraftLogits, list[DraftLogits]]:
    assert world.draft_logits is not None
    first, second = world.draft_logits
    return (
        DraftLogits(first.values.masked_fill(first.values == EXCLUDED, -3.0)),
        [DraftLogits(each.values.masked_fill(each.values == EXCLUDED, -3.0)) for each in second],
    )
