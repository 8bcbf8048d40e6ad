"""The target without some of its layers drafts for itself, through both services."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.client import Client
from tests.cluster import MODELS, Cluster, Service, wait_healthy, wait_until

PROMPT = "def add(a, b):\n"


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 7, "rule": "coupled"}], ids=str)
def test_the_text_is_the_targets_own(options: dict[str, Any], own_draft: Service) -> None:
    with Client(own_draft.address) as client:
        texts = [
            client.complete(PROMPT, max_new_tokens=48, ignore_eos=True, gamma=4, drafter=drafter, **options)
            for drafter in ("model", "none")
        ]
    assert texts[0].token_ids == texts[1].token_ids
    found = texts[0].statistics
    assert found.num_accepted_tokens > 0.6 * found.num_draft_tokens > 0
    (loaded,) = own_draft.logged("loaded")
    assert (loaded["layers"], loaded["skip_layers"]) == (9, "1,5,10")


@pytest.fixture(scope="module")
def own_draft(target_process: Service) -> Iterator[Service]:
    with Cluster("--max-sequences 2") as cluster:
        service = cluster.draft(target_process, model=MODELS / "target", flags="--skip-layers 1,5,10")
        wait_healthy(target_process, service)
        yield service


def test_a_layer_that_is_not_there_ends_the_service(target_process: Service) -> None:
    wait_healthy(target_process)
    with Cluster() as cluster:
        service = cluster.draft(target_process, model=MODELS / "target", flags="--skip-layers 12")
        assert service.process.wait(60) == 1
        (line,) = wait_until(service.plain_lines)
        assert line.startswith("draft_service: --skip-layers 12: ")
        assert line.endswith("has layers 0 to 11, and no layer 12")
