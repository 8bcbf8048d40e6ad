"""Services with Triton kernels, as real processes: captured passes and steps, and eager ones.

Kernels are interpreted here, and a graph repeats its Python calls; a GPU compiles them and captures real graphs.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from outrider.cli.processes import Pair
from outrider.client import Client, Options
from tests.cluster import Cluster, wait_healthy

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")

PROMPT = "def add(a, b):\n"
SAMPLINGS: list[Options] = [
    {"rule": "block", "temperature": 1.0},
    {"rule": "tokenwise", "temperature": 0.7},
    {"rule": "coupled", "temperature": 1.0},
    {"rule": "block", "temperature": 0.0},
    {"rule": "block", "temperature": 1.0, "top_p": 0.95},
]
"""The last has filters, so its kernels are launched without a graph."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Little of everything: all of the KV cache is written once, and the profiling run is interpreted too."""
    flags = "--max-sequences 1 --max-gamma 2 --attention eager --kv-cache-mb 16"
    with Cluster(fault="briskly_interpreted") as cluster:
        verifier = cluster.verifier(flags=f"{flags} --verify-path triton")
        draft = cluster.draft(verifier, flags=flags)
        wait_healthy(verifier, draft)
        yield Pair(verifier, draft)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_those_of_the_torch_path(pair: Pair, demo_pair: Pair, sampling: Options) -> None:
    options = Options(max_new_tokens=6, ignore_eos=True, seed=7, gamma=2) | sampling
    texts = []
    for each in (pair, demo_pair):
        with Client(each.address) as client:
            done = client.complete(PROMPT, **options)
        texts.append((done.token_ids, done.statistics.num_rounds, done.statistics.num_accepted_tokens))
    assert texts[0] == texts[1]
    assert texts[0][2] > 0
