"""Several tokens of one sequence in one call, each drawn from the logits after the one before.

TorchScript compiles the loop with the layers and the draw in it: between two tokens there is then no interpreter, whose
work costs a small model a third of its time. It knows a model's layers and how a token is drawn. It does not know what
the tokens are for, nor where uniforms and noise come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.coupled import weigh
from kernels.distribution import SamplingLaw, sampled_law
from kernels.entropy import entropy, entropy_of_greedy, entropy_of_weights
from kernels.sparse import SparseConfig, SparseLaw, as_law, place, truncate
from outrider.lm.gated_layers import GatedLayers, compiled


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens are drawn.

    Attributes:
        law: how logits become a law.
        config: how much of it is kept (`kernels.sparse`).
        uniforms: one for each token to write, in [0, 1); not used at temperature 0, nor where there is noise.
        vocab_size: ids from there on are padding, and never drawn.
        noise: what `kernels.coupled` chooses the tokens by, `[γ, vocab_size]`; None draws by the uniforms.
        bounds: of each token, the entropy of its law in nats above which writing ends before it; of none, no bounds.
    """

    law: SamplingLaw
    config: SparseConfig
    uniforms: Sequence[float]
    vocab_size: int
    noise: Tensor | None = None
    bounds: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        tokens: the tokens; the last may be -1, where the logits were no numbers, or -2, where a law is above its bound.
        laws: what each was sampled from; None at temperature 0 and with noise.
        scores: what each was chosen by where there is no law, `[V]`: logits, of which the largest wins, or with noise
            what `kernels.coupled.weigh` gives, of which the least does.
    """

    tokens: list[int]
    laws: list[SparseLaw | None]
    scores: list[Tensor | None]


class WritingLoop(nn.Module):
    """The loop. Uncompiled it does the same."""

    def __init__(self, layers: GatedLayers) -> None:
        super().__init__()
        self.layers = layers

    def forward(
        self,
        token_ids: Tensor,
        rotation: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        new: list[Tensor],
        masks: list[list[Tensor]],
        later_masks: list[list[Tensor]],
        uniforms: list[float],
        noise: Tensor,
        vocab_size: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        keep_mass: float,
        max_support: int,
        bounds: list[float],
    ) -> tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]:
        """Runs `token_ids` `[T]`, draws a token, runs that, and so on: one token for each uniform.

        Args:
            token_ids: what is to be run before the first token can be drawn.
            rotation: of all positions that are run, `[T + γ - 1, 1, D/2]`, see `GatedLayers.forward`.
            keys: of each layer up to the last position that is run, see `SlotViews`.
            values: like `keys`.
            new: of each layer, of the positions that are run.
            masks: what `token_ids` need, see `GatedLayers.forward`.
            later_masks: what a single token needs.
            uniforms: γ of them.
            noise: `[γ, vocab_size]`, or of no rows where the uniforms are to be used.
            vocab_size: columns of the logits to draw from.
            temperature: with `top_k`, `top_p` and `min_p`, see `SamplingLaw`.
            keep_mass: with `max_support`, see `SparseConfig`.
            bounds: see `Sampling`.

        Returns:
            The tokens; the ids and weights of the law of each (none at temperature 0, nor with noise); and, where
            there are none, what each was chosen by, `Written.scores`. A token of -1 says that the logits were no
            numbers, one of -2 that the law is above its bound; either is the last.
        """
        tokens: list[int] = []
        ids: list[Tensor] = []
        weights: list[Tensor] = []
        scores: list[Tensor] = []
        before = keys[0].size(2) - new[0].size(2)
        at = 0
        for u in uniforms:
            count = token_ids.size(0)
            seen_keys = [each.narrow(2, 0, before + at + count) for each in keys]
            seen_values = [each.narrow(2, 0, before + at + count) for each in values]
            written = [each.narrow(2, at, count) for each in new]
            logits = self.layers(
                token_ids,
                rotation.narrow(0, at, count),
                [count],
                [seen_keys],
                [seen_values],
                [written],
                masks if at == 0 else later_masks,
                1,
                None,
            )
            z = logits.narrow(1, 0, vocab_size).float().cpu()  # to draw is many small steps: one copy, not one for each
            token = -1
            bound = bounds[len(tokens)] if len(bounds) > 0 else math.inf
            if temperature == 0:
                best = z.argmax()
                if bool(z.view(-1)[best].isfinite()):
                    token = int(best)
                    scores.append(z[0])
                    if bound < math.inf and entropy_of_greedy(z[0]) > bound:
                        token = -2
            else:
                p = sampled_law(z, temperature, top_k, top_p, min_p).squeeze(0)
                if bool(p[0].isnan()):
                    pass
                elif noise.size(0) > 0:
                    if bound < math.inf and entropy(p) > bound:
                        token = -2
                    else:
                        weighed = weigh(p, noise[len(tokens)])
                        token = int(weighed.argmin())
                        scores.append(weighed)
                else:
                    support, integers = truncate(p, keep_mass, max_support)
                    if bound < math.inf and entropy_of_weights(integers) > bound:
                        token = -2  # before anything is sampled
                    else:
                        token = int(support[place(integers, int(integers.sum()), u)])
                        ids.append(support)
                        weights.append(integers)
            tokens.append(token)
            if token < 0:
                break
            at += count
            token_ids = torch.full([1], token, dtype=torch.int64, device=token_ids.device)
        return tokens, ids, weights, scores


class Writer:
    """Writes with the layers of a fused model."""

    def __init__(self, layers: GatedLayers) -> None:
        self._loop = compiled(WritingLoop(layers))

    def __call__(
        self,
        token_ids: Tensor,
        rotation: Tensor,
        views: tuple[list[Tensor], list[Tensor], list[Tensor]],
        masks: list[list[Tensor]],
        later_masks: list[list[Tensor]],
        sampling: Sampling,
    ) -> Written:
        """See `WritingLoop.forward`."""
        law, config = sampling.law, sampling.config
        tokens, ids, weights, scores = self._loop(
            token_ids,
            rotation,
            *views,
            masks,
            later_masks,
            list(sampling.uniforms),
            torch.empty(0, 0) if sampling.noise is None else sampling.noise,
            sampling.vocab_size,
            law.temperature,
            law.top_k,
            law.top_p,
            law.min_p,
            config.keep_mass,
            config.max_support,
            list(sampling.bounds),
        )
        missing = [None] * len(tokens)  # where the last is no token there is neither
        laws = [*map(as_law, ids, weights), *missing]
        return Written(tokens, laws[: len(tokens)], [*scores, *missing][: len(tokens)])
