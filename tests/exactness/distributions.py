"""The target's distribution by enumeration in float64, and how well sampled tokens fit it.

Logits come from transformers' own forward pass; `tests.kernels.reference` applies temperature, top-k and top-p. The
services run neither.

Fits are over single tokens and over rank classes: three classes of tokens with about equal mass, the most probable
first. A wrong acceptance or residual moves mass towards the tokens that the draft favours, or away from them, which is
along these classes. They are far fewer than the tokens, so fewer counts detect it. Over the tokens themselves no bias
can hide, but more counts are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kernels.sampling import SamplingParams
from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Array, Fit
from tests.exactness.pairs import VOCABULARY
from tests.kernels.reference import standardise

PARAMS = SamplingParams(temperature=1.0, top_k=20, top_p=0.9)
CLASSES = 3


@torch.no_grad()
def next_distributions(target: Path, prefixes: Sequence[Sequence[int]], params: SamplingParams) -> Array:
    """Return the distribution after each of the prefixes, which have one length, `[n, V]`."""
    logits = _load(target)(torch.tensor(prefixes), use_cache=False, logits_to_keep=1).logits[:, -1]
    return np.stack([standardise(row, params) for row in logits.double().numpy()])


@cache
def joint_distribution(target: Path, prompt: tuple[int, ...], params: SamplingParams = PARAMS) -> Array:
    """Return the joint distribution of the first three tokens after `prompt`, `[V, V, V]`."""
    joint: Array = np.ones(())
    for _ in range(3):
        prefixes = np.argwhere(joint > 0).tolist()
        longer = np.zeros((*joint.shape, VOCABULARY))
        rows = next_distributions(target, [[*prompt, *prefix] for prefix in prefixes], params)
        for prefix, row in zip(map(tuple, prefixes), rows, strict=True):
            longer[prefix] = joint[prefix] * row
        joint = longer
    return joint


@cache
def transitions(target: Path, params: SamplingParams = PARAMS) -> Array:
    """Return the distribution after each token of a Markov target, `[V, V]`."""
    return next_distributions(target, [[token] for token in range(VOCABULARY)], params)


def first_token_fits(joint: Array, tokens: Array) -> tuple[Fit, Fit]:
    """Test the first n of `tokens` `[N, n or more]` against their joint distribution, by outcome and by class."""
    counts = np.bincount(np.ravel_multi_index(tuple(tokens[:, : joint.ndim].T), joint.shape), minlength=joint.size)
    classes, number = joint_classes(joint).ravel(), CLASSES**joint.ndim
    return _printed(
        chisquare.goodness_of_fit(counts, joint.ravel()),
        chisquare.goodness_of_fit(np.bincount(classes, counts, number), np.bincount(classes, joint.ravel(), number)),
    )


def chain_fits(table: Array, last: int, tokens: Array) -> tuple[Fit, Fit]:
    """Test `tokens` `[N, length]` after a prompt's `last` one against transitions `[V, V]`, by token and by class."""
    before = np.concatenate([np.full((len(tokens), 1), last), tokens[:, :-1]], axis=1)
    V = len(table)
    counts = np.bincount((before * V + tokens).ravel(), minlength=V * V).reshape(V, V)
    classes = [rank_classes(row) for row in table]

    def summed(rows: Array) -> Array:
        return np.stack([np.bincount(labels, row, CLASSES) for row, labels in zip(rows, classes, strict=True)])

    return _printed(chisquare.table_fit(counts, table), chisquare.table_fit(summed(counts), summed(table)))


def rank_classes(p: Array) -> Array:
    """Return the class of each token of a distribution `[V]`. Tokens without mass get the last one."""
    order = np.argsort(-p, kind="stable")
    middle = p[order].cumsum() - p[order] / 2
    found = np.empty(len(p), dtype=np.int64)
    found[order] = np.minimum((middle * CLASSES).astype(np.int64), CLASSES - 1)
    return found


def joint_classes(joint: Array) -> Array:
    """Return the class of each outcome of `[V] * n`, of `CLASSES`^n: each token's rank class in turn."""
    labels = np.zeros(joint.shape, dtype=np.int64)
    for depth in range(joint.ndim):
        mass = joint.sum(axis=tuple(range(depth + 1, joint.ndim)))
        following = joint.ndim - 1 - depth
        for prefix in np.ndindex(mass.shape[:-1]):
            if mass[prefix].sum() > 0:
                found = rank_classes(mass[prefix] / mass[prefix].sum())
                labels[prefix] += (found * CLASSES**following).reshape(-1, *[1] * following)
    return labels


@cache
def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _printed(outcomes: Fit, classes: Fit) -> tuple[Fit, Fit]:
    print(f"outcomes: {outcomes}\nclasses:  {classes}")
    return outcomes, classes
