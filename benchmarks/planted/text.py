"""The text that a planted pair writes, and where its draft is wrong.

After token x the target writes x + 1. So does the draft, except after some tokens drawn beforehand, each with chance
1 - α by itself: there it is wrong. The vocabulary is cut into as many regions as there are rates, and a text stays in
the region that it begins in: which α holds for a text is a matter of its prompt's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_SEED = 20_221_130


@dataclass(frozen=True, slots=True)
class Plant:
    """What a pair was planted with.

    Attributes:
        vocab: V.
        alphas: the rate of acceptance in each region, each in [0, 1].

    Raises:
        ValueError: a rate is none, or there are fewer than 16 tokens for each.
    """

    vocab: int
    alphas: tuple[float, ...]

    def __post_init__(self) -> None:
        for alpha in self.alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"an alpha is {alpha}; each must lie in [0, 1]")
        if not self.alphas or self.region < 16:
            raise ValueError(f"{self.vocab} tokens for {len(self.alphas)} rates; each needs 16 at the least")

    @property
    def region(self) -> int:
        """Tokens of each region."""
        return self.vocab // max(1, len(self.alphas))

    def successors(self) -> Tensor:
        """What the target writes after each token, int64 `[V]`: a permutation."""
        return (torch.arange(self.vocab) + 1) % self.vocab

    def wrong(self) -> Tensor:
        """After which tokens the draft is wrong, bool `[V]`."""
        places = torch.arange(self.vocab).div(self.region, rounding_mode="floor").clamp(max=len(self.alphas) - 1)
        alphas = torch.tensor(self.alphas, dtype=torch.float64)[places]
        drawn = torch.rand(self.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED))
        return drawn >= alphas

    def drafted(self) -> Tensor:
        """What the draft writes after each token, int64 `[V]`: a permutation too, its mistakes a turn of their own."""
        successors = self.successors()
        mistakes = self.wrong().nonzero().flatten()
        if len(mistakes) > 1:  # a single one has nothing to change places with
            successors[mistakes] = successors[mistakes.roll(-1)]
        return successors

    def prompt(self, alpha: float, number: int, *, length: int, output: int) -> tuple[int, ...]:
        """A prompt after which `output` tokens can be written in the region of `alpha`.

        Prompts of other numbers begin elsewhere, as long as the region has room for texts that do not overlap.

        Raises:
            ValueError: no region has this rate, or a text is longer than it.
        """
        if alpha not in self.alphas:
            raise ValueError(f"alpha is {alpha}; this pair is planted with {', '.join(map(str, self.alphas))}")
        texts = (self.region - 1) // (output + 1)
        if texts < 1:
            raise ValueError(f"{output} tokens do not fit a region of {self.region}")
        first = self.alphas.index(alpha) * self.region + (number % texts) * (output + 1)
        source = torch.Generator().manual_seed(number)
        before = torch.randint(self.vocab, (length - 1,), generator=source).tolist()
        return (*before, first)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"vocab": self.vocab, "alphas": list(self.alphas)}

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """The plant that `document` was made of."""
        return cls(int(document["vocab"]), tuple(document["alphas"]))


def written(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """What the target writes after a prompt."""
    return [(prompt[-1] + 1 + i) % vocab for i in range(count)]
