"""Penalties, biases and bans as the field defines them, row by row, forwards and backwards."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules, RowAdjustment, apply
from kernels.sampling import bad_rows
from tests.kernels.cases import gaussian

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


def _adjusted(z: Tensor, rules: LogitRules, prompt: list[int], generated: list[int]) -> Tensor:
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


def _row(rules: LogitRules, prompt: list[int], *generated: int) -> RowAdjustment | None:
    adjuster = Adjuster(rules, prompt, V)
    for token in generated:
        adjuster.push(token)
    return adjuster.row()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_rows_follow_the_tokens_forwards_and_backwards(rules: LogitRules) -> None:
    source = random.Random(6)
    prompt = [1, 1, 4, 8]
    adjuster, generated = Adjuster(rules, prompt, V), list[int]()
    z = gaussian(6, V, scale=3)
    assert not rules.is_identity
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
        assert torch.allclose(adjusted, _adjusted(z, rules, prompt, generated), rtol=1e-6, atol=1e-6)


def test_a_row_has_ascending_ids_and_does_not_change_later() -> None:
    adjuster = Adjuster(EVERYTHING, [8, 1, 4], V)
    rows = []
    for token in (11, 2, 11, 6):
        adjuster.push(token)
        row = adjuster.row()
        assert row is not None
        assert (np.diff(row.ids) > 0).all()
        assert [str(each.dtype) for each in (row.ids, row.repetition, row.bias)] == ["int64", "float32", "float32"]
        assert len(row.ids) == len(row.repetition) == len(row.bias)
        rows.append((row, [each.copy() for each in (row.ids, row.repetition, row.bias)]))
    adjuster.truncate(0)
    for row, before in rows:
        for array, copy in zip((row.ids, row.repetition, row.bias), before, strict=True):
            assert np.array_equal(array, copy)


@pytest.mark.parametrize("rules", [LogitRules(), LogitRules(stop_token_ids=(1,)), LogitRules(min_new_tokens=5)])
def test_rules_that_change_nothing_have_no_rows(rules: LogitRules) -> None:
    assert rules.is_identity
    assert _row(rules, [1, 2], 3) is None


@pytest.mark.parametrize(
    ("rules", "prompt", "generated", "ids"),
    [
        (LogitRules(stop_token_ids=(1,), min_new_tokens=1), [], (), [1]),
        (LogitRules(stop_token_ids=(1,), min_new_tokens=1), [], (3,), None),
        (LogitRules(presence_penalty=1.0), [1, 2], (), None),
        # Prompts count for repetition alone.
        (LogitRules(presence_penalty=1.0, frequency_penalty=1.0), [5], (6,), [6]),
        (LogitRules(repetition_penalty=2.0), [5], (6,), [5, 6]),
    ],
)
def test_rows_hold_the_tokens_that_change(
    rules: LogitRules, prompt: list[int], generated: tuple[int, ...], ids: list[int] | None
) -> None:
    row = _row(rules, prompt, *generated)
    assert (None if row is None else row.ids.tolist()) == ids


def test_tokens_without_a_logit_only_count() -> None:
    row = _row(EVERYTHING, [V, 40], *[V + 5] * 3)
    assert row is not None
    assert row.ids.max() < V
    assert row.bias[row.ids == 0] == 0  # three tokens on, stops are allowed


def test_apply_leaves_other_rows_and_the_input_alone() -> None:
    z = gaussian(1, 3, V)
    before = z.clone()
    row = RowAdjustment(np.array([2]), np.array([1.0], np.float32), np.array([5.0], np.float32))
    out = apply(z, [None, row, None])
    assert torch.equal(z, before)
    before[1, 2] += 5
    assert torch.equal(out, before)
    assert apply(z, [None] * 3) is apply(z, []) is z


def test_apply_widens_short_dtypes() -> None:
    row = RowAdjustment(np.array([0]), np.array([3.0], np.float32), np.array([0.0], np.float32))
    out = apply(torch.full((1, V), 1.0, dtype=torch.bfloat16), [row])
    assert out.dtype == torch.float32
    assert float(out[0, 0]) == pytest.approx(1 / 3, abs=1e-7)


def test_bans_that_leave_nothing_make_a_bad_row() -> None:
    assert bad_rows(apply(torch.zeros(1, V), [_row(LogitRules(banned_tokens=tuple(range(V))), [])])).tolist() == [True]


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
        *(
            ({field: ids}, f"{field} holds token {V}; the vocabulary has {V} ids")
            for field, ids in (("logit_bias", ((V, 1.0),)), ("banned_tokens", (V,)), ("stop_token_ids", (V,)))
        ),
    ],
)
def test_rules_out_of_range_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Adjuster(LogitRules(**fields), [], V)  # type: ignore[arg-type]


def test_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="1 adjustments for 2 rows"):
        apply(torch.zeros(2, V), [None])
    adjuster = Adjuster(EVERYTHING, [], V)
    adjuster.push(1)
    with pytest.raises(ValueError, match=r"n_generated is 2, outside 0\.\.1"):
        adjuster.truncate(2)
    with pytest.raises(ValueError, match="n_generated is -1"):
        adjuster.truncate(-1)
