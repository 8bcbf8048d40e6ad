"""The inner game of staged drafting [L 6]: which guesses the draft's own law lets stand, and what comes after them.

The draft model is the target here, and what it judges by is q̂ itself, truncated and rounded: what goes out is then a
proposal as the model alone would have drawn it, law for law. Draws have three domains of their own, keyed by the base
of the round and by the inner one, which is how many of the round's tokens there were (Law 2). It knows sequences and
logits; nothing of passes, nor of who guesses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from draft_service.drafters.base import DraftSequence
from draft_service.drafters.drawing import Drawn, DrawnToken
from draft_service.drafters.guessing import Guesser, Guesses
from draft_service.drafters.sequence import ModelSequence, TokenLaw
from kernels import coupled
from kernels.adjustments import RowAdjustment, apply
from kernels.philox import Domain, uniform
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig, SparseLaw, draw
from kernels.staged import accepts, resample


@dataclass(eq=False)
class StagedSequence(ModelSequence):
    """A sequence of the draft model for which somebody guesses.

    Attributes:
        guesser: who; None once it has failed.
        read: committed tokens that it has read.
        silent: the base of a round in which it knew of nothing: the rest of that round is the model's alone.
    """

    guesser: Guesser | None = field(default=None, kw_only=True)
    read: int = field(default=0, kw_only=True)
    silent: int = field(default=-1, kw_only=True)

    @classmethod
    def with_guesser(cls, sequence: DraftSequence, vocab_size: int, guesser: Guesser) -> "StagedSequence":
        """A sequence at its opening."""
        # Guesses do not end where the draft is unsure, and nothing is drafted ahead.
        plain = ModelSequence.begin(replace(sequence, max_entropy=None, looks_ahead=False), vocab_size)
        return cls(**{each.name: getattr(plain, each.name) for each in fields(plain)}, guesser=guesser)


@dataclass(frozen=True, slots=True)
class Guessed:
    """What one sequence brings to a pass: guesses that follow its tokens, the rows after each prefix of them.

    Where the last guess is no token of the draft it is not run, and there are as many rows as guesses.
    """

    sequence: StagedSequence
    guesses: Guesses
    rows: int


class Staging:
    """How one draft model judges guesses."""

    def __init__(self, *, target_size: int, draft_size: int, config: SparseConfig) -> None:
        """Sizes of both vocabularies, and how much of the draft's law is kept."""
        self._target_size = target_size
        self._vocab_size = min(target_size, draft_size)
        self._config = config

    def judge(self, games: Sequence[Guessed], logits: torch.Tensor) -> list[Drawn]:
        """The tokens that come of each game and their laws: the guesses that stand, and one more.

        `logits` are `[R, V or more]`, with the rows of the games in order. A token below 0 says that the logits were no
        numbers.
        """
        z = logits[:, : self._vocab_size]
        if any(game.sequence.adjuster is not None for game in games):
            z = apply(z, [row for game in games for row in _adjustments(game)])
        tokens, laws = self._choices(games, z)
        drawn, start = list[Drawn](), 0
        for game in games:
            end = start + game.rows
            kept = _walk(game, tokens[start:end], laws[start:end])
            if game.sequence.tells_logits:
                told: Sequence[TokenLaw] = [
                    draft_logits(z[row : row + 1], game.sequence.law, self._target_size)[0]
                    for row in range(start, start + len(kept))
                ]
            else:
                told = laws[start : start + len(kept)]
            drawn.append([DrawnToken(token, law, None) for token, law in zip(kept, told, strict=True)])
            start = end
        return drawn

    def _choices(self, games: Sequence[Guessed], z: torch.Tensor) -> tuple[list[int], list[SparseLaw | None]]:
        """The draft's own choice in each row of `z` `[R, V]`, and its law; none at temperature 0 or with noise."""
        laws = [game.sequence.law for game in games for _ in range(game.rows)]
        by_noise = [game.sequence.shares_noise for game in games for _ in range(game.rows)]
        tokens, found = [-1] * len(laws), list[SparseLaw | None]([None] * len(laws))
        noisy = [row for row, is_noisy in enumerate(by_noise) if is_noisy]
        others = [row for row, is_noisy in enumerate(by_noise) if not is_noisy]
        if noisy:
            places = [
                (game.sequence.seed, len(game.sequence.tokens) + place)
                for game in games
                if game.sequence.shares_noise
                for place in range(game.rows)
            ]
            noise = coupled.noise_of(places, self._vocab_size)
            for row, token in zip(noisy, coupled.draw(z[noisy], [laws[row] for row in noisy], noise), strict=True):
                tokens[row] = token
        if others:
            uniforms = [u for game in games if not game.sequence.shares_noise for u in _last_uniform(game)]
            drawn = draw(z[others], [laws[row] for row in others], self._config, uniforms)
            for row, token, law in zip(others, *drawn, strict=True):
                tokens[row], found[row] = token, law
        return tokens, found


def _walk(game: Guessed, choices: Sequence[int], laws: Sequence[SparseLaw | None]) -> list[int]:
    """The guesses that stand, and the token after them [L Alg. 1]."""
    kept = list[int]()
    for place, (token, guessed) in enumerate(game.guesses):
        choice, law = choices[place], laws[place]
        if law is None:  # what the draft takes there is settled, or there is no law at all
            if choice != token:
                return [*kept, choice]
        elif not accepts(_uniform(game, place, Domain.STAGED_ACCEPT), guessed, law, token):
            return [*kept, resample(_uniform(game, place, Domain.STAGED_RESAMPLE), guessed, law, token)]
        kept.append(token)
    return [*kept, choices[len(kept)]]


def _last_uniform(game: Guessed) -> Iterator[float]:
    """The draw of the row behind the last guess; what is drawn in the others is not looked at."""
    yield from [0.0] * (game.rows - 1)
    is_drawn = not game.sequence.law.is_greedy and game.rows > len(game.guesses)
    yield _uniform(game, game.rows - 1, Domain.STAGED_RESAMPLE) if is_drawn else 0.0


def _uniform(game: Guessed, place: int, domain: Domain) -> float:
    sequence = game.sequence
    return uniform(sequence.seed, sequence.base, place, domain, sequence.drafted)


def _adjustments(game: Guessed) -> list[RowAdjustment | None]:
    """What changes in each row: guessed tokens count as written."""
    adjuster = game.sequence.adjuster
    if adjuster is None:
        return [None] * game.rows
    written, rows = adjuster.n_generated, [adjuster.row()]
    for token, _ in game.guesses[: game.rows - 1]:
        adjuster.push(token)
        rows.append(adjuster.row())
    adjuster.truncate(written)
    return rows
