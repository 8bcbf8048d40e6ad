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

from kernels.coupled import choose
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
    ) -> tuple[list[int], list[Tensor], list[Tensor]]:
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
            The tokens, and the ids and weights of the law of each (none at temperature 0, nor with noise). A token of
            -1 says that the logits were no numbers, one of -2 that the law is above its bound; either is the last.
        """
        tokens: list[int] = []
        ids: list[Tensor] = []
        weights: list[Tensor] = []
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
                        token = choose(p, noise[len(tokens)])
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
        return tokens, ids, weights


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
    ) -> tuple[list[int], list[SparseLaw | None]]:
        """See `WritingLoop.forward`; the law of each token, None at temperature 0 and with noise."""
        law, config = sampling.law, sampling.config
        tokens, ids, weights = self._loop(
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
        if law.is_greedy or sampling.noise is not None:
            return tokens, [None] * len(tokens)
        laws: list[SparseLaw | None] = [as_law(*each) for each in zip(ids, weights, strict=True)]
        return tokens, laws + [None] * (len(tokens) - len(laws))
