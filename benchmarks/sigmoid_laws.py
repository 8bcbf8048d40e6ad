"""What one drafted place comes to under a rule, by formula: how often its token stands, and the law of what is written.

Nothing is drawn here. With q the law that drafts are sampled from, a(x) the chance that x then stands, and r the law of
the token in its place, the place is written by q·a + (1 - Σ q·a)·r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dense import SigmoidScales


@dataclass(frozen=True, slots=True)
class Precision:
    """In how many bits the rule `sigmoid` is computed.

    Attributes:
        name: what the tables call it.
        target: what the target's logits are rounded to.
        draft: what the draft's are.
        steps: what each step from logits to scores is rounded to.
    """

    name: str
    target: torch.dtype
    draft: torch.dtype
    steps: torch.dtype


SERVICES = Precision("as served", torch.float32, torch.float16, torch.float64)
FLOAT32 = Precision("float32", torch.float32, torch.float32, torch.float32)
FLOAT16 = Precision("float16", torch.float16, torch.float16, torch.float16)
PRECISIONS = (SERVICES, FLOAT32, FLOAT16)


@dataclass(frozen=True, slots=True)
class Places:
    """Several drafted places, `[N]` each. NaN where the scores are no numbers.

    Attributes:
        acceptance: Σ q·a, the chance that the drafted token stands.
        from_target: total variation between what is written and p.
        from_draft: total variation between what is written and q.
        distinct: how many values p̂ takes among the tokens.
    """

    acceptance: Tensor
    from_target: Tensor
    from_draft: Tensor
    distinct: Tensor


def scores(z: Tensor, scales: SigmoidScales, steps: torch.dtype) -> Tensor:
    """Return σ((z - α) / (β - α)) of `z` `[N, V]`, each step rounded to `steps`."""
    alpha, beta = (torch.tensor(value, dtype=torch.float64).to(steps) for value in (scales.alpha, scales.beta))
    return torch.sigmoid((z.to(steps) - alpha) / (beta - alpha))


def by_sigmoid(z: Tensor, v: Tensor, q: Tensor, scales: SigmoidScales, precision: Precision) -> Places:
    """Return the places of target logits `z`, draft logits `v` and the laws `q` drawn from, `[N, V]` each."""
    p_hat = scores(z.to(precision.target), scales, precision.steps)
    q_hat = scores(v.to(precision.draft), scales, precision.steps)
    return judged(torch.softmax(z.double(), -1), q.double(), p_hat.double(), q_hat.double())


def by_tokenwise(z: Tensor, q: Tensor) -> Places:
    """Return the same places under the exact rule, where p and q judge: what is written is p [L A.1]."""
    p = torch.softmax(z.double(), -1)
    return judged(p, q.double(), p, q.double())


def judged(p: Tensor, q: Tensor, p_hat: Tensor, q_hat: Tensor) -> Places:
    """Return places where drafts of law q stand with min(1, p̂/q̂), and norm(max(0, p̂ - q̂)) stands in for the others.

    All are float64 `[N, V]`. Where that residual is nothing, p stands in, as it does in the services.
    """
    stands = torch.where(q_hat > 0, (p_hat / q_hat).clamp(max=1), 0.0)
    stands = torch.where(p_hat.isnan() | q_hat.isnan(), torch.nan, stands)
    acceptance = (q * stands).sum(-1)
    rest = (p_hat - q_hat).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    instead = torch.where(mass == 0, p, rest / mass)
    written = q * stands + (1 - acceptance)[:, None] * instead
    return Places(
        acceptance=acceptance,
        from_target=total_variation(written, p),
        from_draft=total_variation(written, q),
        distinct=torch.tensor([_count_values(row) for row in p_hat], dtype=torch.float64),
    )


def _count_values(row: Tensor) -> float:
    return torch.nan if bool(row.isnan().any()) else len(row.unique())


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ |a - b| / 2 of each pair of rows, `[N]`."""
    return (a - b).abs().sum(-1) / 2
