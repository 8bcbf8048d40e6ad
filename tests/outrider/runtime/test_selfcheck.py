"""`check` refuses results that differ or are NaN, and errors, and names them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.runtime.selfcheck import check, reference
from tests.outrider.runtime.tiny import FAMILIES, VOCABULARY

WANTED = torch.tensor([[4.0, -2.0], [1.0, 0.5], [0.0, 3.0]])


def given(change: Callable[[Tensor], Tensor]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"sums": WANTED, "rows": change(WANTED.clone())}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows, None),
        (lambda rows: rows.bfloat16(), None),
        (lambda rows: rows + 0.039, None),
        (lambda rows: rows - 0.041, "rows differ by 0.01 of their size; 0.01 is allowed"),
        (lambda rows: rows * torch.nan, "rows differ by nan of their size; 0.01 is allowed"),
        (lambda rows: rows @ rows, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x2 and 3x2)"),
    ],
)
def test_the_largest_difference_counts_as_a_share_of_the_largest_number(
    change: Callable[[Tensor], Tensor], reason: str | None
) -> None:
    found = check(given(change), given(lambda rows: rows), 0.01)
    assert found == reason
    assert (found is not None and isinstance(found.cause, RuntimeError)) == (reason is not None and "Runtime" in reason)


def test_soft_capped_scores_are_never_those_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not this version of transformers accepts sdpa for them."""
    model = AutoModelForCausalLM.from_config(FAMILIES["gemma2"]())
    chosen: list[str] = []
    monkeypatch.setattr(model, "set_attn_implementation", chosen.append)
    reference(model, VOCABULARY, 64)
    assert chosen[0] == "eager"


def test_a_typical_check_looks_at_the_median_row() -> None:
    def spoil(rows: int) -> Callable[[Tensor], Tensor]:
        return lambda given: torch.cat((given[:rows] * 2, given[rows:]))

    assert check(given(spoil(1)), given(lambda rows: rows), 0.01, typical=True) is None
    assert check(given(spoil(2)), given(lambda rows: rows), 0.01, typical=True) == (
        "rows differ by 1 of their size; 0.01 is allowed"
    )
