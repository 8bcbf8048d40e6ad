"""What the target alone would write, computed exactly: transformers' own forward, then arithmetic in float64.

Nothing here comes from the project's own code: the filters are written out again from their definition (temperature,
then top-k, then top-p, each keeping what equals its last), so that an error there is not repeated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.exactness.chisquare import Array

CLEARANCE = 1e-5
"""How far the law's cuts must be from a tie: float32 logits are wrong by less."""


class TooClose(ValueError):
    """A cut falls so near a tie that float32 and float64 may keep different tokens."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature (above 0), top-k and top-p; 0 and 1 turn the latter two off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def law(self, logits: Array) -> Array:
        """Return the law of one row of logits `[V]`.

        Raises:
            TooClose: a cut lies within `CLEARANCE` of a tie that is none.
        """
        z = np.asarray(logits, dtype=np.float64)
        ranked = sorted(range(len(z)), key=lambda token: -z[token])
        kept = ranked
        if 0 < self.top_k < len(z):
            kept = [token for token in ranked if z[token] >= z[ranked[self.top_k - 1]]]
            _refuse_near_tie(z, kept[-1], ranked[len(kept)])
        p = _softmax(z, kept, self.temperature)
        if self.top_p < 1:
            mass = list(itertools.accumulate(p[token] for token in kept))
            size = next((i + 1 for i, total in enumerate(mass) if total >= self.top_p), len(kept))
            if any(abs(total - self.top_p) < CLEARANCE for total in mass):
                raise TooClose(f"cumulative mass within {CLEARANCE:g} of top-p {self.top_p:g}")
            nucleus = [token for token in kept if z[token] >= z[kept[size - 1]]]
            if len(nucleus) < len(kept):
                _refuse_near_tie(z, nucleus[-1], kept[len(nucleus)])
            p = _softmax(z, nucleus, self.temperature)
        return p


def _refuse_near_tie(z: Array, last: int, first_out: int) -> None:
    if 0 < z[last] - z[first_out] < CLEARANCE:
        raise TooClose(f"logits {z[last]} and {z[first_out]} on either side of a cut")


def _softmax(z: Array, kept: Sequence[int], temperature: float) -> Array:
    p = np.zeros(len(z))
    p[kept] = np.exp((z[kept] - z[kept].max()) / temperature)
    return np.asarray(p / p.sum())


def load(folder: Path) -> PreTrainedModel:
    """Return the model of a folder in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def next_logits(model: PreTrainedModel, prefixes: Sequence[Sequence[int]]) -> Array:
    """Return the logits after each of the prefixes, which have one length, `[n, V]`."""
    rows = []
    for start in range(0, len(prefixes), 4096):
        ids = torch.tensor(prefixes[start : start + 4096])
        rows.append(model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].to(torch.float64).numpy())
    return np.concatenate(rows)


def joint_law(model: PreTrainedModel, prompt: Sequence[int], length: int, filters: Filters) -> Array:
    """Return the joint law of the first `length` tokens after `prompt`, `[V] * length`, by enumerating every prefix."""
    law: Array = np.ones(())
    for depth in range(length):
        prefixes = [tuple(int(token) for token in prefix) for prefix in np.argwhere(law > 0)]
        logits = next_logits(model, [[*prompt, *prefix] for prefix in prefixes])
        longer = np.zeros((*law.shape, logits.shape[1]))
        for prefix, row in zip(prefixes, logits, strict=True):
            longer[prefix] = law[prefix] * filters.law(row)
        law = longer
        assert law.ndim == depth + 1
    return law


def transition_law(model: PreTrainedModel, filters: Filters) -> Array:
    """Return the law after each token of a model that looks no further back, `[V, V]`."""
    V = model.config.get_text_config().vocab_size
    return np.stack([filters.law(row) for row in next_logits(model, [[token] for token in range(V)])])


def stationary(transitions: Array) -> Array:
    """Return the share of time that a chain of these transitions `[V, V]` spends at each token, `[V]`."""
    V = len(transitions)
    system = np.vstack([transitions.T - np.eye(V), np.ones(V)])
    share: Array = np.linalg.lstsq(system, np.append(np.zeros(V), 1.0), rcond=None)[0]
    return share.clip(0)


def total_variation(first: Array, second: Array) -> float:
    """Return half the sum of absolute differences."""
    return float(np.abs(np.asarray(first) - np.asarray(second)).sum() / 2)


def rank_classes(law: Array, classes: int = 3) -> Array:
    """Return the class of each token of a law `[V]`: 0 for the most probable ones, up to `classes` - 1.

    The classes hold about equal mass, whatever the law. A draft that is wrong in any way favours one of them, so a bias
    towards it shows here with far fewer cells than there are tokens. Tokens without mass get the last class.
    """
    order = np.argsort(-law, kind="stable")
    middle = law[order].cumsum() - law[order] / 2
    found = np.empty(len(law), dtype=np.int64)
    found[order] = np.minimum((middle * classes).astype(np.int64), classes - 1)
    return found


def joint_classes(law: Array, classes: int = 3) -> Array:
    """Return the cell of each outcome of a joint law `[V] * n`, of `classes`^n: each token's rank class in turn."""
    labels = np.zeros(law.shape, dtype=np.int64)
    for depth in range(law.ndim):
        mass = law.sum(axis=tuple(range(depth + 1, law.ndim)))
        for prefix in np.ndindex(mass.shape[:-1]):
            if mass[prefix].sum() > 0:
                found = rank_classes(mass[prefix] / mass[prefix].sum(), classes)
                labels[prefix] += (found * classes ** (law.ndim - 1 - depth)).reshape(-1, *[1] * (law.ndim - depth - 1))
    return labels
