"""What is verified in `benchmarks.kernel`: logits of a Zipf-like law, and drafts of a law near it.

Rows repeat from sequence to sequence, in memory of their own; draws do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.dense import DraftLogits, SigmoidScales
from kernels.rng import Domain, gumbel, uniform
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule

MAX_GAMMA = 20
BASE_LENGTH = 1000
_EXPONENT = 1.5  # p ∝ rank^-1.5: the best 64 of 128k tokens have nine tenths of the mass
_APART = 0.7  # standard deviation of draft and target logits from each other
_SUPPORT = SparseConfig(keep_mass=0.99, max_support=64)
_SCALES = SigmoidScales(-1e3, 1e3)


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of γ drafted tokens over a vocabulary of V."""

    V: int
    B: int
    gamma: int
    rule: Rule = Rule.TOKENWISE

    def keys(self) -> dict[str, Any]:
        """As JSON."""
        return {"V": self.V, "B": self.B, "gamma": self.gamma, "rule": self.rule.value}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence of `MAX_GAMMA` drafts, which those of all others are copies of.

    Attributes:
        logits: `[MAX_GAMMA + 1, V]`.
        draft_logits: `[MAX_GAMMA, V]`.
        laws: q̂ of each draft, `[MAX_GAMMA]`.
    """

    logits: Tensor
    draft_logits: Tensor
    laws: Sequence[SparseDistribution]

    @classmethod
    def make(cls, V: int, dtype: torch.dtype, device: torch.device) -> Rows:
        """Draws them, always the same."""
        source = torch.Generator().manual_seed(V)
        ranks = torch.stack([torch.randperm(V, generator=source) for _ in range(MAX_GAMMA + 1)])
        logits = -_EXPONENT * (1 + ranks).log()
        apart = _APART * torch.randn(MAX_GAMMA, V, generator=source)
        draft_logits = (logits[:-1] + apart).to(dtype)
        laws = sparsify(torch.softmax(draft_logits.float(), dim=-1), _SUPPORT)
        return cls(logits.to(dtype).to(device), draft_logits.to(device), laws)


class Case:
    """One shape, filled."""

    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.shape = shape
        self._rows = rows

    @cached_property
    def logits(self) -> Tensor:
        """The target's, `[B, γ+1, V]`."""
        shape = self.shape
        return self._rows.logits[: shape.gamma + 1].repeat(shape.B, 1, 1)

    @cached_property
    def draft_logits(self) -> Tensor:
        """The draft's, `[B, γ, V]`: what is read by those who take the whole of q."""
        return self._rows.draft_logits[: self.shape.gamma].repeat(self.shape.B, 1, 1)

    @cached_property
    def drafted(self) -> Tensor:
        """Tokens drawn from the whole of q, int64 `[B, γ]`."""
        source = torch.Generator().manual_seed(self.shape.B)
        q = torch.softmax(self._rows.draft_logits[: self.shape.gamma].cpu().float(), dim=-1)
        drawn = torch.multinomial(q, self.shape.B, replacement=True, generator=source)
        return drawn.T.contiguous().to(self._rows.logits.device)

    @cached_property
    def proposals(self) -> list[Proposed]:
        """As Outrider takes them: tokens drawn from q̂, or by the shared noise under `coupled`."""
        shape, laws = self.shape, self._rows.laws[: self.shape.gamma]
        law = SamplingParams()
        if shape.rule is Rule.COUPLED:
            return [Proposed(self._coupled_tokens(), (), law, 0, BASE_LENGTH, Rule.COUPLED)] * shape.B
        q: tuple[Any, ...] = tuple(laws)
        scales = None
        if shape.rule is Rule.SIGMOID:
            q = tuple(DraftLogits(row) for row in self._rows.draft_logits[: shape.gamma].to(torch.float16))
            scales = _SCALES
        return [
            Proposed(
                tuple(each.token_at(uniform(b, BASE_LENGTH, i, Domain.DRAFT)) for i, each in enumerate(laws)),
                q, law, b, BASE_LENGTH, shape.rule, sigmoid=scales,
            )
            for b in range(shape.B)
        ]  # fmt: skip

    @property
    def must_bytes(self) -> int:
        """What must move at the least: each row of logits once; under `sigmoid` the draft's too."""
        shape = self.shape
        rows = shape.B * (shape.gamma + 1) + (shape.B * shape.gamma if shape.rule is Rule.SIGMOID else 0)
        return rows * shape.V * self._rows.logits.element_size()

    def _coupled_tokens(self) -> tuple[int, ...]:
        gamma = self.shape.gamma
        noise = gumbel(0, range(BASE_LENGTH, BASE_LENGTH + gamma), self.shape.V)
        scores = torch.log_softmax(self._rows.draft_logits[:gamma].cpu().float(), dim=-1) + noise
        return tuple(scores.argmax(dim=-1).tolist())
