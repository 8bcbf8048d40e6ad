"""A verifier that judges by Triton's kernels, as a real service: here they are interpreted, on a GPU compiled."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from outrider.cli.pair import Pair
from outrider.client import Client
from tests.services import running_demo

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def judged_by_triton() -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_VERIFY_PATH", "triton")
        with running_demo() as pair:
            yield pair


@pytest.mark.parametrize(
    ("rule", "temperature"), [("block", 1.0), ("tokenwise", 0.7), ("coupled", 1.0), ("block", 0.0)]
)
def test_the_text_is_the_one_that_the_host_path_gives(
    judged_by_triton: Pair, demo_pair: Pair, rule: str, temperature: float
) -> None:
    """With a seed, in float32: the same tokens, the same counts."""
    texts = []
    for pair in (judged_by_triton, demo_pair):
        with Client(pair.address) as client:
            done = client.complete(
                PROMPT, max_new_tokens=10, ignore_eos=True, seed=7, rule=rule, temperature=temperature, gamma=4
            )
        texts.append((done.token_ids, done.statistics.num_rounds, done.statistics.num_accepted_tokens))
    assert texts[0] == texts[1]
    assert texts[0][2] > 0
