"""The exact distribution of the tokens that a `verify` emits for a pair over four tokens, without a look inside.

Each acceptance test passes below an edge of its uniform, and the next token rises with its own, so bisection finds
every edge, and with them the joint distribution of (accepted, tokens) to the last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels import verify_c, verify_torch
from kernels.sampling import SamplingParams
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.sparse import SparseConfig, SparseDistribution
from kernels.verify import Proposed, Rule, Uniforms, VerifyResult
from tests.kernels import reference
from tests.kernels.cases import LAST, Verify, sparsify

Draft = tuple[SparseDistribution, Sequence[SparseDistribution]]

V = 4
EXACT = 44  # bisections: an edge to 1e-13
ROUGH = 14  # enough to see a wrong distribution
WHOLE = SparseConfig(keep_mass=1.0)
PATHS: dict[str, tuple[Verify, float, int]] = {
    "reference": (reference.verify, 1e-12, EXACT),
    "torch": (verify_torch.verify, 2e-6, 28),  # a float32 softmax
    "c": (verify_c.verify, 2e-6, 28),
}
"""The total variation that each may have, and the bisections that find edges far more precisely than that."""
_TINY = 2e-13  # of a cell's area: the bisection's own error


@dataclass(frozen=True)
class TinyPair:
    """A target and a draft of two steps over four tokens.

    Attributes:
        logits: the target's logits after no, one and two tokens: `[4]`, `[4, 4]`, `[4, 4, 4]`.
        q: the draft's distribution of the first token, and of the second after each first.
        lenience: l of [L A.5].
        rule: the acceptance rule.
        draft_logits: sent in place of q under `sigmoid`.
        sigmoid: its scales.
        params: how the target's logits become p.
    """

    logits: tuple[Tensor, Tensor, Tensor]
    q: Draft
    lenience: float = 1.0
    rule: Rule = Rule.TOKENWISE
    draft_logits: tuple[DraftLogits, Sequence[DraftLogits]] | None = None
    sigmoid: SigmoidScales | None = None
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def target(self) -> np.ndarray:
        """The distribution of three tokens written by the target alone, `[4, 4, 4]`."""
        p1, p2, p3 = (torch.softmax(each, -1).numpy() for each in self.logits)
        joint: np.ndarray = p1[:, None, None] * p2[:, :, None] * p3
        return joint

    def rows(self, x1: int, x2: int) -> Tensor:
        """The target's rows for a proposal of x1 and x2, `[3, 4]`."""
        return torch.stack((self.logits[0], self.logits[1][x1], self.logits[2][x1, x2]))

    def proposal(self, x1: int, x2: int, accept: tuple[float, float], resample: float) -> Proposed:
        """The proposal of x1 and x2 with these uniforms."""
        first, second = self.draft_logits or self.q
        return Proposed(
            (x1, x2), (first, second[x1]), self.params, seed=0, base_length=0, rule=self.rule, lenience=self.lenience,
            uniforms=Uniforms(accept, resample), sigmoid=self.sigmoid,
        )  # fmt: skip


def random_pair(seed: int, *, config: SparseConfig = WHOLE, lenience: float = 1.0, rule: Rule) -> TinyPair:
    """Return a pair of random logits, float64; the draft's are the target's in reverse, with noise."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, V, generator=source, dtype=torch.float64) * 1.5

    logits = (draw(), draw(V), draw(V, V))
    first, *second = sparsify(torch.softmax(torch.cat((logits[0][None], logits[1])).flip(-1) + draw(V + 1), -1), config)
    return TinyPair(logits, (first, second), lenience, rule)


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


def emitted(verify: Verify, pair: TinyPair, bisections: int, drawn_from: Draft | None = None) -> np.ndarray:
    """Return the distribution of the first three tokens, `[4, 4, 4]`: the target goes on after a shorter round.

    The drafts are sampled from `drawn_from`, if given, in place of the q of the proposals. Each of the `bisections`
    doubles the precision of every edge.
    """
    p2, p3 = (torch.softmax(each, -1).numpy() for each in pair.logits[1:])
    none, one, both = joint_distribution(verify, pair, bisections, drawn_from)
    total: np.ndarray = none[:, :1, :1] * p2[:, :, None] * p3 + one[:, :, :1] * p3 + both
    return total


def joint_distribution(verify: Verify, pair: TinyPair, bisections: int, drawn_from: Draft | None = None) -> np.ndarray:
    """Return the chances of (accepted, tokens) of one round, `[3, 4, 4, 4]`; the rest of a shorter round is at 0."""
    joint = np.zeros((3, V, V, V))
    first, second = drawn_from or pair.q
    weights = {(x1, x2): first.probability(x1) * second[x1].probability(x2) for x1 in range(V) for x2 in range(V)}
    drafts = [draft for draft, weight in weights.items() if weight > 0]
    # One draft after another, so that a batch stays small.
    for (x1, x2), cells in zip(drafts, _cells(verify, pair, drafts, bisections), strict=True):
        none, one, both = (
            weights[x1, x2] * sum(cell.chance for cell in cells if cell.accepted == accepted) * next_token
            for accepted, next_token in enumerate(_next_tokens(verify, pair, (x1, x2), cells, bisections))
        )
        joint[0, :, 0, 0] += none
        joint[1, x1, :, 0] += one
        joint[2, x1, x2] += both
    return joint


@dataclass(frozen=True)
class _Cell:
    """A rectangle of acceptance uniforms with one outcome: its area, a point inside it, and the outcome."""

    chance: float
    inside: tuple[float, float]
    accepted: int


def _cells(verify: Verify, pair: TinyPair, drafts: Sequence[tuple[int, int]], bisections: int) -> list[list[_Cell]]:
    """Return, for each pair of drafts, the four cells that the edges of both uniforms make of the unit square."""

    def edges_of(accept: Callable[[float], tuple[float, float]], i: int) -> list[float]:
        return _bisect(
            verify,
            [pair.rows(*draft) for draft in drafts],
            lambda b, u: pair.proposal(*drafts[b], accept(u), 0.5),
            lambda _, result: result.accepted > i,
            bisections,
        )

    # The first test decides where the second fails; the second where the first passes.
    edges = zip(edges_of(lambda u: (u, LAST), 0), edges_of(lambda u: (0.0, u), 1), strict=True)
    points = [
        (draft, a_width * b_width, (a, b))
        for draft, (first, second) in zip(drafts, edges, strict=True)
        for a_width, a in ((first, first / 2), (1 - first, (1 + first) / 2))
        for b_width, b in ((second, second / 2), (1 - second, (1 + second) / 2))
    ]
    logits = torch.cat([pair.rows(*draft) for draft, _, _ in points])
    results = verify(logits, [pair.proposal(*draft, inside, 0.5) for draft, _, inside in points])
    cells = [
        _Cell(chance, inside, result.accepted) for (_, chance, inside), result in zip(points, results, strict=True)
    ]
    return [cells[i : i + 4] for i in range(0, len(cells), 4)]


def _next_tokens(
    verify: Verify, pair: TinyPair, draft: tuple[int, int], cells: list[_Cell], bisections: int
) -> list[np.ndarray]:
    """Return the distribution of the next token after no, one and two accepted drafts; zeros where none can be."""
    likely = sorted((cell for cell in cells if cell.chance > _TINY), key=lambda cell: cell.chance)
    ways = {cell.accepted: cell.inside for cell in likely}
    cases = [(accepted, k) for accepted in ways for k in range(V - 1)]
    found = _bisect(
        verify,
        [pair.rows(*draft)] * len(cases),
        lambda b, u: pair.proposal(*draft, ways[cases[b][0]], u),
        lambda b, result: result.next_token <= cases[b][1],
        bisections,
    )
    distributions = [np.zeros(V) for _ in range(3)]
    for accepted in ways:
        cdf = [edge for edge, (each, _) in zip(found, cases, strict=True) if each == accepted]
        distributions[accepted] = np.diff([0.0, *cdf, 1.0])
    return distributions


def _bisect(
    verify: Verify,
    rows: list[Tensor],
    proposal: Callable[[int, float], Proposed],
    holds: Callable[[int, VerifyResult], bool],
    bisections: int,
) -> list[float]:
    """Return, for a question about each of these `rows`, the u in [0, 1] up to which the result holds; in one batch a
    step.
    """
    if not rows:
        return []
    logits, count = torch.cat(rows), len(rows)
    low, high = [-1.0] * count, [1.0] * count  # a question that fails at u = 0 has its edge there
    middle = [0.0] * count
    for _ in range(bisections):
        for b, result in enumerate(verify(logits, [proposal(b, middle[b]) for b in range(count)])):
            (low if holds(b, result) else high)[b] = middle[b]
            middle[b] = max(0.0, (low[b] + high[b]) / 2)
    return middle
