"""Penalties, biases and bans by their usual definitions, with tokens pushed and taken back."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules, RowAdjustment, apply
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
    "repetition and presence": LogitRules(repetition_penalty=0.8, presence_penalty=-0.5),
    "stops": LogitRules(stop_token_ids=(0, 5), min_new_tokens=2),
    "nothing": LogitRules(stop_token_ids=(1,)),
}


def _adjusted(z: Tensor, rules: LogitRules, prompt: list[int], generated: list[int]) -> Tensor:
    """Return one adjusted row `[V]`, token by token."""
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
def test_rows_follow_pushed_and_popped_tokens(rules: LogitRules) -> None:
    source = random.Random(6)
    prompt = [1, 1, 4, 8, V + 3]  # the last one has no logit
    adjuster, generated = Adjuster(rules, prompt, V), list[int]()
    z = gaussian(6, V, scale=3)
    for _ in range(120):
        choice = source.random()
        if choice < 0.6:
            generated.append(source.randrange(V + 2))
            adjuster.push(generated[-1])
        elif choice < 0.8 and generated:
            adjuster.pop()
            generated.pop()
        else:
            size = source.randrange(len(generated) + 1)
            adjuster.truncate(size)
            del generated[size:]
        expected = _adjusted(z, rules, prompt, generated)
        for same in (adjuster, Adjuster(rules, prompt, V, generated)):
            assert same.n_generated == len(generated)
            row = same.row()
            assert row is None or (np.diff(row.ids) > 0).all()
            (adjusted,) = apply(z[None], [row])
            assert torch.allclose(adjusted, expected, rtol=1e-6, atol=1e-6)


def test_apply_leaves_other_rows_and_the_input_alone() -> None:
    z = gaussian(1, 3, V)
    before = z.clone()
    row = RowAdjustment(np.array([2]), np.array([1.0], np.float32), np.array([5.0], np.float32))
    out = apply(z, [None, row, None])
    assert torch.equal(z, before)
    before[1, 2] += 5
    assert torch.equal(out, before)
    assert apply(z, [None] * 3) is apply(z, []) is z


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": ((3, math.inf),)}, "logit_bias of token 3 is inf"),
        ({"logit_bias": ((3, 1.0), (5, 0.0), (3, 2.0))}, "logit_bias has the token 3 2 times"),
        ({"logit_bias": ((-3, 1.0),)}, "logit_bias has the token -3"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"banned_tokens": (V,)}, f"banned_tokens has the token {V}; ids must be below {V}"),
    ],
)
def test_rules_out_of_range_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Adjuster(LogitRules(**fields), [], V)  # type: ignore[arg-type]


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows has length 1; it must be 0 or that of the logits, 2"):
        apply(torch.zeros(2, V), [None])
    adjuster = Adjuster(EVERYTHING, [], V)
    adjuster.push(1)
    with pytest.raises(ValueError, match=r"n_generated is 2; it must be 0 to 1"):
        adjuster.truncate(2)


def test_rows_in_a_row_end_before_stops_are_allowed() -> None:
    """The third token is the last one with a ban; `is_counted` is of tokens that are drawn without another row."""
    adjuster = Adjuster(LogitRules(stop_token_ids=(0,), min_new_tokens=3), [1], V)
    assert [adjuster.is_counted(tokens) for tokens in range(1, 6)] == [True, True, True, False, False]
    adjuster.push(5)
    assert [adjuster.is_counted(tokens) for tokens in range(1, 4)] == [True, True, False]
