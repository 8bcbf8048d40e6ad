"""Services that judge by Triton's kernels, as real processes: on pages with captured passes and steps, and plainly.

Here the kernels are interpreted, and a graph calls again what it holds; on a GPU they are compiled, and it is a graph.
"""

from __future__ import annotations

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
"""The last has filters, which no graph judges: the kernels are launched one by one."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """One sequence and a small γ: what is run at the start, over the largest batch, is interpreted too."""
    flags = "--max-sequences 1 --max-gamma 2 --attention eager"
    with Cluster(fault="briskly_interpreted") as cluster:
        verifier = cluster.verifier(flags=f"{flags} --verify-path triton")
        draft = cluster.draft(verifier, flags="--max-sequences 1 --max-gamma 2 --attention eager")
        wait_healthy(verifier, draft)
        yield Pair(verifier, draft)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_text_is_the_one_that_the_host_path_gives(pair: Pair, demo_pair: Pair, sampling: Options) -> None:
    """With a seed, in float32: the same tokens, the same counts."""
    asked = Options(max_new_tokens=6, ignore_eos=True, seed=7, gamma=2) | sampling
    texts = []
    for each in (pair, demo_pair):
        with Client(each.address) as client:
            done = client.complete(PROMPT, **asked)
        texts.append((done.token_ids, done.statistics.num_rounds, done.statistics.num_accepted_tokens))
    assert texts[0] == texts[1]
    assert texts[0][2] > 0
