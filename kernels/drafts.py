"""What several proposals say of their drafted tokens: each token's p and q̂, and q̂ where it is not 0.

A point mass has a support of one token, a sparse law of K, a dense one of all V; past this module they are alike. All
but dense ones lie in flat arrays, so that a batch of them takes a few calls. Knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.dense import DenseLaw, DraftLogits
from kernels.sparse import SparseLaw
from kernels.verify import DraftLaw, Proposed, Rule


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafted tokens of several proposals, flat `[N]`, and the support of each one's q̂.

    The draft at row r of proposal b is number r - b: each proposal before it has one row more than it has drafts.
    """

    p: list[float]  # p(x)
    q: list[float]  # q̂(x)
    beta: list[float]  # Σ min(p/l, q̂)
    ids: np.ndarray  # [S], all supports in a row, but those of dense laws
    weights: np.ndarray  # [S], q̂ at them
    masses: np.ndarray  # [S], p at them
    ends: list[int]  # [N + 1], where each support begins, and the end
    dense: dict[int, tuple[np.ndarray, np.ndarray]]  # q̂ and p of each draft with a dense law, [V] each

    def support(self, draft: int) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
        """Return the ids of a draft's support, or all of them, with q̂ and p there."""
        if draft in self.dense:
            return slice(None), *self.dense[draft]
        at = slice(self.ends[draft], self.ends[draft + 1])
        return self.ids[at], self.weights[at], self.masses[at]


def gather(rows: np.ndarray, proposals: Sequence[Proposed]) -> Drafts:
    """Return what the proposals say of their drafts; `rows` `[n, V]` holds p of their rows, in order.

    Where a rule knows no q̂ (`coupled`), point masses stand in its place.
    """
    V = rows.shape[1]
    tokens: list[int] = []
    at: list[int] = []
    supports: list[tuple[np.ndarray, np.ndarray, int]] = []
    leniences: list[float] = []
    dense: dict[int, np.ndarray] = {}
    row = 0
    for proposal in proposals:
        laws = (None,) * len(proposal.tokens) if proposal.rule is Rule.COUPLED else proposal.q
        for token, law in zip(proposal.tokens, laws, strict=True):
            token = token if 0 <= token < V else -1
            tokens.append(token)
            at.append(row)
            row += 1
            leniences.append(proposal.lenience)
            if isinstance(law, DenseLaw):
                dense[len(supports)] = law.probabilities.cpu().float().numpy()
            supports.append(_support(law, token))
        row += 1
    N = len(tokens)
    if N == 0:
        return Drafts([], [], [], _NO_IDS, _NO_IDS, _NO_IDS, [0], {})

    sizes = [len(ids) for ids, _, _ in supports]
    draft = np.arange(N).repeat(sizes)
    flat = np.concatenate([ids for ids, _, _ in supports], dtype=np.int64)
    totals = np.array([total for _, _, total in supports], dtype=np.float64)
    q = np.concatenate([weights for _, weights, _ in supports]) / totals.repeat(sizes)
    foreign = flat.view(np.uint64) >= V  # negative ids too
    if foreign.any():
        draft, flat, q = draft[~foreign], flat[~foreign], q[~foreign]
    where, drafted = np.array(at), np.array(tokens)
    p = rows[where[draft], flat].astype(np.float64)
    scaled = p if min(leniences) == 1 else p / np.array(leniences)[draft]
    hit = flat == drafted[draft]
    drafts = Drafts(
        p=rows[where, drafted].tolist(),
        q=np.bincount(draft[hit], q[hit], minlength=N).tolist(),
        beta=np.bincount(draft, np.minimum(scaled, q), minlength=N).tolist(),
        ids=flat,
        weights=q,
        masses=p,
        ends=draft.searchsorted(np.arange(N + 1)).tolist(),
        dense={},
    )
    for number, q_dense in dense.items():
        _put_dense(drafts, number, q_dense, rows[at[number]], tokens[number], leniences[number])
    return drafts


def _put_dense(drafts: Drafts, draft: int, q: np.ndarray, p: np.ndarray, token: int, lenience: float) -> None:
    # q, p: [V], float32
    drafts.q[draft] = float(q[token]) if token >= 0 else 0.0
    scaled = p if lenience == 1 else p / lenience
    drafts.beta[draft] = float(np.minimum(scaled, q).sum(dtype=np.float64))
    drafts.dense[draft] = q, p


def _support(law: DraftLaw, token: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return ids and weights `[K]` of a law, and what the weights are divided by; a point mass is on `token`.

    A dense law has none here.
    """
    match law:
        case SparseLaw():
            return law.ids, law.weights, law.total
        case DenseLaw():
            return _NO_IDS, _NO_WEIGHTS, 1
        case DraftLogits():
            raise TypeError("logits are no law")  # the door lets them through to the rule sigmoid alone
        case None:
            return np.array((token,), dtype=np.int64), _UNIT_WEIGHT, 1


_UNIT_WEIGHT = np.ones(1, dtype=np.uint16)
_NO_WEIGHTS = np.empty(0, dtype=np.uint16)
_NO_IDS = np.empty(0, dtype=np.int64)
