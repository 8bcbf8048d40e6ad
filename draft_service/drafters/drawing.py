"""Tokens of the draft's logits, for each sequence as its rule asks: by the round's uniforms, or its positions' noise.

It knows sequences and laws; nothing of passes, nor of who asks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from draft_service.drafters.sequence import ModelSequence, TokenLaw
from kernels import coupled
from kernels.adjustments import apply
from kernels.philox import Domain, uniform
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig, draw
from outrider.runtime.decode_loop import Sampling


class DrawnToken(NamedTuple):
    """A token and how it came about.

    Attributes:
        token: its id; `kernels.entropy.UNSURE` ends the proposal, -1 says that the logits were no numbers.
        law: what is told of it.
        scores: what it was chosen by, see `outrider.runtime.decode_loop.Decoded`; None where it was drawn from a law.
    """

    token: int
    law: TokenLaw
    scores: torch.Tensor | None


Drawn = list[DrawnToken]


class Drawing:
    """How one draft model's tokens are drawn for one target."""

    def __init__(self, *, target_size: int, draft_size: int, config: SparseConfig) -> None:
        """`target_size` and `draft_size` are the rows of both vocabularies; the draft may lack some of the target's."""
        self._target_size = target_size
        self._vocab_size = min(target_size, draft_size)
        self._config = config

    def samplings(self, writing: Sequence[ModelSequence], *, makes_noise: bool = False) -> list[Sampling]:
        """How what is left of each sequence's round is drawn in one call; `makes_noise`: where the noise is made."""
        sharing = [] if makes_noise else [each for each in writing if each.shares_noise]
        places = {(each.seed, each.base + i) for each in sharing for i in _left(each)}
        # Branches of one sequence lie over one another: each place has one row, and each sequence's follow one another.
        rows = {place: row for row, place in enumerate(sorted(places))}
        noise = coupled.noise_of(list(rows), self._vocab_size) if rows else None
        return [self._sampling(each, rows, noise) for each in writing]

    def _sampling(
        self, sequence: ModelSequence, rows: Mapping[tuple[int, int], int], noise: torch.Tensor | None
    ) -> Sampling:
        left = _left(sequence)
        own, race = None, None
        if sequence.shares_noise and noise is None:
            race = sequence.seed, sequence.base + left.start
        elif sequence.shares_noise:
            assert noise is not None
            own = noise[rows[sequence.seed, sequence.base + left.start] :][: len(left)]
        bounds = [] if sequence.max_entropy is None else [sequence.bound(place) for place in left]
        uniforms = [_uniform(sequence, place) for place in left]
        return Sampling(sequence.law, self._config, uniforms, self._vocab_size, own, bounds, race)

    def draw(self, drawing: Sequence[ModelSequence], logits: torch.Tensor) -> Drawn:
        """The next token of each sequence."""
        # logits: [B, V or more], one row for each sequence
        z = logits[:, : self._vocab_size]
        if any(sequence.adjuster is not None for sequence in drawing):
            z = apply(z, [None if each.adjuster is None else each.adjuster.row() for each in drawing])
        drawn = dict[int, DrawnToken]()
        for by_noise, how in ((False, self._by_uniforms), (True, self._by_noise)):
            rows = [row for row, sequence in enumerate(drawing) if sequence.shares_noise is by_noise]
            if rows:
                some = z if len(rows) == len(drawing) else z[rows]
                drawn.update(zip(rows, how([drawing[row] for row in rows], some), strict=True))
        return [drawn[row] for row in range(len(drawing))]

    def _by_uniforms(self, drawing: Sequence[ModelSequence], z: torch.Tensor) -> Drawn:
        laws = [sequence.law for sequence in drawing]
        uniforms = [_uniform(sequence, sequence.drafted) for sequence in drawing]
        tokens, drawn = draw(z, laws, self._config, uniforms, [each.bound(each.drafted) for each in drawing])
        told = [
            draft_logits(z[row : row + 1], sequence.law, self._target_size)[0] if sequence.tells_logits else law
            for row, (sequence, law) in enumerate(zip(drawing, drawn, strict=True))
        ]
        scores = [row if sequence.law.is_greedy else None for row, sequence in zip(z, drawing, strict=True)]
        return list(map(DrawnToken, tokens, told, scores))

    def _by_noise(self, drawing: Sequence[ModelSequence], z: torch.Tensor) -> Drawn:
        noise = coupled.noise_of([(each.seed, len(each.tokens)) for each in drawing], self._vocab_size)
        bounds = [each.bound(each.drafted) for each in drawing]
        weighed = coupled.weigh_each(z, [each.law for each in drawing], noise, bounds)
        return [DrawnToken(token, None, row) for token, row in zip(coupled.pick(weighed), weighed, strict=True)]


def _left(sequence: ModelSequence) -> range:
    """The places of its proposal that are still to be drawn."""
    return range(sequence.drafted, sequence.gamma)


def _uniform(sequence: ModelSequence, place: int) -> float:
    """The draw at a place of the proposal (Law 2): keyed by that and the round's base."""
    if sequence.law.is_greedy or sequence.shares_noise:
        return 0.0
    return uniform(sequence.seed, sequence.base, place, Domain.DRAFT)
