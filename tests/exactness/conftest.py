"""The services that the tests of this folder share."""

from collections.abc import Iterator

import numpy as np
import pytest

from kernels.sampling import SamplingParams
from tests.cluster import Cluster
from tests.exactness.distributions import transitions
from tests.exactness.pairs import LETTERS
from tests.exactness.services import PairServices


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def attentive(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> PairServices:
    """A pair whose target attends to the whole text: its distribution differs from prefix to prefix."""
    return PairServices(cluster, tmp_path_factory.mktemp("attentive"), seed=1, markov=False)


@pytest.fixture(scope="session")
def markov(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> PairServices:
    """A pair whose target sees the last token alone: each token of a long text is a sample of one table."""
    return PairServices(cluster, tmp_path_factory.mktemp("markov"), seed=4, markov=True)


@pytest.fixture(scope="session")
def counting_flags(markov: PairServices, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of the drafters that count and copy, with a corpus drawn from the Markov target; q̂ is cut to 8 tokens."""
    generator = np.random.default_rng(3)
    table = transitions(markov.target, SamplingParams())[:, : len(LETTERS)]
    at, text = 0, []
    for _ in range(600):
        at = int(generator.choice(len(LETTERS), p=table[at] / table[at].sum()))
        text.append(LETTERS[at])
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(text))
    return f"--ngram-corpus {path} --ngram-order 2 --lookup-min-match 1 --max-support 8"
