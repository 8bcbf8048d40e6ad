"""A tiny pair at work: one target, a draft service for each bad draft, and the target's exact law beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, laws, pairs, sampling
from tests.exactness.chisquare import Array, Fit
from tests.exactness.laws import Filters
from tests.exactness.sampling import Run

FILTERS = Filters(temperature=1.0, top_k=20, top_p=0.9)


@dataclass(frozen=True)
class World:
    """Services and the files behind them."""

    target: Path
    drafts: dict[str, Path]
    verifier: Service
    services: dict[str, Service]

    @classmethod
    def begin(cls, cluster: Cluster, folder: Path, *, seed: int, markov: bool) -> World:
        """Write a pair and start a verifier; a draft service of each kind starts when it is first asked for."""
        target = pairs.write_target(folder / "target", seed=seed, markov=markov)
        drafts = {kind: pairs.write_draft(folder / kind, target, kind) for kind in pairs.BAD_DRAFTS}
        verifier = cluster.verifier(model=target, flags=sampling.VERIFIER_FLAGS)
        wait_healthy(verifier)
        return cls(target, drafts, verifier, _Started(cluster, drafts, verifier))

    @contextmanager
    def with_fault(self, cluster: Cluster, draft: Path, service: str, fault: str | None) -> Iterator[Service]:
        """Start a draft service for this target, with a fault in it or in a verifier of its own; stop both after."""
        verifier = self.verifier
        if service == "verifier_service":
            verifier = cluster.verifier(model=self.target, fault=fault, flags=sampling.VERIFIER_FLAGS)
        in_draft = fault if service == "draft_service" else None
        front = cluster.draft(verifier, model=draft, fault=in_draft, flags=sampling.DRAFT_FLAGS)
        wait_healthy(verifier, front)
        yield front
        front.end()
        if verifier is not self.verifier:
            verifier.end()


class _Started(dict[str, Service]):
    """The draft services of a verifier, each started when it is first asked for."""

    def __init__(self, cluster: Cluster, drafts: dict[str, Path], verifier: Service) -> None:
        super().__init__()
        self._cluster, self._drafts, self._verifier = cluster, drafts, verifier

    def __missing__(self, kind: str) -> Service:
        service = self._cluster.draft(self._verifier, model=self._drafts[kind], flags=sampling.DRAFT_FLAGS)
        wait_healthy(service)
        self[kind] = service
        return service


@dataclass(frozen=True)
class FirstTokens:
    """The joint law of the first three tokens after a prompt.

    There are hundreds of outcomes, and 27 classes of them: for each token, whether it is among the most probable third,
    the middle or the rest of the law it was drawn from. A wrong acceptance or residual moves mass towards what the
    draft likes or away from it, which is along these classes; over the outcomes themselves nothing can hide at all, but
    it takes more counts to see.
    """

    law: Array
    """`[V, V, V]`"""

    @classmethod
    @cache
    def of(cls, target: Path, prompt: tuple[int, ...], filters: Filters = FILTERS) -> FirstTokens:
        """Enumerate."""
        return cls(laws.joint_law(laws.load(target), prompt, 3, filters))

    @cached_property
    def classes(self) -> Array:
        """The class of each outcome, `[V, V, V]`."""
        return laws.joint_classes(self.law)

    @cached_property
    def class_law(self) -> Array:
        """The law of the classes, `[27]`."""
        return np.bincount(self.classes.ravel(), self.law.ravel(), minlength=27)

    def outcomes(self, tokens: Array) -> Fit:
        """Test the first three of `tokens` `[N, 3 or more]` outcome by outcome."""
        counts = np.bincount(np.ravel_multi_index(tuple(tokens[:, :3].T), self.law.shape), minlength=self.law.size)
        return chisquare.goodness_of_fit(counts, self.law.ravel())

    def by_class(self, tokens: Array) -> Fit:
        """Test them class by class."""
        return chisquare.goodness_of_fit(self.class_counts(tokens), self.class_law)

    def class_counts(self, tokens: Array) -> Array:
        """Return how often each class occurred, `[27]`."""
        return np.bincount(self.classes[tuple(tokens[:, :3].T)], minlength=27)


@dataclass(frozen=True)
class Chain:
    """The law of each next token where it depends on the last one alone."""

    transitions: Array
    """`[V, V]`"""

    @classmethod
    @cache
    def of(cls, target: Path, filters: Filters = FILTERS) -> Chain:
        """Compute it."""
        return cls(laws.transition_law(laws.load(target), filters))

    def counts(self, prompt: Sequence[int], tokens: Array) -> Array:
        """Return how often each token followed each, `[V, V]`, in `tokens` `[N, length]` after `prompt`."""
        before = np.concatenate([np.full((len(tokens), 1), prompt[-1]), tokens[:, :-1]], axis=1)
        V = len(self.transitions)
        return np.bincount((before * V + tokens).ravel(), minlength=V * V).reshape(V, V)

    def outcomes(self, counts: Array) -> Fit:
        """Test counts `[V, V]` token by token."""
        return chisquare.table_fit(counts, self.transitions)

    def by_class(self, counts: Array) -> Fit:
        """Test them by rank class: three for each token before."""
        classes = np.stack([laws.rank_classes(law) for law in self.transitions])
        return chisquare.table_fit(_summed(counts, classes), _summed(self.transitions, classes))

    def fits(self, prompt: Sequence[int], tokens: Array) -> tuple[Fit, Fit]:
        """Test `tokens` `[N, length]` after `prompt`, token by token and by rank class; print what came of it."""
        counts = self.counts(prompt, tokens)
        outcomes, classes = self.outcomes(counts), self.by_class(counts)
        print(f"outcomes: {outcomes}\nclasses:  {classes}")
        return outcomes, classes


def sampled_fits(
    service: Service, target: Path, prompt: Sequence[int], *, filters: Filters, **asked: Any
) -> tuple[Run, Fit, Fit]:
    """Have one request's samples written after `prompt`, and test them against the Markov `target` of the service;
    `asked` is what else `sampling.sample` takes.
    """
    samples = sampling.SAMPLES_PER_REQUEST
    run = sampling.sample(service.address, prompt, samples=samples, filters=filters, **asked)
    print(run)
    return run, *Chain.of(target, filters).fits(prompt, run.tokens)


def _summed(table: Array, classes: Array) -> Array:
    return np.stack([np.bincount(labels, row, minlength=3) for row, labels in zip(table, classes, strict=True)])
