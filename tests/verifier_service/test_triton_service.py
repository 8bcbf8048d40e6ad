"""Services that judge by Triton's kernels, as real processes: on pages with captured passes and steps, and plainly.

Here the kernels are interpreted, and a graph calls again what it holds; on a GPU they are compiled, and it is a graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from outrider.cli.processes import Pair
from outrider.client import Client, Options
from tests.cluster import Cluster, wait_healthy

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this platform")

PROMPT = "def add(a, b):\n"
# One sequence and a small γ: what is run at the start, over the largest batch, is interpreted too.
JUDGED = {"OUTRIDER_VERIFY_PATH": "triton", "OUTRIDER_MAX_SEQUENCES": "1", "OUTRIDER_MAX_GAMMA": "2"}
RECORDED = {**JUDGED, "OUTRIDER_ATTENTION": "eager"}
LAWS: list[Options] = [
    {"rule": "block", "temperature": 1.0},
    {"rule": "tokenwise", "temperature": 0.7},
    {"rule": "coupled", "temperature": 1.0},
    {"rule": "block", "temperature": 0.0},
    {"rule": "block", "temperature": 1.0, "top_p": 0.95},
]
"""The last has filters, which no graph judges: the kernels are launched one by one."""


@contextmanager
def running(settings: dict[str, str]) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with Cluster(fault="briskly_interpreted") as cluster:
            verifier = cluster.verifier()
            draft = cluster.draft(verifier)
            wait_healthy(verifier, draft)
            yield Pair(verifier, draft)


@pytest.fixture(scope="module")
def judged() -> Iterator[Pair]:
    with running(JUDGED) as pair:
        yield pair


@pytest.fixture(scope="module")
def captured() -> Iterator[Pair]:
    with running(RECORDED) as pair:
        yield pair


@pytest.mark.parametrize("which", [pytest.param("judged", marks=pytest.mark.slow), "captured"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_text_is_the_one_that_the_host_path_gives(
    which: str, request: pytest.FixtureRequest, demo_pair: Pair, law: Options
) -> None:
    """With a seed, in float32: the same tokens, the same counts."""
    asked = Options(max_new_tokens=6, ignore_eos=True, seed=7, gamma=2) | law
    texts = []
    for pair in (request.getfixturevalue(which), demo_pair):
        with Client(pair.address) as client:
            done = client.complete(PROMPT, **asked)
        texts.append((done.token_ids, done.statistics.num_rounds, done.statistics.num_accepted_tokens))
    assert texts[0] == texts[1]
    assert texts[0][2] > 0


def test_the_log_says_what_attends_what_is_captured_and_where_memory_went(captured: Pair) -> None:
    for service, passes in ((captured.verifier, "3 of 3 sizes"), (captured.draft, "steps of up to 1 sequences; ")):
        lines = [json.loads(line) for line in service.log_lines() if line.startswith("{")]
        said = {line["event"]: line for line in lines}
        assert said["attending"]["attention"] == "eager"
        assert said["attending"]["reason"] == "as asked for"
        assert passes in said["captured"]["passes"]
        assert said["memory"]["weights_mib"] > 0
        assert said["memory"]["kv_mib"] > 0
        assert said["memory"]["kv_tokens"] > 1000
        assert said["layers"]["run_by"] in ("torch", "triton")
