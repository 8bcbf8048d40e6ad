"""What the tests of this folder share: a cluster, and two tiny pairs in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, Service
from tests.exactness import pairs
from tests.exactness.worlds import World


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def attentive(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A pair whose target attends to all that was written: its distribution differs from prefix to prefix."""
    return World(cluster, tmp_path_factory.mktemp("attentive"), seed=1, markov=False)


@pytest.fixture(scope="session")
def markov(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A pair whose target looks at the last token alone: each token of a long text is a sample of one table."""
    return World(cluster, tmp_path_factory.mktemp("markov"), seed=4, markov=True)


@pytest.fixture(scope="session")
def sharpened(markov: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good draft for it, only too sure of itself: acceptance and rejection both have much to say."""
    return pairs.write_draft(tmp_path_factory.mktemp("sharpened"), markov.target, "sharpened")


@pytest.fixture(scope="session")
def sound(markov: World, sharpened: Path) -> Iterator[Service]:
    """A draft service with that draft, and nothing wrong with it."""
    with markov.with_fault(sharpened, "draft_service", None) as service:
        yield service
