"""Both services on a CUDA device write the texts that they write on a CPU, with captured passes."""

import pytest

from outrider.cli.processes import Pair, ServiceProcess, fixed
from outrider.client import Client, Options
from tests.cluster import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = [[number, 40, 50 + number] for number in range(10, 22)]
HEALTHY_WITHIN_S = 240.0  # a first start compiles kernels
SAMPLING: tuple[Options, ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7})


def texts_and_log(device: str) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the demo pair's texts of each prompt in float32, greedy and by a seed; and the verifier's log."""
    address = fixed("127.0.0.1:0")
    flags = ("--dtype", "float32", "--threads", "1", "--device", device, "--kv-cache-mb", "256")
    target = ["--model", str(MODELS / "target"), "--listen", address]
    draft = ["--model", str(MODELS / "draft"), "--listen", "127.0.0.1:0", "--verifier", address]
    with (
        ServiceProcess.launch(["verifier_service", *target, *flags]) as behind,
        ServiceProcess.launch(["draft_service", *draft, *flags]) as front,
    ):
        Pair(behind, front).wait_healthy(HEALTHY_WITHIN_S)
        with Client(front.address, plaintext=True, timeout=120.0) as client:
            common = Options(max_new_tokens=24, ignore_eos=True, gamma=4)
            texts = [client.complete(each, **(common | how)).token_ids for each in PROMPTS for how in SAMPLING]
        return texts, behind.log_lines()


def test_texts_are_the_same_on_the_device_and_on_a_cpu() -> None:
    """In float32 logits differ in their last bits, so that a near-tie may change one text of 24, and hardly two."""
    wanted, _ = texts_and_log("cpu")
    found, log = texts_and_log("cuda:0")
    assert sum(one != other for one, other in zip(found, wanted, strict=True)) <= 1
    assert any("captured" in line and " sizes" in line for line in log)
