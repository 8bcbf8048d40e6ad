"""What goes into verification and what comes out: proposals, rulings, and the names of rules and statuses.

Plain data, shared by every implementation. It knows no arithmetic and no implementation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kernels.adjustments import RowAdjustment
from kernels.dense import DenseLaw, DraftLogits, SigmoidScales
from kernels.distribution import SamplingLaw
from kernels.philox import Domain, uniform
from kernels.sparse import SparseLaw

DraftLaw = SparseLaw | DenseLaw | DraftLogits | None
"""What a drafted token was sampled from; None is a point mass on it. `DraftLogits` go with the rule `sigmoid` alone."""


class Rule(enum.Enum):
    """How a proposal is judged."""

    TOKENWISE = "tokenwise"  # [L Alg. 1]
    BLOCK = "block"  # Sun et al., "Block verification accelerates speculative decoding", 2024
    COUPLED = "coupled"  # draft and target share their noise
    SIGMOID = "sigmoid"  # [W 3.2.2], lossy


class Status(enum.Enum):
    """How a ruling came about."""

    OK = "ok"
    ZERO_RESIDUAL = "zero_residual"  # p = q̂ up to rounding at the rejected token: the next one was drawn from p
    BAD_LOGITS = "bad_logits"  # a row it needed has a NaN, a +inf, or nothing but -inf: there are no tokens


class UnsupportedRule(ValueError):
    """The chosen implementation does not judge by the rule that a proposal names."""


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Draws given by the caller in place of Philox: one for each acceptance test `[γ]`, and one for the next token."""

    accept: tuple[float, ...]
    resample: float


@dataclass(frozen=True, slots=True)
class Proposed:
    """One sequence's proposal.

    Attributes:
        tokens: the γ ≥ 0 drafted tokens.
        q: the law each was sampled from, `[γ]`. Empty under `coupled`; `DraftLogits` under `sigmoid`.
        law: how the target's logits become p.
        seed: key of the draws.
        base_length: committed tokens (prompt included) when the round began; part of every draw's counter, and the
            absolute position of the first drafted token.
        rule: how the proposal is judged.
        lenience: l of [L A.5], in (0, 1]; 1 is exact.
        adjustments: what changes in the target's rows, `[γ+1]`, or nothing.
        top_logprobs: -1 for no log-probabilities, 0 for those of the emitted tokens, N for the N best as well.
        uniforms: the draws to use; by default those of (seed, base_length). `coupled` draws none.
        sigmoid: the scales of the rule `sigmoid`, which needs them.
    """

    tokens: tuple[int, ...]
    q: tuple[DraftLaw, ...]
    law: SamplingLaw
    seed: int
    base_length: int
    rule: Rule = Rule.TOKENWISE
    lenience: float = 1.0
    adjustments: tuple[RowAdjustment | None, ...] = ()
    top_logprobs: int = -1
    uniforms: Uniforms | None = None
    sigmoid: SigmoidScales | None = None

    @property
    def gamma(self) -> int:
        """How many tokens were drafted."""
        return len(self.tokens)

    def accept_uniform(self, index: int) -> float:
        """Return the draw that tests the drafted token at `index`."""
        if self.uniforms is not None:
            return self.uniforms.accept[index]
        return uniform(self.seed, self.base_length, index, Domain.ACCEPT)

    def resample_uniform(self, accepted: int) -> float:
        """Return the draw of the next token, which stands at index `accepted` of the round."""
        if self.uniforms is not None:
            return self.uniforms.resample
        return uniform(self.seed, self.base_length, accepted, Domain.RESAMPLE)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one emitted token, under the target.

    Attributes:
        token: the emitted token.
        raw: its log softmax of the untouched logits.
        adjusted: its log p, after adjustments, temperature and filters; -inf where p is 0.
        top_ids: the ids of highest `raw`, best first, lower ids first among equals.
        top_raw: theirs.
        top_adjusted: theirs.
    """

    token: int
    raw: float
    adjusted: float
    top_ids: tuple[int, ...] = ()
    top_raw: tuple[float, ...] = ()
    top_adjusted: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ruling:
    """What became of one proposal.

    Attributes:
        status: see `Status`.
        accepted: how many drafted tokens stand.
        next_token: the token after them, drawn by the verifier; -1 under BAD_LOGITS.
        beta: Σ min(p/l, q̂) [L 3.5, A.5] of each drafted token, which is its chance of being accepted under
            `tokenwise`, for the rows up to the one that stopped the round: `[min(accepted + 1, γ)]`. Empty under
            `coupled` and `sigmoid`, where no q̂ is known.
        logprobs: one entry for each emitted token, `[accepted + 1]`, where asked for.
    """

    status: Status
    accepted: int
    next_token: int
    beta: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


BAD_LOGITS = Ruling(status=Status.BAD_LOGITS, accepted=0, next_token=-1)
"""The ruling of a sequence whose logits are no law."""
