"""Adjustments: penalties, biases and bans as the field defines them, row by row, forwards and backwards."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules, RowAdjustment, apply
from kernels.sampling import bad_rows

V = 12
EVERYTHING = LogitRules(
    repetition_penalty=1.5,
    presence_penalty=0.25,
    frequency_penalty=0.125,
    logit_bias=((3, 2.0), (4, -1.5), (9, -math.inf)),
    banned_tokens=(7,),
    stop_token_ids=(0, 4),
    min_new_tokens=3,
)
RULES = {
    "everything": EVERYTHING,
    "repetition": LogitRules(repetition_penalty=0.8),
    "presence": LogitRules(presence_penalty=-0.5),
    "frequency": LogitRules(frequency_penalty=0.5),
    "stops": LogitRules(stop_token_ids=(0, 5), min_new_tokens=2),
    "bans": LogitRules(banned_tokens=(1, 2)),
}


def _plainly(z: Tensor, rules: LogitRules, prompt: list[int], generated: list[int]) -> Tensor:
    """Return one adjusted row `[V]` as the definitions read, token by token."""
    out = z.tolist()
    for token, value in enumerate(z.tolist()):
        if token in prompt or token in generated:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        if token in generated:
            value -= rules.presence_penalty + rules.frequency_penalty * generated.count(token)
        value += dict(rules.logit_bias).get(token, 0.0)
        too_early = token in rules.stop_token_ids and len(generated) < rules.min_new_tokens
        out[token] = -math.inf if token in rules.banned_tokens or too_early else value
    return torch.tensor(out)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rows_follow_the_tokens_forwards_and_backwards(rules: LogitRules) -> None:
    source = random.Random(6)
    prompt = [1, 1, 4, 8]
    adjuster, generated = Adjuster(rules, prompt, V), list[int]()
    z = torch.randn(V, generator=torch.Generator().manual_seed(6)) * 3
    for _ in range(120):
        choice = source.random()
        if choice < 0.6:
            generated.append(source.randrange(V))
            adjuster.push(generated[-1])
        elif choice < 0.8 and generated:
            adjuster.pop()
            generated.pop()
        else:
            size = source.randrange(len(generated) + 1)
            adjuster.truncate(size)
            del generated[size:]
        assert adjuster.n_generated == len(generated)
        (adjusted,) = apply(z[None], [adjuster.row()])
        assert torch.allclose(adjusted, _plainly(z, rules, prompt, generated), rtol=1e-6, atol=1e-6)


def test_a_rows_ids_ascend() -> None:
    adjuster = Adjuster(EVERYTHING, [8, 1, 4], V)
    for token in (11, 2, 11, 6):
        adjuster.push(token)
        row = adjuster.row()
        assert row is not None
        assert (np.diff(row.ids) > 0).all()
        assert [str(each.dtype) for each in (row.ids, row.repetition, row.bias)] == ["int64", "float32", "float32"]
        assert len(row.ids) == len(row.repetition) == len(row.bias)


def test_a_row_handed_out_does_not_change() -> None:
    adjuster = Adjuster(EVERYTHING, [1], V)
    adjuster.push(2)
    row = adjuster.row()
    assert row is not None
    before = (row.ids.copy(), row.repetition.copy(), row.bias.copy())
    for token in (2, 5, 2, 3, 0):
        adjuster.push(token)
    adjuster.truncate(0)
    for array, copy in zip((row.ids, row.repetition, row.bias), before, strict=True):
        assert np.array_equal(array, copy)


def test_rules_that_change_nothing_have_no_rows() -> None:
    for rules in (LogitRules(), LogitRules(stop_token_ids=(1,)), LogitRules(min_new_tokens=5)):
        assert rules.is_identity
        adjuster = Adjuster(rules, [1, 2], V)
        adjuster.push(3)
        assert adjuster.row() is None


def test_rows_end_where_the_change_does() -> None:
    assert not any(rules.is_identity for rules in RULES.values())
    stops = Adjuster(LogitRules(stop_token_ids=(1,), min_new_tokens=1), [], V)
    assert stops.row() is not None
    stops.push(3)
    assert stops.row() is None
    assert Adjuster(LogitRules(presence_penalty=1.0), [1, 2], V).row() is None


def test_prompts_count_for_repetition_alone() -> None:
    presence = Adjuster(LogitRules(presence_penalty=1.0, frequency_penalty=1.0), [5], V)
    presence.push(6)
    row = presence.row()
    assert row is not None
    assert row.ids.tolist() == [6]
    repetition = Adjuster(LogitRules(repetition_penalty=2.0), [5], V)
    repetition.push(6)
    row = repetition.row()
    assert row is not None
    assert row.ids.tolist() == [5, 6]


def test_tokens_without_a_logit_only_count() -> None:
    adjuster = Adjuster(EVERYTHING, [V, 40], V)
    for _ in range(3):
        adjuster.push(V + 5)
    row = adjuster.row()
    assert row is not None
    assert row.ids.max() < V
    assert row.bias[row.ids == 0] == 0  # three tokens on, stops are allowed


def test_apply_leaves_other_rows_and_the_input_alone() -> None:
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    before = z.clone()
    row = RowAdjustment(np.array([2]), np.array([1.0], np.float32), np.array([5.0], np.float32))
    out = apply(z, [None, row, None])
    assert torch.equal(z, before)
    assert torch.equal(out[[0, 2]], z[[0, 2]])
    assert out[1, 2] == z[1, 2] + 5
    assert torch.equal(out[1, :2], z[1, :2])


def test_apply_returns_the_same_tensor_where_nothing_changes() -> None:
    z = torch.zeros(2, V, dtype=torch.bfloat16)
    assert apply(z, [None, None]) is z
    assert apply(z, []) is z


def test_apply_widens_short_dtypes() -> None:
    z = torch.full((1, V), 1.0, dtype=torch.bfloat16)
    row = RowAdjustment(np.array([0]), np.array([3.0], np.float32), np.array([0.0], np.float32))
    out = apply(z, [row])
    assert out.dtype == torch.float32
    assert float(out[0, 0]) == pytest.approx(1 / 3, abs=1e-7)


def test_bans_that_leave_nothing_make_a_bad_row() -> None:
    out = apply(torch.zeros(1, V), [Adjuster(LogitRules(banned_tokens=tuple(range(V))), [], V).row()])
    assert bad_rows(out).tolist() == [True]


def test_numbers_of_rows_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match="1 adjustments for 2 rows"):
        apply(torch.zeros(2, V), [None])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias of token 3 is nan"),
        ({"logit_bias": ((3, math.inf),)}, "logit_bias of token 3 is inf"),
        ({"logit_bias": ((3, 1.0), (5, 0.0), (3, 2.0))}, "logit_bias names token 3 2 times"),
        ({"logit_bias": ((-3, 1.0),)}, "logit_bias holds token -3"),
        ({"banned_tokens": (4, -1)}, "banned_tokens holds token -1"),
        ({"stop_token_ids": (-2,)}, "stop_token_ids holds token -2"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ],
)
def test_rules_out_of_range_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LogitRules(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["logit_bias", "banned_tokens", "stop_token_ids"])
def test_rules_for_ids_beyond_the_vocabulary_are_named(field: str) -> None:
    ids = ((V, 1.0),) if field == "logit_bias" else (V,)
    with pytest.raises(ValueError, match=f"{field} holds token {V}; the vocabulary has {V} ids"):
        Adjuster(LogitRules(**{field: ids}), [], V)  # type: ignore[arg-type]


def test_taking_back_too_much_is_named() -> None:
    adjuster = Adjuster(EVERYTHING, [], V)
    adjuster.push(1)
    with pytest.raises(ValueError, match=r"n_generated is 2, outside 0\.\.1"):
        adjuster.truncate(2)
    with pytest.raises(ValueError, match="n_generated is -1"):
        adjuster.truncate(-1)
