"""A tiny pair at work: one target, a draft service for each bad draft, and the target's exact distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, distributions, pairs, sampling
from tests.exactness.chisquare import Array, Fit
from tests.exactness.distributions import Filters
from tests.exactness.sampling import Run

FILTERS = Filters(temperature=1.0, top_k=20, top_p=0.9)


class World:
    """Services and the files behind them. A draft service starts when it is first asked for."""

    def __init__(self, cluster: Cluster, folder: Path, *, seed: int, markov: bool) -> None:
        """Write a pair and start a verifier."""
        self.target = pairs.write_target(folder / "target", seed=seed, markov=markov)
        self.drafts = {kind: pairs.write_draft(folder / kind, self.target, kind) for kind in pairs.BAD_DRAFTS}
        self.verifier = cluster.verifier(model=self.target, flags=sampling.FLAGS)
        self._cluster = cluster
        self._services: dict[str, Service] = {}

    def service(self, kind: str) -> Service:
        """The draft service with this bad draft."""
        if kind not in self._services:
            service = self._cluster.draft(self.verifier, model=self.drafts[kind], flags=sampling.DRAFT_FLAGS)
            wait_healthy(service)
            self._services[kind] = service
        return self._services[kind]

    @contextmanager
    def with_fault(self, draft: Path, service: str, fault: str | None) -> Iterator[Service]:
        """Start a draft service for this target, with a fault in it or in a verifier of its own; stop both after."""
        verifier = self.verifier
        if service == "verifier_service":
            verifier = self._cluster.verifier(model=self.target, fault=fault, flags=sampling.FLAGS)
        in_draft = fault if service == "draft_service" else None
        front = self._cluster.draft(verifier, model=draft, fault=in_draft, flags=sampling.DRAFT_FLAGS)
        wait_healthy(verifier, front)
        yield front
        front.end()
        if verifier is not self.verifier:
            verifier.end()


@cache
def joint_distribution(target: Path, prompt: tuple[int, ...], filters: Filters = FILTERS) -> Array:
    """The joint distribution of the first three tokens after a prompt, `[V, V, V]`."""
    return distributions.joint_distribution(distributions.load(target), prompt, 3, filters)


@cache
def transitions(target: Path, filters: Filters = FILTERS) -> Array:
    """The distribution of each next token where it depends on the last one alone, `[V, V]`."""
    return distributions.transitions(distributions.load(target), filters)


def first_token_fits(joint: Array, tokens: Array) -> tuple[Fit, Fit]:
    """Test the first three of `tokens` `[N, 3 or more]` against their joint distribution; print what came of it.

    There are hundreds of outcomes, and 27 classes of them: for each token, whether it is among the most probable third,
    the middle or the rest. A wrong acceptance or residual moves mass towards what the draft likes or away from it,
    which is along these classes; over the outcomes themselves nothing can hide at all, but it takes more counts to see.
    """
    counts = np.bincount(np.ravel_multi_index(tuple(tokens[:, :3].T), joint.shape), minlength=joint.size)
    classes = distributions.joint_classes(joint).ravel()
    return _printed(
        chisquare.goodness_of_fit(counts, joint.ravel()),
        chisquare.goodness_of_fit(np.bincount(classes, counts, 27), np.bincount(classes, joint.ravel(), 27)),
    )


def chain_fits(table: Array, prompt: Sequence[int], tokens: Array) -> tuple[Fit, Fit]:
    """Test `tokens` `[N, length]` after `prompt` against transitions `[V, V]`, token by token and by rank class: three
    for each token before. Print what came of it.
    """
    before = np.concatenate([np.full((len(tokens), 1), prompt[-1]), tokens[:, :-1]], axis=1)
    V = len(table)
    counts = np.bincount((before * V + tokens).ravel(), minlength=V * V).reshape(V, V)
    classes = [distributions.rank_classes(row) for row in table]

    def summed(rows: Array) -> Array:
        return np.stack([np.bincount(labels, row, minlength=3) for row, labels in zip(rows, classes, strict=True)])

    return _printed(chisquare.table_fit(counts, table), chisquare.table_fit(summed(counts), summed(table)))


def _printed(outcomes: Fit, classes: Fit) -> tuple[Fit, Fit]:
    print(f"outcomes: {outcomes}\nclasses:  {classes}")
    return outcomes, classes


def sampled_fits(
    service: Service, target: Path, prompt: Sequence[int], *, filters: Filters, **asked: Any
) -> tuple[Run, Fit, Fit]:
    """Have one request's samples written after `prompt`, and test them against the Markov `target` of the service;
    `asked` is what else `sampling.sample` takes.
    """
    run = sampling.sample(
        service.address, prompt, filters=filters, **{"samples": sampling.SAMPLES_PER_REQUEST, **asked}
    )
    print(run)
    return run, *chain_fits(transitions(target, filters), prompt, run.tokens)
