"""Both services on a CUDA device write the texts that they write on a CPU: drafted, verified and captured there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider.cli.processes import Pair, ServiceProcess, fixed
from outrider.client import Client, Options
from tests.cluster import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = [[number, 40, 50 + number] for number in range(10, 22)]
HEALTHY_WITHIN_S = 240.0  # a first start compiles kernels


@contextmanager
def pair_on(device: str) -> Iterator[Pair]:
    """The demo pair on a device, in float32."""
    verifier = fixed("127.0.0.1:0")
    flags = ("--dtype", "float32", "--threads", "1", "--device", device, "--kv-cache-mb", "256")
    target = ["--model", str(MODELS / "target"), "--listen", verifier]
    draft = ["--model", str(MODELS / "draft"), "--listen", "127.0.0.1:0", "--verifier", verifier]
    with (
        ServiceProcess.launch(["verifier_service", *target, *flags]) as behind,
        ServiceProcess.launch(["draft_service", *draft, *flags]) as front,
    ):
        pair = Pair(behind, front)
        pair.wait_healthy(HEALTHY_WITHIN_S)
        yield pair


def texts(pair: Pair) -> list[list[int]]:
    """Of each prompt one at temperature 0 and one of a seed, in proposals of 4 tokens."""
    ways: list[Options] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
    asked: Options = {"max_new_tokens": 24, "ignore_eos": True, "gamma": 4}
    with Client(pair.draft.address, plaintext=True, timeout=120.0) as client:
        return [list(client.complete(prompt, **(asked | how)).token_ids) for prompt in PROMPTS for how in ways]


def test_a_pair_on_the_device_writes_what_it_writes_on_a_cpu() -> None:
    """In float32 logits differ in their last bits, so that a near-tie may part one text of 24, and hardly two."""
    with pair_on("cpu") as pair:
        wanted = texts(pair)
    with pair_on("cuda:0") as pair:
        log = pair.verifier.log_lines()
        found = texts(pair)
    assert sum(one != other for one, other in zip(found, wanted, strict=True)) <= 1
    assert any("captured" in line and " sizes" in line for line in log), "passes were captured"
