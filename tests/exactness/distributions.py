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
"""How far cuts must be from a tie: float32 logits are wrong by less."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature (above 0), top-k and top-p; 0 and 1 turn the latter two off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def distribution(self, logits: Array) -> Array:
        """Return the distribution of one row of logits `[V]`.

        Raises:
            ValueError: a cut falls so near a tie that float32 and float64 may keep different tokens.
        """
        z = np.asarray(logits, dtype=np.float64)
        ranked = sorted(range(len(z)), key=lambda token: -z[token])
        if 0 < self.top_k < len(z):
            ranked = _cut(z, ranked, self.top_k)
        p = _softmax(z, ranked, self.temperature)
        if self.top_p < 1:
            mass = list(itertools.accumulate(p[token] for token in ranked))
            if any(abs(total - self.top_p) < CLEARANCE for total in mass):
                raise ValueError(f"cumulative mass within {CLEARANCE:g} of top-p {self.top_p:g}")
            size = next((i + 1 for i, total in enumerate(mass) if total >= self.top_p), len(ranked))
            p = _softmax(z, _cut(z, ranked, size), self.temperature)
        return p


def _cut(z: Array, ranked: list[int], size: int) -> list[int]:
    """The first `size` of `ranked`, and what equals the last of them."""
    kept = [token for token in ranked if z[token] >= z[ranked[size - 1]]]
    if len(kept) < len(ranked) and z[kept[-1]] - z[ranked[len(kept)]] < CLEARANCE:
        raise ValueError(f"logits within {CLEARANCE:g} of each other on either side of a cut")
    return kept


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


def joint_distribution(model: PreTrainedModel, prompt: Sequence[int], length: int, filters: Filters) -> Array:
    """Return the joint distribution of the first `length` tokens after `prompt`, `[V] * length`, by enumeration."""
    joint: Array = np.ones(())
    for _ in range(length):
        prefixes = [tuple(int(token) for token in prefix) for prefix in np.argwhere(joint > 0)]
        logits = next_logits(model, [[*prompt, *prefix] for prefix in prefixes])
        longer = np.zeros((*joint.shape, logits.shape[1]))
        for prefix, row in zip(prefixes, logits, strict=True):
            longer[prefix] = joint[prefix] * filters.distribution(row)
        joint = longer
    return joint


def transitions(model: PreTrainedModel, filters: Filters) -> Array:
    """Return the distribution after each token of a model that looks no further back, `[V, V]`."""
    V = model.config.get_text_config().vocab_size
    return np.stack([filters.distribution(row) for row in next_logits(model, [[token] for token in range(V)])])


def rank_classes(p: Array, classes: int = 3) -> Array:
    """Return the class of each token of a distribution `[V]`: 0 for the most probable ones, up to `classes` - 1.

    The classes hold about equal mass. A draft that is wrong in any way favours one of them, so a bias towards it shows
    here with far fewer cells than there are tokens. Tokens without mass get the last class.
    """
    order = np.argsort(-p, kind="stable")
    middle = p[order].cumsum() - p[order] / 2
    found = np.empty(len(p), dtype=np.int64)
    found[order] = np.minimum((middle * classes).astype(np.int64), classes - 1)
    return found


def joint_classes(joint: Array, classes: int = 3) -> Array:
    """Return the cell of each outcome of `[V] * n`, of `classes`^n: each token's rank class in turn."""
    labels = np.zeros(joint.shape, dtype=np.int64)
    for depth in range(joint.ndim):
        mass = joint.sum(axis=tuple(range(depth + 1, joint.ndim)))
        following = joint.ndim - 1 - depth
        for prefix in np.ndindex(mass.shape[:-1]):
            if mass[prefix].sum() > 0:
                found = rank_classes(mass[prefix] / mass[prefix].sum(), classes)
                labels[prefix] += (found * classes**following).reshape(-1, *[1] * following)
    return labels
