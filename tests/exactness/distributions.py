"""The target's distribution by enumeration in float64, and how well sampled tokens fit it.

Logits come from transformers' own forward pass; `tests.kernels.reference` applies temperature, top-k and top-p. The
services run neither.

Fits of Markov targets are over single tokens and over rank classes: three classes of tokens with about equal mass, the
most probable first. A wrong acceptance or residual moves mass towards the tokens that the draft favours, or away from
them, which is along these classes. They are far fewer than the tokens, so fewer counts detect it. Over the tokens
themselves no bias can hide, but more counts are needed.

Any other target has another distribution after each prefix. There each token has a quantile: a uniform number within
the token's share of [0, 1), in which the tokens lie in order, the most probable first. If tokens are drawn from the
target's distributions, then quantiles are uniform and independent, within a text and between texts (Rosenblatt, 1952).
So all successive pairs or triples of tokens are counts of one distribution: thirds of [0, 1) are rank classes.
"""

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
CELLS = 24


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


@torch.no_grad()
def along(target: Path, prompt: Sequence[int], tokens: Array, params: SamplingParams = PARAMS) -> Array:
    """Return the distribution of each of `tokens` `[N, L]` after `prompt` and the tokens before it, `[N, L, V]`."""
    texts = np.concatenate([np.tile(prompt, (len(tokens), 1)), tokens[:, :-1]], axis=1)
    logits = _load(target)(torch.from_numpy(texts), use_cache=False, logits_to_keep=tokens.shape[1]).logits
    return np.stack([[standardise(row, params) for row in text] for text in logits.double().numpy()])


def quantiles(p: Array, tokens: Array, order: Array | None = None) -> Array:
    """Return the quantile of each of `tokens` `[N, L]` in its distribution `p` `[N, L, V]`; 1 if it has no mass.

    Tokens lie in falling `order` `[N, L, V]`, by default that of `p`.
    """
    ranked = np.argsort(-p if order is None else -order, axis=-1, kind="stable")
    own = np.take_along_axis(p, tokens[..., None], -1)[..., 0]
    at = (ranked == tokens[..., None]).argmax(-1)
    above = np.take_along_axis(np.take_along_axis(p, ranked, -1).cumsum(-1), at[..., None], -1)[..., 0] - own
    found = above + own * np.random.default_rng(0).random(tokens.shape)
    return np.where(own > 0, found.clip(0, np.nextafter(1, 0)), 1.0)


def quantile_fits(found: Array, number: int) -> tuple[Fit, Fit]:
    """Test quantiles `[N, L]` by `CELLS` equal cells, and by the classes of each `number` successive ones."""
    return _printed(
        _uniform_fit(_cells(found, CELLS), CELLS), _uniform_fit(_joint_class(found, number), CLASSES**number)
    )


def fits_after_each(p: Array, tokens: Array, last: int, found: Array) -> tuple[Fit, Fit]:
    """Test what follows each token, by token and by class, over all prefixes that end in it.

    `tokens` `[N, L]` follow a prompt's `last` one; `p` `[N, L, V]` are their distributions, `found` their quantiles.
    Counts by token have the covariance Σ (diag p - p pᵀ) over prefixes: at most that of equal prefixes, so that
    `detectable` is a bound here too.
    """
    before = np.insert(tokens[:, :-1], 0, last, axis=1)
    statistic, df, n, classes = 0.0, 0, 0, np.zeros((VOCABULARY, CLASSES + 1), np.int64)
    for token in range(VOCABULARY):
        rows, chosen, own = p[before == token], tokens[before == token], found[before == token]
        classes[token] = np.bincount(_cells(own, CLASSES), minlength=CLASSES + 1)
        if (own == 1).any():
            statistic = np.inf
        groups = chisquare.groups_of(rows.sum(0))
        rows = (rows @ np.eye(groups.max() + 1)[groups])[:, :-1]  # the last one follows from the others
        surplus = np.bincount(groups[chosen], minlength=groups.max() + 1)[:-1] - rows.sum(0)
        statistic += surplus @ np.linalg.solve(np.diag(rows.sum(0)) - rows.T @ rows, surplus)
        df, n = df + len(surplus), n + len(rows) * (len(surplus) > 0)
    return _printed(
        Fit(float(statistic), df, chisquare.chi2_sf(statistic, df), n),
        chisquare.table_fit(classes, np.tile(_uniform(CLASSES), (VOCABULARY, 1))),
    )


def _joint_class(found: Array, number: int) -> Array:
    """Return the class of each `number` successive quantiles in a text; `CLASSES`^`number` if one has no mass."""
    classes = _cells(found.reshape(-1, number), CLASSES)
    joint = (classes * CLASSES ** np.arange(number)).sum(-1)
    return np.where((classes == CLASSES).any(-1), CLASSES**number, joint)


def _cells(found: Array, cells: int) -> Array:
    return (found * cells).astype(np.int64)


def _uniform(cells: int) -> Array:
    """Equal cells, and one without mass."""
    return np.append(np.full(cells, 1 / cells), 0.0)


def _uniform_fit(labels: Array, cells: int) -> Fit:
    return chisquare.goodness_of_fit(np.bincount(labels.ravel(), minlength=cells + 1), _uniform(cells))


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


@cache
def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _printed(outcomes: Fit, classes: Fit) -> tuple[Fit, Fit]:
    print(f"outcomes: {outcomes}\nclasses:  {classes}")
    return outcomes, classes
