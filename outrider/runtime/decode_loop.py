"""Several tokens of each of a few sequences in one call, each drawn from the logits after the one before.

TorchScript compiles the loop with the layers and the draw in it: between two tokens there is then no interpreter, whose
work costs a small model a third of its time. Sequences take their steps together, since a step of several costs hardly
more than a step of one. It knows a model's layers and how a token is drawn. It does not know what the tokens are for,
nor where uniforms and noise come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.coupled import weigh
from kernels.distribution import SamplingLaw, sampled_law
from kernels.entropy import entropy, entropy_of_greedy, entropy_of_weights
from kernels.sparse import SparseConfig, SparseLaw, as_law, place, truncate
from outrider.runtime.fused_layers import FusedLayers, compiled


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a sequence are drawn.

    Attributes:
        law: how logits become a law.
        config: how much of it is kept (`kernels.sparse`).
        uniforms: one for each token to draw, in [0, 1); not used at temperature 0, nor where there is noise.
        vocab_size: ids from there on are padding, and never drawn.
        noise: what `kernels.coupled` chooses the tokens by, `[γ, vocab_size]`; None draws by the uniforms.
        bounds: of each token, the entropy of its law in nats above which decoding ends before it; of none, no bounds.
        race: seed and position of the first token, where a device makes that noise itself
            (`outrider.runtime.captured_decode_loop`).
    """

    law: SamplingLaw
    config: SparseConfig
    uniforms: Sequence[float]
    vocab_size: int
    noise: Tensor | None = None
    bounds: Sequence[float] = ()
    race: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was decoded of a sequence.

    Attributes:
        tokens: the tokens; the last may be -1, where the logits were no numbers, or -2, where a law is above its bound.
        laws: what each was sampled from; None at temperature 0 and with noise.
        scores: what each was chosen by where there is no law, `[V]`: logits, of which the largest wins, or with noise
            what `kernels.coupled.weigh` gives, of which the least does.
    """

    tokens: list[int]
    laws: list[SparseLaw | None]
    scores: list[Tensor | None]


class _How(NamedTuple):
    """`Sampling` as TorchScript takes it; `noise` has no rows, or `bounds` no numbers, where there is none."""

    vocab_size: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    keep_mass: float
    max_support: int
    uniforms: list[float]
    bounds: list[float]
    noise: Tensor


_Told = tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]
"""Tokens; ids and weights of the law of each (none at temperature 0, nor with noise); else `Decoded.scores` of each."""


class ScriptedLoop(nn.Module):
    """The loop. Uncompiled it does the same."""

    def __init__(self, layers: FusedLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(
        self,
        token_ids: Tensor,
        counts: list[int],
        rotation: Tensor,
        keys: list[list[Tensor]],
        values: list[list[Tensor]],
        new: list[list[Tensor]],
        masks: list[list[Tensor]],
        no_mask: Tensor,
        hows: list[_How],
    ) -> list[tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]]:
        """Runs `token_ids`, draws a token of each of B sequences, runs those, and so on: one for each of its uniforms.

        Args:
            token_ids: `[T]`: what is to be run before the first tokens can be drawn, one sequence after the other.
            counts: how many of them are each sequence's, `[B]`.
            rotation: of all positions that are run, one sequence after the other, see `FusedLayers.forward`.
            keys: of each sequence and layer up to the last position that is run, see `SlotViews`.
            values: like `keys`.
            new: like `keys`, of the positions that are run.
            masks: what `token_ids` need, see `FusedLayers.forward`.
            no_mask: what a single token needs.
            hows: how each sequence's are drawn.

        Returns:
            Of each sequence, see `_Told`. A token of -1 says that the logits were no numbers, one of -2 that the law is
            above its bound; either is a sequence's last.
        """
        told: list[tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]] = []
        begins: list[int] = []  # of each sequence, its first row in `rotation`
        at: list[int] = []  # and how many of its rows have been run
        begin = 0
        for each in new:
            tokens: list[int] = []
            ids: list[Tensor] = []
            weights: list[Tensor] = []
            scores: list[Tensor] = []
            told.append((tokens, ids, weights, scores))
            begins.append(begin)
            at.append(0)
            begin += each[0].size(2)
        active = list(range(len(hows)))  # those that are not done
        while len(active) > 0:
            seen_keys: list[list[Tensor]] = []
            seen_values: list[list[Tensor]] = []
            written: list[list[Tensor]] = []
            rotations: list[Tensor] = []
            for i, b in enumerate(active):
                count = counts[i]
                end = keys[b][0].size(2) - new[b][0].size(2) + at[b] + count
                seen_keys.append([each.narrow(2, 0, end) for each in keys[b]])
                seen_values.append([each.narrow(2, 0, end) for each in values[b]])
                written.append([each.narrow(2, at[b], count) for each in new[b]])
                rotations.append(rotation.narrow(0, begins[b] + at[b], count))
                at[b] += count
            rows: Tensor | None = None
            if len(counts) > 1 and token_ids.size(0) > len(counts):
                rows = torch.tensor(counts, dtype=torch.int64, device=token_ids.device).cumsum(0) - 1
            logits = self.layers(
                token_ids,
                rotations[0] if len(rotations) == 1 else torch.cat(rotations),
                counts,
                seen_keys,
                seen_values,
                written,
                masks,
                len(counts),
                rows,
            )
            z = logits.float().cpu()  # to draw is many small steps: one copy, not one for each
            left: list[int] = []
            drawn: list[int] = []
            for i, b in enumerate(active):
                how = hows[b]
                token = self._draw(z.narrow(0, i, 1).narrow(1, 0, how.vocab_size), how, told[b])
                told[b][0].append(token)
                if token >= 0 and len(told[b][0]) < len(how.uniforms):
                    left.append(b)
                    drawn.append(token)
            active = left
            counts = [1] * len(left)
            token_ids = torch.tensor(drawn, dtype=torch.int64, device=token_ids.device)
            masks = [[no_mask] * len(left)] * len(masks)
        return told

    def _draw(self, z: Tensor, how: _How, told: tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]) -> int:
        # z: [1, V]
        tokens, ids, weights, scores = told
        place_in_round = len(tokens)
        bound = how.bounds[place_in_round] if len(how.bounds) > 0 else math.inf
        if how.temperature == 0:
            best = z.argmax()
            if not bool(z.view(-1)[best].isfinite()):
                return -1
            scores.append(z[0])
            if bound < math.inf and entropy_of_greedy(z[0]) > bound:
                return -2
            return int(best)
        p = sampled_law(z, how.temperature, how.top_k, how.top_p, how.min_p).squeeze(0)
        if bool(p[0].isnan()):
            return -1
        if how.noise.size(0) > 0:
            if bound < math.inf and entropy(p) > bound:
                return -2
            weighed = weigh(p, how.noise[place_in_round])
            scores.append(weighed)
            return int(weighed.argmin())
        support, integers = truncate(p, how.keep_mass, how.max_support)
        if bound < math.inf and entropy_of_weights(integers) > bound:
            return -2  # before anything is sampled
        ids.append(support)
        weights.append(integers)
        return int(support[place(integers, int(integers.sum()), how.uniforms[place_in_round])])


class DecodeLoop:
    """Decodes with the layers of a fused model."""

    def __init__(self, layers: FusedLayers) -> None:
        self._loop = compiled(ScriptedLoop(layers), layers.embedding.device)

    def __call__(
        self,
        token_ids: Tensor,
        counts: list[int],
        rotation: Tensor,
        views: tuple[list[list[Tensor]], list[list[Tensor]], list[list[Tensor]]],
        masks: list[list[Tensor]],
        no_mask: Tensor,
        samplings: Sequence[Sampling],
    ) -> list[Decoded]:
        """See `ScriptedLoop.forward`."""
        told = self._loop(token_ids, counts, rotation, *views, masks, no_mask, list(map(_as_how, samplings)))
        return list(map(_as_written, told))


def _as_how(sampling: Sampling) -> _How:
    law, config = sampling.law, sampling.config
    noise = torch.empty(0, 0) if sampling.noise is None else sampling.noise
    return _How(
        sampling.vocab_size,
        law.temperature,
        law.top_k,
        law.top_p,
        law.min_p,
        config.keep_mass,
        config.max_support,
        list(sampling.uniforms),
        list(sampling.bounds),
        noise,
    )


def _as_written(told: _Told) -> Decoded:
    tokens, ids, weights, scores = told
    missing = [None] * len(tokens)  # where the last is no token there is neither
    laws = [*map(as_law, ids, weights), *missing]
    return Decoded(tokens, laws[: len(tokens)], [*scores, *missing][: len(tokens)])
