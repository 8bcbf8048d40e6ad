"""The exact law of what verification emits, taken from a `verify` as a black box, and the worlds to take it in.

Each acceptance test passes below an edge of its uniform, and the next token rises with its own, so bisection finds
every edge, and with them the joint law of (accepted, tokens) to the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.dense import DenseDistribution, DraftLogits, SigmoidScales
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import Proposed, Rule, Uniforms, VerifyResult

Verify = Callable[[Tensor, Sequence[Proposed]], list[VerifyResult]]
Law = SparseDistribution | DenseDistribution
Draft = tuple[Law, Sequence[Law]]

V = 4
EXACT = 44  # bisections: an edge to 1e-13
ROUGH = 14  # enough to see a wrong law
_TINY = 2e-13  # of a cell's area: the bisection's own error
_LAST = 1 - 2**-53


@dataclass(frozen=True)
class World:
    """A target and a draft of two steps over four tokens.

    Attributes:
        logits: the target's logits after no, one and two tokens: `[4]`, `[4, 4]`, `[4, 4, 4]`.
        q: the draft's law of the first token, and of the second after each first.
        lenience: l of [L A.5].
        rule: how proposals are judged.
        draft_logits: what proposals say of them under `sigmoid`, in place of q.
        sigmoid: its scales.
        law: how the target's logits become p.
    """

    logits: tuple[Tensor, Tensor, Tensor]
    q: Draft
    lenience: float = 1.0
    rule: Rule = Rule.TOKENWISE
    draft_logits: tuple[DraftLogits, Sequence[DraftLogits]] | None = None
    sigmoid: SigmoidScales | None = None
    law: SamplingParams = field(default_factory=SamplingParams)

    @property
    def target(self) -> np.ndarray:
        """The law of three tokens written by the target alone, `[4, 4, 4]`."""
        p1, p2, p3 = (torch.softmax(each, -1).numpy() for each in self.logits)
        joint: np.ndarray = p1[:, None, None] * p2[:, :, None] * p3
        return joint

    def proposal(self, x1: int, x2: int, accept: tuple[float, float], resample: float) -> tuple[Tensor, Proposed]:
        """Return the target's rows `[3, 4]` and the proposal of x1 and x2 with these uniforms."""
        rows = torch.stack((self.logits[0], self.logits[1][x1], self.logits[2][x1, x2]))
        said = self.draft_logits or self.q
        proposed = Proposed(
            tokens=(x1, x2),
            q=(said[0], said[1][x1]),
            law=self.law,
            seed=0,
            base_length=0,
            rule=self.rule,
            lenience=self.lenience,
            uniforms=Uniforms(accept, resample),
            sigmoid=self.sigmoid,
        )
        return rows, proposed


def random_world(
    seed: int,
    sharpness: float = 1.5,
    config: SparseConfig | None = None,
    lenience: float = 1.0,
    rule: Rule = Rule.TOKENWISE,
) -> World:
    """Return a world of random logits, float64; the draft's are the target's in reverse, with noise."""
    source = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, V, generator=source, dtype=torch.float64) * sharpness

    logits = (gaussian(), gaussian(V), gaussian(V, V))
    return World(logits, draft_laws(logits, gaussian(V + 1), config or SparseConfig(keep_mass=1.0)), lenience, rule)


def draft_laws(
    logits: tuple[Tensor, ...], noise: Tensor, config: SparseConfig
) -> tuple[SparseDistribution, tuple[SparseDistribution, ...]]:
    """Return laws of a draft that ranks tokens in reverse, give or take `noise` `[5, 4]`."""
    first, *second = sparsify(torch.softmax(torch.cat((logits[0][None], logits[1])).flip(-1) + noise, -1), config)
    return first, tuple(second)


def in_dyads(law: Law) -> DenseDistribution:
    """Return nearly the same law over all tokens, in multiples of 2^-20: float32 holds them and their sum exactly."""
    parts = np.array([round(chance_of(law, x) * 2**20) for x in range(V)])
    parts[parts.argmax()] += 2**20 - parts.sum()
    return DenseDistribution(torch.from_numpy(parts / 2**20).float())


def emitted_law(
    verify: Verify,
    world: World,
    drawn_from: Draft | None = None,
    bisections: int = EXACT,
) -> np.ndarray:
    """Return the law of the first three tokens, `[4, 4, 4]`, where a round that emits fewer goes on as the target does.

    `drawn_from` is what the drafts are sampled from, if not what the proposals say. Each of the `bisections`
    doubles the precision of every edge.
    """
    p2, p3 = (torch.softmax(each, -1).numpy() for each in world.logits[1:])
    none, one, both = joint_law(verify, world, drawn_from, bisections)
    law: np.ndarray = none[:, :1, :1] * p2[:, :, None] * p3 + one[:, :, :1] * p3 + both
    return law


def joint_law(verify: Verify, world: World, drawn_from: Draft | None = None, bisections: int = EXACT) -> np.ndarray:
    """Return the law of (accepted, tokens) of one round, `[3, 4, 4, 4]`; the rest of a shorter round stands at 0."""
    drafts = [(x1, x2) for x1 in range(V) for x2 in range(V)]
    q1, q2 = drawn_from or world.q
    joint = np.zeros((3, V, V, V))
    # One draft after another, so that what is asked at once stays small.
    for (x1, x2), cells in zip(drafts, _cells(verify, world, drafts, bisections), strict=True):
        weight = chance_of(q1, x1) * chance_of(q2[x1], x2)
        if weight == 0:
            continue
        next_laws = _next_laws(verify, world, (x1, x2), cells, bisections)
        chances = [sum(cell.chance for cell in cells if cell.accepted == accepted) for accepted in range(3)]
        joint[0, :, 0, 0] += weight * chances[0] * next_laws[0]
        joint[1, x1, :, 0] += weight * chances[1] * next_laws[1]
        joint[2, x1, x2] += weight * chances[2] * next_laws[2]
    return joint


def chance_of(law: Law, token: int) -> float:
    """Return q̂(token)."""
    return law.probability(token) if isinstance(law, SparseDistribution) else float(law.probabilities[token])


def accepted_law(verify: Verify, world: World, bisections: int = EXACT) -> np.ndarray:
    """Return the law of how many of the two drafts are accepted, `[3]`."""
    drafts = [(x1, x2) for x1 in range(V) for x2 in range(V)]
    law = np.zeros(3)
    for (x1, x2), cells in zip(drafts, _cells(verify, world, drafts, bisections), strict=True):
        for cell in cells:
            law[cell.accepted] += chance_of(world.q[0], x1) * chance_of(world.q[1][x1], x2) * cell.chance
    return law


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Return half the sum of differences."""
    return float(np.abs(a - b).sum() / 2)


@dataclass(frozen=True)
class _Cell:
    """Acceptance uniforms that are judged alike: a rectangle of this area, a point inside it, and the outcome."""

    chance: float
    inside: tuple[float, float]
    accepted: int


def _cells(verify: Verify, world: World, drafts: list[tuple[int, int]], bisections: int) -> list[list[_Cell]]:
    """Return, for each pair of drafts, the four cells that the edges of both uniforms make of the unit square."""

    def edges_of(ask: Callable[[float], tuple[float, float]], place: int) -> list[float]:
        return _bisect(
            verify,
            len(drafts),
            lambda b, u: world.proposal(*drafts[b], ask(u), 0.5),
            lambda _, result: result.accepted > place,
            bisections,
        )

    # The first test decides where the second fails; the second where the first passes.
    edges = zip(edges_of(lambda u: (u, _LAST), 0), edges_of(lambda u: (0.0, u), 1), strict=True)
    points = [
        (draft, a_width * b_width, (a, b))
        for draft, (first, second) in zip(drafts, edges, strict=True)
        for a_width, a in ((first, first / 2), (1 - first, (1 + first) / 2))
        for b_width, b in ((second, second / 2), (1 - second, (1 + second) / 2))
    ]
    asked = [world.proposal(*draft, inside, 0.5) for draft, _, inside in points]
    results = verify(torch.cat([rows for rows, _ in asked]), [proposed for _, proposed in asked])
    cells = [
        _Cell(chance, inside, result.accepted) for (_, chance, inside), result in zip(points, results, strict=True)
    ]
    return [cells[i : i + 4] for i in range(0, len(cells), 4)]


def _next_laws(
    verify: Verify, world: World, draft: tuple[int, int], cells: list[_Cell], bisections: int
) -> list[np.ndarray]:
    """Return the law of the next token after no, one and two accepted drafts, each `[4]`; zeros where none can be."""
    likely = sorted((cell for cell in cells if cell.chance > _TINY), key=lambda cell: cell.chance)
    ways = {cell.accepted: cell.inside for cell in likely}
    cases = [(accepted, k) for accepted in ways for k in range(V - 1)]
    found = _bisect(
        verify,
        len(cases),
        lambda b, u: world.proposal(*draft, ways[cases[b][0]], u),
        lambda b, r: r.next_token <= cases[b][1],
        bisections,
    )
    laws = [np.zeros(V) for _ in range(3)]
    for accepted in ways:
        cdf = [edge for edge, (each, _) in zip(found, cases, strict=True) if each == accepted]
        laws[accepted] = np.diff([0.0, *cdf, 1.0])
    return laws


def _bisect(
    verify: Verify,
    count: int,
    ask: Callable[[int, float], tuple[Tensor, Proposed]],
    holds: Callable[[int, VerifyResult], bool],
    bisections: int,
) -> list[float]:
    """Return, for each of `count` questions, the u in [0, 1] up to which the result holds; all asked in one batch."""
    low, high = [-1.0] * count, [1.0] * count  # a question that fails at u = 0 has its edge there
    middle = [0.0] * count
    for _ in range(bisections):
        asked = [ask(b, middle[b]) for b in range(count)]
        results = verify(torch.cat([rows for rows, _ in asked]), [proposed for _, proposed in asked]) if asked else []
        for b, result in enumerate(results):
            if holds(b, result):
                low[b] = middle[b]
            else:
                high[b] = middle[b]
            middle[b] = max(0.0, (low[b] + high[b]) / 2)
    return [max(0.0, (a + b) / 2) for a, b in zip(low, high, strict=True)]
